"""Scoring a checkpoint: every figure against numpy in float64 on stock mlx-lm's logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import exports
import mlx.core as mx
import models
import numpy as np
import numpy.typing as npt
import pytest
from exports import exported
from mlx_lm.utils import load_model

from reap.artifacts import DocumentScore, Evaluation, Provenance
from reap.artifacts.evaluation import Estimate, clustered_mean, domain_average
from reap.artifacts.manifest import MANIFEST, check_manifest
from reap.errors import ArtifactError, ReapError
from reap.evaluate import EvaluationSettings, evaluate, evaluate_all
from reap.export import add_measurement
from reap.models.source import open_source
from reap.models.text import TextSet, load_tokenizer

Array = npt.NDArray[np.float64]

PROSE = (
    "It was the best of times, it was the worst of times, it was the age of wisdom.",
    "Call me Ishmael.",
    "In the beginning God created the heaven and the earth. And the earth was without form, and "
    "void; and darkness was upon the face of the deep.",
    "All happy families are alike; every unhappy family is unhappy in its own way.",
)
CODE = (
    "def add(a, b):\n    return a + b\n",
    "for (int i = 0; i < n; i++) {\n  total += values[i] * weights[i];\n}\n",
    "import os\n\nprint(os.getcwd())\n",
)
TEXTS = (TextSet("prose", "prose", "p0", PROSE), TextSet("code", "code.jsonl", "c0", CODE))
LENGTH = 16
"""Shorter than most documents, so that they are cut."""


def run(
    path: Path, reference: Path | None = None, *, batch_tokens: int = 64, **settings: Any
) -> Evaluation:
    return evaluate(
        open_source(str(path)),
        TEXTS,
        EvaluationSettings(**{"sequence_length": LENGTH, "batch_tokens": batch_tokens} | settings),
        reference=None if reference is None else open_source(str(reference)),
    )


@dataclass(frozen=True)
class Scored:
    """Per predicted token of one document: ln p over the vocabulary and the token's id."""

    domain: str
    log_p: Array
    target: npt.NDArray[np.int64]

    @property
    def nll(self) -> Array:
        return -self.log_p[np.arange(len(self.target)), self.target]


@functools.cache
def by_hand(path: Path) -> tuple[Scored, ...]:
    """Every document through stock mlx-lm, one sequence at a time, then float64."""
    model, _ = load_model(path, trust_remote_code=True)
    for name, module in model.named_modules():  # as models.load_plain, also for two banks
        if ".switch_mlp." in name and "weight" in module and "scales" not in module:
            module.weight = module.weight.astype(mx.float32)
    tokenizer = load_tokenizer(path)
    scored = []
    for text in TEXTS:
        for document in text.documents:
            ids = tokenizer.encode(document)
            parts = [ids[i : i + LENGTH] for i in range(0, len(ids), LENGTH)]
            rows, targets = [], []
            for part in parts:
                if len(part) > 1:
                    rows.append(np.array(model(mx.array([part]))[0, :-1].astype(mx.float32)))
                    targets += part[1:]
            raw = np.concatenate(rows).astype(np.float64)
            shifted = raw - raw.max(axis=-1, keepdims=True)
            log_p = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
            scored.append(Scored(text.domain, log_p, np.array(targets)))
    return tuple(scored)


def divergence(base: Scored, own: Scored) -> Array:
    return (np.exp(base.log_p) * (base.log_p - own.log_p)).sum(axis=-1)


LAYOUTS = [
    ("kimi_k3", "stock"),
    ("kimi_k3", "per-layer"),
    ("kimi_k3", "two-bank"),
    ("qwen3_moe", "two-bank"),
    ("deepseek_v3", "two-bank"),
    ("deepseek_v3-groups", "per-layer"),
]


@pytest.mark.parametrize("case", LAYOUTS, ids="-".join)
def test_sums_per_document_are_those_of_mlx_lm(case: tuple[str, str]) -> None:
    made = exported(*case)
    found = run(made.path, made.source).documents
    own, base = by_hand(made.path), by_hand(made.source)
    assert [d.domain for d in found] == [s.domain for s in own]
    for document, q, p in zip(found, own, base):
        dp = np.exp(-q.nll) - np.exp(-p.nll)
        kl = divergence(p, q)
        assert document.tokens == len(q.target)
        assert kl.mean() > 1e-3  # there is something to measure
        wanted = {
            "nll": q.nll.sum(),
            "nll_squared": (q.nll**2).sum(),
            "base_nll": p.nll.sum(),
            "base_nll_squared": (p.nll**2).sum(),
            "nll_cross": (q.nll * p.nll).sum(),
            "kl": kl.sum(),
            "dp": dp.sum(),
            "dp_squared": (dp**2).sum(),
            "same_top": (q.log_p.argmax(-1) == p.log_p.argmax(-1)).sum(),
        }
        for name, value in wanted.items():
            assert getattr(document, name) == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_figures_and_errors_are_those_of_the_tokens() -> None:
    made = exported("deepseek_v3", "two-bank")
    found = run(made.path, made.source)
    own, base = by_hand(made.path), by_hand(made.source)
    kls = [divergence(p, q) for p, q in zip(base, own)]
    means = {}
    for domain in ("prose", "code"):
        rows = [i for i, scored in enumerate(own) if scored.domain == domain]
        score = found.domain_score(domain)
        assert (score.documents, score.tokens) == (len(rows), sum(len(kls[i]) for i in rows))
        nll = _clustered([own[i].nll for i in rows])
        assert score.perplexity.value == pytest.approx(math.exp(nll.value), rel=1e-5)
        assert score.perplexity.error == pytest.approx(math.exp(nll.value) * nll.error, rel=1e-4)
        assert score.base_perplexity is not None and score.kl is not None
        base_nll = _clustered([base[i].nll for i in rows])
        assert score.base_perplexity.value == pytest.approx(math.exp(base_nll.value), rel=1e-5)
        means[domain] = _clustered([kls[i] for i in rows])
        assert score.kl.value == pytest.approx(means[domain].value, rel=1e-4)
        assert score.kl.error == pytest.approx(means[domain].error, rel=1e-4)
        assert score.same_top is not None
        same = _clustered(
            [(own[i].log_p.argmax(-1) == base[i].log_p.argmax(-1)) * 1.0 for i in rows]
        )
        assert (score.same_top.value, score.same_top.error) == pytest.approx(
            (same.value, same.error)
        )
    prose, code = means["prose"], means["code"]
    assert found.mean_kl.value == pytest.approx((prose.value + code.value) / 2, rel=1e-4)
    assert found.mean_kl.error == pytest.approx(math.hypot(prose.error, code.error) / 2, rel=1e-4)
    pooled = np.concatenate(kls)
    percentages = [0, 1, 5, 10, 50, 90, 95, 99, 99.9, 100]
    assert list(found.kl_quantiles) == [str(percentage) for percentage in percentages]
    for name, value in found.kl_quantiles.items():
        assert value == pytest.approx(np.percentile(pooled, float(name)), rel=1e-3, abs=1e-6)


def _clustered(per_document: Sequence[Array]) -> Estimate:
    """Ratio of sums, and its error by the linearised variance over documents, spelt out."""
    n, tokens = len(per_document), sum(map(len, per_document))
    mean = sum(values.sum() for values in per_document) / tokens
    residuals = [values.sum() - len(values) * mean for values in per_document]
    variance = n / (n - 1) * sum(r * r for r in residuals) / tokens**2
    return Estimate(mean, math.sqrt(variance))


def test_the_summary_has_llama_perplexitys_figures() -> None:
    made = exported("kimi_k3", "stock")
    found = run(made.path, made.source).summary()
    own, base = by_hand(made.path), by_hand(made.source)
    q = np.concatenate([scored.nll for scored in own])
    p = np.concatenate([scored.nll for scored in base])
    top = np.concatenate([a.log_p.argmax(-1) == b.log_p.argmax(-1) for a, b in zip(own, base)])
    dp = np.exp(-q) - np.exp(-p)
    kl = np.concatenate([divergence(b, a) for a, b in zip(own, base)])
    ratio = math.exp(q.mean() - p.mean())
    values = {
        "Mean PPL(Q)": math.exp(q.mean()),
        "Mean PPL(base)": math.exp(p.mean()),
        "Cor(ln(PPL(Q)), ln(PPL(base)))": 100 * np.corrcoef(q, p)[0, 1],
        "Mean ln(PPL(Q)/PPL(base))": q.mean() - p.mean(),
        "Mean PPL(Q)/PPL(base)": ratio,
        "Mean KLD": kl.mean(),
        "Mean Δp": 100 * dp.mean(),
        "RMS Δp": 100 * math.sqrt((dp**2).mean()),
        "Same top p": 100 * top.mean(),
    }
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert found[name].value == pytest.approx(value, rel=1e-3), name
    log_ratio = _clustered([a.nll - b.nll for a, b in zip(own, base)])
    assert found["Mean ln(PPL(Q)/PPL(base))"].error == pytest.approx(log_ratio.error, rel=1e-4)
    assert found["Mean PPL(Q)/PPL(base)"].error == pytest.approx(ratio * log_ratio.error, rel=1e-3)
    assert list(run(made.path).summary()) == ["Mean PPL(Q)"]


@pytest.mark.parametrize("family", exports.FAMILIES)
def test_a_model_does_not_differ_from_itself(family: str) -> None:
    made = exported(family, "identity")
    for path in (made.source, made.path):
        found = run(path, made.source)
        for document in found.documents:
            assert (document.kl, document.dp, document.dp_squared) == (0.0, 0.0, 0.0)
            assert document.same_top == document.tokens > 0
            assert document.nll == document.base_nll
        assert set(found.kl_quantiles.values()) == {0.0}
        assert (found.mean_kl.value, found.mean_kl.error) == (0.0, 0.0)
        assert found.summary()["Same top p"].value == 100
        assert found.summary()["Cor(ln(PPL(Q)), ln(PPL(base)))"].value == pytest.approx(100)


@pytest.mark.parametrize("case", LAYOUTS[2:5], ids="-".join)
def test_padding_and_batch_size_do_not_matter(case: tuple[str, str]) -> None:
    made = exported(*case)
    alone = run(made.path, made.source, batch_tokens=1)
    together = run(made.path, made.source, batch_tokens=100_000)
    for one, other in zip(alone.documents, together.documents, strict=True):
        assert (one.domain, one.tokens) == (other.domain, other.tokens)
        for name in ("nll", "nll_cross", "base_nll", "kl", "same_top", "dp_squared"):
            wanted = pytest.approx(getattr(one, name), rel=1e-3, abs=1e-5)
            assert getattr(other, name) == wanted, name


def test_without_a_reference_there_is_only_perplexity() -> None:
    made = exported("qwen3_moe", "stock")
    compared, alone = run(made.path, made.source), run(made.path)
    assert [d.nll for d in alone.documents] == [d.nll for d in compared.documents]
    assert (alone.reference, alone.kl_quantiles) == (None, {})
    assert alone.domain_score("code").kl is None
    assert alone.domain_score("code").base_perplexity is None
    assert compared.reference == made.source.name


@pytest.mark.parametrize("case", LAYOUTS, ids="-".join)
def test_bytes_are_those_of_the_plan(case: tuple[str, str]) -> None:
    made = exported(*case)
    found, water = run(made.path, made.source, tokens=40), made.plan.waterfall
    assert found.weight_bytes == water.weights
    assert found.expert_bytes == water.high + water.low
    assert found.base_expert_bytes == made.spec.experts_bytes


def test_a_token_limit_is_shared_by_the_domains() -> None:
    found = run(exported("qwen3_moe", "stock").path, tokens=40)
    assert [corpus.tokens for corpus in found.provenance.corpora] == [20, 20]
    assert sum(d.tokens for d in found.documents if d.domain == "code") < 20


def test_logits_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    def edit(shard: models.Tensors) -> models.Tensors:
        bad = {
            n: mx.full(a.shape, np.nan, a.dtype) for n, a in shard.items() if n == "lm_head.weight"
        }
        return shard | bad

    broken = models.copy_checkpoint(exports.source_checkpoint("qwen3_moe"), tmp_path / "x", edit)
    with pytest.raises(ReapError, match="not finite"):
        run(broken)
    with pytest.raises(ReapError, match="not finite"):
        run(exports.source_checkpoint("qwen3_moe"), broken)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    def edit(shard: models.Tensors) -> models.Tensors:
        return {n: a[:1024] if a.shape[0] == 2048 else a for n, a in shard.items()}

    source = exports.source_checkpoint("qwen3_moe")
    small = models.copy_checkpoint(source, tmp_path / "small", edit, vocab_size=1024)
    with pytest.raises(ReapError, match=r"source has 2048 tokens, small 1024"):
        run(source, small)
    with pytest.raises(ReapError, match="tokenizer"):
        run(small)


def test_several_checkpoints_in_one_pass_score_as_they_do_alone() -> None:
    source = exports.source_checkpoint("qwen3_moe")
    paths = {shape: exported("qwen3_moe", shape).path for shape in ("stock", "two-bank")}
    found = evaluate_all(
        {shape: open_source(str(path)) for shape, path in paths.items()},
        TEXTS,
        EvaluationSettings(sequence_length=LENGTH, batch_tokens=64),
        reference=open_source(str(source)),
    )
    assert [one.label for one in found] == ["stock", "two-bank"]
    assert found == [replace(run(path, source), label=shape) for shape, path in paths.items()]
    assert found[0].documents != found[1].documents


# Statistics on made-up numbers


def test_clustered_mean_by_hand() -> None:
    # 21 of 12 tokens: 1.75. Residuals -0.5, 3 and -2.5: 15.5 * 3/2 = 23.25, its root / 12.
    found = clustered_mean(np.array([3.0, 10.0, 8.0]), np.array([2.0, 4.0, 6.0]))
    assert found.value == 1.75
    assert found.error == pytest.approx(0.401819, rel=1e-5)
    # Documents of one token each: the ordinary standard error of a mean.
    values = np.array([1.0, 2.0, 4.0, 9.0])
    found = clustered_mean(values, np.ones(4))
    assert (found.value, found.error) == (4.0, pytest.approx(values.std(ddof=1) / 2))
    # Tokens of a document that agree are one observation, not many.
    assert clustered_mean(100 * values, 100 * np.ones(4)) == found
    assert math.isnan(clustered_mean(np.array([3.0]), np.array([2.0])).error)


def test_domain_average_by_hand() -> None:
    found = domain_average([Estimate(1.0, 0.3), Estimate(2.0, 0.4)])
    assert found == Estimate(1.5, pytest.approx(0.25))


def made_up(kls: Sequence[float], tokens: Sequence[int] = (2, 4, 6, 10, 10)) -> Evaluation:
    domains = ("a", "a", "a", "b", "b")
    return Evaluation(
        provenance=Provenance("0.1.0", "", "m", "", "c0", {}),
        checkpoint="x",
        reference="m",
        label="x",
        sequence_length=8,
        weight_bytes=1,
        expert_bytes=1,
        base_expert_bytes=1,
        documents=tuple(
            DocumentScore(domain, count, nll=1.0, nll_squared=1.0, kl=kl)
            for domain, count, kl in zip(domains, tokens, kls)
        ),
        kl_quantiles={},
    )


def test_differences_are_paired_by_document() -> None:
    one = made_up([3.0, 10.0, 8.0, 5.0, 1.0])
    other = made_up([1.0, 8.0, 2.0, 3.0, 1.0])
    # Domain a: differences 2, 2, 6 over 12 tokens: 10/12; residuals 1/3, -4/3, 1.
    # Domain b: 2, 0 over 20: 0.1; residuals 1, -1.
    error_a = math.sqrt((1 / 9 + 16 / 9 + 1) * 3 / 2) / 12
    error_b = math.sqrt(2 * 2) / 20
    found = one.kl_difference(other)
    assert found.value == pytest.approx((10 / 12 + 0.1) / 2)
    assert found.error == pytest.approx(math.hypot(error_a, error_b) / 2)
    back = other.kl_difference(one)
    assert (back.value, back.error) == pytest.approx((-found.value, found.error))
    # A constant difference per token is certain, however the documents vary.
    shifted = made_up([kl + 0.5 * t for kl, t in zip([3, 10, 8, 5, 1], (2, 4, 6, 10, 10))])
    assert shifted.kl_difference(one).error == pytest.approx(0, abs=1e-12)
    assert shifted.kl_difference(one).value == pytest.approx(0.5)


def test_other_documents_are_not_compared() -> None:
    one, other = made_up([1, 2, 3, 4, 5]), made_up([1, 2, 3, 4, 5], (2, 4, 7, 10, 10))
    with pytest.raises(ArtifactError, match="not evaluated on the same documents"):
        one.kl_difference(other)
    with pytest.raises(ArtifactError, match="not evaluated on the same documents"):
        one.kl_difference(replace(one, documents=one.documents[1:]))


# The card


def test_a_measurement_is_put_into_the_card(tmp_path: Path) -> None:
    made = exported("kimi_k3", "two-bank")
    for name in ("README.md", "config.json", MANIFEST):
        (tmp_path / name).write_text((made.path / name).read_text())
    before = (tmp_path / "README.md").read_text()
    found = run(made.path, made.source)
    add_measurement(tmp_path, found)
    card = (tmp_path / "README.md").read_text()
    assert "Not measured yet" in before and "Not measured yet" not in card
    start, end = "<!-- reap:measured -->", "<!-- /reap:measured -->"
    assert card.split(start)[0] == before.split(start)[0]
    assert card.split(end)[1] == before.split(end)[1]
    for domain in ("prose", "code"):
        score = found.domain_score(domain)
        assert score.kl is not None
        ppl = f"{score.perplexity.value:.3f} ± {score.perplexity.error:.3f}"
        assert f"| {domain} | {score.tokens:,} | {ppl} |" in card
        assert f"{score.kl.value:.4f} ± {score.kl.error:.4f}" in card
    assert f"Mean KL over the domains: {found.mean_kl.value:.4f}" in card
    add_measurement(tmp_path, found)
    assert (tmp_path / "README.md").read_text() == card
    found_files = {file.path: file.status for file in check_manifest(tmp_path)}
    assert found_files["README.md"] == found_files["config.json"] == "ok"
    add_measurement(tmp_path, run(made.path))
    alone = (tmp_path / "README.md").read_text()
    assert "KL ±" not in alone and "| prose |" in alone
    add_measurement(tmp_path, found)
    assert (tmp_path / "README.md").read_text() == card


def test_a_comparison_with_another_model_is_not_put_into_the_card(tmp_path: Path) -> None:
    made = exported("kimi_k3", "two-bank")
    for name in ("README.md", "config.json"):
        (tmp_path / name).write_text((made.path / name).read_text())
    add_measurement(tmp_path, run(made.path, exported("kimi_k3", "stock").path))
    assert "Not measured yet" in (tmp_path / "README.md").read_text()


def test_a_card_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    add_measurement(tmp_path, made_up([1, 2, 3, 4, 5]))
    assert not list(tmp_path.iterdir())
    (tmp_path / "README.md").write_text("# Mine\n")
    add_measurement(tmp_path, made_up([1, 2, 3, 4, 5]))
    assert (tmp_path / "README.md").read_text() == "# Mine\n"

"""The HTML report, from synthetic files with known contents, and in a real browser."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from reap.artifacts import (
    Corpus,
    DocumentScore,
    Evaluation,
    Format,
    LayerPlan,
    Measurement,
    ModelSpec,
    ModuleSpec,
    MoeLayer,
    Plan,
    Projection,
    Provenance,
    Saliency,
    Waterfall,
)
from reap.artifacts.evaluation import Estimate
from reap.artifacts.files import sha256
from reap.errors import ArtifactError, ReapError
from reap.formatting import Unit, decimal, nats, plus_minus, practically, significant, tick
from reap.report import render, write_report
from reap.report.charts import NARROW, WIDE, Axis, Dot, Frame, Mark, Row, dots, scatter
from reap.report.data import FormatTrial, ReportData, band, spearman
from reap.report.figures import KL_BANDS, packed_map

MXFP4, TWO_BIT = Format(4, 32, "mxfp4"), Format(2, 128, "affine")
HOSTILE = "evil</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"


def provenance(model: str, corpora: Sequence[Corpus] = (), command: str = "reap") -> Provenance:
    return Provenance("0.1.0", command, model, "abc123", "c" * 64, {}, tuple(corpora))


def make_spec(model: str, layers: int, experts: int, top_k: int, width: int) -> ModelSpec:
    names = ("gate_proj", "up_proj", "down_proj")
    dense = Format(16, 0, "dense")
    modules = [ModuleSpec("model.embed_tokens", None, "embedding", width * 500, width,
                          "bfloat16", dense, 0)]  # fmt: skip
    for index in range(1, layers + 1):
        modules.append(ModuleSpec(f"model.layers.{index}.mlp.gate", index, "router",
                                  experts * width, width, "bfloat16", dense, 0))  # fmt: skip
    return ModelSpec(
        model=model,
        revision="abc123",
        model_sha256="c" * 64,
        model_type="kimi_k3",
        parameters=layers * experts * 3 * width * width,
        num_layers=layers + 1,
        num_experts=experts,
        top_k=top_k,
        n_group=1,
        topk_group=1,
        modules=tuple(modules),
        moe_layers=tuple(
            MoeLayer(
                index,
                f"model.layers.{index}.mlp.switch_mlp",
                tuple(Projection(name, width, width, "bfloat16", MXFP4) for name in names),
                4,
            )
            for index in range(1, layers + 1)
        ),
        state_bytes_fixed=4096,
        state_bytes_per_token=64,
        carried_bytes=0,
    )


def make_saliency(
    model: str = "example/tiny-moe",
    *,
    layers: int = 4,
    experts: int = 32,
    top_k: int = 4,
    width: int = 128,
    domains: Sequence[str] = ("code", "english", "chinese"),
    measured: bool = True,
) -> Saliency:
    """Lognormal saliency; every domain prefers other experts; a few are never routed."""
    random = np.random.default_rng(7)
    shape = (2, len(domains), layers, experts)
    tokens_each = 2048
    common = random.lognormal(0, 1.0, (1, 1, layers, experts))
    taste = random.lognormal(0, 0.7, (1, len(domains), layers, experts))
    noise = random.lognormal(0, 0.25, shape)
    share = common * taste * noise
    count = np.rint(share / share.sum(axis=3, keepdims=True) * tokens_each * top_k).astype("i8")
    count[..., -1] = 0
    count[..., -2] = 1
    scale = np.geomspace(0.05, 4.0, layers)[:, None]
    gate = count / top_k
    norm = count * scale * (0.6 + common)
    gate2_norm2 = norm**2 / np.maximum(count, 1) / top_k**2
    corpora = [
        Corpus(d, f"calibration/{d}.jsonl", f"{i}" * 64, 40, 2 * tokens_each)
        for i, d in enumerate(domains)
    ]
    measurement = None
    if measured:
        grid = np.array(sorted({round(experts * p / 8) for p in range(2, 9)})[::-1])
        energy = np.geomspace(20, 900, layers)
        kappa = random.uniform(0.6, 1.6, layers)
        lost = 1 - (grid / experts) ** 0.5
        rho = random.uniform(0.16, 0.34, layers)
        measurement = Measurement(
            formats=(TWO_BIT,),
            tokens=np.full(layers, 1024, dtype=np.int64),
            kept=grid.astype(np.int64),
            order=np.argsort(-gate2_norm2.sum(axis=(0, 1)), axis=1, kind="stable"),
            output_energy=energy,
            drop_error=energy[:, None] * kappa[:, None] * lost[None, :],
            low_error=(energy * rho)[None],
            low_expert_error=(gate2_norm2.sum(axis=(0, 1)) * rho[:, None])[None],
            kl_kept=grid[len(grid) // 2 :][:1].astype(np.int64),
            drop_kl=kappa * 0.02,
            low_kl=rho * 0.03,
        )
    per_layer = (2, len(domains), layers)
    return Saliency(
        provenance=provenance(model, corpora, "reap calibrate example/tiny-moe"),
        spec=make_spec(model, layers, experts, top_k, width),
        domains=tuple(domains),
        count=count,
        gate=gate,
        norm=norm,
        gate_norm=norm / top_k,
        gate2_norm2=gate2_norm2,
        norm2=norm**2 / np.maximum(count, 1),
        max_norm=norm / np.maximum(count, 1) * 3,
        tokens=np.full(per_layer, tokens_each, dtype=np.int64),
        residual_energy=np.ones(per_layer),
        output_energy=np.ones(per_layer),
        measurement=measurement,
    )


def make_plan(saliency: Saliency, *, two_banks: bool = True, model: str | None = None) -> Plan:
    """Keeps 40 to 75 % of each layer's experts, a third of them in the high bank."""
    spec = saliency.spec
    scores = saliency.score("energy")
    last = max(len(spec.moe_layers) - 1, 1)
    kept = []
    for index, layer in enumerate(spec.moe_layers):
        n = round(spec.num_experts * (0.4 + 0.35 * abs(2 * index / last - 1)))
        order = np.argsort(-scores[index], kind="stable")[:n]
        kept.append(LayerPlan(layer.layer, tuple(order.tolist()), n // 3 if two_banks else n))
    names = [p.name for p in spec.moe_layers[0].projections]
    high, low = dict.fromkeys(names, MXFP4), dict.fromkeys(names, TWO_BIT)
    first = spec.moe_layers[0]
    high_bytes = sum(x.high for x in kept) * spec.expert_bytes(first, high)
    low_bytes = sum(x.low for x in kept) * spec.expert_bytes(first, low)
    rows = sum(len(x.kept) for x in kept) * spec.router_row_bytes(first)
    used = spec.trunk_bytes() + rows + high_bytes + low_bytes + spec.state_bytes(8192)
    return Plan(
        provenance=provenance(model or spec.model, command="reap plan --budget 512GB"),
        model_type=spec.model_type,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        layout="two-bank" if two_banks else "per-layer",
        layers=tuple(kept),
        high=high,
        low=low,
        trunk={},
        experts_path={layer.layer: layer.experts for layer in spec.moe_layers},
        waterfall=Waterfall(
            budget=round(used * 1.1),
            trunk=spec.trunk_bytes(),
            router=rows,
            high=high_bytes,
            low=low_bytes,
            state=spec.state_bytes(8192),
            reserve=round(used * 0.08),
            carried=0,
            context=8192,
        ),
        damage=0.0412,
        lower_bound=0.0408,
        alternatives={"uniform, REAP": 0.0533, "all experts at 2 bits": 0.0467, "random": 0.131},
        settings={"criterion": "energy", "context": 8192},
    )


def make_evaluation(
    saliency: Saliency,
    plan: Plan,
    *,
    label: str = "two-bank plan",
    kl: float = 0.0213,
    size: float = 1.0,
    ripple: float = 0.2,
    reference: str | None = "example/tiny-moe",
) -> Evaluation:
    """Twelve documents a domain, whose mean KL over domains is about `kl`, alternately `ripple`
    more and less."""
    documents = []
    for index, domain in enumerate(saliency.domains):
        for document in range(12):
            tokens = 400 + 25 * document
            base = 2.0 + 0.35 * index + 0.03 * document
            extra = kl * (1 + ripple * (-1) ** document) * (1 + 0.5 * (index - 1))
            nll = base + extra
            documents.append(
                DocumentScore(
                    domain=domain,
                    tokens=tokens,
                    nll=nll * tokens,
                    nll_squared=(nll**2 + 1.5) * tokens,
                    base_nll=base * tokens,
                    base_nll_squared=(base**2 + 1.5) * tokens,
                    nll_cross=(nll * base + 1.45) * tokens,
                    kl=extra * tokens,
                    same_top=round(0.93 * tokens),
                    dp=-0.004 * tokens,
                    dp_squared=0.002 * tokens,
                )
            )
    expert_bytes = plan.waterfall.high + plan.waterfall.low
    corpora = [
        Corpus(d, f"held-out/{d}.jsonl", f"{i + 5}" * 64, 12, 6450)
        for i, d in enumerate(saliency.domains)
    ]
    quantiles = {"0": 0.0, "1": 1e-6, "5": 1e-5, "10": 6e-5, "50": 0.004, "90": 0.05,
                 "95": 0.09, "99": 0.31, "99.9": 1.2, "100": 4.7}  # fmt: skip
    return Evaluation(
        provenance=provenance(saliency.spec.model, corpora, "reap evaluate out"),
        checkpoint="out",
        reference=reference,
        label=label,
        sequence_length=2048,
        weight_bytes=round(plan.waterfall.weights * size),
        expert_bytes=round(expert_bytes * size),
        base_expert_bytes=saliency.spec.experts_bytes,
        documents=tuple(documents),
        kl_quantiles=quantiles if reference else {},
    )


def make_rivals(saliency: Saliency, plan: Plan) -> list[Evaluation]:
    return [
        make_evaluation(saliency, plan, label=label, kl=kl, size=size, ripple=ripple)
        for label, kl, size, ripple in (
            ("random (seed 0)", 0.64, 1.0, 0.2),
            ("random (seed 1)", 0.61, 1.001, 0.2),
            ("frequency", 0.19, 1.0, 0.2),
            ("REAP, uniform", 0.121, 0.998, 0.2),
            ("all experts at 2-bit g128", 0.0221, 1.01, -0.2),
        )
    ]


@pytest.fixture(scope="module")
def saliency() -> Saliency:
    return make_saliency()


@pytest.fixture(scope="module")
def plan(saliency: Saliency) -> Plan:
    return make_plan(saliency)


@pytest.fixture(scope="module")
def evaluation(saliency: Saliency, plan: Plan) -> Evaluation:
    return make_evaluation(saliency, plan)


@pytest.fixture(scope="module")
def data(saliency: Saliency, plan: Plan, evaluation: Evaluation) -> ReportData:
    return ReportData.build(saliency, plan, evaluation, make_rivals(saliency, plan))


class Page(HTMLParser):
    """Counts tags and collects ids, attributes and text; void and raw-text tags handled."""

    void = frozenset({"meta", "input", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.tags)


def write_files(
    folder: Path,
    saliency: Saliency,
    plan: Plan,
    evaluation: Evaluation | None = None,
    rivals: Sequence[Evaluation] = (),
) -> dict[str, object]:
    saliency.save(folder / "saliency.safetensors")
    plan.save(folder / "plan.json")
    paths: dict[str, object] = {
        "saliency": folder / "saliency.safetensors",
        "plan": folder / "plan.json",
        "evaluation": None,
    }
    if evaluation is not None:
        evaluation.save(folder / "evaluation.json")
        paths["evaluation"] = folder / "evaluation.json"
    for index, rival in enumerate(rivals):
        rival.save(folder / f"rival-{index}.json")
    paths["rivals"] = [folder / f"rival-{index}.json" for index in range(len(rivals))]
    return paths


def report(out: Path, paths: dict[str, object], *, force: bool = False) -> ReportData:
    return write_report(out, **paths, force=force)  # type: ignore[arg-type]


def test_numbers_are_printed_one_way() -> None:
    assert [decimal(v, 2) for v in (1234.5, -0.5, -0.001, float("nan"))] == [
        "1,234.50", "−0.50", "0.00", "–"]  # fmt: skip
    assert [significant(v) for v in (0, 0.0412, 12345, 1.5e-7, -3.25e-9)] == [
        "0", "0.0412", "12,345", "1.50 × 10⁻⁷", "−3.25 × 10⁻⁹"]  # fmt: skip
    assert [tick(v) for v in (0, 0.001, 1e-5, 3e-5, 20000, 1e5, 0.1 + 0.2)] == [
        "0", "0.001", "10⁻⁵", "3·10⁻⁵", "20,000", "10⁵", "0.3"]  # fmt: skip
    assert Unit.for_bytes(1_446_500_000_000).text(390_000_000_000) == "390.00\xa0GB"
    assert Unit.for_bytes(4_000_000).text(1_234_567) == "1.23\xa0MB"


def test_bands_follow_the_usual_names() -> None:
    names = [band(kl) for kl in (0.0, 9e-5, 2e-3, 0.021, 0.1, 3.0)]
    assert names == ["identical", "identical", "very close", "typical 4-bit",
                     "substantial", "substantial"]  # fmt: skip
    assert band(0.07) == "between “typical 4-bit” and “substantial”"


def test_axis_moves_outliers_to_its_ends_and_ticks_are_inside() -> None:
    axis = Axis(1e-3, 1.0, 0, 300, log=True)
    assert [round(axis(v)) for v in (1e-3, 1e-2, 1.0, 50.0)] == [0, 100, 300, 300]
    assert np.allclose(axis.ticks(), [0.001, 0.01, 0.1, 1])
    assert Axis(0, 37, 0, 1).ticks() == [0, 10, 20, 30]
    assert Axis(0.5, 4.5, 0, 1, whole=True).ticks(10) == [1, 2, 3, 4]


def test_verdict_says_what_was_kept_and_what_it_cost(data: ReportData, plan: Plan) -> None:
    kept = sum(len(layer.kept) for layer in plan.layers)
    text = " ".join(" ".join(data.verdict).split())
    share = 100 * (plan.waterfall.high + plan.waterfall.low) / data.spec.experts_bytes
    assert f"keeps {kept} of 128 experts in {share:.0f} % of their bytes" in text
    assert "in the band “typical 4-bit”" in text
    assert "models with pruned experts usually near 0.1" in text
    assert "Of 5 other plans measured on the same documents, it is clearly closer" in text
    assert "to the original than 4, not clearly different from 1; the best of them is" in text
    best = data.contenders[1]
    assert text.endswith(f"“{best.label}”, at {nats(best.kl)} nats.")
    assert best.kl == min((c.kl for c in data.contenders[1:]), key=lambda kl: kl.value)


def test_without_evaluation_it_says_so(saliency: Saliency, plan: Plan) -> None:
    data = ReportData.build(saliency, plan)
    assert "has not been measured" in " ".join(data.verdict)
    words = Page(render(data)).words
    assert "No evaluation was given" in words and "not measured yet" in words
    assert "Mean PPL" not in words


def test_without_reference_there_is_no_kl(saliency: Saliency, plan: Plan) -> None:
    alone = make_evaluation(saliency, plan, reference=None)
    data = ReportData.build(saliency, plan, alone, make_rivals(saliency, plan))
    assert data.mean_kl is None and "does not say what was lost" in " ".join(data.verdict)
    assert {c.outcome for c in data.contenders[1:]} == {"not comparable: no reference"}
    assert "Without a reference model there is no KL divergence" in Page(render(data)).words


def test_masses_agreement_and_coverage_are_counted(saliency: Saliency, plan: Plan) -> None:
    data = ReportData.build(saliency, plan)
    energy = saliency.gate2_norm2.sum(axis=(0, 1))[2]
    best = list(plan.layers[2].kept)
    assert data.layers[2].mass == pytest.approx(energy[best].sum() / energy.sum())
    assert [layer.never for layer in data.layers] == [1] * 4
    routed = saliency.count.sum(axis=(0, 1))
    assert [layer.rare for layer in data.layers] == ((routed > 0) & (routed < 30)).sum(1).tolist()
    halves = saliency.gate2_norm2.sum(axis=1)[:, 2]
    first, second = ({*np.argsort(-half, kind="stable")[: len(best)].tolist()} for half in halves)
    assert data.layers[2].agreement == pytest.approx(len(first & second) / len(first | second))
    assert np.allclose(np.diag(data.overlap), 1) and np.allclose(data.overlap, data.overlap.T)


def test_domain_mass_weighs_layers_equally(saliency: Saliency, plan: Plan) -> None:
    data = ReportData.build(saliency, plan)
    energy = saliency.gate2_norm2.sum(axis=0)[1]
    shares = [energy[i, list(x.kept)].sum() / energy[i].sum() for i, x in enumerate(plan.layers)]
    mass = data.domains[1]
    assert mass.kept == pytest.approx(np.mean(shares))
    assert (mass.worst, mass.worst_layer) == (
        pytest.approx(min(shares)), plan.layers[int(np.argmin(shares))].layer)  # fmt: skip


def test_low_bits_are_compared_with_dropping_to_the_same_bytes(
    saliency: Saliency, plan: Plan
) -> None:
    measurement = saliency.measurement
    assert measurement is not None
    measured = ReportData.build(saliency, plan).measured
    assert measured is not None
    (trial,) = measured.trials
    assert trial.bytes_share == pytest.approx(2.25 / 4.25)
    expected = [
        np.interp(32 * 2.25 / 4.25, measurement.kept[::-1], errors[::-1]) / energy
        for errors, energy in zip(measurement.drop_error, measurement.output_energy)
    ]
    assert trial.drop == pytest.approx(expected)
    assert trial.wins == sum(trial.low < np.array(expected))


def test_rivals_are_paired_and_named_only_when_clear(
    saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    rivals = make_rivals(saliency, plan)
    shorter = replace(rivals[0], label="other text", documents=rivals[0].documents[1:])
    data = ReportData.build(saliency, plan, evaluation, [*rivals, shorter])
    found = {c.label: c for c in data.contenders}
    assert data.contenders[0].own and data.contenders[0].outcome == ""
    assert found["frequency"].difference == evaluation.kl_difference(rivals[2])
    assert found["frequency"].outcome == "closer"
    assert found["all experts at 2-bit g128"].outcome == "not clearly different"
    assert found["other text"].outcome == "not comparable: other documents"
    better = make_evaluation(saliency, plan, label="better", kl=0.002)
    data = ReportData.build(saliency, plan, evaluation, [better])
    assert data.contenders[1].outcome == "further off"


def test_one_document_gives_no_interval(
    saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    firsts = [next(d for d in evaluation.documents if d.domain == x) for x in saliency.domains]
    single = replace(evaluation, documents=tuple(firsts))
    data = ReportData.build(saliency, plan, single, [replace(single, label="same")])
    assert data.contenders[1].outcome == "not decided: too few documents"
    assert not re.search(r"\bnan\b", Page(render(data)).words)
    assert data.mean_kl is not None
    assert plus_minus(data.mean_kl, 4) == f"{data.mean_kl.value:.4f}"


def test_files_of_different_models_are_refused(saliency: Saliency, plan: Plan) -> None:
    foreign = replace(plan, provenance=replace(plan.provenance, model_sha256="d" * 64))
    with pytest.raises(ArtifactError, match=r"cccccccccccc.*dddddddddddd"):
        ReportData.build(saliency, foreign)
    with pytest.raises(ArtifactError, match="4 MoE layers of 32 experts, the plan 3 of 32"):
        ReportData.build(saliency, replace(plan, layers=plan.layers[:-1]))


def test_doubts_are_said_aloud(
    tmp_path: Path, saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    leaked = replace(
        evaluation,
        expert_bytes=10,
        provenance=replace(evaluation.provenance, corpora=saliency.provenance.corpora),
    )
    other = replace(
        plan,
        provenance=replace(plan.provenance, inputs={"s": "0" * 64}),
        settings={
            "assumed": ["kappa = 1"],
            "warnings": ["layers 3 (4) keep fewer experts than 0.5 × the mean of 12."],
        },
        waterfall=replace(plan.waterfall, budget=1000),
    )
    paths = write_files(tmp_path, saliency, other, leaked)
    words = " ".join(report(tmp_path / "r.html", paths).notices)
    assert "not made from this saliency file" in words
    assert "assumed what was not measured: kappa = 1 (dropping an expert costs" in words
    assert "The planner warns: layers 3 (4) keep fewer experts" in words
    assert "over its budget" in words
    assert "also calibration text" in words
    assert "may belong to another plan" in words


def test_llama_perplexity_names_and_order(data: ReportData) -> None:
    block = re.search(r"<pre[^>]*>(.*?)</pre>", render(data), re.S)
    assert block is not None
    rows = [line.split(" : ")[0].strip() for line in html.unescape(block[1]).splitlines()]
    assert rows == [
        "====== Perplexity statistics ======",
        "Mean PPL(Q)",
        "Mean PPL(base)",
        "Cor(ln(PPL(Q)), ln(PPL(base)))",
        "Mean ln(PPL(Q)/PPL(base))",
        "Mean PPL(Q)/PPL(base)",
        "",
        "====== KL divergence statistics ======",
        "Mean KLD",
        "Maximum KLD",
        *(f"{p}%   KLD" for p in ("99.9", "99.0", "95.0", "90.0")),
        "Median  KLD",
        *(f"{p}%   KLD" for p in ("10.0", "5.0", "1.0")),
        "Minimum KLD",
        "",
        "====== Token probability statistics ======",
        "Mean Δp",
        "RMS Δp",
        "Same top p",
    ]


def test_map_holds_every_expert_once(data: ReportData, plan: Plan) -> None:
    packed = packed_map(data)

    def unpack(name: str) -> np.ndarray:
        raw = base64.b64decode(str(packed[name]))
        return np.frombuffer(raw, "<u2").reshape(4, 32).astype(np.int64)

    cells = unpack("cells")
    assert (np.sort(cells & 16383, axis=1) == np.arange(32)).all()
    for row, layer in zip(cells, plan.layers):
        states = dict(zip((row & 16383).tolist(), (row >> 14).tolist()))
        assert {e for e, s in states.items() if s == 2} == {*layer.kept[: layer.high]}
        assert {e for e, s in states.items() if s == 1} == {*layer.kept[layer.high :]}
    codes = unpack("saliency")
    assert (np.diff(codes, axis=1) <= 0).all() and (codes[:, -1] == 0).all()
    low, high = map(float, packed["saliencyRange"])  # type: ignore[call-overload]
    values = np.where(codes > 0, 10 ** (low + (codes - 1) / 65534 * (high - low)), 0)
    assert np.allclose(values, data.map.saliency, rtol=1e-3)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    saliency = make_saliency(HOSTILE, domains=(HOSTILE, "b"))
    plan = replace(make_plan(saliency), alternatives={HOSTILE: 0.05}, settings={HOSTILE: HOSTILE})
    evaluation = make_evaluation(saliency, plan, label=HOSTILE)
    rival = make_evaluation(saliency, plan, label=HOSTILE + "2", kl=0.3)
    paths = write_files(tmp_path, saliency, plan, evaluation, [rival])
    report(tmp_path / "r.html", paths)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and page.count("script") == 2 and page.count("img") == 0
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
    assert page.words.count("evil</script>") > 5


def test_page_is_whole_and_loads_nothing(data: ReportData) -> None:
    text = render(data)
    page = Page(text)
    assert page.open == []
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len({*ids})
    for tag, attrs in page.tags:
        assert not {"src", "srcset", "xlink:href", "action"} & {*attrs}, tag
        assert "href" not in attrs or tag == "a", tag
        if tag == "svg":
            assert attrs["role"] == "img" and attrs["aria-label"]
        assert attrs.get("aria-labelledby", ids[0]) in ids
    assert page.count("svg") >= 12
    unlinked = re.sub(r'<a href="https://[^"]+">', "", text)
    assert not re.search(r"https?://|//cdn|@import|url\(|fetch\(|XMLHttp|import\(", unlinked)
    assert not re.search(r"\bnan\b|\binf\b|undefined|\bNone\b", page.words)


def test_every_chart_has_marks_inside_its_box(data: ReportData) -> None:
    for svg in re.findall(r"<svg.*?</svg>", render(data), re.S):
        box = re.search(r'viewBox="0 0 (\d+) (\d+)"', svg)
        assert box is not None and ("<rect" in svg or "<path" in svg or "<circle" in svg)
        for name, limit in (("x", int(box[1])), ("cx", int(box[1])), ("cy", int(box[2]))):
            places = [float(v) for v in re.findall(rf' {name}="([^"]+)"', svg)]
            assert all(-1 <= v <= limit + 1 for v in places), (name, places)


def test_same_inputs_same_bytes_and_no_silent_overwrite(
    tmp_path: Path, saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    paths = write_files(tmp_path, saliency, plan, evaluation, make_rivals(saliency, plan))
    report(tmp_path / "a.html", paths)
    report(tmp_path / "b.html", paths)
    first = (tmp_path / "a.html").read_bytes()
    assert first == (tmp_path / "b.html").read_bytes()
    with pytest.raises(ReapError, match=r"a\.html exists already"):
        report(tmp_path / "a.html", paths)
    report(tmp_path / "a.html", paths, force=True)
    assert (tmp_path / "a.html").read_bytes() == first
    assert not list(tmp_path.glob("*.partial"))


def test_single_bank_names_no_other(saliency: Saliency) -> None:
    words = Page(render(ReportData.build(saliency, make_plan(saliency, two_banks=False)))).words
    assert "high bank (mxfp4)" in words and "low bank (2-bit g128)" not in words


def test_odd_inputs_still_make_a_page(saliency: Saliency, plan: Plan) -> None:
    bare = replace(
        make_saliency(measured=False, domains=("only",)),
        tokens=np.stack([np.full((1, 4), 2048), np.zeros((1, 4), dtype=np.int64)]),
    )
    whole = [LayerPlan(x.layer, tuple(range(32)), 32) for x in plan.layers]
    kept_all = replace(
        plan, layers=tuple(whole), layout="stock", alternatives={}, damage=0.0, lower_bound=0.0
    )
    data = ReportData.build(bare, kept_all)
    page = Page(render(data))
    assert page.open == [] and "keeps all 128 experts" in page.words
    assert "Stability between the halves" in page.words
    assert "no measured errors" in page.words
    halved = ReportData.build(bare, plan)
    assert {layer.agreement for layer in halved.layers} == {None}
    assert "One half of the calibration text is empty" in " ".join(halved.notices)
    identical = make_evaluation(saliency, plan, kl=0.0)
    words = Page(render(ReportData.build(saliency, plan, identical, [identical]))).words
    assert "in the band “identical”" in words


def test_report_of_the_size_of_k3_stays_small() -> None:
    data = make_k3()
    assert len(render(data).encode()) < 3e6


def make_k3() -> ReportData:
    saliency = make_saliency(
        "moonshotai/Kimi-K3",
        layers=92,
        experts=896,
        top_k=16,
        width=3328,
        domains=("code", "agentic", "english", "chinese", "math"),
    )
    plan = make_plan(saliency)
    return ReportData.build(
        saliency, plan, make_evaluation(saliency, plan), make_rivals(saliency, plan)
    )


@pytest.fixture(scope="session")
def browser() -> str:
    for name in ("chromium", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no chromium or google-chrome on PATH")


def browse(browser: str, profile: Path, *arguments: str) -> str:
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync", f"--user-data-dir={profile}", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_script_runs_in_a_browser(
    tmp_path: Path, browser: str, saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    paths = write_files(tmp_path, saliency, plan, evaluation, make_rivals(saliency, plan))
    out = tmp_path / "report.html"
    report(out, paths)
    dom = browse(browser, tmp_path / "profile", "--dump-dom", out.as_uri())
    body = re.search(r"<body[^>]*>", dom)
    assert body is not None
    assert 'data-ready="128 cells"' in body[0] and 'data-errors="0"' in body[0]
    canvas = re.search(r"<canvas[^>]*>", dom)
    assert canvas is not None and int(re.search(r'width="(\d+)"', canvas[0])[1]) > 300  # type: ignore[index]
    image = tmp_path / "report.png"
    browse(browser, tmp_path / "profile", f"--screenshot={image}", out.as_uri())
    assert image.stat().st_size > 20_000


def of_plan(evaluation: Evaluation, sha: str) -> Evaluation:
    """The evaluation as it is if its checkpoint was made from the plan file with this sha256."""
    return replace(evaluation, provenance=replace(evaluation.provenance, inputs={"plan": sha}))


def test_evaluation_of_another_plan_is_refused(
    tmp_path: Path, saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    foreign = write_files(tmp_path, saliency, plan, of_plan(evaluation, "0" * 64))
    with pytest.raises(ReapError, match=r"evaluation\.json is of .* than .*plan\.json") as caught:
        report(tmp_path / "r.html", foreign)
    assert caught.value.hint and "evaluate the checkpoint of this plan" in caught.value.hint
    assert not (tmp_path / "r.html").exists()
    own = of_plan(replace(evaluation, expert_bytes=10), sha256(tmp_path / "plan.json"))
    own.save(tmp_path / "evaluation.json", force=True)
    data = report(tmp_path / "r.html", foreign)
    assert "may belong to another plan" not in " ".join(data.notices)


def test_chance_is_that_of_each_layers_count(saliency: Saliency, plan: Plan) -> None:
    data = ReportData.build(saliency, plan)
    random = np.random.default_rng(0)
    for layer in data.layers:
        drawn = [{*random.choice(32, layer.kept, replace=False).tolist()} for _ in range(2000)]
        found = np.mean([len(a & b) / len(a | b) for a, b in zip(drawn[::2], drawn[1::2])])
        assert layer.chance == pytest.approx(found, abs=0.02)
    page = render(data)
    for layer in data.layers:
        assert f"Layer {layer.layer}: {layer.chance:.2f} by chance" in page


def test_missing_stability_is_explained(saliency: Saliency, plan: Plan) -> None:
    (corpus, *_) = saliency.provenance.corpora
    empty = saliency.tokens.copy()
    empty[1] = 0
    one = replace(
        saliency,
        tokens=empty,
        provenance=replace(saliency.provenance, corpora=(replace(corpus, documents=1),)),
    )
    words = Page(render(ReportData.build(one, plan))).words
    assert "the calibration text is a single one." in words
    assert "for the text is a single document" in words
    whole = replace(plan, layers=tuple(LayerPlan(x.layer, tuple(range(32)), 32)
                                       for x in plan.layers))  # fmt: skip
    assert (
        "cannot be shown: every expert is kept"
        in Page(render(ReportData.build(saliency, whole))).words
    )


def test_what_is_undefined_is_a_dash(
    saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    constant = tuple(
        replace(d, nll=2.0 * d.tokens, nll_squared=4.0 * d.tokens, base_nll=2.0 * d.tokens,
                base_nll_squared=4.0 * d.tokens, nll_cross=4.0 * d.tokens)
        for d in evaluation.documents
    )  # fmt: skip
    silent = replace(saliency, count=saliency.count.copy(), gate2_norm2=saliency.gate2_norm2.copy())
    silent.count[:, 1], silent.gate2_norm2[:, 1] = 0, 0
    page = Page(render(ReportData.build(silent, plan, replace(evaluation, documents=constant))))
    assert re.search(r"Cor\(ln\(PPL\(Q\)\), ln\(PPL\(base\)\)\) : +–", page.words)
    assert "no routed token of this domain" in page.words
    assert not re.search(r"\bnan\b", page.words)


def test_rivals_are_called_what_they_are(
    saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    def words(*labels: str) -> str:
        others = [make_evaluation(saliency, plan, label=label, kl=0.3) for label in labels]
        return Page(render(ReportData.build(saliency, plan, evaluation, others))).words

    assert "Against other plans" in words("plain: random", "mine")
    assert "Against plain recipes" in words("plain: random", "Plain REAP")
    assert "It is clearly closer to the original than the one other plan" in words("mine")


def test_rivals_on_other_text_are_listed_but_not_drawn(
    saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    rival = make_evaluation(saliency, plan, label="near", kl=0.3)
    corpora = tuple(replace(c, sha256="f" * 64) for c in rival.provenance.corpora)
    far = replace(rival, label="far", provenance=replace(rival.provenance, corpora=corpora))
    data = ReportData.build(saliency, plan, evaluation, [rival, far])
    assert [c.outcome for c in data.contenders] == ["", "closer", "not comparable: other documents"]
    text = render(data)
    (chart,) = (svg for svg in re.findall(r"<svg.*?</svg>", text, re.S) if "Size against" in svg)
    assert "near" in chart and "far" not in chart
    assert "listed but not drawn" in Page(text).words
    alone = ReportData.build(saliency, plan, evaluation, [far])
    assert "Size against divergence" not in render(alone)


def test_identical_results_are_called_so(
    saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    data = ReportData.build(saliency, plan, evaluation, [replace(evaluation, label="twin")])
    assert data.contenders[1].outcome == "identical"
    assert "It is identical in its answers to the one other plan" in " ".join(data.verdict)
    assert "than 0" not in " ".join(data.verdict)


def test_bound_is_left_out_for_plain_recipes(saliency: Saliency, plan: Plan) -> None:
    recipe = replace(plan, settings={"recipe": "random", "seed": 3, "damage_unit": "nats"})
    words = Page(render(ReportData.build(saliency, recipe))).words
    assert "can be below" not in words and "random, seed 3" in words
    assert "Predicted damage 0.04120 nats, of the plain recipe “random”" in words
    assert "can be below" in Page(render(ReportData.build(saliency, plan))).words


def test_nothing_needed_pruning(saliency: Saliency, plan: Plan) -> None:
    whole = replace(
        plan,
        layers=tuple(LayerPlan(x.layer, tuple(range(32)), 32) for x in plan.layers),
        damage=0.0,
        lower_bound=0.0,
        alternatives={},
        settings={"identity": True},
    )
    data = ReportData.build(saliency, whole)
    assert "Nothing needed pruning" in " ".join(data.verdict)
    assert "Nothing needed pruning: all experts fit, so" in Page(render(data)).words
    rounded = replace(whole, trunk={"lm_head": Format(8, 64, "affine")})
    words = Page(render(ReportData.build(saliency, rounded))).words
    assert "predicted damage is 0, rounding the trunk to 8 bits not counted." in words


def test_damage_has_its_unit(saliency: Saliency, plan: Plan) -> None:
    for unit in ("nats", "relative squared error"):
        page = Page(render(ReportData.build(
            saliency, replace(plan, settings={"damage_unit": unit}))))  # fmt: skip
        assert f"predicted damage, {unit}" in page.words
        assert f"Predicted damage 0.04120 {unit}" in page.words


def test_settings_are_in_plain_words(saliency: Saliency, plan: Plan) -> None:
    settings = {
        "budget": None, "size": 9_564_240, "context": 8192, "reserve": 0.08, "layout": "auto",
        "trunk": "source", "low_down": None, "min_experts": None, "min_bank": 1, "keep": [],
        "protect_super": 0, "domains": "worst", "clamp": "auto", "identity": False,
        "assumed": ["rho = 0.1 for 2-bit g128"], "domains_kept": {"code": 0.981},
        "low_bank": {"rule": "A 2-bit g128 bank pays below a ratio of 0.47.", "rho": 0.1},
        "warnings": ["mind the gap."],
    }  # fmt: skip
    data = ReportData.build(saliency, replace(plan, settings=settings))
    rows = dict(data.settings)
    assert list(rows) == [
        "Size of the weights", "Layout", "Trunk", "Does a low bank pay?",
        "Calibration domains weighed", "Energy kept of each domain", "Assumed, not measured",
    ]  # fmt: skip
    assert rows["Size of the weights"] == "9.56\xa0MB"
    assert rows["Energy kept of each domain"] == "code 98.1\xa0%"
    assert "costs the block's output this part of its energy" in rows["Assumed, not measured"]
    assert "of dropping it (kappa)" in rows["Does a low bank pay?"]
    words = Page(render(data)).words
    assert words.count("A 2-bit g128 bank pays below a ratio of 0.47;") == 2
    assert "memory budget" not in words.lower() and "Size of the weights" in words
    budget = replace(plan, settings=settings | {"budget": 10**7, "size": None})
    assert dict(ReportData.build(saliency, budget).settings)["Room for a context of"] == (
        "8,192 tokens")  # fmt: skip


def test_dense_layers_are_named_once(data: ReportData) -> None:
    assert Page(render(data)).words.count("Layer 0 is dense") == 1


def test_long_names_fit_or_have_a_tip() -> None:
    name = "uniform REAP at high precision"
    row = Row(name, [Dot(1.0, "c1", "tip")])
    assert f">{name}</text>" in dots(Frame("t", "d", width=WIDE), [row], x=(0, 2))
    assert f"<title>{name}</title>" in dots(Frame("t", "d", width=NARROW), [row], x=(0, 2))


def test_original_is_not_hidden_under_the_plan(data: ReportData) -> None:
    (chart,) = (s for s in re.findall(r"<svg.*?</svg>", render(data), re.S)
                if "<title>Perplexity by domain" in s)  # fmt: skip
    heights = re.findall(r'cy="([^"]+)"', chart)
    assert len(heights) == len({*heights}) == 6


def test_every_band_of_a_chart_has_its_name() -> None:
    rows = [Row("code", [Dot(6e-6, "c1", "tip")])]
    chart = dots(Frame("t", "d"), rows, x=(1e-6, 0.3), log=True, bands=KL_BANDS)
    for name in ("identical", "very close", "typical 4-bit", "substantial"):
        assert f">{name}</text>" in chart


def test_divergence_below_the_axis_has_a_mark() -> None:
    mark = Mark(1.0, 0.0, 0.0, "same", "s-high", "tip")
    assert ">≤ same</text>" in scatter(Frame("t", "d"), [mark], x=(0, 2), y=(1e-5, 1))
    assert ">≤</text>" in dots(
        Frame("t", "d"), [Row("code", [Dot(0.0, "c1", "tip")])], x=(1e-5, 1), log=True
    )


def test_small_numbers_keep_their_digits() -> None:
    assert nats(Estimate(6.1e-6, 5e-7)) == "0.0000061 ± 0.0000005"
    assert nats(Estimate(0.0213, 0.0012)) == "0.0213 ± 0.0012"
    assert nats(Estimate(6.1e-9, 5e-10)) == "(6.1 ± 0.5) × 10⁻⁹"
    assert nats(Estimate(6.1e-9, float("nan"))) == "6.1 × 10⁻⁹"
    assert practically(3.9e-11) == "≈ 0" and practically(0.0123) == "0.012"


def test_absurd_ratios_are_put_in_words() -> None:
    def trial(drop: float, low: float) -> str:
        one = np.array([1.0])
        return FormatTrial("2-bit", 0.5, low * one, drop * one).comparison

    assert "dropping costs practically nothing" in trial(3.9e-13, 0.01)
    assert "they cost practically nothing" in trial(0.01, 3.9e-13)
    assert trial(0.5, 0.25) == "dropping costs 2.0 times as much (median)"


def test_paired_ratio_stands_beside_the_perplexity(
    data: ReportData, evaluation: Evaluation
) -> None:
    (code, *_) = data.ratios
    assert code is not None
    mine = [d for d in evaluation.documents if d.domain == "code"]
    log_ratio = sum(d.nll - d.base_nll for d in mine) / sum(d.tokens for d in mine)
    assert code.value == pytest.approx(np.exp(log_ratio))
    assert code.error < data.scores[0].perplexity.error / 50
    assert f"{code.value:.4f} ± {code.error:.4f}" in Page(render(data)).words


def test_reference_bands_have_a_source(data: ReportData) -> None:
    page = Page(render(data))
    assert "smcleod.net" in page.words and "llama.cpp, pull request 6936" in page.words
    links = " ".join(attrs["href"] or "" for tag, attrs in page.tags if tag == "a")
    assert all(part in links for part in ("//smcleod.net/", "llama.cpp/pull/6936", "2510.13999"))


def test_rank_correlation_is_spearmans() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 4000]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4: covariance 4.5, variances 4.5 and 5.
    assert spearman([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert spearman([1, 2], [1, 2]) is None and spearman([1, 1, 1], [1, 2, 3]) is None


def test_predictions_are_set_against_measurements(
    tmp_path: Path, saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    plan = replace(plan, settings={"damage_unit": "nats"})
    rivals, plans = [], []
    for index, damage in enumerate((0.5, 0.4, 0.3, 0.2)):
        unit = "nats" if index < 3 else "relative squared error"
        path = tmp_path / f"plan-{index}.json"
        recipe = {"damage_unit": unit, "recipe": "random", "seed": index}
        replace(plan, damage=damage, settings=recipe).save(path)
        one = make_evaluation(saliency, plan, label=f"rival {index}", kl=0.6 - 0.1 * index)
        rivals.append(of_plan(one, sha256(path)))
        plans.append(path)
    orphan = tmp_path / "orphan.json"
    replace(plan, damage=9.0).save(orphan)
    paths = write_files(tmp_path, saliency, plan, evaluation, rivals)
    paths["rival_plans"] = [orphan, *plans[::-1]]
    data = report(tmp_path / "r.html", paths)
    assert {c.label: c.predicted for c in data.contenders} == {
        "two-bank plan": 0.0412, "rival 0": 0.5, "rival 1": 0.4, "rival 2": 0.3, "rival 3": None,
    }  # fmt: skip
    assert data.rank_correlation == pytest.approx(1)
    page = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "rank correlation over 4 plans: 1.00 ;" in page.words
    assert "Predicted damage against measured divergence" in page.words
    assert "1 of the other plans given belong to none of the evaluations" in page.words
    assert "1 of the other plans given predict damage from another" in page.words
    missing = "No prediction (–): the plan of that checkpoint was not given"
    assert missing in page.words and "predicted, nats" in page.words
    paths["rivals"] = paths["rivals"][:3]  # type: ignore[index]
    report(tmp_path / "all.html", paths)
    assert missing not in Page((tmp_path / "all.html").read_text(encoding="utf-8")).words
    paths["rival_plans"] = ()
    data = report(tmp_path / "s.html", paths)
    assert data.predictions == data.contenders[:1]
    assert "predicted, nats" not in Page(render(data)).words
    assert "Predicted damage against measured" not in render(data)


def test_bars_have_their_numbers(data: ReportData, saliency: Saliency) -> None:
    def values(title: str, page: str) -> list[str]:
        (chart,) = (s for s in re.findall(r"<svg.*?</svg>", page, re.S)
                    if f"<title>{title}" in s)  # fmt: skip
        return re.findall(r'class="value"[^>]*>([^<]+)<', chart)

    page = render(data)
    kept = [str(layer.kept) for layer in data.layers]
    assert values("Experts kept in each layer", page) == kept
    assert values("Predicted damage of other plans", page) == ["0.0412", "0.0467", "0.0533",
                                                               "0.131"]  # fmt: skip
    shares = [f"{100 * mass.kept:.1f}\xa0%" for mass in data.domains]
    assert values("Energy kept in each domain", page) == shares
    assert values("Experts kept in each layer", render(make_k3())) == []  # no room; in the table


def test_tokens_are_said_to_be_scored_or_read(data: ReportData, evaluation: Evaluation) -> None:
    words = Page(render(data)).words
    scored = sum(document.tokens for document in evaluation.documents)
    assert f"{scored:,} tokens of 36 documents were scored" in words
    assert "domain documents tokens scored" in words and "documents tokens read" in words


def test_divergence_below_zero_is_explained(
    data: ReportData, saliency: Saliency, plan: Plan, evaluation: Evaluation
) -> None:
    note = "A divergence cannot be below zero"
    assert note not in Page(render(data)).words
    rounded = replace(evaluation, kl_quantiles=evaluation.kl_quantiles | {"0": -3.9e-6})
    words = Page(render(ReportData.build(saliency, plan, rounded))).words
    assert note in words and "-3.90e-06" in words


def test_size_of_the_original_stands_beside_the_plan_s(
    data: ReportData, saliency: Saliency
) -> None:
    spec = saliency.spec
    routers = sum(m.bytes() for m in spec.modules if m.role == "router")
    routers += spec.num_experts * sum(layer.router_row_bytes for layer in spec.moe_layers)
    assert data.base_weight_bytes == spec.trunk_bytes() + routers + spec.experts_bytes
    words = Page(render(data)).words
    assert f"The original's weights are {data.base_weight_bytes / 1e6:.2f} MB." in words
    assert f"MB, {100 * data.weight_bytes / data.base_weight_bytes:.0f} % perplexity" in words


def test_map_json_is_plain(data: ReportData) -> None:
    found = re.search(r'id="map-data">(.*?)</script>', render(data), re.S)
    assert found is not None
    assert json.loads(found[1])["experts"] == 32

"""Saliency and its measurement against float64 calculations that share no code with them.

Texts are written as token ids: the tokenizer of these tests turns "5 17" into [5, 17].
"""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import models
import numpy as np
import numpy.typing as npt
import pytest
from reference import kimi_k3
from test_k3_reference import TEXTS, TIE
from tokenizers import Tokenizer

from reap.artifacts import Format, Measurement, Saliency
from reap.calibrate import CalibrationSettings, calibrate
from reap.calibrate.measure import keep_best, kept_grid, restricted_router
from reap.errors import CalibrationError
from reap.models.hooks import hooked
from reap.models.source import open_source
from reap.models.text import (
    RowSet,
    TextSet,
    batches,
    load_texts,
    load_tokenizer,
    read_texts,
    sequences,
)

Array = npt.NDArray[np.float64]
Documents = Sequence[Sequence[int]]
Corpora = Mapping[str, Documents]

SUMS = ("gate", "norm", "gate_norm", "gate2_norm2", "norm2")
ENERGIES = ("residual_energy", "output_energy")
LOW = Format(2, 64, "affine")
UNMEASURED = CalibrationSettings(probe_tokens=0)
# Plain, so that low bits are compared with mx.quantize; see test_low_bank for the others.
MEASURED = CalibrationSettings(
    probe_tokens=10_000, batch_tokens=100, low_formats=(LOW,), low_rounding="plain"
)


class Numbers:
    """A tokenizer of numbers."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


class Letters:
    """A tokenizer of characters."""

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


def text_set(domain: str, documents: Documents) -> TextSet:
    return TextSet(domain, domain, "", tuple(" ".join(map(str, ids)) for ids in documents))


def saliency_of(
    path: Path, corpora: Corpora, settings: CalibrationSettings = UNMEASURED
) -> Saliency:
    """Calibrate on documents of token ids by domain."""
    texts = [text_set(domain, documents) for domain, documents in corpora.items()]
    with pytest.MonkeyPatch.context() as patch:
        # `reap.calibrate.calibrate` is the function, which hides its module.
        module = importlib.import_module("reap.calibrate.calibrate")
        patch.setattr(module, "load_tokenizer", lambda path, **options: Numbers())
        return calibrate(open_source(str(path)), texts, settings)


def random_documents(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, models.VOCABULARY, n).tolist() for n in lengths]


CORPORA: Corpora = {
    "one": random_documents(30, 5, 12, seed=1),
    "two": random_documents(2, 41, seed=2),
}
FEW: Corpora = {"one": random_documents(11, 5, 3, seed=1), "two": random_documents(2, 8, seed=2)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("checkpoints")
    return {
        "kimi_k3": models.float32_k3(at / "k3"),
        "qwen3_moe": models.write_qwen3_moe(at / "q", mlp_only_layers=[1]),
        "qwen3_moe unnormalised": models.write_qwen3_moe(at / "u", norm_topk_prob=False, top_k=3),
        "deepseek_v3": models.write_deepseek_v3(at / "d", top_k=3),
        "deepseek_v3 groups": models.write_deepseek_v3(at / "g", n_group=4, topk_group=2),
        "glm4_moe": models.write_glm4_moe(at / "glm"),
    }


PLAIN_FAMILIES = (
    "qwen3_moe",
    "qwen3_moe unnormalised",
    "deepseek_v3",
    "deepseek_v3 groups",
    "glm4_moe",
)


# A MoE block by hand


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    g = gate @ x
    return down @ (g * sigmoid(g) * (up @ x))


@dataclass(frozen=True)
class HandMade:
    """One MoE block in float64 on the tensors of the file, one token at a time."""

    config: dict[str, Any]
    tensors: Mapping[str, Array]
    layer: int

    @property
    def experts(self) -> int:
        return int(self.config.get("num_experts") or self.config["n_routed_experts"])

    def weight(self, name: str) -> Array:
        return self.tensors[f"model.layers.{self.layer}.mlp.{name}"]

    def route(self, x: Array, keep: Sequence[int] | None = None) -> dict[int, float]:
        """Expert → weight for one token; only experts in `keep` exist, all if it is None."""
        kept = sorted(range(self.experts) if keep is None else keep)
        top_k = self.config["num_experts_per_tok"]
        logits = self.weight("gate.weight")[kept] @ x
        if self.config["model_type"] == "qwen3_moe":
            scores = np.exp(logits - logits.max())
            scores /= scores.sum()
            choice = scores
        else:
            scores = sigmoid(logits)
            choice = scores + self.weight("gate.e_score_correction_bias")[kept]
            size = self.experts // self.config["n_group"]
            group = np.array(kept) // size
            best_two = {g: np.sort(choice[group == g])[-2:].sum() for g in set(group.tolist())}
            open_groups = sorted(best_two, key=lambda g: -best_two[g])[: self.config["topk_group"]]
            choice = np.where(np.isin(group, open_groups), choice, -np.inf)
        order = np.argsort(-choice, kind="stable")
        assert len(order) == top_k or choice[order[top_k - 1]] - choice[order[top_k]] > TIE
        chosen = order[:top_k]
        weights = scores[chosen]
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum()
        weights = weights * self.config.get("routed_scaling_factor", 1.0)
        return {kept[i]: float(w) for i, w in zip(chosen.tolist(), weights, strict=True)}

    def matrices(self, expert: int, format: Format | None = None) -> list[Array]:
        found = []
        for part in ("gate_proj", "up_proj", "down_proj"):
            weight = self.weight(f"experts.{expert}.{part}.weight")
            if format is not None:
                packed = mx.quantize(
                    mx.array(weight.astype(np.float32)), format.group_size, format.bits
                )
                dense = mx.dequantize(*packed, format.group_size, format.bits)
                weight = np.array(dense).astype(np.float64)
            found.append(weight)
        return found

    def shared(self, x: Array) -> Array:
        if not self.config.get("n_shared_experts"):
            return np.zeros_like(x)
        parts = ("gate_proj", "up_proj", "down_proj")
        return swiglu(x, *(self.weight(f"shared_experts.{part}.weight") for part in parts))

    def output(
        self, x: Array, keep: Sequence[int] | None = None, format: Format | None = None
    ) -> Array:
        """The block's output for one token."""
        routed = self.route(x, keep)
        y = sum(w * swiglu(x, *self.matrices(e, format)) for e, w in routed.items())
        return np.asarray(y + self.shared(x))


class Recorded:
    """What really enters each MoE block and leaves each layer, document by document."""

    def __init__(self, path: Path, documents: Documents) -> None:
        self.config = json.loads((path / "config.json").read_text())
        self.tensors = models.file_tensors(path)
        self.layers: list[int] = []
        self.inputs: dict[int, list[Array]] = {}
        self.outputs: dict[int, list[Array]] = {}
        self.logits: list[Array] = []
        model = models.load_plain(path)
        with ExitStack() as hooks:
            for index, layer in enumerate(model.layers):
                if not hasattr(layer.mlp, "switch_mlp"):
                    continue
                self.layers.append(index)
                hooks.enter_context(hooked(layer.mlp, self._keeps(self.inputs, index, entry=True)))
                hooks.enter_context(hooked(layer, self._keeps(self.outputs, index, entry=False)))
            for ids in documents:
                self.logits.append(float64(model(mx.array([ids]))[0]))

    def _keeps(self, into: dict[int, list[Array]], index: int, *, entry: bool) -> Any:
        def call(original: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            y = original(x, *args, **kwargs)
            into.setdefault(index, []).append(float64(x[0] if entry else y[0]))
            return y

        return call

    def block(self, layer: int) -> HandMade:
        return HandMade(self.config, self.tensors, layer)


def float64(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def all_documents(corpora: Corpora) -> list[Sequence[int]]:
    return [document for documents in corpora.values() for document in documents]


def places(corpora: Corpora) -> Iterator[tuple[int, int]]:
    """(half, domain) of every document in order."""
    for domain, documents in enumerate(corpora.values()):
        for number, _ in enumerate(documents):
            yield number % 2, domain


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_every_sum_is_that_of_a_loop_over_tokens(checkpoints: dict[str, Path], family: str) -> None:
    found = saliency_of(checkpoints[family], CORPORA, replace(UNMEASURED, batch_tokens=64))
    real = Recorded(checkpoints[family], all_documents(CORPORA))
    assert found.layers == tuple(real.layers)
    expected = {name: np.zeros(found.gate.shape) for name in (*SUMS, "count", "max_norm")}
    expected |= {name: np.zeros(found.tokens.shape) for name in (*ENERGIES, "tokens")}
    for position, layer in enumerate(real.layers):
        block = real.block(layer)
        for document, (half, domain) in enumerate(places(CORPORA)):
            for x in real.inputs[layer][document]:
                for expert, g in block.route(x).items():
                    at = (half, domain, position, expert)
                    norm = float(np.linalg.norm(swiglu(x, *block.matrices(expert))))
                    terms = (g, norm, g * norm, (g * norm) ** 2, norm**2)
                    for name, term in zip(SUMS, terms, strict=True):
                        expected[name][at] += term
                    expected["count"][at] += 1
                    expected["max_norm"][at] = max(expected["max_norm"][at], norm)
                where = (half, domain, position)
                expected["tokens"][where] += 1
                expected["output_energy"][where] += (block.output(x) ** 2).sum()
            expected["residual_energy"][half, domain, position] += (
                real.outputs[layer][document] ** 2
            ).sum()
    for name in ("count", "tokens"):
        np.testing.assert_array_equal(getattr(found, name), expected[name], err_msg=name)
    for name in (*SUMS, *ENERGIES, "max_norm"):
        np.testing.assert_allclose(getattr(found, name), expected[name], 1e-5, err_msg=name)


@dataclass(frozen=True)
class K3Texts:
    """Documents up to the first token that a near tie routes, and what the reference saw."""

    reference: kimi_k3.Model
    documents: list[list[int]]
    observed: list[list[tuple[int, npt.NDArray[np.int64], Array, Array]]]


@pytest.fixture(scope="module")
def k3_texts() -> K3Texts:
    reference = kimi_k3.load(models.embedded_model())
    tokenizer = Tokenizer.from_file(str(models.embedded_model() / "tokenizer.json"))
    documents, observations = [], []
    for text in TEXTS[:3]:
        ids = tokenizer.encode(json.loads(text.read_text().partition("\n")[0])["text"]).ids[:32]
        seen: list[tuple[int, int, npt.NDArray[np.int64], Array, Array]] = []
        ties: list[bool] = []
        route = kimi_k3.route

        def record(logits: Array, bias: Array, config: Any, allowed: Sequence[int]) -> Any:
            ranked = np.sort(kimi_k3.sigmoid(logits) + bias)[::-1]
            k = config.num_experts_per_token
            ties.append(bool(ranked[k - 1] - ranked[k] < TIE))  # noqa: B023
            return route(logits, bias, config, allowed)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kimi_k3, "route", record)
            kimi_k3.forward(
                reference,
                ids,
                observe=lambda *what: seen.append(what),  # noqa: B023
            )
        tied = np.reshape(ties, (-1, len(ids))).any(axis=0)
        decided = int(np.argmax(tied)) if tied.any() else len(ids)
        documents.append(ids[:decided])
        observations.append([(layer, e, w, y) for layer, t, e, w, y in seen if t < decided])
    assert sum(map(len, documents)) > 60
    return K3Texts(reference, documents, observations)


Observed = list[tuple[int, npt.NDArray[np.int64], Array, Array]]
K3_CORPORA = {"ab": slice(0, 2), "c": slice(2, None)}


def k3_corpora(texts: K3Texts) -> Corpora:
    return {domain: texts.documents[part] for domain, part in K3_CORPORA.items()}


def k3_sums(found: Saliency, texts: K3Texts, observed: list[Observed]) -> dict[str, Array]:
    """The sums of a loop over what the reference's experts gave, document by document."""
    expected = {name: np.zeros(found.gate.shape) for name in (*SUMS, "count", "max_norm")}
    for (half, domain), seen in zip(places(k3_corpora(texts)), observed, strict=True):
        for layer, experts, weights, outputs in seen:
            norms = np.linalg.norm(outputs, axis=-1)
            for expert, g, norm in zip(experts, weights, norms, strict=True):
                at = (half, domain, found.layers.index(layer), expert)
                terms = (g, norm, g * norm, (g * norm) ** 2, norm**2)
                for name, term in zip(SUMS, terms, strict=True):
                    expected[name][at] += term
                expected["count"][at] += 1
                expected["max_norm"][at] = max(expected["max_norm"][at], norm)
    return expected


def test_the_sums_of_k3_are_those_of_a_float64_loop(
    checkpoints: dict[str, Path], k3_texts: K3Texts
) -> None:
    """The reference's MoE block, token by token, on what really enters each block."""
    found = saliency_of(checkpoints["kimi_k3"], k3_corpora(k3_texts))
    model = models.load_plain(checkpoints["kimi_k3"])
    observed: list[Observed] = []
    for ids in k3_texts.documents:
        seen: Observed = []
        with ExitStack() as hooks:
            for index in found.layers:

                def call(original: Any, x: mx.array, layer: int = index) -> mx.array:
                    kimi_k3.moe(
                        float64(x[0]),
                        k3_texts.reference.layer(layer).inside("block_sparse_moe"),
                        k3_texts.reference.config,
                        layer,
                        None,
                        lambda layer, _, e, w, y: seen.append((layer, e, w, y)),  # noqa: B023
                    )
                    return original(x)

                hooks.enter_context(hooked(model.layers[index].mlp, call))
            mx.eval(model(mx.array([ids])))
        observed.append(seen)
    expected = k3_sums(found, k3_texts, observed)
    np.testing.assert_array_equal(found.count, expected["count"])
    for name in (*SUMS, "max_norm"):
        np.testing.assert_allclose(getattr(found, name), expected[name], 1e-5, err_msg=name)


def test_the_sums_of_k3_are_those_of_the_float64_reference(
    checkpoints: dict[str, Path], k3_texts: K3Texts
) -> None:
    """The whole forward pass in float64: float32 drifts over the layers by about 1e-5."""
    found = saliency_of(checkpoints["kimi_k3"], k3_corpora(k3_texts))
    expected = k3_sums(found, k3_texts, k3_texts.observed)
    np.testing.assert_array_equal(found.count, expected["count"])
    lengths = [[len(k3_texts.documents[0]), len(k3_texts.documents[2])]]
    lengths += [[len(k3_texts.documents[1]), 0]]
    assert found.tokens.tolist() == [[[n] * 5 for n in half] for half in lengths]
    for name in (*SUMS, "max_norm"):
        np.testing.assert_allclose(getattr(found, name), expected[name], 1e-4, err_msg=name)


# What saliency must not depend on


def assert_same(
    one: Saliency, other: Saliency, total: Callable[[Array], Array] = lambda array: array
) -> None:
    for name in ("count", "tokens"):
        np.testing.assert_array_equal(total(getattr(one, name)), total(getattr(other, name)))
    for name in (*SUMS, *ENERGIES):
        np.testing.assert_allclose(
            total(getattr(one, name)), total(getattr(other, name)), 1e-5, err_msg=name
        )


@pytest.mark.parametrize("family", ["kimi_k3", "qwen3_moe", "deepseek_v3 groups"])
def test_saliency_does_not_depend_on_batches_order_or_domains(
    checkpoints: dict[str, Path], family: str
) -> None:
    path = checkpoints[family]
    five = {str(n): random_documents(9 + n, 3, seed=n) for n in range(5)}
    found = saliency_of(path, five)
    for batch_tokens in (1, 20, 31):
        assert_same(found, saliency_of(path, five, replace(UNMEASURED, batch_tokens=batch_tokens)))

    def over_halves(array: Array) -> Array:
        return array.sum(axis=0)

    def over_all(array: Array) -> Array:
        return array.sum(axis=(0, 1))

    backwards = {name: documents[::-1] for name, documents in five.items()}
    assert_same(found, saliency_of(path, backwards), over_halves)
    together = saliency_of(path, {"all": all_documents(five)})
    assert together.domains == ("all",)
    assert_same(found, together, over_all)
    assert found.max_norm.max(axis=(0, 1)) == pytest.approx(
        together.max_norm.max(axis=(0, 1)), rel=1e-5
    )


def test_the_measurement_does_not_depend_on_the_size_of_batches(
    checkpoints: dict[str, Path],
) -> None:
    for family in ("kimi_k3", "deepseek_v3 groups"):
        one, other = (
            saliency_of(checkpoints[family], FEW, replace(MEASURED, batch_tokens=n)).measurement
            for n in (1, 4096)
        )
        assert one is not None and other is not None
        for field in fields(Measurement):
            if field.name not in ("formats", "low_rounding"):
                a, b = getattr(one, field.name), getattr(other, field.name)
                # Where nothing is lost, what is left is float32 rounding of sums around 1.
                rounding = 1e-6 if field.name.endswith("_kl") else 1e-9 * np.abs(b).max()
                np.testing.assert_allclose(
                    a, b, 1e-4, atol=rounding, err_msg=f"{family} {field.name}"
                )


def test_experts_without_tokens_have_zero_sums(checkpoints: dict[str, Path]) -> None:
    found = saliency_of(checkpoints["kimi_k3"], {"short": [[5, 6, 7]]})
    never = found.count.sum(axis=(0, 1)) == 0
    assert never.any() and not never.all()
    for criterion in ("energy", "reap", "frequency"):
        assert (found.score(criterion)[never] == 0).all()
        assert (found.score(criterion)[~never] > 0).all()


# The measurement


def squared(difference: Array) -> float:
    return float((difference**2).sum())


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_errors_of_dropping_and_low_bits_are_those_of_a_loop_over_tokens(
    checkpoints: dict[str, Path], family: str
) -> None:
    found = saliency_of(checkpoints[family], CORPORA, MEASURED)
    measured = found.measurement
    assert measured is not None and measured.formats == (LOW,)
    real = Recorded(checkpoints[family], all_documents(CORPORA))
    groups = real.config.get("n_group", 1)
    for position, layer in enumerate(real.layers):
        block = real.block(layer)
        inputs = np.concatenate(real.inputs[layer])
        plain = [block.output(x) for x in inputs]
        assert measured.tokens[position] == len(inputs)
        energy = found.gate2_norm2.sum(axis=(0, 1))[position]
        order = measured.order[position]
        assert (np.diff(energy[order]) <= 0).all()
        assert measured.output_energy[position] == pytest.approx(
            sum(squared(y) for y in plain), rel=1e-5
        )
        for kept, error in zip(measured.kept, measured.drop_error[position], strict=True):
            size = len(order) // groups
            keep = [
                int(expert)
                for group in range(groups)
                for expert in [e for e in order if e // size == group][: kept // groups]
            ]
            assert len(keep) == kept
            expected = sum(
                squared(block.output(x, keep) - y) for x, y in zip(inputs, plain, strict=True)
            )
            assert error == pytest.approx(expected, rel=1e-4, abs=1e-9), (layer, kept)
        assert measured.low_error[0, position] == pytest.approx(
            sum(
                squared(block.output(x, format=LOW) - y) for x, y in zip(inputs, plain, strict=True)
            ),
            rel=1e-4,
        )
        of_expert = np.zeros(block.experts)
        low = {e: block.matrices(e, LOW) for e in range(block.experts)}
        for x in inputs:
            for expert, g in block.route(x).items():
                exact = swiglu(x, *block.matrices(expert))
                of_expert[expert] += g * g * squared(swiglu(x, *low[expert]) - exact)
        np.testing.assert_allclose(measured.low_expert_error[0, position], of_expert, 1e-4)


def divergence(logits: Array, changed: Array) -> Array:
    """KL(p ‖ q) of each token."""

    def log_softmax(x: Array) -> Array:
        shifted = x - x.max(axis=-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))

    p, q = log_softmax(logits), log_softmax(changed)
    return (np.exp(p) * (p - q)).sum(axis=-1)


@contextmanager
def with_fewer(model: nn.Module, layer: int, keep: Sequence[int]) -> Iterator[None]:
    """The plain model with dropped experts masked in the router's logits or bias."""
    mlp = model.layers[layer].mlp
    dropped = mx.array([e not in keep for e in range(mlp.switch_mlp.gate_proj.num_experts)])
    owner = next((m for m in (mlp, mlp.gate) if "e_score_correction_bias" in m), None)
    if owner is None:
        with hooked(mlp.gate, lambda gate, x: mx.where(dropped, -mx.inf, gate(x))):
            yield
        return
    bias = owner.e_score_correction_bias
    owner.e_score_correction_bias = mx.where(dropped, -1e9, bias)
    yield
    owner.e_score_correction_bias = bias


@contextmanager
def with_low_bits(model: nn.Module, layer: int) -> Iterator[None]:
    """The plain model with every expert of a layer stored at 2 bit."""
    experts = model.layers[layer].mlp.switch_mlp
    before = {name: experts[name] for name in ("gate_proj", "up_proj", "down_proj")}
    for name, part in before.items():
        dense = part.weight
        if "scales" in part:
            dense = mx.dequantize(dense, part.scales, group_size=32, bits=4, mode="mxfp4")
        low = mx.dequantize(*mx.quantize(dense, LOW.group_size, LOW.bits), LOW.group_size, LOW.bits)
        experts[name] = Dense(low.astype(mx.float32))
    yield
    for name, part in before.items():
        experts[name] = part


class Dense(nn.Module):
    """Expert matrices, multiplied without sorting tricks."""

    def __init__(self, weight: mx.array) -> None:
        super().__init__()
        self.weight = weight

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return mx.gather_mm(x, self.weight.swapaxes(-1, -2), rhs_indices=indices)


# Of 12 tokens each domain has 6: of 11, 5 and 3 the first 6 of the first; of 2 and 8 two and four.
BEGINNINGS: Corpora = {"one": [FEW["one"][0][:6]], "two": [FEW["two"][0], FEW["two"][1][:4]]}


@pytest.mark.parametrize(
    ("family", "tokens", "compared"),
    [
        *((family, None, FEW) for family in ("kimi_k3", *PLAIN_FAMILIES)),
        *((family, 12, BEGINNINGS) for family in ("kimi_k3", "qwen3_moe")),
    ],
)
def test_the_sensitivity_is_that_of_the_whole_changed_model(
    checkpoints: dict[str, Path], family: str, tokens: int | None, compared: Corpora
) -> None:
    settings = replace(MEASURED, sensitivity_tokens=tokens)
    found = saliency_of(checkpoints[family], FEW, settings)
    measured = found.measurement
    assert measured is not None
    assert measured.kl_tokens.tolist() == [sum(map(len, all_documents(compared)))]
    model = models.load_plain(checkpoints[family])
    documents = [mx.array([ids]) for ids in all_documents(compared)]
    plain = [float64(model(ids)[0]) for ids in documents]
    groups = found.spec.n_group
    for position, layer in enumerate(found.layers):
        order, kept = measured.order[position], int(measured.kl_kept[0])
        assert kept in measured.kept and 0 < kept < len(order)
        size = len(order) // groups
        keep = [
            e for g in range(groups) for e in [x for x in order if x // size == g][: kept // groups]
        ]
        assert measured.drop_kl[0] > 0.01 and measured.low_kl[0] > 0.01
        for change, divergences in (
            (with_fewer(model, layer, keep), measured.drop_kl),
            (with_low_bits(model, layer), measured.low_kl),
        ):
            with change:
                changed = [float64(model(ids)[0]) for ids in documents]
            kl = np.concatenate([divergence(*pair) for pair in zip(plain, changed, strict=True)])
            assert divergences[position] == pytest.approx(kl.mean(), rel=1e-4, abs=1e-6)


def test_nothing_but_the_sensitivity_depends_on_its_tokens(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["kimi_k3"]
    every, none = (
        saliency_of(path, FEW, replace(MEASURED, **changes))
        for changes in ({"sensitivity_tokens": MEASURED.probe_tokens}, {"sensitivity": False})
    )
    few = saliency_of(path, FEW, replace(MEASURED, sensitivity_tokens=12))
    of = {"drop_kl", "low_kl", "kl_tokens"}
    for one in (every, none):
        for field in fields(Measurement):
            pair = [getattr(s.measurement, field.name) for s in (few, one)]
            assert np.array_equal(*pair) == (field.name not in of), field.name
        assert np.array_equal(few.gate2_norm2, one.gate2_norm2)
    assert every.measurement is not None and none.measurement is not None
    assert every.measurement.kl_tokens.tolist() == [29]
    assert none.measurement.kl_tokens.size == 0


def test_the_restricted_router_is_that_of_a_model_without_the_other_experts(
    checkpoints: dict[str, Path], k3_texts: K3Texts
) -> None:
    source = open_source(str(checkpoints["kimi_k3"]))
    source.load_trunk()
    generator = np.random.default_rng(0)
    keep = {layer: generator.permutation(64)[:24].tolist() for layer in source.moe_layers}
    ids = k3_texts.documents[0][:20]
    with ExitStack() as restricted:
        for layer in range(len(source.layers)):
            source.load_layer(layer)
        plain = float64(source.model(mx.array([ids]))[0])
        for layer, kept in keep.items():
            restricted.enter_context(restricted_router(source, layer, kept))
        logits = float64(source.model(mx.array([ids]))[0])
    expected = kimi_k3.forward(k3_texts.reference, ids, keep=keep)
    assert np.abs(logits - expected).max() < 1e-3
    assert np.abs(logits - plain).max() > 1
    assert np.array_equal(float64(source.model(mx.array([ids]))[0]), plain)


def test_experts_are_dropped_equally_from_all_groups() -> None:
    order = np.array([0, 1, 2, 3, 15, 14, 4, 8, 5, 6, 7, 9, 10, 11, 12, 13])
    assert keep_best(order, 4, 1) == [0, 1, 2, 3]
    assert keep_best(order, 8, 4) == [0, 1, 4, 5, 8, 9, 15, 14]


def test_the_grid_keeps_whole_shares_of_the_groups() -> None:
    grid = kept_grid(64, 8, 4)
    assert (grid % 4 == 0).all() and (np.diff(grid) < 0).all()
    assert grid[0] < 64 and grid[-1] == 8
    assert kept_grid(8, 8, 4).tolist() == [8]


def test_nothing_is_measured_without_probes_and_no_kl_without_sensitivity(
    checkpoints: dict[str, Path],
) -> None:
    path, corpora = checkpoints["qwen3_moe"], {"a": random_documents(8)}
    assert saliency_of(path, corpora).measurement is None
    measured = saliency_of(path, corpora, replace(MEASURED, sensitivity=False)).measurement
    assert measured is not None
    assert measured.drop_kl.size == measured.low_kl.size == 0
    assert measured.drop_error.shape == (2, len(measured.kept))


def test_an_expert_too_narrow_for_every_low_format_is_still_measured(tmp_path: Path) -> None:
    path = models.write_qwen3_moe(tmp_path / "narrow", intermediate=48, layers=2)
    measured = saliency_of(path, {"a": random_documents(8)}, MEASURED).measurement
    assert measured is not None and measured.formats == ()
    assert measured.drop_kl.shape == (2,) and measured.low_kl.size == 0
    assert measured.low_expert_error.shape == (0, 2, 8)


def test_memory_does_not_grow_with_the_layers(tmp_path: Path) -> None:
    """With everything measured: a layer's copies and variants go when the layer goes."""
    peaks = []
    for layers in (2, 8):
        path = models.write_qwen3_moe(tmp_path / str(layers), layers=layers, experts=16)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        gc.disable()  # it would hide, now and then, what reference cycles keep alive
        found = saliency_of(path, {"a": random_documents(4)}, MEASURED)
        gc.enable()
        layer = 16 * found.spec.expert_bytes(found.spec.moe_layers[0])
        peaks.append((mx.get_peak_memory() - before) / layer)
    assert peaks[1] < peaks[0] + 0.5


# Faults


@pytest.mark.parametrize("part", ["gate_proj", "down_proj"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_damaged_expert_is_named(
    checkpoints: dict[str, Path], tmp_path: Path, part: str, value: float
) -> None:
    name = f"model.layers.1.mlp.experts.11.{part}.weight"

    def damage(tensors: models.Tensors) -> models.Tensors:
        if name in tensors:
            tensors[name][3, 3] = value
        return tensors

    path = models.copy_checkpoint(checkpoints["deepseek_v3"], tmp_path / "damaged", damage)
    with pytest.raises(CalibrationError, match="expert 11 in layer 1 gives a value that is not f"):
        saliency_of(path, CORPORA, MEASURED)


def test_a_damaged_scale_of_k3_is_named(tmp_path: Path) -> None:
    """The E8M0 byte 255 stands for NaN."""
    corpora = {"a": random_documents(3)}
    counts = saliency_of(models.embedded_model(), corpora).count.sum(axis=(0, 1))
    expert = int(np.argmax(counts[1]))  # the second MoE layer is layer 2
    name = f"language_model.model.layers.2.block_sparse_moe.experts.{expert}.w2.weight_scale"

    def damage(tensors: models.Tensors) -> models.Tensors:
        if name in tensors:
            tensors[name][7, 1] = 255
        return tensors

    path = models.copy_checkpoint(models.embedded_model(), tmp_path / "damaged", damage)
    with pytest.raises(CalibrationError, match=f"expert {expert} in layer 2 gives a value that"):
        saliency_of(path, corpora)


def test_a_damaged_attention_is_noticed_in_its_layer(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    def damage(tensors: models.Tensors) -> models.Tensors:
        name = "model.layers.1.self_attn.o_proj.weight"
        return tensors | ({name: tensors[name] * np.nan} if name in tensors else {})

    path = models.copy_checkpoint(checkpoints["deepseek_v3"], tmp_path / "damaged", damage)
    with pytest.raises(CalibrationError, match=r"layer 1.* not finite"):
        saliency_of(path, CORPORA)


@pytest.mark.parametrize(
    ("corpora", "settings", "message"),
    [
        ({"a": [[7]]}, {}, "0 tokens"),
        ({"a": [[]]}, {}, "0 tokens"),
        ({"a": [[7, 8, 9]]}, {"tokens": 1}, "0 tokens"),
        ({"a": [[7, 8, 9]], "b": [[7]]}, {}, "b has 0 tokens"),
        ({"a": [[7, 2048]]}, {}, "id 2048, the model has 2048 embeddings"),
        ({"a": [[7, 8]]}, {"sequence_length": 16_385}, "16,385 tokens .* most 16,384"),
    ],
    ids=["one", "none", "limit", "one domain", "foreign tokenizer", "too long"],
)
def test_text_that_cannot_be_used_is_refused_before_any_work(
    checkpoints: dict[str, Path],
    corpora: Corpora,
    settings: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(*args: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("reap.models.source.SourceModel.load_layer", read)
    with pytest.raises(CalibrationError, match=message):
        saliency_of(checkpoints["qwen3_moe"], corpora, replace(UNMEASURED, **settings))


def test_a_block_that_hides_its_weights_is_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(self: Any, x: mx.array) -> mx.array:
        y = self.switch_mlp(x, mx.zeros((*x.shape[:-1], 2), mx.uint32))
        return mx.einsum("btkd,btk->btd", y, mx.ones((*x.shape[:-1], 2)))

    monkeypatch.setattr("mlx_lm.models.qwen3_moe.Qwen3MoeSparseMoeBlock.__call__", call)
    with pytest.raises(CalibrationError, match="weights in layer 0 cannot be observed"):
        saliency_of(checkpoints["qwen3_moe"], CORPORA)


# Text


def jsonl(path: Path, *documents: object) -> Path:
    lines = [json.dumps({"text": document}, ensure_ascii=False) for document in documents]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_files_are_read_document_by_document(tmp_path: Path) -> None:
    odd = "one\u2028line\x85and\x0cone\rdocument"
    file = jsonl(tmp_path / "a.jsonl", odd, "two", " ")
    plain = tmp_path / "b.txt"
    plain.write_text("x\n\ny")
    first, second = load_texts([str(file), str(plain)], split="calibration")
    assert isinstance(first, RowSet) and isinstance(second, TextSet)
    assert first.domain == "a"
    assert [text for _, text in first.rows.documents()] == [odd, "two", " "]
    assert (second.domain, second.documents) == ("b", ("x\n\ny",))


def test_the_shipped_sets_have_the_checksums_of_their_descriptions() -> None:
    for split in ("calibration", "evaluation"):
        texts = load_texts([], split=split)
        assert len({text.domain for text in texts}) == len(texts) > 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt has no text: 0 tokens"),
        ("blank.jsonl", b'{"text": " "}\n\n', "blank.jsonl has no text: 0 tokens"),
        ("none.jsonl", b"\n", "none.jsonl has no text: 0 tokens"),
        ("cut.jsonl", b'{"text": "a"}\n{"te', "cut.jsonl is not JSON lines"),
        (
            "other.jsonl",
            b'{"content": "a"}',
            "other.jsonl has no column .*its columns: content",
        ),
        ("list.jsonl", b"[1]", "list.jsonl is not JSON lines"),
        ("null.jsonl", b'{"text": null}', "line 1 of .*null.jsonl: text is null, not a string"),
        ("latin.txt", b"caf\xe9", "latin.txt cannot be read"),
        ("table.tsv", b"a\tb", "table.tsv is of a kind that reap cannot read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        texts = load_texts([str(tmp_path / name)], split="calibration")
        read_texts(texts, Letters(), sequence_length=9)


def test_an_unknown_text_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CalibrationError, match="poetry is neither a shipped text set nor") as found:
        load_texts(["code", "poetry"], split="calibration")
    assert "code" in str(found.value.hint) and "prose" in str(found.value.hint)


def test_two_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "code.jsonl", "x")
    with pytest.raises(CalibrationError, match="two text sets are called code"):
        load_texts(["code", str(file)], split="calibration")


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    path = models.write_qwen3_moe(tmp_path / "model", layers=1)
    for name in models.TOKENIZER:
        (path / name).unlink()
    with pytest.raises(CalibrationError, match=f"tokenizer of {path} cannot be loaded"):
        load_tokenizer(path)


def test_documents_are_cut_and_the_limit_is_shared() -> None:
    texts = [
        text_set("a", [range(10), range(100, 103), range(200, 205)]),
        text_set("b", [range(300, 302)]),
    ]

    def cut(length: int, tokens: int | None = None) -> list[tuple[int, ...]]:
        parts = sequences(
            texts, Numbers(), sequence_length=length, tokens=tokens, vocab_size=models.VOCABULARY
        )
        return [part.tokens for part in parts]

    assert cut(4) == [
        (0, 1, 2, 3),
        (100, 101, 102),
        (200, 201, 202, 203),
        (4, 5, 6, 7),
        (8, 9),
        (300, 301),
    ]
    assert cut(4, tokens=12) == [(0, 1, 2, 3), (100, 101), (300, 301)]


def test_batches_hold_one_domain_and_half_and_waste_little() -> None:
    texts = [text_set("a", random_documents(5, 9, 2, 9)), text_set("b", random_documents(3))]
    parts = sequences(texts, Numbers(), sequence_length=64, vocab_size=models.VOCABULARY)
    made = batches(parts, tokens_per_batch=10)
    assert [(b.domain, b.half, b.documents) for b in made] == [
        (0, 0, (0, 2)),
        (0, 1, (1,)),
        (0, 1, (3,)),
        (1, 0, (0,)),
    ]
    assert made[0].mask.tolist() == [[True] * 5, [True] * 2 + [False] * 3]
    for batch in made:
        assert batch.tokens.size <= 10

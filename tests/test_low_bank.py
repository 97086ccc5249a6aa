"""Second moments in calibration, and the low bank that calibration, plan and export agree on."""

from __future__ import annotations

from dataclasses import replace

import exports
import mlx.core as mx
import numpy as np
import pytest

from reap.artifacts import Format, Plan, Provenance, Saliency
from reap.artifacts.files import sha256
from reap.calibrate import CalibrationSettings, calibrate
from reap.calibrate.moments import LayerMoments
from reap.errors import ReapError
from reap.export import export
from reap.models.lowbit import quantizer
from reap.models.quantize import dequantized, requantized
from reap.models.source import open_source
from reap.models.text import load_texts
from reap.planning import PlanSettings, make_plan

TWO = Format(2, 128, "affine")


@pytest.fixture(scope="module")
def calibrated(tiny_k3) -> dict[str, Saliency]:
    """By rounding of the low bits."""
    settings = CalibrationSettings(
        tokens=600, sequence_length=64, probe_tokens=100, sensitivity=False, low_formats=(TWO,)
    )
    return {
        rounding: calibrate(
            open_source(str(tiny_k3)),
            load_texts(["code", "prose"], split="calibration"),
            replace(settings, low_rounding=rounding),
        )
        for rounding in ("plain", "weighted", "feedback")
    }


@pytest.fixture(scope="module")
def saliency_file(calibrated, tmp_path_factory):
    file = tmp_path_factory.mktemp("low-bank") / "saliency.safetensors"
    calibrated["weighted"].save(file)
    return file


def planned(saliency: Saliency, digest: str, **settings) -> Plan:
    spec = saliency.spec
    provenance = Provenance(
        "0", "", spec.model, spec.revision, spec.model_sha256, {"saliency": digest}
    )
    size = spec.trunk_bytes() + spec.experts_bytes // 2
    return make_plan(saliency, PlanSettings(size=size, **settings), provenance=provenance)


def test_rows_are_the_routed_tokens_without_padding(calibrated):
    saliency = calibrated["weighted"]
    routed = saliency.count.sum(axis=(0, 1, 3))
    assert saliency.moments.sums.keys() == {"gate_proj", "up_proj", "down_proj"}
    for projection in saliency.spec.moe_layers[0].projections:
        assert np.array_equal(saliency.moments.rows[projection.name], routed)
        assert saliency.moments.sums[projection.name].shape == (len(routed), projection.columns)
    assert np.array_equal(saliency.moments.sums["gate_proj"], saliency.moments.sums["up_proj"])


@pytest.mark.parametrize("tokens", [3, 40], ids=["unsorted", "sorted"])
def test_second_moments_equal_a_loop_over_pairs_in_float64(tiny_k3, tokens):
    source = open_source(str(tiny_k3))
    source.load_layer(2)
    experts = source.experts(2)
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((2, tokens, 128)), dtype=mx.bfloat16)
    indices = mx.array(rng.integers(0, 64, (2, tokens, 4)), dtype=mx.uint32)
    mask = np.ones((2, tokens), bool)
    mask[1, tokens // 2 :] = False
    moments = LayerMoments(2, experts, products=True)
    with moments.observed(mask):
        observed = experts(x, indices)
    assert mx.array_equal(observed, experts(x, indices))
    dense = {
        name: np.array(
            dequantized(dict(experts[name]), Format(4, 32, "mxfp4")).astype(mx.float32), np.float64
        )
        for name in ("gate_proj", "up_proj")
    }
    inputs, hidden = np.zeros(128), np.zeros(128)
    for sequence, token in np.argwhere(mask):
        given = np.array(x[sequence, token].astype(mx.float32), np.float64)
        for expert in np.array(indices[sequence, token]):
            up, gate = (dense[name][expert] @ given for name in ("up_proj", "gate_proj"))
            activated = experts.activation(mx.array(up), mx.array(gate))
            inputs += given**2
            hidden += np.array(activated.astype(mx.float32), np.float64) ** 2
    assert moments.rows == dict.fromkeys(moments.rows, 4 * int(mask.sum()))
    assert np.allclose(moments.sums["gate_proj"], inputs, rtol=1e-5)
    for name in ("gate_proj", "down_proj"):
        diagonal = np.diag(moments.product(name))
        assert np.allclose(diagonal, moments.sums[name], rtol=1e-5)
    assert moments.product("gate_proj") is moments.product("up_proj")
    given = np.array(x.astype(mx.float32), np.float64)[mask]
    assert np.allclose(moments.product("gate_proj"), 4 * given.T @ given, atol=1e-3)
    # The layer's own activations are rounded to bfloat16.
    assert np.allclose(moments.sums["down_proj"], hidden, rtol=0.05)


def test_calibration_measures_the_rounding_it_says(calibrated):
    found = {rounding: saliency.measurement for rounding, saliency in calibrated.items()}
    assert all(measured.low_rounding == rounding for rounding, measured in found.items())
    plain, weighted, feedback = found["plain"], found["weighted"], found["feedback"]
    assert weighted.low_error.sum() < 0.7 * plain.low_error.sum()
    assert feedback.low_error.sum() < 0.8 * weighted.low_error.sum()
    assert np.array_equal(weighted.drop_error, plain.drop_error)


def test_a_plan_rounds_as_was_measured_unless_told_otherwise(calibrated):
    weighted, plain = calibrated["weighted"], calibrated["plain"]
    assert planned(weighted, "").low_rounding == "weighted"
    assert planned(plain, "").low_rounding == "plain"
    other = planned(weighted, "", low_rounding="plain")
    assert other.low_rounding == "plain"
    assert "low-bit errors of weighted rounding, not plain" in other.settings["assumed"]
    assert planned(replace(weighted, measurement=None), "").low_rounding == "weighted"
    bare = replace(weighted, measurement=None, moments=None)
    assert planned(bare, "").low_rounding == "search"
    with pytest.raises(ReapError, match="second moments"):
        planned(bare, "", low_rounding="weighted")
    assert planned(calibrated["feedback"], "").low_rounding == "feedback"
    with pytest.raises(ReapError, match="covariances"):
        planned(weighted, "", low_rounding="feedback")
    with pytest.raises(ReapError, match="low_rounding"):
        CalibrationSettings(low_rounding="nearest")
    with pytest.raises(ReapError, match="low_rounding"):
        PlanSettings(size=1, low_rounding="nearest")


@pytest.mark.parametrize("rounding", ["plain", "search", "weighted", "feedback"])
def test_export_stores_what_the_rounding_gives(tiny_k3, calibrated, tmp_path, rounding):
    saliency = calibrated["feedback"]
    saliency_file = tmp_path / "saliency.safetensors"
    saliency.save(saliency_file)
    plan = planned(saliency, sha256(saliency_file), layout="two-bank", low_rounding=rounding)
    file = tmp_path / "plan.json"
    plan.save(file)
    export(
        open_source(str(tiny_k3)),
        Plan.load(file),
        tmp_path / "out",
        plan_file=file,
        saliency=saliency_file if rounding in ("weighted", "feedback") else None,
    )
    written = open_source(str(tmp_path / "out"))
    source = open_source(str(tiny_k3))
    position, layer = next((i, entry) for i, entry in enumerate(plan.layers) if entry.low)
    weights = source.layer_weights(layer.layer, layer.kept[layer.high :])
    found = written.layer_weights(layer.layer)
    experts = source.family.experts
    bank = f"{experts}.low." if layer.split else f"{experts}."
    for name in ("gate_proj", "down_proj"):
        head = f"{experts}.{name}."
        arrays = {n.removeprefix(head): a for n, a in weights.items() if n.startswith(head)}
        moments = saliency.moments
        quantize = quantizer(
            rounding,
            moments.mean(name, position),
            lambda n=name, m=moments: m.covariance(n, position),
        )
        expected = requantized(arrays, Format(4, 32, "mxfp4"), plan.low[name], quantize)
        for leaf, array in expected.items():
            assert mx.array_equal(found[f"{bank}{name}.{leaf}"], array), (name, leaf)


def test_export_needs_the_saliency_file_of_the_plan(tiny_k3, calibrated, saliency_file, tmp_path):
    plan = planned(calibrated["weighted"], sha256(saliency_file), layout="two-bank")
    file = tmp_path / "plan.json"
    plan.save(file)

    def write(plan: Plan, saliency) -> None:
        export(open_source(str(tiny_k3)), plan, tmp_path / "out", plan_file=file, saliency=saliency)

    with pytest.raises(ReapError, match="needs the saliency file"):
        write(plan, None)
    other = tmp_path / "other.safetensors"
    calibrated["plain"].save(other)
    with pytest.raises(ReapError, match="another saliency file"):
        write(plan, other)
    bare = tmp_path / "bare.safetensors"
    replace(calibrated["weighted"], moments=None).save(bare)
    provenance = replace(plan.provenance, inputs={"saliency": sha256(bare)})
    with pytest.raises(ReapError, match="no second moments"):
        write(replace(plan, provenance=provenance), bare)
    with pytest.raises(ReapError, match="no covariances"):
        write(replace(plan, low_rounding="feedback"), saliency_file)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_weighted_rounding_loses_less_than_min_and_max(family, tmp_path):
    """On dense sources, by the error that the plan minds: Σ E[x²] (w - w')² over the low bank."""
    path, spec = exports.source_checkpoint(family), exports.spec_of(family)
    source = open_source(str(path))
    settings = CalibrationSettings(tokens=300, sequence_length=64, probe_tokens=0)
    saliency = calibrate(source, load_texts(["code"], split="calibration"), settings)
    file = tmp_path / "saliency.safetensors"
    saliency.save(file)
    plain = exports.hand_plan(spec, exports.kept_experts(spec, "two-bank"))
    provenance = replace(plain.provenance, inputs={"saliency": sha256(file)})
    weighted = replace(plain, provenance=provenance, low_rounding="weighted")
    exports.write(path, plain, tmp_path / "plain")
    exports.write(path, weighted, tmp_path / "weighted", saliency=file)

    def lost(out, name: str, position: int) -> float:
        layer = plain.layers[position]
        written = open_source(str(out)).layer_weights(layer.layer)
        bank = f"{source.family.experts}{'.low' if layer.split else ''}.{name}"
        parts = {leaf: written[f"{bank}.{leaf}"] for leaf in ("weight", "scales", "biases")}
        low = layer.kept[layer.high :]
        dense = source.layer_weights(layer.layer, low)[f"{source.family.experts}.{name}.weight"]
        rest = np.array((dequantized(parts, plain.low[name]) - dense).astype(mx.float32))
        return float((saliency.moments.mean(name, position) * rest.astype(np.float64) ** 2).sum())

    for position, layer in enumerate(plain.layers):
        for name in plain.low if layer.low else ():
            found = lost(tmp_path / "weighted", name, position)
            assert found < 0.8 * lost(tmp_path / "plain", name, position), (layer.layer, name)

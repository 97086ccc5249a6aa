"""The files between the stages: written and read back whole, refused with an exact message."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from reap.artifacts import (
    Corpus,
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
    SecondMoments,
    Waterfall,
)
from reap.artifacts.files import sha256, written_whole
from reap.artifacts.saliency import CRITERIA
from reap.errors import ArtifactError, CalibrationError, ReapError

MXFP4 = Format(4, 32, "mxfp4")
BF16 = Format(16, 0, "dense")
TWO = Format(2, 128, "affine")
CORPUS = Corpus("code", "calibration/code", "ab12", 3, 400)
PROVENANCE = Provenance("0.1.0", "reap calibrate tiny", "tiny", "r1", "c0", {}, (CORPUS,))


def make_spec() -> ModelSpec:
    projections = (Projection("up_proj", 128, 256, "bfloat16", MXFP4, 8),)
    router = ModuleSpec("layers.1.gate", 1, "router", 4 * 256, 256, "bfloat16", BF16, 16)
    trunk = ModuleSpec("lm_head", None, "trunk", 512 * 256, 256, "bfloat16", BF16, 6)
    return ModelSpec(
        model="tiny",
        revision="r1",
        model_sha256="c0",
        model_type="tiny_moe",
        parameters=9,
        num_layers=3,
        num_experts=4,
        top_k=2,
        n_group=1,
        topk_group=1,
        modules=(router, trunk),
        moe_layers=(
            MoeLayer(1, "layers.1.mlp.experts", projections, 4),
            MoeLayer(2, "layers.2.mlp.experts", projections, 4),
        ),
        state_bytes_fixed=100,
        state_bytes_per_token=3,
        carried_bytes=0,
    )


def make_saliency(*, measured: bool = True) -> Saliency:
    rng = np.random.default_rng(0)
    experts = {
        name: rng.random((2, 1, 2, 4))
        for name in ("gate", "norm", "gate_norm", "gate2_norm2", "norm2", "max_norm")
    }
    measurement = Measurement(
        formats=(TWO, Format(3, 64, "affine")),
        tokens=np.array([50, 50]),
        kept=np.array([4, 2]),
        order=np.array([[0, 1, 2, 3], [3, 2, 1, 0]]),
        output_energy=rng.random(2),
        drop_error=rng.random((2, 2)),
        low_error=rng.random((2, 2)),
        low_expert_error=rng.random((2, 2, 4)),
        kl_kept=np.array([2]),
        drop_kl=np.zeros(0),
        low_kl=np.zeros(0),
        kl_tokens=np.array([30]),
    )
    return Saliency(
        provenance=PROVENANCE,
        spec=make_spec(),
        domains=("code",),
        count=rng.integers(1, 9, (2, 1, 2, 4)),
        tokens=np.full((2, 1, 2), 20),
        residual_energy=rng.random((2, 1, 2)),
        output_energy=rng.random((2, 1, 2)),
        measurement=measurement if measured else None,
        **experts,
    )


def make_plan() -> Plan:
    return Plan(
        provenance=PROVENANCE,
        model_type="tiny_moe",
        num_layers=3,
        num_experts=4,
        layout="two-bank",
        layers=(LayerPlan(1, (3, 0, 2), 1), LayerPlan(2, (1, 2), 2)),
        high={"up_proj": MXFP4},
        low={"up_proj": TWO},
        trunk={"lm_head": Format(8, 64, "affine")},
        experts_path={1: "layers.1.mlp.experts", 2: "layers.2.mlp.experts"},
        waterfall=Waterfall(1000, 500, 20, 200, 100, 50, 80, 7, 8192),
        damage=0.25,
        lower_bound=0.2,
        alternatives={"uniform low bits": 0.5},
        settings={"budget": 1000, "size": None, "assumed": ["kappa = 1"]},
    )


def assert_same(left: Any, right: Any) -> None:
    """Dataclasses with arrays, compared field by field."""
    for entry in fields(left):
        one, other = getattr(left, entry.name), getattr(right, entry.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == other.dtype, entry.name
            assert np.array_equal(one, other), entry.name
        elif isinstance(one, Measurement):
            assert_same(one, other)
        else:
            assert one == other, entry.name


@pytest.mark.parametrize("measured", [True, False])
def test_saliency_round_trip(tmp_path: Path, measured: bool) -> None:
    saliency = make_saliency(measured=measured)
    path = tmp_path / "run" / "saliency.safetensors"
    saliency.save(path)
    assert_same(saliency, Saliency.load(path))
    assert [entry.name for entry in path.parent.iterdir()] == ["saliency.safetensors"]
    first = path.read_bytes()
    saliency.save(path, force=True)
    assert path.read_bytes() == first


def test_plan_round_trip(tmp_path: Path) -> None:
    plan = make_plan()
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    data = json.loads(path.read_text())
    assert data["expert_counts"] == [0, 3, 2]
    assert data["expert_bank_split"] == [0, 1, 0]
    two, mxfp4 = (
        {"bits": f.bits, "group_size": f.group_size, "mode": f.mode} for f in (TWO, MXFP4)
    )
    assert data["quantization"] == {
        "lm_head": {"bits": 8, "group_size": 64, "mode": "affine"},
        "layers.1.mlp.experts.high.up_proj": mxfp4,
        "layers.1.mlp.experts.low.up_proj": two,
        "layers.2.mlp.experts.up_proj": mxfp4,
    }
    low = replace(plan, layers=(LayerPlan(1, (3, 0), 0), LayerPlan(2, (1, 2), 0)))
    assert low.quantization["layers.1.mlp.experts.up_proj"] == TWO
    assert low.expert_bank_split == [0, 0, 0]


def test_nothing_is_overwritten_silently(tmp_path: Path) -> None:
    for artifact, name in ((make_plan(), "plan.json"), (make_saliency(), "s.safetensors")):
        path = tmp_path / name
        path.write_text("mine")
        with pytest.raises(ReapError) as caught:
            artifact.save(path)
        assert caught.value.message == f"{path} exists already."
        assert caught.value.hint == "pass --force to replace it, or name another place"
        assert path.read_text() == "mine"
        artifact.save(path, force=True)
        assert path.read_bytes() != b"mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plan.json", "s.safetensors"]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("mine")
    broken = replace(make_plan(), settings={"budget": object()})
    with pytest.raises(TypeError):
        broken.save(path, force=True)
    assert path.read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_block_leaves_nothing_behind(tmp_path: Path) -> None:
    for directory in (False, True):
        with pytest.raises(RuntimeError), written_whole(tmp_path / "out") as partial:
            partial.mkdir() if directory else partial.write_text("half")
            raise RuntimeError
        assert list(tmp_path.iterdir()) == []


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> str:
    """Save a plan, edit its JSON and return the message with which it is refused."""
    make_plan().save(path, force=True)
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ArtifactError) as caught:
        Plan.load(path)
    return caught.value.message


def test_plan_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ArtifactError) as caught:
        Plan.load(path)
    assert caught.value.message == f"{path} does not exist."
    path.write_text("{")
    with pytest.raises(ArtifactError) as caught:
        Plan.load(path)
    assert caught.value.message.startswith(f"{path} is not readable JSON: Expecting property name")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match="is not readable JSON"):
        Plan.load(path)
    for text in ("[]", "{}", "null"):
        path.write_text(text)
        with pytest.raises(ArtifactError) as caught:
            Plan.load(path)
        assert caught.value.message == f"{path} is not a reap file; expected reap.plan."
    message = edited(path, lambda data: data.update(format="reap.evaluation"))
    assert message == f"{path} is a reap.evaluation file; expected reap.plan."
    message = edited(path, lambda data: data.update(format_version=3))
    assert message == f"{path} has reap.plan version 3; this reap reads version 2."


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("damage"), " is damaged: KeyError('damage')"),
        (lambda d: d.pop("quantization"), " is damaged: KeyError('quantization')"),
        (lambda d: d.pop("expert_counts"), " is damaged: KeyError('expert_counts')"),
        (lambda d: d.update(high=[]), " is damaged: AttributeError("),
        (lambda d: d["expert_counts"].pop(), ": expert_counts has 2 entries for 3 layers."),
        (lambda d: d["waterfall"].pop("trunk"), " is damaged: TypeError("),
        (lambda d: d["high"]["up_proj"].update(colour=1), " is damaged: TypeError("),
        (lambda d: d["layers"][0].update(kept=[3, 0, 3]), ": layer 1 keeps an expert twice."),
        (lambda d: d["layers"][1].update(kept=[4, 1]), ": layer 2 keeps an expert outside 0..3."),
        (
            lambda d: d["layers"][1].update(high=3),
            ": layer 2: 3 experts in the high bank of 2 kept.",
        ),
        (
            lambda d: d["layers"][1].update(high=-1),
            ": layer 2: -1 experts in the high bank of 2 kept.",
        ),
        (
            lambda d: d["layers"][0].update(kept=[3, 0]),
            ": expert_counts[1] is 3, but layer 1 lists 2.",
        ),
        (
            lambda d: d["layers"][0].update(high=2),
            ": expert_bank_split[1] is 1, but layer 1 lists 2.",
        ),
        (
            lambda d: d["low"]["up_proj"].update(bits=3),
            ": `quantization` disagrees with high, low and trunk at "
            "layers.1.mlp.experts.low.up_proj.",
        ),
        (lambda d: d.update(layout="stock"), ": layout stock has no room for two banks."),
        (lambda d: d.update(layout="per-layer"), ": layout per-layer has no room for two banks."),
    ],
)
def test_plan_refuses_damage_and_contradictions(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = tmp_path / "plan.json"
    assert edited(path, edit).startswith(f"{path}{message}")


def test_stock_needs_equal_counts(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    layers = LayerPlan(1, (3, 0, 2), 3), LayerPlan(2, (1, 2), 2)
    replace(make_plan(), layers=layers, layout="stock").save(path)
    with pytest.raises(ArtifactError) as caught:
        Plan.load(path)
    assert caught.value.message == f"{path}: layout stock needs the same count in every layer."
    replace(make_plan(), layers=layers, layout="per-layer").save(path, force=True)
    assert Plan.load(path).expert_counts == [0, 3, 2]


def test_saliency_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "saliency.safetensors"
    with pytest.raises(ArtifactError) as caught:
        Saliency.load(path)
    assert caught.value.message == f"{path} does not exist."
    assert caught.value.hint == "run `reap calibrate` first"
    path.write_text("nothing of the kind")
    with pytest.raises(ArtifactError) as caught:
        Saliency.load(path)
    assert caught.value.message.startswith(f"{path} is not a readable safetensors file: ")
    make_saliency().save(path, force=True)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="is not a readable safetensors file"):
        Saliency.load(path)
    save_file({"count": np.zeros(3)}, path)
    with pytest.raises(ArtifactError) as caught:
        Saliency.load(path)
    assert caught.value.message == f"{path} is not a reap file; expected reap.saliency."
    save_file({"count": np.zeros(3)}, path, {"reap": '{"format": "reap.x", "format_version": 1}'})
    with pytest.raises(ArtifactError) as caught:
        Saliency.load(path)
    assert caught.value.message == f"{path} is a reap.x file; expected reap.saliency."
    header = '{"format": "reap.saliency", "format_version": 3}'
    save_file({"count": np.zeros(3)}, path, {"reap": header})
    with pytest.raises(ArtifactError) as caught:
        Saliency.load(path)
    assert caught.value.message == (
        f"{path} has reap.saliency version 3; this reap reads version 2."
    )
    assert caught.value.hint == (
        "make it again with this version of reap, or use the reap that wrote it"
    )


def test_saliency_refuses_missing_parts(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = tmp_path / "saliency.safetensors"
    make_saliency().save(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    arrays = load_file(path)
    for name in ("gate", "measurement.order"):
        fewer = {key: array for key, array in arrays.items() if key != name}
        save_file(fewer, path, metadata)
        with pytest.raises(ArtifactError, match="is damaged: "):
            Saliency.load(path)
    for name in ("spec", "provenance", "measured_formats"):
        header = json.loads(metadata["reap"])
        del header[name]
        save_file(arrays, path, {"reap": json.dumps(header)})
        with pytest.raises(ArtifactError) as caught:
            Saliency.load(path)
        assert caught.value.message == f"{path} is damaged: KeyError('{name}')"


def test_saliency_check() -> None:
    saliency = make_saliency()
    saliency.check()
    count = saliency.count.copy()
    count[:, :, 1] = 0
    with pytest.raises(CalibrationError) as caught:
        replace(saliency, count=count).check()
    assert caught.value.message == "layer 2 saw no tokens: there is nothing to rank by."
    bad = saliency.gate_norm.copy()
    bad[1, 0, 1, 3] = np.nan
    with pytest.raises(CalibrationError) as caught:
        replace(saliency, gate_norm=bad).check()
    assert caught.value.message == "gate_norm is not finite in layer 2, expert 3 (domain code)."
    energy = np.full((2, 1, 2), np.inf)
    with pytest.raises(CalibrationError) as caught:
        replace(saliency, residual_energy=energy).check()
    assert caught.value.message == "residual_energy is not finite in layer 1 (domain code)."


def test_scores_by_hand() -> None:
    """Two halves of one domain; expert 0 of layer 1 is routed 3 + 1 times with norms 3, 4, 5."""
    zero = np.zeros((2, 1, 2, 4))
    sums = {
        name: zero.copy()
        for name in ("gate", "norm", "gate_norm", "gate2_norm2", "norm2", "max_norm")
    }
    count = np.zeros((2, 1, 2, 4), dtype=np.int64)
    count[:, 0, 0, 0] = 3, 1
    sums["norm"][:, 0, 0, 0] = 3 + 4 + 5, 4
    sums["norm2"][:, 0, 0, 0] = 9 + 16 + 25, 16
    sums["gate"][:, 0, 0, 0] = 1.5, 0.5
    sums["gate_norm"][:, 0, 0, 0] = 6, 2
    sums["gate2_norm2"][:, 0, 0, 0] = 12.5, 4
    saliency = replace(make_saliency(), count=count, tokens=np.full((2, 1, 2), 10), **sums)
    expected = {
        "reap": 2.0,
        "reap-all-tokens": 0.4,
        "energy": 0.825,
        "frequency": 0.2,
        "soft-frequency": 0.1,
        "ean": 16.0,
        "man": 4.0,
        "msan": 16.5,
    }
    assert expected.keys() == CRITERIA.keys()
    for criterion, value in expected.items():
        score = saliency.score(criterion)
        assert score.tolist() == [[value, 0, 0, 0], [0, 0, 0, 0]]
    assert saliency.score("man", half=1)[0, 0] == 4
    assert saliency.score("energy", half=0, domain="code")[0, 0] == 1.25


def test_bytes_of_formats() -> None:
    assert [f.bytes(1024, "bfloat16") for f in (BF16, MXFP4, TWO)] == [2048, 544, 288]
    assert Format(4, 64, "affine").bytes(1024, "float32") == 512 + 16 * 8
    spec = make_spec()
    # Weights, scales and an 8-byte bias; the router's row, its share of the bias, 4 bytes beside.
    assert spec.expert_bytes(spec.moe_layers[0]) == 128 * 256 * 17 // 32 + 8
    assert spec.router_row_bytes(spec.moe_layers[0]) == 512 + 4 + 4
    assert spec.router_row_bytes(spec.moe_layers[1]) == 4
    assert spec.trunk_bytes() == 512 * 256 * 2 + 6
    assert spec.state_bytes(10) == 130


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mxfp4", MXFP4),
        ("2bit", TWO),
        ("3-bit g64", Format(3, 64, "affine")),
        ("8bit", Format(8, 64, "affine")),
        ("4bit-g32", Format(4, 32, "affine")),
    ],
)
def test_parse_format(text: str, expected: Format) -> None:
    assert Format.parse(text) == expected
    assert Format.parse(expected.label) == expected


@pytest.mark.parametrize("text", ["", "bit", "7bit", "2bit-g48", "xbit", "2bit-gx", "16-bit"])
def test_parse_format_refuses(text: str) -> None:
    with pytest.raises(ValueError):
        Format.parse(text)


def make_moments(seed: int = 0) -> SecondMoments:
    rng = np.random.default_rng(seed)
    return SecondMoments({"up_proj": rng.random((2, 256))}, {"up_proj": np.array([40, 80])})


def test_second_moments_survive_the_file_and_give_means(tmp_path: Path) -> None:
    file = tmp_path / "saliency.safetensors"
    moments = make_moments()
    replace(make_saliency(), moments=moments).save(file)
    loaded = Saliency.load(file).moments
    assert loaded is not None
    assert np.array_equal(loaded.sums["up_proj"], moments.sums["up_proj"])
    assert np.array_equal(loaded.rows["up_proj"], [40, 80])
    assert np.array_equal(loaded.mean("up_proj", 1), moments.sums["up_proj"][1] / 80)


def test_products_of_one_input_are_stored_once_and_added_up(tmp_path: Path) -> None:
    product = np.random.default_rng(0).random((2, 4, 4)).astype(np.float32)
    names = ("up_proj", "gate_proj")
    moments = SecondMoments(
        sums=dict.fromkeys(names, np.ones((2, 4))),
        rows=dict.fromkeys(names, np.array([10, 20])),
        products=dict.fromkeys(names, product),
    )
    file = tmp_path / "saliency.safetensors"
    replace(make_saliency(), moments=moments).save(file)
    assert sum(name.startswith("moments.products") for name in load_file(file)) == 1
    loaded = Saliency.load(file).moments
    assert loaded is not None
    assert loaded.products["gate_proj"] is loaded.products["up_proj"]
    assert np.allclose(loaded.covariance("up_proj", 1), product[1] / 20)
    both = loaded.merged(loaded)
    assert both.products["gate_proj"] is both.products["up_proj"]
    assert np.array_equal(both.products["up_proj"], product + product)
    assert loaded.merged(replace(loaded, products={})).products == {}


def test_second_moments_add_up_or_come_from_the_run_that_has_them() -> None:
    without, one = make_saliency(), replace(make_saliency(), moments=make_moments())
    other = replace(make_saliency(), moments=make_moments(1))
    both = one.merged(other, provenance=PROVENANCE).moments
    assert both is not None
    assert np.array_equal(both.rows["up_proj"], [80, 160])
    expected = make_moments().sums["up_proj"] + make_moments(1).sums["up_proj"]
    assert np.array_equal(both.sums["up_proj"], expected)
    for merged in (
        one.merged(without, provenance=PROVENANCE),
        without.merged(one, provenance=PROVENANCE),
    ):
        assert merged.moments is one.moments
    assert without.merged(without, provenance=PROVENANCE).moments is None


def test_a_file_that_does_not_say_how_many_tokens_kl_is_of_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "saliency"
    make_saliency().save(file)
    tensors = load_file(file)
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    del tensors["measurement.kl_tokens"]
    file.write_bytes(save(tensors, metadata))
    loaded = Saliency.load(file).measurement
    assert loaded is not None and loaded.kl_tokens.size == 0


@pytest.mark.parametrize(
    ("tokens", "kl_tokens", "kept"), [(50, 31, 31), (50, 29, 30), (49, 99, 30)]
)
def test_of_two_measurements_that_on_most_tokens_is_kept(
    tokens: int, kl_tokens: int, kept: int
) -> None:
    one = make_saliency()
    assert one.measurement is not None
    measured = replace(one.measurement, tokens=np.full(2, tokens), kl_tokens=np.array([kl_tokens]))
    other = replace(one, measurement=measured)
    for pair in ((one, other), (other, one)):
        found = pair[0].merged(pair[1], provenance=PROVENANCE).measurement
        assert found is not None and found.kl_tokens.tolist() == [kept]


def test_how_low_bits_were_rounded_survives_the_file(tmp_path: Path) -> None:
    file = tmp_path / "saliency.safetensors"
    saliency = make_saliency()
    assert saliency.measurement is not None
    measured = replace(saliency.measurement, low_rounding="weighted")
    replace(saliency, measurement=measured).save(file)
    loaded = Saliency.load(file).measurement
    assert loaded is not None and loaded.low_rounding == "weighted"


def test_a_plan_keeps_its_rounding(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    replace(make_plan(), low_rounding="search").save(file)
    assert Plan.load(file).low_rounding == "search"
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"low_rounding": "up"}))
    with pytest.raises(ArtifactError, match="low_rounding is 'up'"):
        Plan.load(file)


def test_a_failed_write_leaves_nothing_and_a_crash_between_renames_is_mended(
    tmp_path: Path,
) -> None:
    target = tmp_path / "new" / "deep" / "checkpoint"
    with pytest.raises(RuntimeError), written_whole(target) as partial:
        partial.mkdir()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []

    with written_whole(target) as partial:
        partial.mkdir()
        (partial / "a").write_text("first")
    target.rename(target.with_name("checkpoint.old.partial"))
    with pytest.raises(ReapError, match="exists already"), written_whole(target):
        pass
    assert (target / "a").read_text() == "first"


def test_what_has_no_checksum_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"absent does not exist"):
        sha256(tmp_path / "absent")
    with pytest.raises(ArtifactError, match=rf"{tmp_path.name} cannot be read: Is a directory"):
        sha256(tmp_path)

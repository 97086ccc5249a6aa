"""What a plan may be told: protected experts, domains, clamps, formats; and what it says back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_planning import (
    BF16,
    MXFP4,
    PROVENANCE,
    TWO,
    assert_consistent,
    hand_made,
    make_saliency,
    make_spec,
    plan_with,
    size_for,
)

from reap.artifacts import Format, ModelSpec, Plan, Saliency
from reap.errors import BudgetError, ReapError
from reap.planning import LowBankRule, PlanSettings, low_bank_rule, plain_plan, super_experts
from reap.planning.damage import damage_model, rank
from reap.planning.domains import combined, kept_energy

THREE = Format(3, 128, "affine")


def with_kl(saliency: Saliency, drop: float = 0.5, low: float = 0.3) -> Saliency:
    measured = saliency.measurement
    assert measured is not None
    layers = len(saliency.layers)
    kl = {
        "kl_kept": measured.kept[1:2],
        "drop_kl": np.linspace(drop, 2 * drop, layers),
        "low_kl": np.full(layers, low),
    }
    return replace(saliency, measurement=replace(measured, **kl))


def banks(plan: Plan, layer: int) -> tuple[set[int], set[int]]:
    entry = next(entry for entry in plan.layers if entry.layer == layer)
    return set(entry.kept[: entry.high]), set(entry.kept[entry.high :])


# Formats


def test_down_projections_of_the_low_bank_have_their_own_format() -> None:
    spec = make_spec(experts=16)
    saliency = make_saliency(spec)
    size = size_for(spec, 0.6)
    plan = plan_with(saliency, size=size, low_down="3bit", layout="two-bank")
    assert plan.low == {"gate_proj": TWO, "up_proj": TWO, "down_proj": THREE}
    assert_consistent(plan, saliency, size)
    layer = spec.moe_layers[0]
    expected = (2 * 128 * 256 * 2.25 + 256 * 128 * 3.25) / 8
    assert spec.expert_bytes(layer, plan.low) == expected
    assert plan.settings["assumed"] == [
        "error of 3-bit g128 = 0.307 times that of 2-bit g128",
        "errors of matrices add up: 0.67 × 2-bit g128 + 0.33 × 3-bit g128",
    ]
    # The same text is one format again, and nothing has to add up.
    same = plan_with(saliency, size=size, low_down="2bit", layout="two-bank")
    assert same.settings["assumed"] == []
    assert same.layers == plan_with(saliency, size=size, layout="two-bank").layers
    with pytest.raises(ReapError, match=r"4-bit g64 is lossy and not smaller than the high bank"):
        plan_with(saliency, size=size, low_down="4bit")


def test_formats_fit_the_matrices_they_are_for() -> None:
    # 96 columns of down_proj take groups of 32, the 256 of the others 128.
    spec = make_spec(experts=16, inner=96)
    saliency = make_saliency(spec)
    plan = plan_with(saliency, size=size_for(spec, 0.7), low="2bit", low_down="3bit")
    assert plan.low["gate_proj"] == TWO
    assert plan.low["down_proj"] == Format(3, 32, "affine")
    plan = plan_with(saliency, size=size_for(spec, 0.7), low="3bit-g128", low_down="2bit-g32")
    assert plan.low["up_proj"] == THREE
    with pytest.raises(ReapError, match=r"3-bit g64 does not fit: .*down_proj has 96 columns"):
        plan_with(saliency, size=size_for(spec, 0.7), low_down="3bit-g64")
    odd = make_spec(experts=16, inner=80, source=BF16)
    with pytest.raises(ReapError, match="down_proj has 80 columns"):
        plan_with(make_saliency(odd), size=size_for(odd, 0.7), low_down="3bit")


def test_errors_of_a_mixed_bank_are_weighed_by_matrix() -> None:
    saliency = hand_made()
    measured = saliency.measurement
    assert measured is not None
    both = replace(
        measured,
        formats=(TWO, THREE),
        low_error=np.array([[60.0], [15.0]]),
        low_expert_error=np.concatenate([measured.low_expert_error] * 2),
    )
    saliency = replace(saliency, measurement=both)
    energy = saliency.score("energy")

    def low(mix: dict[Format, float]) -> float:
        return float(damage_model(saliency, scores=energy, high={}, low=mix).low[0, -1])

    # 60 / 10 and 15 / 10 per token, a = 1 / 100.
    assert low({TWO: 1.0}) == pytest.approx(0.06)
    assert low({TWO: 2 / 3, THREE: 1 / 3}) == pytest.approx(0.06 * 2 / 3 + 0.015 / 3)
    # A third of the matrices is stored exactly.
    assert low({TWO: 2 / 3}) == pytest.approx(0.04)
    assert low({}) == 0
    model = damage_model(saliency, scores=energy, high={}, low={TWO: 2 / 3})
    assert model.assumed == ("errors of matrices add up: 0.67 × 2-bit g128",)


def test_matrices_as_in_the_source_have_no_error() -> None:
    four = Format(4, 64, "affine")
    spec = make_spec(experts=16, source=four)
    saliency = make_saliency(spec)
    plan = plan_with(saliency, size=size_for(spec, 0.7), low_down="4bit", layout="two-bank")
    assert plan.low == {"gate_proj": TWO, "up_proj": TWO, "down_proj": four}
    assert plan.settings["assumed"] == ["errors of matrices add up: 0.67 × 2-bit g128"]


@pytest.mark.parametrize("high", ["mxfp4", "4bit", "5bit", "6bit", "8bit", "8bit-g32", "nvfp4"])
def test_high_bank_of_a_dense_source(high: str) -> None:
    spec = make_spec(experts=16, source=BF16)
    saliency = make_saliency(spec)
    size = size_for(spec, 0.2)
    plan = plan_with(saliency, size=size, high=high, low="3bit")
    assert set(plan.high.values()) == {Format.parse(high)}
    assert_consistent(plan, saliency, size)


def test_high_bank_of_a_source_whose_layers_differ() -> None:
    spec = make_spec(experts=16, source=BF16)
    first, *others = spec.moe_layers
    narrow = tuple(replace(p, format=Format(8, 64, "affine")) for p in first.projections)
    spec = replace(spec, moe_layers=(replace(first, projections=narrow), *others))
    with pytest.raises(ReapError, match="a bank has one format for all layers") as caught:
        plan_with(make_saliency(spec), size=size_for(spec, 0.5))
    assert caught.value.hint == "name one for the high bank, e.g. --high 8bit-g64"
    for high, bits in (("8bit-g64", 8), ("4bit", 4)):
        plan = plan_with(make_saliency(spec), size=size_for(spec, 0.3), high=high)
        assert set(plan.high.values()) == {Format(bits, 64, "affine")}
    # At 8 bit the first layer would lose and not gain.
    with pytest.raises(ReapError, match="8-bit g32 is lossy and not smaller than the source"):
        plan_with(make_saliency(spec), size=size_for(spec, 0.7), high="8bit-g32")


# Protected experts


def test_kept_experts_are_in_the_high_bank() -> None:
    spec = make_spec(layers=3, experts=16)
    saliency = make_saliency(spec, seed=4)
    energy = saliency.score("energy")
    order = rank(energy)
    worst = {layer: order[index, -3:].tolist() for index, layer in enumerate(saliency.layers)}
    keep = {1: worst[1], 3: worst[3][:1]}
    for layout in ("auto", "stock", "per-layer", "two-bank"):
        size = size_for(spec, 0.55)
        plan = plan_with(saliency, size=size, keep=keep, layout=layout)
        assert set(worst[1]) <= banks(plan, 1)[0]
        assert worst[3][0] in banks(plan, 3)[0]
        assert not set(worst[2]) & banks(plan, 2)[0]
        # Bank order is still by saliency.
        assert_consistent(plan, saliency, size)
        free = plan_with(saliency, size=size, layout=layout)
        assert free.damage < plan.damage
        assert plan.lower_bound >= free.lower_bound
        plain = {k: v for k, v in free.alternatives.items() if k.startswith("uniform")}
        assert {k: plan.alternatives[k] for k in plain} == plain


def test_kept_experts_as_written() -> None:
    pairs = ((1, 3), (1, 5), (2, 0))
    for keep in ({1: [5, 3], 2: [0]}, [(2, 0), (1, 5), (1, 3), (1, 3)], {"1": (3, 5), "2": [0]}):
        assert PlanSettings(size=1, keep=keep).pairs == pairs
    for bad in (5, [1], [(1, 2, 3)], {1: 2}, {"one": [1]}, [("a", "b")]):
        with pytest.raises(ReapError, match="not pairs of a layer and an expert"):
            PlanSettings(size=1, keep=bad)  # type: ignore[arg-type]
    saliency = make_saliency(make_spec(layers=3, experts=16))
    size = size_for(saliency.spec, 0.6)
    with pytest.raises(ReapError, match=r"layer 0, .* has no experts") as caught:
        plan_with(saliency, size=size, keep={0: [1]})
    assert caught.value.hint == "MoE layers: 1-3"
    with pytest.raises(ReapError, match=r"layer 2 has no expert 16\."):
        plan_with(saliency, size=size, keep={2: [16]})


def test_settings_of_a_plan_make_it_again(tmp_path: Path) -> None:
    saliency = make_saliency(make_spec(layers=3, experts=16))
    plan = plan_with(
        saliency,
        size=size_for(saliency.spec, 0.6),
        keep={2: [7]},
        domains={"code": 2, "prose": 1},
        clamp=(0.7, 1.3),
        protect_super=2,
    )
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    settings = PlanSettings.from_json(loaded.settings)
    assert settings.pairs == ((2, 7),) and settings.clamp == (0.7, 1.3)
    again = plan_with(saliency, **{k: v for k, v in settings.to_json().items() if v is not None})
    assert again == plan


def test_kept_experts_of_router_groups() -> None:
    spec = make_spec(layers=2, experts=16, groups=4)
    saliency = make_saliency(spec, seed=1)
    worst = int(rank(saliency.score("energy"))[0, -1])
    plan = plan_with(saliency, size=size_for(spec, 0.6), keep={1: [worst]}, min_experts=8)
    assert_consistent(plan, saliency, size_for(spec, 0.6))
    high, low = banks(plan, 1)
    assert worst in high and not low
    kept = plan.layers[0].kept
    assert [sum(expert // 4 == group for expert in kept) for group in range(4)] == [
        len(kept) // 4
    ] * 4


def test_too_many_kept_experts_need_more_bytes() -> None:
    spec = make_spec(layers=3, experts=32)
    saliency = make_saliency(spec)
    keep = {layer: list(range(20)) for layer in (1, 2, 3)}
    layer = spec.moe_layers[0]
    row = spec.router_row_bytes(layer)
    smallest = spec.trunk_bytes() + 3 * 20 * (spec.expert_bytes(layer) + row)
    for layout in ("auto", "stock", "two-bank"):
        plan = plan_with(saliency, size=smallest, keep=keep, layout=layout)
        assert plan.expert_counts == [0, 20, 20, 20]
        with pytest.raises(BudgetError, match="60 experts that must be high"):
            plan_with(saliency, size=smallest - 1, keep=keep, layout=layout)


def test_super_experts() -> None:
    spec = make_spec(layers=3, experts=16)
    saliency = make_saliency(spec, seed=2)
    largest = saliency.max_norm.copy()
    weak = int(rank(saliency.score("energy"))[1, -1])
    largest[0, 0, 1, weak] = 40 * np.median(largest[:, :, 1].max(axis=(0, 1)))
    # The same figure in a layer whose experts are all that large is nothing special.
    largest[:, :, 2] *= 50
    saliency = replace(saliency, max_norm=largest)
    assert super_experts(saliency) == ((2, weak),)
    assert super_experts(saliency, 0) == ()
    assert len(super_experts(saliency, 3)) == 3 and super_experts(saliency, 3)[0] == (2, weak)
    size = size_for(spec, 0.55)
    bare = plan_with(saliency, size=size, layout="per-layer", min_experts=2)
    assert weak not in banks(bare, 2)[0]
    assert any(text.startswith(f"super experts 2/{weak} (") for text in bare.settings["warnings"])
    safe = plan_with(saliency, size=size, layout="per-layer", min_experts=2, protect_super=1)
    assert weak in banks(safe, 2)[0]
    assert not any("super" in text for text in safe.settings["warnings"])
    plain = plain_plan(
        saliency,
        PlanSettings(size=size, protect_super=1, keep={1: [0]}),
        recipe="low",
        provenance=PROVENANCE,
    )
    assert all(layer.high == 0 for layer in plain.layers)


# Domains


def two_domains(spec: ModelSpec, share: float = 0.1) -> Saliency:
    """Code uses the first half of the experts, prose the rest, with `share` of the tokens."""
    saliency = make_saliency(spec, measured=False, sigma=0.3)
    energy = saliency.gate2_norm2.copy()
    half = spec.num_experts // 2
    energy[:, 0, :, half:] *= 1e-3
    energy[:, 1, :, :half] *= 1e-3
    energy[:, 1] *= share
    tokens = saliency.tokens.copy()
    tokens[:, 1] = (tokens[:, 1] * share).astype(np.int64)
    return replace(saliency, gate2_norm2=energy, tokens=tokens)


def test_domains_by_hand() -> None:
    saliency = make_saliency(make_spec(layers=1, experts=4), measured=False)
    energy = np.zeros((2, 2, 1, 4))
    energy[:, 0, 0] = 500 * np.array([6.0, 3.0, 1.0, 0.0]) / 2
    energy[:, 1, 0] = 500 * np.array([0.0, 1.0, 1.0, 0.0]) / 2
    saliency = replace(saliency, gate2_norm2=energy)
    assert combined(saliency, "energy").tolist() == [[3, 2, 1, 0]]
    # Three quarters of code, one of prose, by token: the numbers count, not the token counts.
    weighed = combined(saliency, "energy", {"code": 3, "prose": 1})
    assert weighed.tolist() == [[4.5, 2.5, 1.0, 0.0]]
    # Shares .6 .3 .1 0 of code and 0 .5 .5 0 of prose; the layer has 6.
    worst = combined(saliency, "energy", "worst")
    assert worst[0] == pytest.approx([3.6, 3.0, 3.0, 0.0])
    kept = kept_energy(saliency, np.array([[True, True, False, True]]))
    assert kept == pytest.approx({"code": 0.9, "prose": 0.5})
    one = replace(
        saliency,
        domains=("code",),
        **{
            name: getattr(saliency, name)[:, :1]
            for name in ("count", "gate2_norm2", "tokens", "residual_energy", "output_energy")
        },
    )
    assert combined(one, "energy", "worst")[0] == pytest.approx(combined(one, "energy")[0])


def test_drops_and_errors_follow_the_domains() -> None:
    saliency = hand_made()
    energy = saliency.score("energy")
    formats: dict[str, Any] = {"scores": energy, "high": {}, "low": {TWO: 1.0}}
    plain = damage_model(saliency, **formats)
    weighed = np.array([[5.0, 0, 1, 4, 4, 8]])
    model = damage_model(saliency, energy=weighed, **formats)
    # Order 5, 4, 3, 2, 0, 1: the fourth's share doubles, the fifth is of a domain that had none.
    assert np.diff(model.low[0]) == pytest.approx(np.diff(plain.low[0]) * [1, 1, 2, 1, 1, 1])
    assert model.drop[0] == pytest.approx(np.array([22, 15, 15, 12, 10, 0, 0]) / 100)
    assert model.energy is weighed


def test_worst_domain_is_not_erased() -> None:
    spec = make_spec(layers=3, experts=32)
    saliency = two_domains(spec)
    size = size_for(spec, 0.5)
    settings: dict[str, Any] = {"size": size, "layout": "per-layer", "low": "3bit"}
    total = plan_with(saliency, **settings)
    worst = plan_with(saliency, domains="worst", **settings)
    only = plan_with(saliency, domains={"code": 0, "prose": 1}, **settings)
    kept = {
        name: plan.settings["domains_kept"]["prose"]
        for name, plan in (("sum", total), ("worst", worst), ("only", only))
    }
    assert kept["sum"] < 0.5 < 0.7 < kept["worst"] <= kept["only"]
    assert any(text.startswith("domain prose loses") for text in total.settings["warnings"])
    assert not any("domain" in text for text in worst.settings["warnings"])
    assert worst.damage > total.damage
    measured = make_saliency(spec)
    plan = plan_with(measured, size=size, domains="worst")
    said = "what was measured on all domains together holds for each"
    assert plan.settings["assumed"] == [said]


def test_domains_are_checked() -> None:
    saliency = make_saliency(make_spec(layers=3, experts=16))
    size = size_for(saliency.spec, 0.6)
    with pytest.raises(ReapError, match="maths is not a domain of the calibration") as caught:
        plan_with(saliency, size=size, domains={"code": 1, "maths": 1})
    assert caught.value.hint == "domains: code, prose"
    with pytest.raises(ReapError, match="prose has no weight; write 0 to leave it out"):
        plan_with(saliency, size=size, domains={"code": 1})
    for bad, message in (
        ("mean", "unknown domains 'mean'"),
        ({"code": "much"}, "not numbers by name"),
        ({"code": -1}, "at least 0, and not all 0"),
        ({"code": 0}, "at least 0, and not all 0"),
        (3, "not numbers by name"),
    ):
        with pytest.raises(ReapError, match=message):
            PlanSettings(size=1, domains=bad)  # type: ignore[arg-type]


# Clamp


def lopsided(spec: ModelSpec) -> Saliency:
    """The first layer matters a hundred times as much as the others."""
    saliency = make_saliency(spec, sigma=0.3)
    energy = saliency.residual_energy.copy()
    energy[:, :, 0] /= 100
    return replace(saliency, residual_energy=energy)


def test_clamp_holds_unless_sensitivity_was_measured() -> None:
    spec = make_spec(layers=6, experts=64)
    saliency = lopsided(spec)
    settings: dict[str, Any] = {"size": size_for(spec, 0.4), "layout": "per-layer", "low": "3bit"}
    loose = plan_with(saliency, clamp=None, **settings)
    held = plan_with(saliency, **settings)
    tight = plan_with(saliency, clamp=(1.0, 1.0), **settings)
    counts = {name: p.expert_counts[1:] for name, p in (("loose", loose), ("held", held))}
    assert held.settings["clamped"] == [12, 53]
    assert "clamped" not in loose.settings
    assert min(counts["held"]) >= 12 > min(counts["loose"])
    assert loose.damage < held.damage <= tight.damage
    assert tight.settings["clamped"][0] <= min(tight.expert_counts[1:])
    sensitive = plan_with(with_kl(saliency), **settings)
    assert "clamped" not in sensitive.settings
    assert sensitive.settings["clamp"] == "auto"
    assert "clamped" in plan_with(with_kl(saliency), clamp=(0.5, 1.6), **settings).settings


def test_counts_far_from_the_mean_are_named() -> None:
    spec = make_spec(layers=6, experts=64)
    settings: dict[str, Any] = {"size": size_for(spec, 0.4), "layout": "per-layer", "low": "3bit"}
    plan = plan_with(lopsided(spec), clamp=None, **settings)
    warnings = plan.settings["warnings"]
    assert len(warnings) == 2
    few = [layer for layer, count in enumerate(plan.expert_counts) if 0 < count < 15]
    assert few and plan.expert_counts[1] == 64
    assert warnings[0].startswith("fewer experts than 0.5 ×") and f"{few[0]} (" in warnings[0]
    assert warnings[1].startswith(
        "more experts than 1.6 × the mean of 30 in layers (experts) 1 (64)."
    )
    measured = with_kl(lopsided(spec)).measurement
    assert measured is not None
    uneven = replace(measured, drop_kl=measured.drop_kl * np.array([1000, 1, 1, 1, 1, 1]))
    sensitive = plan_with(replace(lopsided(spec), measurement=uneven), clamp=None, **settings)
    counts = sensitive.expert_counts[1:]
    assert max(counts) > 1.6 * sum(counts) / len(counts)
    assert sensitive.settings["warnings"] == []
    even = plan_with(make_saliency(spec, sigma=0.3), **settings | {"layout": "stock"})
    assert even.settings["warnings"] == []


@pytest.mark.parametrize("clamp", [(1.1, 1.6), (0.5, 0.9), (-1, 2), (0.5,), "wide", (1, "x")])
def test_clamp_is_checked(clamp: Any) -> None:
    with pytest.raises(ReapError, match="clamp"):
        PlanSettings(size=1, clamp=clamp)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"protect_super": -1}, "at least 0 super experts are protected, not -1."),
        ({"high": "3bit"}, "high precision '3bit' has fewer than 4 bits."),
        ({"low_down": "mxfp4"}, "low_down precision 'mxfp4' is not an affine format"),
        ({"low_down": "x"}, "unknown low_down precision 'x'."),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ReapError) as caught:
        PlanSettings(size=1, **settings)
    assert caught.value.message.startswith(message)


# The rule for two banks


def test_low_bank_rule_by_hand() -> None:
    saliency = hand_made()
    # Kept: 3 of 6, where kappa is 2; rho = 6 of an energy of 15.
    spec = saliency.spec
    layer = spec.moe_layers[0]
    row = spec.router_row_bytes(layer)
    three = spec.expert_bytes(layer) + row
    plan = plan_with(saliency, size=spec.trunk_bytes() + 3 * three, layout="stock", min_experts=2)
    kept = len(plan.layers[0].kept)
    rule = low_bank_rule(saliency, plan)
    assert isinstance(rule, LowBankRule)
    assert rule.rho.tolist() == pytest.approx([6 / 15])
    assert rule.weight.tolist() == [1]
    assert rule.kappa.tolist() == pytest.approx([{3: 2.0, 4: 2.0, 5: 2.0}[kept]])
    low = spec.expert_bytes(layer, plan.low) + row
    assert rule.break_even.tolist() == pytest.approx([1 - low / three])
    assert rule.pays.tolist() == [True]
    summary = plan.settings["low_bank"]
    assert summary["pays_in"] == summary["layers"] == 1
    assert (summary["rho"], summary["kappa"], summary["ratio"]) == (0.4, 2.0, 0.2)
    assert summary["rule"] == str(rule)
    assert str(rule).startswith("A 2-bit g128 bank pays below a ratio of 0.4")


def test_low_bank_rule_is_what_the_solver_does() -> None:
    """With equal experts the rule is exact: a low bank is in the plan if and only if it pays."""
    spec = make_spec(layers=4, experts=64)
    found = set()
    for rho in (0.1, 0.3, 0.42, 0.52, 0.7):
        saliency = make_saliency(spec, kappa=(1.0, 1.0), rho=rho, sigma=0.0, seed=3)
        same = np.full_like(saliency.count, 50)
        saliency = replace(saliency, count=same, gate2_norm2=0.09 * same.astype(float))
        measured = saliency.measurement
        assert measured is not None
        energy = saliency.score("energy")
        dropped = energy.sum(axis=1)[:, None] * (1 - measured.kept / 64)
        errors = 100 * rho * energy
        exact = replace(
            measured,
            order=rank(energy),
            drop_error=100 * dropped,
            low_expert_error=errors[None],
            low_error=errors.sum(axis=1)[None],
        )
        saliency = replace(saliency, measurement=exact)
        plan = plan_with(saliency, size=size_for(spec, 0.45), layout="stock")
        rule = low_bank_rule(saliency, plan)
        assert rule is not None and rule.rho == pytest.approx(rho)
        assert bool(rule.pays.all()) == bool(rule.pays.any()) == (plan.layers[0].high == 0)
        found.add(bool(rule.pays.all()))
    assert found == {True, False}


def test_low_bank_rule_without_a_low_bank() -> None:
    spec = make_spec(experts=16, source=TWO)
    saliency = make_saliency(spec)
    plan = plan_with(saliency, size=size_for(spec, 0.7))
    assert "low_bank" not in plan.settings
    assert low_bank_rule(saliency, plan) is None


def test_low_bank_rule_weighs_sensitivity_and_a_lossy_high_bank() -> None:
    spec = make_spec(layers=3, experts=16, source=BF16)
    saliency = with_kl(make_saliency(spec))
    size = size_for(spec, 0.2)
    plan = plan_with(saliency, size=size, high="4bit", layout="two-bank")
    rule = low_bank_rule(saliency, plan)
    assert rule is not None
    assert len(set(rule.weight.tolist())) == 3
    layer = spec.moe_layers[0]
    row = spec.router_row_bytes(layer)
    share = (spec.expert_bytes(layer, plan.low) + row) / (spec.expert_bytes(layer, plan.high) + row)
    high_rho = rule.rho * 0.029 / 0.541
    expected = 1 - share + rule.weight * high_rho / rule.kappa * share
    assert rule.break_even == pytest.approx(expected)
    assert MXFP4 not in plan.high.values()

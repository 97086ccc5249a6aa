"""What other budgets buy, and what two plans do differently."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from test_planning import (
    BF16,
    PROVENANCE,
    make_saliency,
    make_spec,
    plan_with,
    size_for,
    source_bytes,
)

from reap.artifacts import LayerPlan, Plan
from reap.errors import BudgetError, ReapError
from reap.planning import PlanSettings, diff, frontier, next_bytes, plain_plan
from reap.planning.planner import UNIFORM_LOW, UNIFORM_REAP, UNIFORM_TWO_BANK


def test_frontier_is_the_plans() -> None:
    spec = make_spec(layers=4, experts=32)
    saliency = make_saliency(spec, seed=7)
    sizes = [size_for(spec, share) for share in (0.9, 0.5, 0.3, 0.5, 1.0)]
    points = frontier(saliency, PlanSettings(size=1), sizes)
    assert [point.amount for point in points] == sorted(set(sizes))
    for point in points:
        plan = plan_with(saliency, size=point.amount)
        assert (point.damage, point.lower_bound) == (plan.damage, plan.lower_bound)
        assert (point.layout, point.weights) == (plan.layout, plan.waterfall.weights)
        assert point.kept == sum(plan.expert_counts)
        assert point.high == sum(layer.high for layer in plan.layers)
        if point.damage:
            plain = {k: v for k, v in plan.alternatives.items() if k.startswith("uniform")}
            assert point.plain == plain
            assert point.plain.keys() == {UNIFORM_REAP, UNIFORM_LOW, UNIFORM_TWO_BANK}
    assert points[-1].damage == points[-1].plain[UNIFORM_REAP] == 0
    with pytest.raises(BudgetError):
        plan_with(saliency, size=1)


def test_frontier_from_the_smallest_plan_to_everything() -> None:
    spec = make_spec(layers=3, experts=32)
    saliency = make_saliency(spec)
    for settings in (PlanSettings(size=1), PlanSettings(budget=10**9, context=10, reserve=0.1)):
        points = frontier(saliency, settings, 9)
        assert len(points) == 9
        assert points[0].kept == 3 * 8 and points[0].high == 0
        assert points[-1].damage == 0 and points[-1].weights == source_bytes(spec)
        assert all(a.damage >= b.damage for a, b in itertools.pairwise(points))
        assert all(p.lower_bound <= p.damage for p in points)
        if settings.budget is not None:
            assert points[-1].amount > source_bytes(spec) / 0.9
    # The settings' own stands among them, if it is between the ends.
    own = (points[0].weights + points[-1].weights) // 2 + 1
    asked = frontier(saliency, PlanSettings(size=own), 9)
    assert len(asked) == 10 and own in [point.amount for point in asked]
    # What cannot be lossless ends with everything in the high bank.
    dense = make_saliency(make_spec(layers=3, experts=32, source=BF16))
    last = frontier(dense, PlanSettings(size=1, high="4bit"), 3)[-1]
    assert last.high == 3 * 32 and last.damage > 0
    assert [p.amount for p in frontier(saliency, PlanSettings(size=1), [5, 10**9])] == [10**9]


def test_next_bytes() -> None:
    spec = make_spec(layers=4, experts=32)
    saliency = make_saliency(spec, seed=3)
    size = size_for(spec, 0.5)
    settings = PlanSettings(size=size)
    extra = 3 * spec.expert_bytes(spec.moe_layers[0])
    now = plan_with(saliency, size=size)
    more = next_bytes(saliency, settings, extra)
    then = plan_with(saliency, size=size + extra, layout=now.layout)
    assert (more.damage, more.layout) == ((now.damage, then.damage), now.layout)
    assert more.gain > 0 and more.amount == size + extra
    changed = {
        a.layer: ((len(a.kept), len(b.kept)), (a.high, b.high))
        for a, b in zip(now.layers, then.layers)
        if (len(a.kept), a.high) != (len(b.kept), b.high)
    }
    assert {c.layer: (c.kept, c.high) for c in more.layers} == changed != {}
    text = str(more)
    assert f"damage {now.damage:.4g} → {then.damage:.4g}" in text
    assert all(f"layer {layer}:" in text for layer in changed)
    assert next_bytes(saliency, settings) == next_bytes(saliency, settings, size // 20)
    # Ten gigabytes hold all of this model; a budget works as a size does.
    whole = next_bytes(saliency, PlanSettings(budget=2 * size, context=0), 10**10)
    assert whole.damage == (0, 0) and whole.layers == ()
    whole = next_bytes(saliency, settings, 10**10)
    assert whole.damage[1] == 0
    assert all(change.kept[1] == 32 for change in whole.layers)
    with pytest.raises(BudgetError):
        next_bytes(saliency, PlanSettings(size=10))


def test_next_bytes_stay_in_the_layout() -> None:
    spec = make_spec(layers=4, experts=32)
    saliency = make_saliency(spec, seed=0, kappa=(1, 1))
    size, larger = (size_for(spec, 0.35 + 0.6 * step / 39) for step in (32, 33))
    assert plan_with(saliency, size=size).layout == "per-layer"
    assert plan_with(saliency, size=larger).layout == "two-bank"
    more = next_bytes(saliency, PlanSettings(size=size), larger - size)
    assert more.layout == "per-layer"
    same = plan_with(saliency, size=larger, layout="per-layer")
    assert more.damage[1] == same.damage < more.damage[0]


def plan_of(*layers: LayerPlan) -> Plan:
    spec = make_spec(layers=len(layers), experts=16)
    made = plan_with(make_saliency(spec), size=size_for(spec, 0.6), layout="two-bank")
    return replace(made, layers=tuple(layers))


def test_diff_by_hand() -> None:
    a = plan_of(LayerPlan(1, (0, 1, 2, 3), 2), LayerPlan(2, (5, 6), 2))
    b = plan_of(LayerPlan(1, (0, 2, 7, 1, 4), 3), LayerPlan(2, (6, 5), 2))
    b = replace(b, damage=a.damage / 2)
    found = diff(a, b)
    first, second = found.layers
    assert (first.only_a, first.only_b) == ((3,), (4, 7))
    assert (first.raised, first.lowered) == ((2,), (1,))
    assert first.jaccard == pytest.approx(3 / 6)
    assert second.same and second.jaccard == 1
    assert found.jaccard == pytest.approx(5 / 8)
    assert found.comparable and found.damage == (a.damage, a.damage / 2)
    assert found.layers[0].kept == (4, 5) and found.layers[0].high == (2, 3)
    lines = str(found).splitlines()
    assert lines[4].split() == ["experts", "6", "7", "+1"]
    assert lines[6].split()[-1] == "-50.0%"
    assert lines[7].startswith("62.5% of the experts that either keeps are in both")
    assert lines[-1].split() == ["1", "4", "→", "5", "2", "→", "3", "1", "2", "1", "1", "50.0%"]
    assert not any(line.startswith("2 ") for line in lines)
    # The other way round everything is mirrored.
    back = diff(b, a).layers[0]
    assert (back.only_a, back.only_b, back.raised, back.lowered) == ((4, 7), (3,), (1,), (2,))


def test_diff_of_real_plans() -> None:
    spec = make_spec(layers=3, experts=16)
    saliency = make_saliency(spec)
    small = plan_with(saliency, size=size_for(spec, 0.4), layout="two-bank")
    large = plan_with(saliency, size=size_for(spec, 0.8), layout="two-bank")
    same = diff(small, small)
    assert same.jaccard == 1 and all(layer.same for layer in same.layers)
    assert str(same).endswith("Every layer keeps the same experts in the same banks.")
    found = diff(small, large)
    assert found.weights == (small.waterfall.weights, large.waterfall.weights)
    assert all(not layer.only_a for layer in found.layers)
    worst = plan_with(saliency, size=size_for(spec, 0.4), domains="worst")
    assert not diff(small, worst).comparable
    assert "other unit" in str(diff(small, worst))
    plain = plain_plan(
        saliency, PlanSettings(size=size_for(spec, 0.4)), recipe="low", provenance=PROVENANCE
    )
    assert diff(small, plain).formats == ("mxfp4 + 2-bit g128", "2-bit g128")


def test_diff_needs_one_model() -> None:
    plan = plan_of(LayerPlan(1, (0, 1), 2))
    other = replace(plan, provenance=replace(plan.provenance, model="big", model_sha256="c1"))
    with pytest.raises(ReapError, match=r"different models: tiny \(c0\) and big"):
        diff(plan, other)
    with pytest.raises(ReapError, match="different models"):
        diff(plan, plan_of(LayerPlan(1, (0, 1), 2), LayerPlan(2, (0, 1), 2)))

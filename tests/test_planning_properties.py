"""What must hold for any plan, on random instances."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planning import (
    assert_consistent,
    make_saliency,
    make_spec,
    plan_with,
    random_problem,
    size_for,
    source_bytes,
)

from reap.artifacts import Saliency
from reap.errors import BudgetError
from reap.planning import PlanSettings
from reap.planning.planner import SIMPLER_WITHIN, WORTH_BYTES, prepare
from reap.planning.protect import protected
from reap.planning.solver import solve

FEW = settings(max_examples=60, deadline=None, derandomize=True)
LAYOUTS = ("auto", "stock", "per-layer", "two-bank")


@st.composite
def instances(draw: st.DrawFn) -> tuple[Saliency, dict[str, Any]]:
    """A model with measured or assumed damage, and settings without a size."""
    groups = draw(st.sampled_from([1, 1, 1, 2, 4]))
    spec = make_spec(
        layers=draw(st.integers(1, 4)),
        experts=draw(st.sampled_from([8, 16, 24, 32])),
        groups=groups,
    )
    saliency = make_saliency(
        spec,
        seed=draw(st.integers(0, 10_000)),
        measured=draw(st.booleans()),
        kappa=(draw(st.floats(1, 6)), draw(st.floats(0.8, 2))),
        rho=draw(st.floats(0.02, 0.9)),
        never=draw(st.integers(0, 2)),
        sigma=draw(st.floats(0, 1.5)),
    )
    measured = saliency.measurement
    if measured is not None and len(measured.kept) > 1 and draw(st.booleans()):
        weights = np.random.default_rng(draw(st.integers(0, 99))).lognormal(
            0, 1, (2, len(saliency.layers))
        )
        kl = {"kl_kept": measured.kept[1:2], "drop_kl": weights[0], "low_kl": weights[1]}
        saliency = replace(saliency, measurement=replace(measured, **kl))
    pairs = st.tuples(st.integers(1, len(saliency.layers)), st.integers(0, spec.num_experts - 1))
    options: dict[str, Any] = {
        "layout": draw(st.sampled_from(LAYOUTS if groups == 1 else LAYOUTS[:3])),
        "min_experts": draw(st.sampled_from([spec.min_experts, spec.min_experts, None])),
        "min_bank": draw(st.integers(1, 3)),
        "low": draw(st.sampled_from(["2bit", "3bit", "3bit-g64"])),
        "low_down": draw(st.sampled_from([None, "3bit"])),
        "criterion": draw(st.sampled_from(["energy", "energy", "reap", "frequency"])),
        "keep": tuple(draw(st.lists(pairs, max_size=4))),
        "protect_super": draw(st.integers(0, 2)),
        "domains": draw(st.sampled_from(["sum", "worst", {"code": 3, "prose": 1}])),
        "clamp": None,
    }
    return saliency, options


@FEW
@given(instances(), st.floats(0.2, 1.05), st.sampled_from(["auto", None, (0.8, 1.2)]))
def test_plans_obey_what_they_are_told(
    instance: tuple[Saliency, dict[str, Any]], share: float, clamp: Any
) -> None:
    saliency, options = instance
    options = options | {"clamp": clamp}
    size = size_for(saliency.spec, share)
    try:
        plan = plan_with(saliency, size=size, **options)
    except BudgetError:
        # Then twice the experts, which is more than everything, must be enough.
        plan = plan_with(saliency, size=size_for(saliency.spec, 2.0), **options)
        assert plan.damage == 0
        return
    assert_consistent(plan, saliency, size)
    must = protected(saliency, PlanSettings(size=1, **options))
    for layer, row in zip(plan.layers, must):
        assert set(np.flatnonzero(row)) <= set(layer.kept[: layer.high])
        mixed = 0 < layer.high < len(layer.kept)
        assert not mixed or min(layer.high, layer.low) >= options["min_bank"]
        if "clamped" in plan.settings:
            least, most = plan.settings["clamped"]
            needed = len(layer.kept) == max(len(layer.kept) - layer.low, layer.high)
            assert len(layer.kept) >= least - saliency.spec.n_group
            assert len(layer.kept) <= most or (needed and row.any())
    assert not np.isnan(plan.damage)


@FEW
@given(instances(), st.lists(st.floats(0.25, 1.0), min_size=2, max_size=6, unique=True))
def test_a_bigger_budget_is_never_worse(
    instance: tuple[Saliency, dict[str, Any]], shares: list[float]
) -> None:
    saliency, options = instance
    if options["layout"] == "auto":
        options = options | {"layout": "per-layer"}
    damages = []
    for share in sorted(shares):
        try:
            plan = plan_with(saliency, size=size_for(saliency.spec, share), **options)
        except BudgetError:
            assert not damages, "what fits must fit in more"
            continue
        damages.append(plan.damage)
    assert all(b <= a * (1 + 1e-12) for a, b in itertools.pairwise(damages))


@FEW
@given(instances(), st.floats(0.3, 0.98), st.floats(0.0, 0.06))
def test_auto_is_never_worse_with_a_hundredth_more(
    instance: tuple[Saliency, dict[str, Any]], share: float, step: float
) -> None:
    """The guarantee in the module docstring of the planner, at steps around WORTH_BYTES."""
    saliency, options = instance
    options = options | {"layout": "auto"}
    spec = saliency.spec
    small = size_for(spec, share)
    large = min(round(small * (1 + step)), source_bytes(spec))
    try:
        before = plan_with(saliency, size=small, **options)
    except BudgetError:
        return
    after = plan_with(saliency, size=large, **options)
    assert after.damage <= before.damage * SIMPLER_WITHIN * (1 + 1e-12)
    task = prepare(saliency, PlanSettings(size=large, **options))
    room_before = task.with_amount(small).capacity
    if room_before <= int(task.capacity * (1 - WORTH_BYTES)):
        assert after.damage <= before.damage * (1 + 1e-12)


@FEW
@given(
    st.integers(0, 10_000),
    st.integers(1, 6),
    st.integers(4, 20),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1),
)
def test_the_solver_keeps_to_its_capacity_and_bound(
    seed: int, layers: int, experts: int, two_banks: bool, protected: bool, share: float
) -> None:
    problem = random_problem(seed, layers, experts, two_banks=two_banks, protected=protected)
    least = int(problem.bytes(*problem.cheapest()).sum())
    capacity = least + round(share * 90 * layers * experts)
    found = solve(problem, capacity)
    assert found is not None
    assert problem.bytes(found.kept, found.high).sum() <= capacity
    assert found.lower_bound <= found.damage
    assert (found.high >= problem.least).all()
    assert solve(problem, least - 1) is None

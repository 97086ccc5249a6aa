"""Planning: damage against hand-made numbers, the solver against brute force and HiGHS."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from reap.artifacts import (
    Format,
    Measurement,
    ModelSpec,
    ModuleSpec,
    MoeLayer,
    Plan,
    Projection,
    Provenance,
    Saliency,
)
from reap.errors import BudgetError, CalibrationError, ReapError
from reap.planning import PlanSettings, format_size, make_plan, parse_size, plain_plan
from reap.planning.damage import KL_FLOOR, damage_model, rank
from reap.planning.domains import combined
from reap.planning.planner import (
    RECIPES,
    SIMPLER_WITHIN,
    UNIFORM_LOW,
    UNIFORM_REAP,
    UNIFORM_TWO_BANK,
    WORTH_BYTES,
)
from reap.planning.settings import budget_for, reserved
from reap.planning.size import parse_percent
from reap.planning.solver import Problem, Solution, _best_within, _respond, solve, uniform

MXFP4 = Format(4, 32, "mxfp4")
BF16 = Format(16, 0, "dense")
TWO = Format(2, 128, "affine")
NO_KL = {"kl_kept": np.array([3]), "drop_kl": np.zeros(0), "low_kl": np.zeros(0)}
PROVENANCE = Provenance("0.1.0", "reap plan", "tiny", "", "c0", {"saliency": "s0"})


def make_spec(
    layers: int = 3,
    experts: int = 6,
    *,
    top_k: int = 2,
    groups: int = 1,
    hidden: int = 256,
    inner: int = 128,
    source: Format = MXFP4,
) -> ModelSpec:
    """One dense layer, then `layers` MoE layers; hidden × inner experts."""
    modules = [
        ModuleSpec(
            "model.embed_tokens", None, "embedding", 512 * hidden, hidden, "bfloat16", BF16, 0
        ),
        ModuleSpec("model.conv", None, "fixed", 4 * hidden, hidden, "bfloat16", BF16, 2 * hidden),
        ModuleSpec("lm_head", None, "trunk", 512 * hidden, hidden, "bfloat16", BF16, 0),
        ModuleSpec("model.odd", None, "trunk", 10 * 48, 48, "bfloat16", BF16, 0),
    ]
    moe = []
    for layer in range(1, layers + 1):
        base = f"model.layers.{layer}"
        elements = hidden * experts
        modules.append(
            ModuleSpec(f"{base}.mlp.gate", layer, "router", elements, hidden, "bfloat16", BF16, 0)
        )
        modules.append(
            ModuleSpec(
                f"{base}.attention", layer, "trunk", hidden * hidden, hidden, "bfloat16", BF16, 6
            )
        )
        projections = (
            Projection("gate_proj", inner, hidden, "bfloat16", source),
            Projection("up_proj", inner, hidden, "bfloat16", source),
            Projection("down_proj", hidden, inner, "bfloat16", source),
        )
        moe.append(MoeLayer(layer, f"{base}.mlp.switch_mlp", projections, 4))
    return ModelSpec(
        model="tiny",
        revision="",
        model_sha256="c0",
        model_type="tiny_moe",
        parameters=1,
        num_layers=layers + 1,
        num_experts=experts,
        top_k=top_k,
        n_group=groups,
        topk_group=max(1, groups // 2),
        modules=tuple(modules),
        moe_layers=tuple(moe),
        state_bytes_fixed=1000,
        state_bytes_per_token=10,
        carried_bytes=77,
    )


def make_saliency(
    spec: ModelSpec,
    *,
    seed: int = 0,
    measured: bool = True,
    kappa: tuple[float, float] = (2.5, 1.0),
    rho: float = 0.5,
    never: int = 0,
    sigma: float = 0.81,
) -> Saliency:
    """Lognormal saliency over 1,000 tokens. kappa falls from the first to the second number."""
    rng = np.random.default_rng(seed)
    layers, experts = len(spec.moe_layers), spec.num_experts
    shape = 2, 2, layers, experts
    norm = rng.lognormal(0, sigma / 2, (1, 1, layers, experts)) * rng.uniform(0.9, 1.1, shape)
    count = rng.integers(1, 100, shape)
    if never:
        count[..., :never] = 0
    tokens = np.full((2, 2, layers), 250)
    scale = rng.uniform(0.5, 2, (1, 1, layers))
    saliency = Saliency(
        provenance=PROVENANCE,
        spec=spec,
        domains=("code", "prose"),
        count=count,
        gate=0.3 * count,
        norm=norm * count,
        gate_norm=0.3 * norm * count,
        gate2_norm2=0.09 * norm**2 * count,
        norm2=norm**2 * count,
        max_norm=2 * norm * (count > 0),
        tokens=tokens,
        residual_energy=1000.0 * tokens * scale,
        output_energy=10.0 * tokens * scale,
    )
    if not measured:
        return saliency
    energy = saliency.score("energy")
    order = rank(energy)
    kept = np.unique(np.linspace(spec.min_experts, experts, 5).astype(np.int64))[::-1]
    ranked = np.take_along_axis(energy, order, axis=1)
    dropped = np.stack([ranked[:, n:].sum(axis=1) for n in kept], axis=1)
    factor = np.interp(kept, [0, experts], kappa) * rng.uniform(0.9, 1.1, (layers, 1))
    measured_tokens = np.full(layers, 100)
    errors = rho * energy * rng.uniform(0.9, 1.1, energy.shape) * 100
    measurement = Measurement(
        formats=(TWO,),
        tokens=measured_tokens,
        kept=kept,
        order=order,
        output_energy=np.full(layers, 1000.0),
        drop_error=100 * factor * dropped,
        low_error=errors.sum(axis=1)[None] * 1.1,
        low_expert_error=errors[None],
        **NO_KL,
    )
    return replace(saliency, measurement=measurement)


def plan_with(saliency: Saliency, **settings: Any) -> Plan:
    return make_plan(saliency, PlanSettings(**settings), provenance=PROVENANCE)


def source_bytes(spec: ModelSpec) -> int:
    router = sum(spec.num_experts * spec.router_row_bytes(layer) for layer in spec.moe_layers)
    return spec.trunk_bytes() + router + spec.experts_bytes


def size_for(spec: ModelSpec, share: float) -> int:
    """Bytes of the weights when `share` of the experts' bytes is left."""
    return source_bytes(spec) - round((1 - share) * spec.experts_bytes)


# Solver


def random_problem(
    seed: int,
    layers: int,
    experts: int,
    *,
    floor: int = 2,
    two_banks: bool = True,
    edge: int = 1,
    protected: bool = False,
) -> Problem:
    """Concave-ish curves with bumps, and bytes that differ between layers."""
    rng = np.random.default_rng(seed)
    energy = np.sort(rng.lognormal(0, 1, (layers, experts)), axis=1)[:, ::-1]
    zero = np.zeros((layers, 1))
    drop = np.hstack([energy[:, ::-1].cumsum(axis=1)[:, ::-1], zero])
    drop = drop * np.linspace(2.0, 0.8, experts + 1) * rng.uniform(0.5, 2, (layers, 1))
    noise = rng.uniform(0.2, 0.6, energy.shape)
    low = np.hstack([zero, (energy * noise).cumsum(axis=1)])
    low_bytes = rng.integers(50, 60, layers)
    least = np.arange(layers) % 4 * int(protected)
    fewest = np.maximum(max(floor, edge), least)[:, None]
    return Problem(
        keep=np.where(np.arange(experts + 1) >= fewest, drop + low, np.inf),
        lift=-low,
        low_bytes=low_bytes,
        lift_bytes=rng.integers(35, 50, layers),
        low_bank=True,
        two_banks=two_banks,
        min_bank=edge,
        least_high=least,
    )


def capacity_of(problem: Problem, share: float) -> int:
    """`share` of the way from the smallest plan to everything in the high bank."""
    everything = np.full(len(problem.keep), problem.keep.shape[1] - 1)
    least = int(problem.bytes(*problem.cheapest()).sum())
    most = int(problem.bytes(everything, everything).sum())
    return least + round(share * (most - least))


def choices(problem: Problem, layer: int) -> list[tuple[int, int, int, float]]:
    """(n, h, bytes, damage), written without the solver's own helpers."""
    found = []
    for n in range(problem.keep.shape[1]):
        if not np.isfinite(problem.keep[layer, n]):
            continue
        for h in range(n + 1):
            mixed = problem.two_banks and min(h, n - h) >= problem.min_bank
            if h < problem.least[layer]:
                continue
            if h == n or (h == 0 and problem.low_bank) or mixed:
                size = int(problem.low_bytes[layer]) * n + int(problem.lift_bytes[layer]) * h
                damage = float(problem.keep[layer, n] + problem.lift[layer, h])
                found.append((n, h, size, damage))
    return found


def brute_force(problem: Problem, capacity: int) -> float:
    best = math.inf
    layers = range(len(problem.keep))
    for combination in itertools.product(*(choices(problem, layer) for layer in layers)):
        if sum(choice[2] for choice in combination) <= capacity:
            best = min(best, sum(choice[3] for choice in combination))
    return best


def highs(problem: Problem, capacity: int) -> float:
    every = [(layer, *c) for layer in range(len(problem.keep)) for c in choices(problem, layer)]
    layer, _, _, size, damage = (np.array(column) for column in zip(*every))
    one_each = csr_array((np.ones(len(every)), (layer, np.arange(len(every)))))
    result = milp(
        damage,
        integrality=np.ones(len(every)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(csr_array(size[None].astype(float)), -np.inf, capacity),
        ],
        options={"mip_rel_gap": 1e-9, "time_limit": 60},
    )
    assert result.success
    return float(result.fun)


def assert_valid(problem: Problem, capacity: int, solution: Solution) -> None:
    assert problem.bytes(solution.kept, solution.high).sum() <= capacity
    pairs = zip(solution.kept.tolist(), solution.high.tolist())
    for layer, pair in enumerate(pairs):
        assert pair in [choice[:2] for choice in choices(problem, layer)]
    assert solution.damage == problem.damage(solution.kept, solution.high).sum()
    assert solution.lower_bound <= solution.damage


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("two_banks", [True, False])
def test_solver_is_exact_on_small_problems(seed: int, two_banks: bool) -> None:
    edge = 1 + seed % 3
    problem = random_problem(seed, 3, 6, two_banks=two_banks, edge=edge, protected=seed % 2 == 1)
    every = [min(choices(problem, layer), key=lambda c: c[2])[2] for layer in range(3)]
    assert problem.bytes(*problem.cheapest()).sum() == sum(every)
    for share in (0.0, 0.05, 0.3, 0.5, 0.77, 1.0):
        capacity = capacity_of(problem, share)
        solution = solve(problem, capacity)
        assert solution is not None
        assert_valid(problem, capacity, solution)
        assert solution.damage == pytest.approx(brute_force(problem, capacity), rel=1e-12)
        assert solution.lower_bound == solution.damage


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("two_banks", [True, False])
def test_solver_agrees_with_highs(seed: int, two_banks: bool) -> None:
    problem = random_problem(seed, 8, 24, floor=4, two_banks=two_banks, edge=1 + 2 * (seed % 2))
    for share in (0.2, 0.6):
        capacity = capacity_of(problem, share)
        solution, best = solve(problem, capacity), highs(problem, capacity)
        assert solution is not None
        assert_valid(problem, capacity, solution)
        assert solution.lower_bound <= best * (1 + 1e-9)
        assert solution.damage == pytest.approx(best, rel=1e-7)


def test_solver_bound_holds_when_the_search_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(5, 8, 24)
    capacity = capacity_of(problem, 0.4)
    best = solve(problem, capacity)
    assert best is not None
    for limit, value in (("MAX_OPTIONS", 1), ("MAX_STATES", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(f"reap.planning.solver.{limit}", value)
            rough = solve(problem, capacity)
        assert rough is not None
        assert_valid(problem, capacity, rough)
        assert rough.lower_bound < best.damage <= rough.damage <= best.damage * 1.02


@pytest.mark.parametrize("two_banks", [True, False])
@pytest.mark.parametrize("edge", [1, 4])
@pytest.mark.parametrize("protected", [True, False])
def test_steps_of_the_solver(two_banks: bool, edge: int, protected: bool) -> None:
    """The best response to a price of bytes, and the best choice of each layer within bytes."""
    problem = random_problem(8, 5, 12, two_banks=two_banks, edge=edge, protected=protected)
    every = [choices(problem, layer) for layer in range(5)]
    for price in (0.0, 1e-3, 1e-2, 0.1, 1.0):
        n, h, least = _respond(problem, price)
        for layer, options in enumerate(every):
            expected = min(damage + price * size for _, _, size, damage in options)
            assert least[layer] == pytest.approx(expected, rel=1e-12)
            size, damage = next(o[2:] for o in options if o[:2] == (n[layer], h[layer]))
            assert damage + price * size == pytest.approx(expected, rel=1e-12)
    for allowance in range(450, 1100, 50):
        n, h = _best_within(problem, np.full(5, allowance))
        for layer, options in enumerate(every):
            expected = min(damage for _, _, size, damage in options if size <= allowance)
            size, damage = next(o[2:] for o in options if o[:2] == (n[layer], h[layer]))
            assert size <= allowance
            assert damage == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("two_banks", [True, False])
def test_more_bytes_are_never_worse(two_banks: bool) -> None:
    problem = random_problem(3, 4, 12, two_banks=two_banks)
    least, most = capacity_of(problem, 0.0), capacity_of(problem, 1.0)
    damages = []
    for capacity in range(least, most + 1, 7):
        solution = solve(problem, capacity)
        assert solution is not None
        damages.append(solution.damage)
    assert len(damages) > 300
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(damages))


def test_nothing_fits_below_the_smallest_plan() -> None:
    problem = random_problem(0, 3, 6)
    least = capacity_of(problem, 0.0)
    assert solve(problem, least - 1) is None
    assert uniform(problem, least - 1, "low") is None
    solution = solve(problem, least)
    assert solution is not None and solution.kept.tolist() == [2, 2, 2]
    assert uniform(problem, least, "low") == (2, 0)


@pytest.mark.parametrize("seed", range(6))
def test_uniform_is_exact(seed: int) -> None:
    problem = random_problem(seed, 3, 8, edge=2)
    # Layer 3 must have two in the high bank, so no layer may be all low.
    held = random_problem(seed, 3, 8, edge=2, protected=True)
    assert uniform(held, capacity_of(held, 0.45), "low") is None
    for bank in ("high", "two"):
        assert uniform(held, capacity_of(held, 0.45), bank)[1] >= 2
    capacity = capacity_of(problem, 0.45)
    shared = [c for c in itertools.product(range(9), range(9)) if c[1] <= c[0]]
    for bank in ("high", "low", "two"):
        fitting = []
        for n, h in shared:
            split = {"high": h == n, "low": h == 0, "two": True}[bank]
            possible = all((n, h) in [x[:2] for x in choices(problem, layer)] for layer in range(3))
            size = n * problem.low_bytes.sum() + h * problem.lift_bytes.sum()
            if split and possible and size <= capacity:
                damage = problem.keep[:, n].sum() + problem.lift[:, h].sum()
                fitting.append((float(damage), n, h))
        found = uniform(problem, capacity, bank)
        assert found is not None
        n, h = found
        damage = problem.keep[:, n].sum() + problem.lift[:, h].sum()
        assert damage == pytest.approx(min(fitting)[0], rel=1e-12)
        assert uniform(problem, capacity, bank, most=True)[0] == max(f[1] for f in fitting)


# Damage model


def test_rank_breaks_ties_by_id_and_interleaves_groups() -> None:
    scores = np.array([[1.0, 3.0, 0.0, 0.0, 3.0, 2.0]])
    assert rank(scores).tolist() == [[1, 4, 5, 0, 2, 3]]
    assert rank(scores, groups=2).tolist() == [[1, 4, 0, 5, 2, 3]]


def hand_made() -> Saliency:
    """Energies 8, 4, 2, 1, 0, 0 per token in reverse order of the ids; a = 1 / 100."""
    spec = make_spec(layers=1)
    saliency = make_saliency(spec, measured=False)
    energy = np.array([0.0, 0.0, 1.0, 2.0, 4.0, 8.0])
    count = np.broadcast_to(np.array([0, 0, 5, 5, 5, 5]), (2, 2, 1, 6)).copy()
    return replace(
        saliency,
        count=count,
        gate2_norm2=np.broadcast_to(250 * energy, (2, 2, 1, 6)).copy(),
        residual_energy=np.full((2, 2, 1), 25_000.0),
        measurement=Measurement(
            formats=(TWO,),
            tokens=np.array([10]),
            kept=np.array([6, 5, 3, 1]),
            order=np.array([[5, 4, 3, 2, 0, 1]]),
            output_energy=np.array([150.0]),
            # Dropped energies 0, 0, 1, 7: kappa is unknown, unknown, 2, 1 at n = 6, 5, 3, 1.
            drop_error=np.array([[0.0, 0.0, 20.0, 70.0]]),
            low_error=np.array([[60.0]]),
            low_expert_error=np.array([[[0.0, 0.0, 2.0, 4.0, 8.0, 16.0]]]),
            **NO_KL,
        ),
    )


def test_damage_by_hand() -> None:
    saliency = hand_made()
    energy = saliency.score("energy")
    assert energy.tolist() == [[0, 0, 1, 2, 4, 8]]
    model = damage_model(saliency, scores=energy, high={}, low={TWO: 1.0})
    assert model.order.tolist() == [[5, 4, 3, 2, 0, 1]]
    assert model.assumed == ()
    # kappa = 1, 1, 1.5, 2, 2, 2, 2 times dropped energy 15, 7, 3, 1, 0, 0, 0.
    assert model.drop[0] == pytest.approx(np.array([15, 7, 4.5, 2, 0, 0, 0]) / 100)
    # 60 / 10 per token in the ratio 16 : 8 : 4 : 2 : 0 : 0.
    assert model.low[0] == pytest.approx(np.array([0, 3.2, 4.8, 5.6, 6, 6, 6]) / 100)
    assert model.high.tolist() == [[0] * 7]
    # Four kept, one of them high: only the second to the fourth have the low bank's error.
    damage = model.damage(np.array([4]), np.array([1]))
    assert damage == pytest.approx([0.028])


def test_drop_never_rises_with_more_experts() -> None:
    saliency = hand_made()
    assert saliency.measurement is not None
    # kappa 9 at n = 3, 1 at n = 1: without the correction dropping 3 would beat dropping 2.
    measurement = replace(saliency.measurement, drop_error=np.array([[0.0, 0.0, 90.0, 70.0]]))
    model = damage_model(
        replace(saliency, measurement=measurement),
        scores=saliency.score("energy"),
        high={},
        low={},
    )
    assert model.drop[0] == pytest.approx(np.array([15, 15, 15, 9, 0, 0, 0]) / 100)


def test_another_order_pays_for_the_energy_it_drops() -> None:
    saliency = hand_made()
    worst_first = -saliency.score("energy")
    model = damage_model(saliency, scores=worst_first, high={}, low={TWO: 1.0})
    assert model.order.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert model.drop[0] == pytest.approx(np.array([28, 28, 28, 28, 24, 16, 0]) / 100)
    assert model.low[0] == pytest.approx(np.array([0, 0, 0, 0.4, 1.2, 2.8, 6]) / 100)


def test_what_was_not_measured_is_assumed_and_said() -> None:
    saliency = hand_made()
    energy = saliency.score("energy")
    bare = replace(saliency, measurement=None)
    model = damage_model(bare, scores=energy, high={}, low={TWO: 1.0})
    assert model.assumed == ("kappa = 1", "rho = 0.541 for 2-bit g128")
    assert model.drop[0] == pytest.approx(np.array([15, 7, 3, 1, 0, 0, 0]) / 100)
    assert model.low[0, -1] == pytest.approx(0.541 * 0.15)
    three = Format(3, 64, "affine")
    model = damage_model(saliency, scores=energy, high={three: 1.0}, low={TWO: 1.0})
    assert model.assumed == ("error of 3-bit g64 = 0.25 times that of 2-bit g128",)
    assert model.high[0, -1] == pytest.approx(0.06 * 0.135 / 0.541)
    plan = plan_with(make_saliency(make_spec(), measured=False), size=size_for(make_spec(), 0.6))
    assert plan.settings["assumed"] == ["kappa = 1", "rho = 0.541 for 2-bit g128"]
    plan = plan_with(make_saliency(make_spec()), size=size_for(make_spec(), 0.6))
    assert plan.settings["assumed"] == []


def test_measured_kl_weighs_drops_and_low_bits_apart() -> None:
    saliency = hand_made()
    assert saliency.measurement is not None
    kl = {"kl_kept": np.array([3]), "drop_kl": np.array([0.5]), "low_kl": np.array([0.3])}
    measured = replace(saliency, measurement=replace(saliency.measurement, **kl))
    model = damage_model(measured, scores=saliency.score("energy"), high={}, low={TWO: 1.0})
    assert model.unit == "nats"
    # 0.5 nats for an error of 20 / 10 with three experts; 0.3 nats for 60 / 10 at low bits.
    assert model.drop[0] == pytest.approx(np.array([15, 7, 4.5, 2, 0, 0, 0]) * 0.25)
    assert model.low[0] == pytest.approx(np.array([0, 3.2, 4.8, 5.6, 6, 6, 6]) * 0.05)
    kl["drop_kl"] = np.array([-1e-9])
    negative = replace(saliency, measurement=replace(saliency.measurement, **kl))
    model = damage_model(negative, scores=saliency.score("energy"), high={}, low={TWO: 1.0})
    assert model.drop[0, 3] == pytest.approx(KL_FLOOR)


def test_a_layer_without_an_error_weighs_as_the_median() -> None:
    saliency = make_saliency(make_spec(layers=3, experts=8))
    measured = saliency.measurement
    assert measured is not None
    at = 1
    error = measured.drop_error.copy()
    error[:, at] = 100, 0, 300
    kl = {
        "kl_kept": measured.kept[at : at + 1],
        "drop_kl": np.array([2.0, 1e-9, 3.0]),
        "low_kl": np.ones(3),
    }
    saliency = replace(saliency, measurement=replace(measured, drop_error=error, **kl))
    model = damage_model(saliency, scores=saliency.score("energy"), high={}, low={})
    # 2 / (100 / 100), 3 / (300 / 100) and the median of both.
    assert model.drop_weight.tolist() == [2.0, 1.5, 1.0]
    assert np.isfinite(model.drop).all()


def test_layers_are_compared_by_the_energy_of_their_residual_stream() -> None:
    saliency = hand_made()
    dead = replace(saliency, residual_energy=np.zeros((2, 2, 1)))
    with pytest.raises(CalibrationError, match="after layer 1 has no energy"):
        damage_model(dead, scores=saliency.score("energy"), high={}, low={TWO: 1.0})


# Plans


def assert_consistent(plan: Plan, saliency: Saliency, cap: int) -> None:
    """Everything that must hold for any plan, from the spec alone."""
    spec = saliency.spec
    energy = combined(saliency, "energy", plan.settings["domains"])
    water = plan.waterfall
    high = low = router = 0
    for entry, layer, row in zip(plan.layers, spec.moe_layers, energy, strict=True):
        assert entry.layer == layer.layer
        assert len(set(entry.kept)) == len(entry.kept)
        assert all(0 <= expert < spec.num_experts for expert in entry.kept)
        assert len(entry.kept) >= spec.min_experts
        high += entry.high * spec.expert_bytes(layer, plan.high)
        low += entry.low * spec.expert_bytes(layer, plan.low)
        router += len(entry.kept) * spec.router_row_bytes(layer, plan.trunk)
        if plan.settings["criterion"] == "energy" and "recipe" not in plan.settings:
            for bank in (entry.kept[: entry.high], entry.kept[entry.high :]):
                values = [row[expert] for expert in bank]
                identity = plan.settings["identity"]
                assert identity or spec.n_group > 1 or values == sorted(values, reverse=True)
    assert (water.high, water.low, water.router) == (high, low, router)
    assert water.trunk == spec.trunk_bytes(plan.trunk)
    assert water.weights == water.trunk + water.router + water.high + water.low
    assert water.weights + water.state + water.reserve + water.slack == water.budget
    assert water.slack >= 0
    assert water.weights <= cap
    assert plan.lower_bound <= plan.damage


@pytest.mark.parametrize("layout", ["auto", "stock", "per-layer", "two-bank"])
@pytest.mark.parametrize("seed", range(3))
def test_plans_are_consistent_at_every_size(layout: str, seed: int) -> None:
    spec = make_spec(layers=4, experts=16)
    saliency = make_saliency(spec, seed=seed, never=1)
    previous = math.inf
    for share in np.linspace(0.3, 1.02, 25):
        size = size_for(spec, float(share))
        plan = plan_with(saliency, size=size, layout=layout)
        assert_consistent(plan, saliency, size)
        assert plan.waterfall.budget == size
        assert (plan.waterfall.state, plan.waterfall.reserve) == (0, 0)
        if layout == "auto":
            assert plan.damage <= previous * SIMPLER_WITHIN
        else:
            assert plan.damage <= previous + 1e-15
        if layout == "two-bank":
            assert all(plan.damage <= other for other in plan.alternatives.values())
        previous = plan.damage
    assert plan.damage == 0


@pytest.mark.parametrize("layout", ["auto", "stock", "per-layer", "two-bank"])
def test_without_a_low_bank_every_expert_is_as_in_the_source(layout: str) -> None:
    spec = make_spec(layers=4, experts=16)
    for seed, share in itertools.product(range(3), (0.55, 0.7, 0.9)):
        saliency = make_saliency(spec, seed=seed)
        size = size_for(spec, share)
        plan = plan_with(saliency, size=size, layout=layout, low="none")
        assert_consistent(plan, saliency, size)
        assert plan.low == {} and plan.waterfall.low == 0
        assert all(layer.high == len(layer.kept) for layer in plan.layers)
        assert plan.layout in ("stock", layout, "per-layer")
        assert PlanSettings.from_json(plan.settings).low == "none"
        both = plan_with(saliency, size=size, layout=layout)
        assert both.damage <= plan.damage * SIMPLER_WITHIN
    with pytest.raises(ReapError, match="recipe 'low' needs a low bank, but --low is none"):
        plain_plan(
            saliency, PlanSettings(size=size, low="none"), recipe="low", provenance=PROVENANCE
        )
    with pytest.raises(ReapError, match="leaves no bank for low_down '3bit'"):
        PlanSettings(size=size, low="none", low_down="3bit")


def test_layouts_are_nested() -> None:
    spec = make_spec(layers=4, experts=16)
    for seed, share in itertools.product(range(4), (0.35, 0.5, 0.7, 0.9)):
        saliency = make_saliency(spec, seed=seed)
        size = size_for(spec, share)
        plans = {
            layout: plan_with(saliency, size=size, layout=layout)
            for layout in ("auto", "stock", "per-layer", "two-bank")
        }
        stock, per_layer, two_bank = (plans[n] for n in ("stock", "per-layer", "two-bank"))
        assert two_bank.damage <= per_layer.damage <= stock.damage
        assert stock.layout == "stock"
        assert len(set(stock.expert_counts[1:])) == 1
        assert set(stock.expert_bank_split + per_layer.expert_bank_split) == {0}
        auto = plans["auto"]
        assert auto.damage <= two_bank.damage * SIMPLER_WITHIN
        assert auto.lower_bound == two_bank.lower_bound
        rank_of = ("stock", "per-layer", "two-bank").index
        for simpler in ("stock", "per-layer"):
            if rank_of(simpler) < rank_of(auto.layout):
                assert plans[simpler].damage > two_bank.damage * SIMPLER_WITHIN


def test_auto_takes_the_simpler_layout_within_two_percent() -> None:
    spec = make_spec(layers=1, experts=16)
    # One layer: stock is as good as per-layer. Dear drops and cheap low bits: all low is best.
    saliency = make_saliency(spec, kappa=(50, 20), rho=0.01)
    low = plan_with(saliency, size=size_for(spec, 0.55))
    assert low.layout == "stock"
    assert low.layers[0].high == 0
    assert UNIFORM_LOW in low.alternatives
    assert {n for n in low.alternatives if n.startswith("best")} == {
        "best per-layer plan",
        "best two-bank plan",
    }
    # Cheap drops and useless low bits: all high.
    saliency = make_saliency(spec, kappa=(1, 1), rho=1.0)
    high = plan_with(saliency, size=size_for(spec, 0.55))
    assert high.layout == "stock"
    assert high.layers[0].high == len(high.layers[0].kept)


def test_auto_prefers_per_layer_to_a_slightly_better_two_bank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec(layers=4, experts=32)
    # Low bits are next to useless: a few experts fill what high ones leave.
    saliency = make_saliency(spec, kappa=(1.0, 1.0), rho=0.5)
    size = size_for(spec, 0.6)
    plans = {
        layout: plan_with(saliency, size=size, layout=layout)
        for layout in ("auto", "per-layer", "two-bank")
    }
    two_bank = plans["two-bank"]
    assert two_bank.layout == "two-bank"
    assert two_bank.damage < plans["per-layer"].damage < 1.02 * two_bank.damage
    auto = plans["auto"]
    assert auto.layers == plans["per-layer"].layers
    assert auto.layout == "per-layer"
    assert auto.lower_bound == two_bank.lower_bound < auto.damage
    assert auto.alternatives["best two-bank plan"] == two_bank.damage
    # What is not known to be the best says so.
    monkeypatch.setattr("reap.planning.solver.MAX_STATES", 1)
    assert plan_with(saliency, size=size, layout="two-bank").lower_bound < two_bank.damage


def test_auto_never_gives_up_more_than_a_hundredth_of_the_bytes() -> None:
    """Where bytes matter little, 2 % more damage can be worth many of them."""
    spec = make_spec(layers=6, experts=64)
    saliency = make_saliency(spec, kappa=(1, 1), rho=0.4)
    size = size_for(spec, 0.16)
    plans = {
        layout: plan_with(saliency, size=size, layout=layout, min_experts=2, clamp=None)
        for layout in ("auto", "per-layer", "two-bank")
    }
    per_layer, two_bank = plans["per-layer"], plans["two-bank"]
    assert per_layer.damage < SIMPLER_WITHIN * two_bank.damage
    assert plans["auto"].layers == two_bank.layers
    room = size - spec.trunk_bytes()
    less = size - math.ceil(WORTH_BYTES * room)
    fewer = plan_with(saliency, size=less, layout="two-bank", min_experts=2, clamp=None)
    assert fewer.damage < per_layer.damage


def test_the_solver_beats_plain_recipes_and_its_bound_holds() -> None:
    spec = make_spec(layers=4, experts=32)
    saliency = make_saliency(spec, seed=7)
    size = size_for(spec, 0.5)
    plan = plan_with(saliency, size=size, layout="two-bank")
    assert {UNIFORM_REAP, UNIFORM_LOW, UNIFORM_TWO_BANK} == plan.alternatives.keys()
    for recipe in RECIPES:
        plain = plain_plan(
            saliency,
            PlanSettings(size=size),
            recipe=recipe,
            seed=1,
            provenance=PROVENANCE,
        )
        assert_consistent(plain, saliency, size)
        assert plan.lower_bound <= plan.damage <= plain.damage
        uneven = {"two-bank": "two-bank", "coverage": "per-layer", "global-reap": "per-layer"}
        assert plain.layout == uneven.get(recipe, "stock")
    names = {"reap": UNIFORM_REAP, "low": UNIFORM_LOW, "two-bank": UNIFORM_TWO_BANK}
    for recipe, name in names.items():
        plain = plain_plan(saliency, PlanSettings(size=size), recipe=recipe, provenance=PROVENANCE)
        assert plain.damage == pytest.approx(plan.alternatives[name], rel=1e-12)


def test_plain_recipes() -> None:
    spec = make_spec(layers=2, experts=32)
    saliency = make_saliency(spec)
    settings = PlanSettings(size=size_for(spec, 0.5))

    def plain(recipe: str, seed: int = 0) -> Plan:
        return plain_plan(saliency, settings, recipe=recipe, seed=seed, provenance=PROVENANCE)

    frequent = plain("frequency")
    counts = saliency.score("frequency")[0]
    best = sorted(range(32), key=lambda expert: (-counts[expert], expert))
    assert frequent.layers[0].kept == tuple(best[: len(frequent.layers[0].kept)])
    # Half of the experts, and the bytes of dropped router rows beside.
    assert len(frequent.layers[0].kept) == frequent.layers[0].high == 16
    assert plain("random", 1) == plain("random", 1)
    assert plain("random", 1).layers != plain("random", 2).layers
    assert plain("random").settings["recipe"] == "random"
    low = plain("low")
    assert low.layers[0].high == 0
    # 2.25 of 4.25 bits per weight: nearly all of them.
    assert low.expert_counts == [0, 30, 30]
    with pytest.raises(ReapError, match=r"unknown recipe 'best'\."):
        plain("best")


def test_everything_fits() -> None:
    spec = make_spec()
    saliency = make_saliency(spec)
    for layout in ("auto", "two-bank"):
        plan = plan_with(saliency, size=source_bytes(spec), layout=layout)
        assert plan.layout == "stock"
        assert plan.expert_counts == [0, 6, 6, 6]
        assert plan.expert_bank_split == [0, 0, 0, 0]
        assert plan.layers[0].kept == (0, 1, 2, 3, 4, 5)
        assert (plan.damage, plan.lower_bound, plan.alternatives) == (0, 0, {})
        assert plan.settings["identity"] is True
        assert plan.waterfall.slack == 0
        assert plan.waterfall.carried == 77
    plan = plan_with(saliency, size=source_bytes(spec) - 1)
    assert plan.settings["identity"] is False
    assert plan.damage > 0


def test_plans_are_deterministic() -> None:
    spec = make_spec(layers=3, experts=12)
    saliency = make_saliency(spec, sigma=0.0)
    first = plan_with(saliency, size=size_for(spec, 0.6))
    assert first == plan_with(saliency, size=size_for(spec, 0.6))


def test_experts_never_routed_go_first_and_come_back_if_there_is_room() -> None:
    spec = make_spec(layers=2, experts=12)
    saliency = make_saliency(spec, never=3)
    low = plan_with(saliency, size=size_for(spec, 0.55), layout="stock")
    assert low.expert_counts == [0, 12, 12] and low.layers[0].high == 0
    assert [layer.kept[-3:] for layer in low.layers] == [(0, 1, 2)] * 2
    # Two experts short of everything: two that were never routed are gone, at no damage.
    one = spec.expert_bytes(spec.moe_layers[0]) + spec.router_row_bytes(spec.moe_layers[0])
    plan = plan_with(saliency, size=source_bytes(spec) - 2 * one, layout="per-layer")
    assert sum(plan.expert_counts) == 22
    assert plan.damage == 0


def test_least_experts_and_least_bank() -> None:
    spec = make_spec(layers=3, experts=32)
    saliency = make_saliency(spec, seed=3)
    size = size_for(spec, 0.4)
    assert min(plan_with(saliency, size=size).expert_counts[1:]) >= 8
    free = plan_with(saliency, size=size, min_experts=2, layout="two-bank")
    held = plan_with(saliency, size=size, min_experts=22, layout="two-bank")
    assert min(held.expert_counts[1:]) >= 22 > min(free.expert_counts[1:])
    assert free.damage <= held.damage
    size = size_for(spec, 0.6)
    free = plan_with(saliency, size=size, layout="two-bank")
    bank = plan_with(saliency, size=size, min_bank=7, layout="two-bank")
    assert any(layer.split for layer in bank.layers)
    assert any(0 < layer.high < 7 or 0 < layer.low < 7 for layer in free.layers)
    assert not any(0 < layer.high < 7 or 0 < layer.low < 7 for layer in bank.layers)
    with pytest.raises(ReapError, match="can keep 2 to 32 experts in a layer, not at least 1"):
        plan_with(saliency, size=size, min_experts=1)
    with pytest.raises(ReapError, match="can keep 2 to 32 experts in a layer, not at least 33"):
        plan_with(saliency, size=size, min_experts=33)
    with pytest.raises(ReapError, match="bank of at least 33 experts is more than the layer's 32"):
        plan_with(saliency, size=size, min_bank=33)


def test_router_groups_stay_equal_and_in_order() -> None:
    spec = make_spec(layers=3, experts=16, groups=4)
    assert spec.min_experts == 8
    saliency = make_saliency(spec, seed=2)
    energy = saliency.score("energy")
    for layout in ("auto", "stock", "per-layer"):
        plan = plan_with(saliency, size=size_for(spec, 0.75), layout=layout, min_experts=8)
        assert_consistent(plan, saliency, size_for(spec, 0.75))
        assert UNIFORM_TWO_BANK not in plan.alternatives
        for layer, row in zip(plan.layers, energy):
            share = len(layer.kept) // 4
            assert len(layer.kept) == 4 * share
            for group in range(4):
                members = range(4 * group, 4 * group + 4)
                best = sorted(members, key=lambda expert: (-row[expert], expert))
                part = layer.kept[share * group : share * (group + 1)]
                assert list(part) == best[:share]
        assert set(plan.expert_bank_split) == {0}
    with pytest.raises(ReapError, match=r"tiny_moe routes to groups of experts \(4 groups\)"):
        plan_with(saliency, size=size_for(spec, 0.75), layout="two-bank")
    with pytest.raises(ReapError, match="cannot be split into two banks"):
        plain_plan(
            saliency,
            PlanSettings(size=size_for(spec, 0.75)),
            recipe="two-bank",
            provenance=PROVENANCE,
        )


def test_budget_waterfall() -> None:
    spec = make_spec(layers=3, experts=32)
    saliency = make_saliency(spec)
    budget = size_for(spec, 0.6)
    plan = plan_with(saliency, budget=budget, context=100, reserve=0.1)
    water = plan.waterfall
    assert (water.budget, water.state, water.context) == (budget, 2000, 100)
    assert water.reserve == round(budget * 0.1)
    assert_consistent(plan, saliency, budget - 2000 - water.reserve)
    same = plan_with(saliency, size=budget - 2000 - water.reserve)
    assert same.layers == plan.layers
    # Less than the bytes of one expert are left.
    assert water.slack < spec.expert_bytes(spec.moe_layers[0])


def test_budget_too_small_names_what_it_takes() -> None:
    spec = make_spec(layers=3, experts=32)
    saliency = make_saliency(spec)
    with pytest.raises(BudgetError) as caught:
        plan_with(saliency, budget=10**6, context=0)
    smallest = spec.trunk_bytes() + 3 * 8 * (
        spec.expert_bytes(
            spec.moe_layers[0], dict.fromkeys(("gate_proj", "up_proj", "down_proj"), TWO)
        )
        + spec.router_row_bytes(spec.moe_layers[0])
    )
    needed = budget_for(smallest, 1000, 0.08)
    assert caught.value.message == (
        f"a budget of 1.0 MB (1,000,000 bytes) is too small: the smallest plan (8 of 32 experts in "
        f"each layer at 2-bit g128) has 1.6 MB ({smallest:,} bytes) of weights and needs a budget "
        f"of 1.7 MB ({needed:,} bytes), with 0 tokens of context and 8% in reserve. Most of it: "
        f"trunk, 0.9 MB."
    ).replace("0.9 MB", format_size(spec.trunk_bytes()))
    assert caught.value.hint == "quantize the trunk, e.g. --trunk 4bit, or raise --budget"
    assert plan_with(saliency, budget=needed, context=0).expert_counts == [0, 8, 8, 8]
    with pytest.raises(BudgetError):
        plan_with(saliency, budget=needed - 1, context=0)
    with pytest.raises(
        BudgetError, match=r"1\.0 MB \(1,000,000 bytes\) of weights are too few"
    ) as e:
        plan_with(saliency, size=10**6, trunk="4bit", min_experts=31)
    assert e.value.hint == "lower --min-experts (at least 2), or raise --size"
    with pytest.raises(BudgetError, match=r"Most of it: state, 10\.0 MB") as e:
        plan_with(saliency, budget=10**6, context=10**6)
    assert e.value.hint == "lower --context, or raise --budget"


def test_budget_too_small_for_a_plain_recipe() -> None:
    spec = make_spec(layers=3, experts=32)
    layer = spec.moe_layers[0]
    row = spec.router_row_bytes(layer)
    smallest = spec.trunk_bytes() + 3 * 8 * (spec.expert_bytes(layer) + row)

    def plain(size: int) -> Plan:
        return plain_plan(
            make_saliency(spec), PlanSettings(size=size), recipe="reap", provenance=PROVENANCE
        )

    assert plain(smallest).expert_counts == [0, 8, 8, 8]
    with pytest.raises(
        BudgetError, match=rf"in each layer at mxfp4\) has .* \({smallest:,} bytes\)"
    ):
        plain(smallest - 1)


@pytest.mark.parametrize("share", [0.0, 0.08, 0.333])
def test_budget_for_is_the_smallest(share: float) -> None:
    for need in (1, 999, 123_456_789, 10**12 + 7):
        budget = budget_for(need, 50, share)
        assert budget - reserved(budget, share) >= need + 50
        assert budget - 1 - reserved(budget - 1, share) < need + 50


def test_trunk_precision() -> None:
    spec = make_spec(layers=1, experts=32)
    saliency = make_saliency(spec)
    assert plan_with(saliency, size=size_for(spec, 0.6)).trunk == {}
    plan = plan_with(saliency, size=size_for(spec, 0.6), trunk="4bit")
    four, eight = Format(4, 64, "affine"), Format(8, 64, "affine")
    # `odd` is 48 wide: no group fits. What is fixed never changes. The router keeps 8 bits.
    assert plan.trunk == {
        "model.embed_tokens": four,
        "lm_head": four,
        "model.layers.1.mlp.gate": eight,
        "model.layers.1.attention": four,
    }
    assert_consistent(plan, saliency, size_for(spec, 0.6))
    # What is small already stays.
    small = replace(spec.modules[0], format=Format(4, 64, "affine"))
    spec = replace(spec, modules=(small, *spec.modules[1:]))
    plan = plan_with(make_saliency(spec), size=size_for(spec, 0.6), trunk="8bit")
    assert "model.embed_tokens" not in plan.trunk
    said = "rounding the trunk is no part of the predicted damage; `reap evaluate` measures it."
    assert plan.settings["warnings"][0] == said
    plan = plan_with(make_saliency(spec), size=size_for(spec, 1.0), trunk="8bit")
    assert plan.settings["warnings"] == [f"{said} All would fit with --trunk source."]
    plan = plan_with(make_saliency(spec), size=size_for(spec, 0.6))
    assert not any("trunk" in warning for warning in plan.settings["warnings"])
    narrow = replace(spec.modules[2], elements=512 * 96, width=96)
    spec = replace(spec, modules=(small, narrow))
    plan = plan_with(make_saliency(spec), size=size_for(spec, 0.6), trunk="8bit")
    assert plan.trunk == {"lm_head": Format(8, 32, "affine")}


def test_bank_formats() -> None:
    spec = make_spec(experts=16)
    plan = plan_with(make_saliency(spec), size=size_for(spec, 0.6))
    assert plan.high == dict.fromkeys(("gate_proj", "up_proj", "down_proj"), MXFP4)
    assert plan.low == dict.fromkeys(("gate_proj", "up_proj", "down_proj"), TWO)
    # down_proj has 96 columns: the default group of 128 becomes 32, an explicit one is refused.
    narrow = make_spec(experts=16, inner=96)
    plan = plan_with(make_saliency(narrow), size=size_for(narrow, 0.7))
    assert set(plan.low.values()) == {Format(2, 32, "affine")}
    with pytest.raises(
        ReapError, match=r"switch_mlp\.down_proj has 96 columns, not a multiple of 64"
    ):
        plan_with(make_saliency(narrow), size=size_for(narrow, 0.7), low="2bit-g64")
    # Nothing divides 80: plans without a low bank.
    odd = make_spec(experts=16, inner=80, source=BF16)
    plan = plan_with(make_saliency(odd), size=size_for(odd, 0.7))
    assert plan.low == {}
    assert_consistent(plan, make_saliency(odd), size_for(odd, 0.7))
    assert plan.alternatives.keys() >= {UNIFORM_REAP}
    assert UNIFORM_LOW not in plan.alternatives
    with pytest.raises(ReapError, match="down_proj has 80 columns"):
        plan_with(make_saliency(odd), size=size_for(odd, 0.7), low="3bit")
    with pytest.raises(ReapError, match="needs a low bank"):
        plain_plan(
            make_saliency(odd),
            PlanSettings(size=size_for(odd, 0.7)),
            recipe="low",
            provenance=PROVENANCE,
        )
    # Lossy and larger than mxfp4.
    with pytest.raises(ReapError, match="4-bit g64 is lossy and not smaller than the high bank"):
        plan_with(make_saliency(spec), size=size_for(spec, 0.6), low="4bit")
    with pytest.raises(ReapError, match="8-bit g64 is lossy and not smaller than the source"):
        plan_with(make_saliency(spec), size=size_for(spec, 0.6), high="8bit")
    # A source that is as small already has no low bank.
    tiny = make_spec(experts=16, source=TWO)
    assert plan_with(make_saliency(tiny), size=size_for(tiny, 0.7)).low == {}


def test_dense_source() -> None:
    spec = make_spec(experts=16, source=BF16)
    saliency = make_saliency(spec)
    plan = plan_with(saliency, size=size_for(spec, 0.6), layout="two-bank")
    assert set(plan.high.values()) == {BF16}
    assert_consistent(plan, saliency, size_for(spec, 0.6))
    # A lossy high bank is no identity, however large the budget.
    plan = plan_with(saliency, size=source_bytes(spec), high="4bit")
    assert set(plan.high.values()) == {Format(4, 64, "affine")}
    assert plan.expert_counts == [0, 16, 16, 16]
    assert plan.layout == "stock"
    assert plan.damage > 0
    assert plan.settings["assumed"] == ["error of 4-bit g64 = 0.0536 times that of 2-bit g128"]
    mixed = list(spec.moe_layers)
    first = mixed[1].projections[0]
    mixed[1] = replace(
        mixed[1], projections=(replace(first, format=MXFP4), *mixed[1].projections[1:])
    )
    spec = replace(spec, moe_layers=tuple(mixed))
    with pytest.raises(
        ReapError, match="gate_proj is stored as mxfp4, in earlier layers as 16-bit"
    ):
        plan_with(make_saliency(spec), size=size_for(spec, 0.6))


def test_criterion_decides_the_order() -> None:
    spec = make_spec(experts=16)
    saliency = make_saliency(spec)
    plan = plan_with(saliency, size=size_for(spec, 0.6), criterion="frequency", layout="stock")
    counts = saliency.score("frequency")[1]
    kept = plan.layers[1].kept
    assert [counts[expert] for expert in kept] == sorted(counts, reverse=True)[: len(kept)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give exactly one of a budget and a size."),
        ({"budget": 1, "size": 1}, "give exactly one of a budget and a size."),
        ({"size": 1, "context": -1}, "the context must be at least 0 tokens, not -1."),
        ({"size": 1, "reserve": 1.0}, "the reserve is a share of the budget below 1, not 1.0."),
        ({"size": 1, "min_bank": 0}, "a bank holds at least 1 expert, not 0."),
        ({"size": 1, "layout": "flat"}, "unknown layout 'flat'."),
        ({"size": 1, "trunk": "2bit"}, "unknown trunk '2bit'."),
        ({"size": 1, "criterion": "luck"}, "unknown criterion 'luck'."),
        ({"size": 1, "high": "7bit"}, "unknown high precision '7bit'."),
        ({"size": 1, "low": "tiny"}, "unknown low precision 'tiny'."),
        ({"size": 1, "low": "mxfp4"}, "low precision 'mxfp4' is not an affine format of 2, 3 or"),
        ({"size": 1, "low": "8bit"}, "low precision '8bit' is not an affine format of 2, 3 or 4"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ReapError) as caught:
        PlanSettings(**settings)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512GB", 512 * 10**9),
        ("512GiB", 512 * 2**30),
        ("300 MB", 300 * 10**6),
        ("451e9", 451 * 10**9),
        ("1.5TB", 1_500 * 10**9),
        ("0.1kib", 102),
        ("42", 42),
        ("42 B", 42),
        (7, 7),
    ],
)
def test_parse_size(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "512G", "5,5GB", "-1GB", "nan", "inf", "1e-3GB", "1 2"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ReapError) as caught:
        parse_size(text)
    assert caught.value.message == f"{text!r} is not a size."
    assert caught.value.hint == "write e.g. 512GB (10^9 bytes) or 512GiB (2^30 bytes)"


def test_parse_percent() -> None:
    shares = [parse_percent(text) for text in ("55%", " 12.5 % ", ".5%", "100%", "55", "1e1%", "")]
    assert shares == [Decimal("0.55"), Decimal("0.125"), Decimal("0.005"), 1, None, None, None]
    for text in ("0%", "-5%", "100.1%"):
        with pytest.raises(ReapError, match=f"{text} is not a share of the experts"):
            parse_percent(text)


def test_parse_size_wants_something() -> None:
    for nothing in (0, "0GB", -5):
        with pytest.raises(ReapError, match="a size must be positive"):
            parse_size(nothing)


def test_format_size() -> None:
    assert [format_size(n) for n in (451 * 10**9, 1_446_500_000_000, 2_340_000, 1500, 7)] == [
        "451.0 GB",
        "1446.5 GB",
        "2.3 MB",
        "1.5 KB",
        "7 B",
    ]


def test_a_layer_whose_drop_made_hardly_an_error_does_not_explode() -> None:
    saliency = make_saliency(make_spec(layers=3), seed=3)
    measured = saliency.measurement
    assert measured is not None
    grid = len(measured.kept)
    at = grid // 2
    error = measured.drop_error.copy()
    error[1, at] = 1e-9 * measured.output_energy[1]
    kl = {
        "kl_kept": measured.kept[at : at + 1],
        "drop_kl": np.array([0.1, -1e-9, 0.2]),
        "low_kl": np.array([0.01, 0.01, 0.01]),
    }
    changed = replace(saliency, measurement=replace(measured, drop_error=error, **kl))
    model = damage_model(changed, scores=changed.score("energy"), high={}, low={TWO: 1.0})
    # It counts as the median layer does, not 1e-7 nats for next to nothing.
    ours = error[[0, 2], at] / measured.tokens[[0, 2]]
    median = np.median(np.array([0.1, 0.2]) / ours)
    assert model.drop.max() < 10 * median * error.max() / measured.tokens.min()

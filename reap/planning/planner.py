"""From saliency and settings to a plan."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from reap.artifacts.plan import LayerPlan, Layout, Plan, Rounding, Waterfall
from reap.artifacts.provenance import Provenance
from reap.artifacts.saliency import CRITERIA, Saliency
from reap.artifacts.spec import ModelSpec
from reap.errors import BudgetError, ReapError
from reap.planning.damage import DamageModel, Floats, Ints, damage_model
from reap.planning.precision import Precision, choose_precision
from reap.planning.settings import PlanSettings, budget_for, reserved
from reap.planning.size import format_size
from reap.planning.solver import Problem, Solution, solve, uniform

SIMPLER_WITHIN = 1.02
"""Layout "auto" takes a simpler layout if its damage is at most this times the best layout's."""

UNIFORM_REAP = "uniform REAP at high precision"
UNIFORM_LOW = "uniform low bits"
UNIFORM_TWO_BANK = "uniform two-bank"
ALTERNATIVE_LAYOUT = "best {} plan"

RECIPES = ("random", "low", "two-bank", *CRITERIA)


def make_plan(saliency: Saliency, settings: PlanSettings, *, provenance: Provenance) -> Plan:
    """The plan of least predicted damage within the settings' bytes.

    If everything fits, all experts are kept in their own order and nothing is lost. Raises
    BudgetError if nothing fits, ReapError if the settings contradict the model.
    """
    task = _prepare(saliency, settings, scores=saliency.score(settings.criterion))
    spec = saliency.spec
    everything = np.full(len(spec.moe_layers), spec.num_experts)
    if task.precision.high_format is None and task.fits(everything, everything):
        solution = Solution(everything, everything, 0.0, 0.0)
        plan = _plan(task, solution, "stock", provenance, {}, {"identity": True})
        unchanged = tuple(range(spec.num_experts))
        return replace(plan, layers=tuple(replace(p, kept=unchanged) for p in plan.layers))
    _require(task, low=bool(task.precision.low))

    layouts: tuple[Layout, ...] = ("stock", "per-layer", "two-bank")
    if settings.layout != "auto":
        layouts = (settings.layout,)
    elif spec.n_group > 1:
        layouts = ("stock", "per-layer")
    solutions = {layout: _solve(task, layout) for layout in layouts}
    found = {layout: s for layout, s in solutions.items() if s is not None}
    best = min(s.damage for s in found.values())
    chosen = next(name for name, s in found.items() if s.damage <= SIMPLER_WITHIN * best)
    solution = replace(found[chosen], lower_bound=min(s.lower_bound for s in found.values()))

    alternatives = _plain_damages(task)
    for layout in found.keys() - {chosen}:
        alternatives[ALTERNATIVE_LAYOUT.format(layout)] = found[layout].damage
    return _plan(task, solution, _simplest(solution), provenance, alternatives, {"identity": False})


def plain_plan(
    saliency: Saliency,
    settings: PlanSettings,
    *,
    recipe: str,
    seed: int = 0,
    provenance: Provenance,
) -> Plan:
    """What people do without a planner, at the same bytes, to compare with: as many experts as fit.

    All recipes keep the same number in every layer. A criterion's name (see CRITERIA): the best by
    it, in the high bank. "random": any, drawn with `seed`, in the high bank. "low": the best by
    energy, in the low bank. "two-bank": the same split in every layer, the best count and split.
    """
    if recipe not in RECIPES:
        raise ReapError(f"unknown recipe {recipe!r}.", f"one of {', '.join(RECIPES)}")
    if recipe == "random":
        shape = len(saliency.spec.moe_layers), saliency.spec.num_experts
        scores = np.random.default_rng(seed).random(shape)
    else:
        scores = saliency.score(recipe if recipe in CRITERIA else "energy")
    task = _prepare(saliency, settings, scores=scores)
    if recipe in ("low", "two-bank") and not task.precision.low:
        raise ReapError(
            f"recipe {recipe!r} needs a low bank, but no format is smaller than the source's.",
            "choose another recipe",
        )
    if recipe == "two-bank" and saliency.spec.n_group > 1:
        raise _no_two_banks(saliency.spec)
    _require(task, low=recipe in ("low", "two-bank"))
    bank = {"low": "low", "two-bank": "two"}.get(recipe, "high")
    solution = _uniform(task, bank, most=bank != "two")
    assert solution is not None
    notes = {"recipe": recipe, "seed": seed}
    return _plan(task, solution, _simplest(solution), provenance, {}, notes)


@dataclass(frozen=True)
class _Task:
    """What make_plan and plain_plan have in common. `capacity` is left for experts and routers."""

    saliency: Saliency
    settings: PlanSettings
    precision: Precision
    model: DamageModel
    floor: int
    state: int
    capacity: int

    @property
    def spec(self) -> ModelSpec:
        return self.saliency.spec

    def problem(self, *, two_banks: bool) -> Problem:
        steps = np.arange(self.spec.num_experts + 1)
        allowed = (steps >= self.floor) & (steps % self.spec.n_group == 0)
        return Problem(
            keep=np.where(allowed, self.model.drop + self.model.low, np.inf),
            lift=self.model.high - self.model.low,
            low_bytes=self.precision.low_bytes + self.precision.router_bytes,
            lift_bytes=self.precision.high_bytes - self.precision.low_bytes,
            low_bank=bool(self.precision.low),
            two_banks=two_banks and bool(self.precision.low),
            min_bank=self.settings.min_bank,
        )

    def fits(self, kept: Ints, high: Ints) -> bool:
        problem = self.problem(two_banks=True)
        return int(problem.bytes(kept, high).sum()) <= self.capacity


def _prepare(saliency: Saliency, settings: PlanSettings, *, scores: Floats) -> _Task:
    saliency.check()
    spec = saliency.spec
    if settings.layout == "two-bank" and spec.n_group > 1:
        raise _no_two_banks(spec)
    precision = choose_precision(spec, settings)
    # A size is one of weights only: no state, no reserve.
    state = spec.state_bytes(settings.context) if settings.budget is not None else 0
    return _Task(
        saliency=saliency,
        settings=settings,
        precision=precision,
        model=damage_model(
            saliency, scores=scores, high=precision.high_format, low=precision.low_format
        ),
        floor=_floor(spec, settings),
        state=state,
        capacity=settings.usable(state) - precision.trunk_bytes,
    )


def _no_two_banks(spec: ModelSpec) -> ReapError:
    return ReapError(
        f"{spec.model_type} routes to groups of experts ({spec.n_group} groups): its experts must "
        "stay in group order and cannot be split into two banks.",
        "use --layout per-layer or --layout stock",
    )


def _floor(spec: ModelSpec, settings: PlanSettings) -> int:
    """Fewest experts of a layer, a multiple of the router's groups."""
    if settings.min_experts is None:
        wanted = max(min(4 * spec.top_k, spec.num_experts), spec.min_experts)
    else:
        wanted = settings.min_experts
        if not spec.min_experts <= wanted <= spec.num_experts:
            raise ReapError(
                f"{spec.model_type} can keep {spec.min_experts} to {spec.num_experts} experts in a "
                f"layer, not at least {wanted}.",
                "choose --min-experts in that range",
            )
    if settings.min_bank > spec.num_experts:
        raise ReapError(
            f"a bank of at least {settings.min_bank} experts is more than the layer's "
            f"{spec.num_experts}.",
            "choose a smaller --min-bank",
        )
    return math.ceil(max(wanted, settings.min_bank) / spec.n_group) * spec.n_group


def _require(task: _Task, *, low: bool) -> None:
    """Raise BudgetError unless the smallest plan fits, all in the low or all in the high bank."""
    kept = np.full(len(task.spec.moe_layers), task.floor)
    high = np.zeros_like(kept) if low else kept
    if task.fits(kept, high):
        return
    settings, precision = task.settings, task.precision
    bank = precision.low if low else precision.high
    experts = int((kept * (precision.low_bytes if low else precision.high_bytes)).sum())
    router = int((kept * precision.router_bytes).sum())
    weights = precision.trunk_bytes + experts + router
    smallest = (
        f"{task.floor} of {task.spec.num_experts} experts in each layer at "
        f"{'/'.join(sorted({format.label for format in bank.values()}))}"
    )
    parts = {"experts": experts, "trunk": precision.trunk_bytes}
    if settings.budget is None:
        assert settings.size is not None
        message = (
            f"{_exact(settings.size)} of weights are too few: the smallest plan ({smallest}) has "
            f"{_exact(weights)}."
        )
    else:
        needed = budget_for(weights, task.state, settings.reserve)
        message = (
            f"a budget of {_exact(settings.budget)} is too small: the smallest plan ({smallest}) "
            f"has {_exact(weights)} of weights and needs a budget of {_exact(needed)}, with "
            f"{settings.context} tokens of context and {settings.reserve:.0%} in reserve."
        )
        parts |= {"state": task.state, "reserve": reserved(needed, settings.reserve)}
    largest = max(parts, key=lambda name: parts[name])
    message += f" Most of it: {largest}, {format_size(parts[largest])}."
    raise BudgetError(message, _advice(task, largest, low=low))


def _exact(size: int) -> str:
    return f"{format_size(size)} ({size} bytes)"


def _advice(task: _Task, largest: str, *, low: bool) -> str:
    settings = task.settings
    limit = "--budget" if settings.size is None else "--size"
    if largest == "state":
        return f"lower --context, or raise {limit}"
    if largest == "reserve":
        return f"lower --reserve, or raise {limit}"
    if largest == "trunk" and settings.trunk != "4bit":
        return f"quantize the trunk, e.g. --trunk 4bit, or raise {limit}"
    if largest == "experts" and task.floor > task.spec.min_experts:
        return f"lower --min-experts (at least {task.spec.min_experts}), or raise {limit}"
    return f"raise {limit}"


def _solve(task: _Task, layout: Layout) -> Solution | None:
    """The best plan of a layout. Plain plans of the same layout can only win if it is not exact."""
    if layout == "stock":
        banks = ("high", "low") if task.precision.low else ("high",)
        plain = [s for bank in banks if (s := _uniform(task, bank)) is not None]
        return min(plain, key=lambda s: s.damage, default=None)
    two_banks = layout == "two-bank"
    found = solve(task.problem(two_banks=two_banks), task.capacity)
    if found is None:
        return None
    bound = None if found.lower_bound == found.damage else found.lower_bound
    solution = _scored(task, found.kept, found.high, bound)
    plain_solution = _uniform(task, "two") if two_banks else _solve(task, "stock")
    if plain_solution is not None and plain_solution.damage < solution.damage:
        bound = min(solution.lower_bound, plain_solution.damage)
        return replace(plain_solution, lower_bound=bound)
    return solution


def _uniform(task: _Task, bank: str, *, most: bool = False) -> Solution | None:
    shared = uniform(task.problem(two_banks=bank == "two"), task.capacity, bank, most=most)
    if shared is None:
        return None
    kept, high = (np.full(len(task.spec.moe_layers), number) for number in shared)
    return _scored(task, kept, high)


def _scored(task: _Task, kept: Ints, high: Ints, bound: float | None = None) -> Solution:
    """With the damage as the model has it; the plan is the best there is unless bound says less."""
    damage = math.fsum(task.model.damage(kept, high).tolist())
    return Solution(kept, high, damage, damage if bound is None else min(bound, damage))


def _plain_damages(task: _Task) -> dict[str, float]:
    """Predicted damage of the plain recipes that fit."""
    reap = _prepare(task.saliency, task.settings, scores=task.saliency.score("reap"))
    plain = {UNIFORM_REAP: _uniform(reap, "high", most=True)}
    if task.precision.low:
        plain[UNIFORM_LOW] = _uniform(task, "low", most=True)
        if task.spec.n_group == 1:
            plain[UNIFORM_TWO_BANK] = _uniform(task, "two")
    return {name: solution.damage for name, solution in plain.items() if solution is not None}


def _simplest(solution: Solution) -> Layout:
    """The simplest layout that can hold the solution, whatever it was searched in."""
    kept, high = solution.kept, solution.high
    if ((high > 0) & (high < kept)).any():
        return "two-bank"
    if len(set(kept.tolist())) == 1 and len(set((high > 0).tolist())) == 1:
        return "stock"
    return "per-layer"


def _plan(
    task: _Task,
    solution: Solution,
    layout: Layout,
    provenance: Provenance,
    alternatives: dict[str, float],
    notes: dict[str, Any],
) -> Plan:
    spec, settings, precision = task.spec, task.settings, task.precision
    kept, high = solution.kept, solution.high
    budget = settings.budget
    rounding, assumed = _low_rounding(task)
    return Plan(
        provenance=provenance,
        model_type=spec.model_type,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        layout=layout,
        layers=tuple(
            LayerPlan(layer.layer, _bank_order(task, index, int(kept[index])), int(high[index]))
            for index, layer in enumerate(spec.moe_layers)
        ),
        high=precision.high,
        low=precision.low,
        trunk=precision.trunk,
        experts_path={layer.layer: layer.experts for layer in spec.moe_layers},
        waterfall=Waterfall(
            budget=settings.usable(0) if budget is None else budget,
            trunk=precision.trunk_bytes,
            router=int((kept * precision.router_bytes).sum()),
            high=int((high * precision.high_bytes).sum()),
            low=int(((kept - high) * precision.low_bytes).sum()),
            state=task.state,
            reserve=0 if budget is None else reserved(budget, settings.reserve),
            carried=spec.carried_bytes,
            context=settings.context,
        ),
        damage=solution.damage,
        lower_bound=solution.lower_bound,
        alternatives=dict(sorted(alternatives.items())),
        settings=asdict(settings)
        | {"assumed": [*task.model.assumed, *assumed], "damage_unit": task.model.unit}
        | notes,
        low_rounding=rounding,
    )


def _low_rounding(task: _Task) -> tuple[Rounding, list[str]]:
    """The plan's rounding of the low bank, and what is assumed if another one was measured."""
    measured, moments = task.saliency.measurement, task.saliency.moments
    if measured is not None:
        usual = measured.low_rounding
    else:
        usual = "search" if moments is None else "weighted"
    chosen = task.settings.low_rounding or usual
    if chosen == "weighted" and moments is None:
        raise ReapError(
            "weighted rounding needs second moments, which the saliency file does not have.",
            "calibrate again, or plan with low_rounding search",
        )
    if chosen == "feedback" and (moments is None or not moments.products):
        raise ReapError(
            "rounding with feedback needs covariances, which the saliency file does not have.",
            "calibrate with low_rounding feedback, or plan with low_rounding weighted",
        )
    other = measured is not None and chosen != usual and bool(task.precision.low)
    note = [f"low-bit errors of {usual} rounding, not {chosen}"] if other else []
    return cast(Rounding, chosen), note


def _bank_order(task: _Task, layer: int, count: int) -> tuple[int, ...]:
    """Ids of the kept experts by falling saliency; with router groups, group after group."""
    ids = task.model.order[layer, :count].reshape(-1, task.spec.n_group)
    return tuple(int(expert) for expert in ids.T.ravel())

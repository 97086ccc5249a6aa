"""From saliency and settings to a plan.

Layout "auto" takes the simplest layout that is nearly as good as the best: its damage is at most
SIMPLER_WITHIN times the best layout's at the same bytes, and not more than the best layout's at
1 - WORTH_BYTES of them. So a budget that leaves WORTH_BYTES more for the experts is never planned
worse than the smaller one, and any larger budget by at most SIMPLER_WITHIN. An explicit layout is
never worse with more bytes, up to the solver's CLOSE_ENOUGH on large models and unless a clamp,
which moves with the bytes, is in the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from reap.artifacts.plan import LayerPlan, Layout, Plan, Rounding, Waterfall
from reap.artifacts.provenance import Provenance
from reap.artifacts.saliency import CRITERIA, Saliency
from reap.artifacts.spec import ModelSpec
from reap.errors import BudgetError, ReapError
from reap.planning.damage import (
    Bools,
    DamageModel,
    Floats,
    Ints,
    damage_model,
    sensitivity_measured,
)
from reap.planning.domains import combined
from reap.planning.precision import Precision, choose_precision
from reap.planning.protect import protected
from reap.planning.rule import LowBankRule
from reap.planning.settings import CLAMP, NO_LOW, PlanSettings, budget_for, reserved
from reap.planning.size import format_size
from reap.planning.solver import Problem, Solution, solve, uniform
from reap.planning.warn import domains_kept, warnings

SIMPLER_WITHIN = 1.02
WORTH_BYTES = 0.01

UNIFORM_REAP = "uniform REAP at high precision"
UNIFORM_LOW = "uniform low bits"
UNIFORM_TWO_BANK = "uniform two-bank"
ALTERNATIVE_LAYOUT = "best {} plan"

SPREADS = ("coverage", "global-reap")
RECIPES = ("random", "low", "two-bank", *SPREADS, *CRITERIA)


def make_plan(saliency: Saliency, settings: PlanSettings, *, provenance: Provenance) -> Plan:
    """The plan of least predicted damage within the settings' bytes.

    If everything fits, all experts are kept in their own order and nothing is lost. Raises
    BudgetError if nothing fits, ReapError if the settings contradict the model.
    """
    task = prepare(saliency, settings)
    if task.lossless:
        spec = saliency.spec
        everything = np.full(len(spec.moe_layers), spec.num_experts)
        solution = Solution(everything, everything, 0.0, 0.0)
        plan = _plan(task, solution, "stock", provenance, {}, {"identity": True})
        unchanged = tuple(range(spec.num_experts))
        return replace(plan, layers=tuple(replace(p, kept=unchanged) for p in plan.layers))
    choice = choose(task)
    alternatives = plain_damages(task)
    for layout, other in choice.others.items():
        alternatives[ALTERNATIVE_LAYOUT.format(layout)] = other.damage
    notes: dict[str, Any] = {"identity": False}
    rule = LowBankRule.of(task.model, task.precision, choice.solution.kept)
    if rule is not None:
        notes["low_bank"] = rule.summary()
    if task.limits is not None:
        notes["clamped"] = list(task.limits)
    return _plan(task, choice.solution, choice.layout, provenance, alternatives, notes)


@dataclass(frozen=True)
class Choice:
    """The solution taken, the simplest layout that holds it, and the best of the other layouts."""

    solution: Solution
    layout: Layout
    others: dict[Layout, Solution]


def low_bank_rule(saliency: Saliency, plan: Plan) -> LowBankRule | None:
    """The rule of every layer for a plan made from `saliency`; None if it has no low bank."""
    task = prepare(saliency, PlanSettings.from_json(plan.settings))
    kept = np.array([len(layer.kept) for layer in plan.layers], dtype=np.int64)
    return LowBankRule.of(task.model, task.precision, kept)


def choose(task: Task) -> Choice:
    """The plan of the settings' layout, or of the one that "auto" takes (see the module)."""
    require(task)
    found = _layouts(task)
    chosen = next(iter(found))
    if len(found) > 1:
        best = min(s.damage for s in found.values())
        within = [name for name, s in found.items() if s.damage <= SIMPLER_WITHIN * best]
        chosen = within[0]
        if found[chosen].damage > best:
            less = task.with_capacity(int(task.capacity * (1 - WORTH_BYTES)))
            worse = _solve(less, list(found)[-1])
            limit = math.inf if worse is None else max(best, worse.damage)
            chosen = next(name for name in within if found[name].damage <= limit)
    bound = min(s.lower_bound for s in found.values())
    solution = replace(found[chosen], lower_bound=bound)
    others = {name: s for name, s in found.items() if name != chosen}
    return Choice(solution, _simplest(solution), others)


def _layouts(task: Task) -> dict[Layout, Solution]:
    """The best plan of each layout that the settings allow and that fits, the simplest first."""
    if task.settings.layout != "auto":
        names: tuple[Layout, ...] = (task.settings.layout,)
    elif task.spec.n_group > 1:
        names = ("stock", "per-layer")
    else:
        names = ("stock", "per-layer", "two-bank")
    solutions = {layout: _solve(task, layout) for layout in names}
    return {layout: s for layout, s in solutions.items() if s is not None}


def plain_plan(
    saliency: Saliency,
    settings: PlanSettings,
    *,
    recipe: str,
    seed: int = 0,
    provenance: Provenance,
) -> Plan:
    """What people do without a planner, at the same bytes, to compare with: as many experts as fit.

    Most recipes keep the same number in every layer. A criterion's name (see CRITERIA): the best by
    it, in the high bank. "random": any, drawn with `seed`, in the high bank. "low": the best by
    energy, in the low bank. "two-bank": the same split in every layer, the best count and split.
    Two recipes spread high experts unevenly: "coverage" keeps in every layer as few as carry the
    same share of its gate-norm mass (SHAPE, arXiv 2606.09886), "global-reap" the best of the model
    by the raw REAP score. Both keep the settings' minimum in every layer.
    """
    if recipe not in RECIPES:
        raise ReapError(f"unknown recipe {recipe!r}.", f"one of {', '.join(RECIPES)}")
    if recipe == "random":
        shape = len(saliency.spec.moe_layers), saliency.spec.num_experts
        scores = np.random.default_rng(seed).random(shape)
    else:
        ranked_by = {"coverage": "reap-all-tokens", "global-reap": "reap"}.get(recipe, recipe)
        scores = saliency.score(ranked_by if ranked_by in CRITERIA else "energy")
    task = prepare(saliency, _plain(settings), scores=scores)
    if recipe in ("low", "two-bank") and not task.precision.low:
        why = (
            "--low is none" if settings.low == NO_LOW else "no format is smaller than the source's"
        )
        raise ReapError(
            f"recipe {recipe!r} needs a low bank, but {why}.",
            "choose another recipe",
        )
    if recipe == "two-bank" and saliency.spec.n_group > 1:
        raise _no_two_banks(saliency.spec)
    require(task, plain="low" if recipe in ("low", "two-bank") else "high")
    if recipe in SPREADS:
        solution: Solution | None = _spread(task, scores, recipe)
    else:
        bank = {"low": "low", "two-bank": "two"}.get(recipe, "high")
        solution = _uniform(task, bank, most=bank != "two")
    assert solution is not None
    notes = {"recipe": recipe, "seed": seed}
    return _plan(task, solution, _simplest(solution), provenance, {}, notes)


def _plain(settings: PlanSettings) -> PlanSettings:
    """Without what a plain recipe knows nothing of."""
    layout = "auto" if settings.layout == "two-bank" else settings.layout
    return replace(settings, keep=(), protect_super=0, clamp=None, layout=layout)


@dataclass(frozen=True)
class Task:
    """What all plans of one model and settings have in common.

    `scores` [L, E] rank the experts of a layer, those that must be in the high bank ahead of all
    others; `least_high` [L]: how far the order must go to hold them. `limits`: least and largest
    count of a layer. `capacity` is left for experts and routers.
    """

    saliency: Saliency
    settings: PlanSettings
    precision: Precision
    scores: Floats
    model: DamageModel
    least_high: Ints
    floor: int
    state: int
    capacity: int
    limits: tuple[int, int] | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.saliency.spec

    @property
    def lossless(self) -> bool:
        """Whether the whole model fits as it is."""
        everything = np.full(len(self.spec.moe_layers), self.spec.num_experts)
        return not self.precision.high_mix and self.fits(everything, everything)

    @property
    def two_banks(self) -> bool:
        """Whether the settings allow two banks in a layer."""
        return self.settings.layout in ("auto", "two-bank") and self.spec.n_group == 1

    def with_amount(self, amount: int) -> Task:
        """The task for another budget or size, whichever the settings have."""
        if self.settings.budget is None:
            settings = replace(self.settings, size=amount)
        else:
            settings = replace(self.settings, budget=amount)
        resized = replace(self, settings=settings)
        return resized.with_capacity(settings.usable(self.state) - self.precision.trunk_bytes)

    def with_capacity(self, capacity: int) -> Task:
        resized = replace(self, capacity=capacity, limits=None)
        return replace(resized, limits=_limits(resized))

    def problem(self, *, two_banks: bool, clamped: bool = True) -> Problem:
        steps = np.arange(self.spec.num_experts + 1)
        least = np.maximum(self.floor, self.least_high)[:, None]
        most = np.full_like(least, self.spec.num_experts)
        if clamped and self.limits is not None:
            least, most = np.maximum(least, self.limits[0]), np.maximum(least, self.limits[1])
        allowed = (steps >= least) & (steps <= most) & (steps % self.spec.n_group == 0)
        return Problem(
            keep=np.where(allowed, self.model.drop + self.model.low, np.inf),
            lift=self.model.high - self.model.low,
            low_bytes=self.precision.low_bytes + self.precision.router_bytes,
            lift_bytes=self.precision.high_bytes - self.precision.low_bytes,
            low_bank=bool(self.precision.low),
            two_banks=two_banks and bool(self.precision.low),
            min_bank=self.settings.min_bank,
            least_high=self.least_high,
        )

    def fits(self, kept: Ints, high: Ints) -> bool:
        problem = self.problem(two_banks=True)
        return int(problem.bytes(kept, high).sum()) <= self.capacity


def prepare(saliency: Saliency, settings: PlanSettings, *, scores: Floats | None = None) -> Task:
    """Check the settings against the model and build the model of damage.

    scores [L, E] rank the experts; default: the settings' criterion over the settings' domains.
    """
    saliency.check()
    spec = saliency.spec
    if settings.layout == "two-bank" and spec.n_group > 1:
        raise _no_two_banks(spec)
    precision = choose_precision(spec, settings)
    first = protected(saliency, settings)
    if scores is None:
        scores = combined(saliency, settings.criterion, settings.domains)
    model = _damage(saliency, precision, settings, scores, first)
    # A size is one of weights only: no state, no reserve.
    state = spec.state_bytes(settings.context) if settings.budget is not None else 0
    by_group = first.reshape(len(first), spec.n_group, -1).sum(axis=2)
    task = Task(
        saliency=saliency,
        settings=settings,
        precision=precision,
        scores=scores,
        model=model,
        least_high=(spec.n_group * by_group.max(axis=1)).astype(np.int64),
        floor=_floor(spec, settings),
        state=state,
        capacity=0,
    )
    _low_rounding(task)  # refuses what the saliency file has no figures for
    return task.with_amount(settings.amount)


def _damage(
    saliency: Saliency,
    precision: Precision,
    settings: PlanSettings,
    scores: Floats,
    first: Bools | None = None,
) -> DamageModel:
    return damage_model(
        saliency,
        scores=scores,
        high=precision.high_mix,
        low=precision.low_mix,
        energy=combined(saliency, "energy", settings.domains),
        first=first,
    )


def _limits(task: Task) -> tuple[int, int] | None:
    """Least and largest count of a layer by the clamp, None if there is none.

    Relative to the uniform plans at the same bytes: from all high (the fewest experts) to all low
    (the most), so that every uniform plan is within.
    """
    clamp = task.settings.clamp
    if clamp == "auto":
        clamp = None if sensitivity_measured(task.saliency) else CLAMP
    if clamp is None:
        return None
    problem = task.problem(two_banks=False)
    found = [uniform(problem, task.capacity, bank, most=True) for bank in ("high", "low")]
    counts = [shared[0] for shared in found if shared is not None]
    if not counts:
        return None
    # Without room for a uniform plan at high precision there is no least count to speak of.
    least = math.floor(clamp[0] * min(counts)) if found[0] is not None else 0
    most = min(task.spec.num_experts, math.ceil(clamp[1] * max(counts)))
    limits = max(least, task.floor), most
    smallest = replace(task, limits=limits).problem(two_banks=task.two_banks)
    fits = int(smallest.bytes(*smallest.cheapest()).sum()) <= task.capacity
    return limits if fits else None


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


def require(task: Task, *, plain: str = "") -> None:
    """Raise BudgetError unless the smallest plan fits; `plain`: of that bank alone."""
    kept, high = smallest(task, plain=plain)
    if task.fits(kept, high):
        return
    settings, precision = task.settings, task.precision
    experts = int((high * precision.high_bytes + (kept - high) * precision.low_bytes).sum())
    router = int((kept * precision.router_bytes).sum())
    weights = precision.trunk_bytes + experts + router
    low = bool((high < kept).any())
    bank = precision.low if low else precision.high
    least = (
        f"{task.floor} of {task.spec.num_experts} experts in each layer at "
        f"{'/'.join(sorted({format.label for format in bank.values()}))}"
    )
    must = int(protected(task.saliency, settings).sum())
    if must:
        least += f", {must} experts that must be high"
    parts = {"experts": experts, "trunk": precision.trunk_bytes}
    if settings.budget is None:
        assert settings.size is not None
        message = (
            f"{_exact(settings.size)} of weights are too few: the smallest plan ({least}) has "
            f"{_exact(weights)}."
        )
    else:
        needed = budget_for(weights, task.state, settings.reserve)
        message = (
            f"a budget of {_exact(settings.budget)} is too small: the smallest plan ({least}) "
            f"has {_exact(weights)} of weights and needs a budget of {_exact(needed)}, with "
            f"{settings.context} tokens of context and {settings.reserve:.0%} in reserve."
        )
        parts |= {"state": task.state, "reserve": reserved(needed, settings.reserve)}
    largest = max(parts, key=lambda name: parts[name])
    message += f" Most of it: {largest}, {format_size(parts[largest])}."
    raise BudgetError(message, _advice(task, largest))


def smallest(task: Task, *, plain: str = "") -> tuple[Ints, Ints]:
    """kept and high [L] of the plan of the fewest bytes; `plain`: of that bank alone."""
    problem = task.problem(two_banks=task.two_banks, clamped=False)
    if plain or task.settings.layout == "stock":
        shared = plain or ("low" if task.precision.low and not task.least_high.any() else "high")
        kept = np.full(len(problem.keep), max(task.floor, int(task.least_high.max())))
        return kept, np.zeros_like(kept) if shared == "low" else kept
    return problem.cheapest()


def _exact(size: int) -> str:
    return f"{format_size(size)} ({size:,} bytes)"


def _advice(task: Task, largest: str) -> str:
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


def _solve(task: Task, layout: Layout) -> Solution | None:
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


def _uniform(task: Task, bank: str, *, most: bool = False) -> Solution | None:
    shared = uniform(task.problem(two_banks=bank == "two"), task.capacity, bank, most=most)
    if shared is None:
        return None
    kept, high = (np.full(len(task.spec.moe_layers), number) for number in shared)
    return _scored(task, kept, high)


def _spread(task: Task, scores: Floats, recipe: str) -> Solution:
    """Uneven counts, all high: the largest coverage, or the lowest score, that fits.

    The candidates are the values at which a count changes, so the bisection is exact.
    """
    falling = -np.sort(-scores, axis=1)
    if recipe == "coverage":
        mass = np.cumsum(falling, axis=1)
        levels = mass / np.maximum(mass[:, -1:], np.finfo(np.float64).tiny)
    else:
        levels = -falling
    candidates = np.unique(levels)
    step = task.spec.n_group

    def counts(level: float) -> Ints:
        if recipe == "coverage":  # the expert that reaches the share is needed too
            reached = (levels < level).sum(axis=1) + 1
        else:
            reached = (levels <= level).sum(axis=1)
        whole = -(-np.maximum(reached, task.floor) // step) * step
        return np.minimum(whole, task.spec.num_experts).astype(np.int64)

    low, high = 0, len(candidates) - 1
    best = counts(candidates[0])
    while low <= high:
        middle = (low + high) // 2
        trial = counts(candidates[middle])
        if task.fits(trial, trial):
            best, low = trial, middle + 1
        else:
            high = middle - 1
    return _scored(task, best, best)


def _scored(task: Task, kept: Ints, high: Ints, bound: float | None = None) -> Solution:
    """With the damage as the model has it; the plan is the best there is unless bound says less."""
    damage = math.fsum(task.model.damage(kept, high).tolist())
    return Solution(kept, high, damage, damage if bound is None else min(bound, damage))


def plain_damages(task: Task) -> dict[str, float]:
    """Predicted damage of the plain recipes that fit, at the task's bytes."""
    free = replace(task, limits=None, least_high=np.zeros_like(task.least_high))
    saliency, precision, settings = task.saliency, task.precision, task.settings
    if task.least_high.any():
        free = replace(free, model=_damage(saliency, precision, settings, task.scores))
    reap = replace(free, model=_damage(saliency, precision, settings, saliency.score("reap")))
    plain = {UNIFORM_REAP: _uniform(reap, "high", most=True)}
    if task.precision.low:
        plain[UNIFORM_LOW] = _uniform(free, "low", most=True)
        if task.spec.n_group == 1:
            plain[UNIFORM_TWO_BANK] = _uniform(free, "two")
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
    task: Task,
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
    layers = tuple(
        LayerPlan(layer.layer, _bank_order(task, index, int(n), int(h)), int(h))
        for index, (layer, n, h) in enumerate(zip(spec.moe_layers, kept, high))
    )
    return Plan(
        provenance=provenance,
        model_type=spec.model_type,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        layout=layout,
        layers=layers,
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
        settings=settings.to_json()
        | {
            "assumed": [*task.model.assumed, *assumed],
            "damage_unit": task.model.unit,
            "domains_kept": domains_kept(task.saliency, layers),
            "warnings": [*_of_trunk(task), *warnings(task.saliency, layers)],
        }
        | notes,
        low_rounding=rounding,
    )


def _of_trunk(task: Task) -> list[str]:
    """A sentence if the trunk is rounded, of which the damage says nothing."""
    if not task.precision.trunk:
        return []
    said = "rounding the trunk is no part of the predicted damage; `reap evaluate` measures it."
    if task.spec.weight_bytes <= task.settings.usable(task.state):
        said += " All would fit with --trunk source."
    return [said]


def _low_rounding(task: Task) -> tuple[Rounding, list[str]]:
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


def _bank_order(task: Task, layer: int, kept: int, high: int) -> tuple[int, ...]:
    """Ids of the kept experts, each bank by falling saliency; with router groups each group."""
    ids, scores = task.model.order[layer, :kept], task.scores[layer]
    groups = task.spec.n_group
    banks = [ids[:high], ids[high:]] if groups == 1 else list(ids.reshape(-1, groups).T)
    # Experts that must be kept are ahead in the order, whatever their saliency.
    banks = [bank[np.lexsort((bank, -scores[bank]))] for bank in banks]
    return tuple(int(expert) for expert in np.concatenate(banks))

"""What other byte budgets would buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reap.artifacts.plan import Layout
from reap.artifacts.saliency import Saliency
from reap.planning.planner import Task, choose, plain_damages, prepare, require, smallest
from reap.planning.settings import PlanSettings, budget_for
from reap.planning.size import format_size
from reap.planning.solver import Solution


@dataclass(frozen=True)
class FrontierPoint:
    """The plan for one `amount` of bytes, a budget or a size as the settings have it.

    `weights` bytes of the model, `kept` experts and how many of them are high, predicted damage and
    its lower bound, the layout, and the damage of the plain recipes that fit in the same bytes.
    """

    amount: int
    weights: int
    kept: int
    high: int
    damage: float
    lower_bound: float
    layout: Layout
    plain: dict[str, float]


@dataclass(frozen=True)
class LayerChange:
    """Counts of one layer now and then."""

    layer: int
    kept: tuple[int, int]
    high: tuple[int, int]


@dataclass(frozen=True)
class NextBytes:
    """What `extra` bytes more buy, in the layout that the plan has now; `str` says it."""

    extra: int
    amount: int
    layout: Layout
    damage: tuple[float, float]
    layers: tuple[LayerChange, ...]

    @property
    def gain(self) -> float:
        return self.damage[0] - self.damage[1]

    def __str__(self) -> str:
        now, then = self.damage
        share = f" (-{self.gain / now:.1%})" if now > 0 else ""
        more = sum(change.kept[1] - change.kept[0] for change in self.layers)
        raised = sum(change.high[1] - change.high[0] for change in self.layers)
        lines = [
            f"{format_size(self.extra)} more: damage {now:.4g} → {then:.4g}{share}, "
            f"{more:+d} experts, {raised:+d} in the high bank."
        ]
        lines += [
            f"  layer {c.layer}: {c.kept[0]} → {c.kept[1]} experts, {c.high[0]} → {c.high[1]} high"
            for c in sorted(self.layers, key=lambda c: -abs(c.kept[1] - c.kept[0]))[:10]
        ]
        if len(self.layers) > 10:
            lines.append(f"  and {len(self.layers) - 10} more layers")
        return "\n".join(lines)


def frontier(
    saliency: Saliency, settings: PlanSettings, sizes: Sequence[int] | int = 12
) -> list[FrontierPoint]:
    """One point for each of `sizes`, by rising bytes, without those at which nothing fits.

    sizes: budgets if the settings have a budget, else sizes of the weights; or how many to spread
    evenly from the smallest plan to the largest that helps, beside the settings' own if between.
    """
    task = prepare(saliency, settings)
    if isinstance(sizes, int):
        ends = _bytes(task, *smallest(task)), _bytes(task, *_largest(task))
        steps = max(sizes - 1, 1)
        sizes = [ends[0] + (ends[1] - ends[0]) * step // steps for step in range(steps + 1)]
        if ends[0] < settings.amount < ends[1]:
            sizes.append(settings.amount)
    points = []
    for amount in sorted(set(sizes)):
        resized = task.with_amount(amount)
        if not resized.fits(*smallest(resized)):
            continue
        solution, layout = _solved(resized)
        points.append(
            FrontierPoint(
                amount=amount,
                weights=_weights(resized, solution.kept, solution.high),
                kept=int(solution.kept.sum()),
                high=int(solution.high.sum()),
                damage=solution.damage,
                lower_bound=solution.lower_bound,
                layout=layout,
                plain=plain_damages(resized),
            )
        )
    return points


def next_bytes(saliency: Saliency, settings: PlanSettings, extra: int | None = None) -> NextBytes:
    """What `extra` more bytes of budget or size (None: a twentieth of it) would buy.

    Raises BudgetError as make_plan does.
    """
    extra = max(settings.amount // 20, 1) if extra is None else extra
    task = prepare(saliency, settings)
    now, layout = _solved(task)
    amount = settings.amount + extra
    # A layout that is taken for its simplicity could otherwise hide what the bytes bring.
    fixed = PlanSettings.from_json(settings.to_json() | {"layout": layout})
    then, _ = _solved(prepare(saliency, fixed).with_amount(amount))
    changes = [
        LayerChange(layer, (int(n0), int(n1)), (int(h0), int(h1)))
        for layer, n0, n1, h0, h1 in zip(saliency.layers, now.kept, then.kept, now.high, then.high)
        if (n0, h0) != (n1, h1)
    ]
    damage = now.damage, then.damage
    return NextBytes(extra, amount, layout, damage, tuple(changes))


def _solved(task: Task) -> tuple[Solution, Layout]:
    if task.lossless:
        everything, _ = _largest(task)
        return Solution(everything, everything, 0.0, 0.0), "stock"
    require(task)
    choice = choose(task)
    return choice.solution, choice.layout


def _largest(task: Task) -> tuple[np.ndarray, np.ndarray]:
    everything = np.full(len(task.spec.moe_layers), task.spec.num_experts)
    return everything, everything


def _weights(task: Task, kept: np.ndarray, high: np.ndarray) -> int:
    size = task.problem(two_banks=True).bytes(kept, high)
    return task.precision.trunk_bytes + int(size.sum())


def _bytes(task: Task, kept: np.ndarray, high: np.ndarray) -> int:
    """The budget or size that a plan needs."""
    weights = _weights(task, kept, high)
    if task.settings.budget is None:
        return weights
    return budget_for(weights, task.state, task.settings.reserve)

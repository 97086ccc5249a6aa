"""How many experts each layer keeps, and how many of them in the high bank, for given bytes.

A multiple-choice knapsack: every layer chooses one pair (n, h). Lagrange multipliers give a lower
bound and a plan close to it; a search over the few choices that the bound does not rule out then
finds the best plan (Pisinger, A minimal algorithm for the multiple-choice knapsack problem, 1995).
Knows nothing of experts or formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MAX_ROUNDS = 500
MAX_STATES = 2_000
MAX_OPTIONS = 128
"""Limits of the search: most partial plans, and choices of one layer. Beyond them the plan may
miss the optimum by a part in a million, and the lower bound is the dual's."""

LARGE = 5_000
LARGE_STATES = 200
CLOSE_ENOUGH = 1e-4
"""With more than LARGE experts the search keeps fewer partial plans, and is left out where the
bound shows that it could gain less than this share of the damage. One expert of Kimi-K3 is 5e-5
of the bytes; what the damage itself predicts is far less certain."""


@dataclass(frozen=True)
class Problem:
    """min Σ_l keep[l, n_l] + lift[l, h_l] with Σ_l low_bytes[l]·n_l + lift_bytes[l]·h_l ≤ capacity.

    keep float64 [L, E + 1]: damage with n experts kept, all in the low bank; inf where a layer may
    not keep n. lift float64 [L, E + 1]: what moving the first h to the high bank adds, lift[:, 0]
    = 0. low_bytes, lift_bytes int64 [L]. One bank means h = n, or h = 0 if `low_bank`; `two_banks`
    also allows min_bank ≤ h ≤ n - min_bank. No layer may keep fewer than min_bank, or than
    least_high int64 [L], the first experts that must be in the high bank.
    """

    keep: Floats
    lift: Floats
    low_bytes: Ints
    lift_bytes: Ints
    low_bank: bool
    two_banks: bool
    min_bank: int = 1
    least_high: Ints | None = None

    @property
    def least(self) -> Ints:
        """least_high, [L]."""
        return np.zeros(len(self.keep), np.int64) if self.least_high is None else self.least_high

    @property
    def steps(self) -> Ints:
        return np.arange(self.keep.shape[1])

    def damage(self, kept: Ints, high: Ints) -> Floats:
        """Damage of each layer, [L]."""
        rows = np.arange(len(kept))
        return np.asarray(self.keep[rows, kept] + self.lift[rows, high])

    def bytes(self, kept: Ints, high: Ints) -> Ints:
        """Bytes of each layer, [L]."""
        return np.asarray(self.low_bytes * kept + self.lift_bytes * high)

    def splits(self, kept: Ints, least: Ints) -> Bools:
        """Which h are allowed beside kept [...] if least [...] must be high: bool [..., E + 1]."""
        high, kept, least = self.steps, np.asarray(kept)[..., None], np.asarray(least)[..., None]
        allowed = (high == kept) & (kept >= least)
        if self.low_bank:
            allowed = allowed | ((high == 0) & (least == 0))
        if self.two_banks:
            mixed = (high >= np.maximum(self.min_bank, least)) & (high <= kept - self.min_bank)
            allowed = allowed | mixed
        return np.asarray(allowed)

    def cheapest(self) -> tuple[Ints, Ints]:
        """The plan of the fewest bytes."""
        steps, least = self.steps, self.least[:, None]
        high = np.broadcast_to(steps, self.keep.shape)
        if self.two_banks:
            fewest = np.maximum(self.min_bank, least)
            high = np.where(steps >= fewest + self.min_bank, fewest, high)
        if self.low_bank:
            high = np.where(least == 0, 0, high)
        size = self.low_bytes[:, None] * steps + self.lift_bytes[:, None] * high
        allowed = np.isfinite(self.keep) & (steps >= least)
        kept = np.argmin(np.where(allowed, size, np.iinfo(np.int64).max), axis=1)
        return kept, np.take_along_axis(high, kept[:, None], axis=1)[:, 0]


@dataclass(frozen=True)
class Solution:
    """kept, high int64 [L]; no solution has less damage than `lower_bound`."""

    kept: Ints
    high: Ints
    damage: float
    lower_bound: float


def solve(problem: Problem, capacity: int) -> Solution | None:
    """The best plan within `capacity` bytes, None if there is none. Deterministic."""
    bound, multiplier, incumbent = _lagrange(problem, capacity)
    if incumbent is None:
        return None
    kept, high = _fill(problem, capacity, *incumbent)
    exact = False
    damage = float(problem.damage(kept, high).sum())
    close = problem.keep.size > LARGE and damage - bound <= CLOSE_ENOUGH * damage
    if damage > bound and not close:
        kept, high, exact = _search(problem, capacity, multiplier, bound, kept, high)
    # Experts that cost nothing to drop come back as far as there is room.
    kept, high = _fill(problem, capacity, kept, high)
    damage = float(problem.damage(kept, high).sum())
    return Solution(kept, high, damage, damage if exact else min(bound, damage))


def uniform(
    problem: Problem, capacity: int, bank: str, *, most: bool = False
) -> tuple[int, int] | None:
    """The best (n, h) that all layers can share, None if none fits.

    `bank`: "high" (h = n), "low" (h = 0) or "two" (any h). `most` takes the largest n that fits
    instead of the best, and the best h beside it.
    """
    keep, lift = problem.keep.sum(axis=0), problem.lift.sum(axis=0)
    n, h = np.ix_(problem.steps, problem.steps)
    least = np.full_like(problem.steps, problem.least.max())
    allowed = np.isfinite(keep)[:, None] & problem.splits(problem.steps, least)
    if bank != "two":
        allowed &= (h == n) if bank == "high" else (h == 0)
    allowed &= int(problem.low_bytes.sum()) * n + int(problem.lift_bytes.sum()) * h <= capacity
    if not allowed.any():
        return None
    if most:
        allowed &= n == np.flatnonzero(allowed.any(axis=1))[-1]
    damage = np.where(allowed, keep[:, None] + lift[None, :], np.inf)
    best = int(np.flatnonzero(damage.ravel() == damage.min())[-1])
    return divmod(best, len(problem.steps))


def _respond(problem: Problem, multiplier: float) -> tuple[Ints, Ints, Floats]:
    """For each layer the (n, h) of least damage + multiplier · bytes, and that least value."""
    steps, least = problem.steps, problem.least
    kept = problem.keep + multiplier * (problem.low_bytes[:, None] * steps)
    lifted = problem.lift + multiplier * (problem.lift_bytes[:, None] * steps)
    best = np.where(steps >= least[:, None], lifted, np.inf)
    if problem.low_bank:
        best = np.where(least[:, None] == 0, np.minimum(best, 0.0), best)
    if problem.two_banks:
        edge = problem.min_bank
        prefix = _least_so_far(lifted, np.maximum(edge, least))
        best[:, edge:] = np.minimum(best[:, edge:], prefix[:, : len(steps) - edge])
    total = kept + best
    n = np.argmin(total, axis=1)
    h = np.argmin(np.where(problem.splits(n, least), lifted, np.inf), axis=1)
    rows = np.arange(len(n))
    return n, h, kept[rows, n] + lifted[rows, h]


def _least_so_far(values: Floats, start: Ints) -> Floats:
    """[L, E + 1] → the least of values[l, start[l] : h + 1], inf before start."""
    within = np.where(np.arange(values.shape[1]) >= start[:, None], values, np.inf)
    return np.asarray(np.minimum.accumulate(within, axis=1))


def _lagrange(problem: Problem, capacity: int) -> tuple[float, float, tuple[Ints, Ints] | None]:
    """Maximise the dual: (bound, multiplier, feasible plan).

    Two plans, one within and one beyond the capacity, give the next multiplier: the damage per
    byte between them. It ends when no plan lies below the line through both.
    """
    light = problem.cheapest()
    light_bytes = int(problem.bytes(*light).sum())
    if light_bytes > capacity:
        return np.inf, 0.0, None
    light_damage = float(problem.damage(*light).sum())
    n, h, least = _respond(problem, 0.0)
    bound, multiplier = float(least.sum()), 0.0
    heavy_damage, heavy_bytes = bound, int(problem.bytes(n, h).sum())
    if heavy_bytes <= capacity:
        return bound, multiplier, (n, h)
    for _ in range(MAX_ROUNDS):
        if light_damage <= heavy_damage:
            break
        slope = (light_damage - heavy_damage) / (heavy_bytes - light_bytes)
        n, h, least = _respond(problem, slope)
        dual = float(least.sum()) - slope * capacity
        if dual > bound:
            bound, multiplier = dual, slope
        damage, size = float(problem.damage(n, h).sum()), int(problem.bytes(n, h).sum())
        line = light_damage + slope * light_bytes
        if damage + slope * size >= line - 1e-13 * abs(line):
            break
        if size <= capacity:
            light, light_damage, light_bytes = (n, h), damage, size
        else:
            heavy_damage, heavy_bytes = damage, size
    return bound, multiplier, light


def _fill(problem: Problem, capacity: int, kept: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Spend what is left: again and again the change of one layer that helps most and fits."""
    kept, high = kept.copy(), high.copy()
    while True:
        now, size = problem.damage(kept, high), problem.bytes(kept, high)
        n, h = _best_within(problem, size + (capacity - int(size.sum())))
        gain = now - problem.damage(n, h)
        gain[(gain <= 1e-15 * now) & (n <= kept)] = -1.0
        layer = int(np.argmax(gain))
        if not gain[layer] >= 0:
            return kept, high
        kept[layer], high[layer] = n[layer], h[layer]


def _best_within(problem: Problem, allowance: Ints) -> tuple[Ints, Ints]:
    """Each layer's least damage if it alone had allowance [L] bytes; of equals the largest n."""
    steps, edge, least = problem.steps, problem.min_bank, problem.least
    affordable = (allowance[:, None] - problem.low_bytes[:, None] * steps) // problem.lift_bytes[
        :, None
    ]
    enough = steps >= least[:, None]
    best = np.where(enough & (affordable >= steps), problem.lift, np.inf)
    if problem.low_bank:
        low = (affordable >= 0) & (least[:, None] == 0)
        best = np.minimum(best, np.where(low, 0.0, np.inf))
    if problem.two_banks:
        prefix = _least_so_far(problem.lift, np.maximum(edge, least))
        reach = np.minimum(affordable, steps - edge)
        mixed = np.take_along_axis(prefix, np.maximum(reach, 0), axis=1)
        best = np.minimum(best, np.where(reach >= 0, mixed, np.inf))
    total = problem.keep + best
    n = len(steps) - 1 - np.argmin(total[:, ::-1], axis=1)
    reach = np.take_along_axis(affordable, n[:, None], axis=1)
    allowed = problem.splits(n, least) & (steps <= reach)
    return n, np.argmin(np.where(allowed, problem.lift, np.inf), axis=1)


def _search(
    problem: Problem, capacity: int, multiplier: float, bound: float, kept: Ints, high: Ints
) -> tuple[Ints, Ints, bool]:
    """The best plan among all that the bound allows to beat (kept, high); True if none is missed.

    A plan's damage is bound + Σ_l (its layers' reduced costs) + multiplier · (unused bytes), all
    terms ≥ 0. So a layer's choice with a reduced cost above the gap is in no better plan, and of
    two partial plans one is useless if it has neither fewer bytes nor less damage.
    """
    now = float(problem.damage(kept, high).sum())
    gap = (now - bound) * (1 + 1e-9) + 1e-14 * now
    _, _, least = _respond(problem, multiplier)
    exact = True
    states = min(MAX_STATES, LARGE_STATES if problem.keep.size > LARGE else MAX_STATES)
    options = []
    for layer in range(len(kept)):
        found, complete = _options(problem, layer, multiplier, float(least[layer]), gap)
        options.append(found)
        exact &= complete
    fewest = _after(np.array([sizes[0] for sizes, _, _, _ in options]))
    most = _after(np.array([sizes[-1] for sizes, _, _, _ in options]))
    size, damage = np.zeros(1, dtype=np.int64), np.zeros(1)
    trail: list[tuple[Ints, Ints]] = []
    spent = 0.0
    for layer, (sizes, damages, _, _) in enumerate(options):
        spent += float(least[layer])
        new_size = (size[:, None] + sizes).ravel()
        new_damage = (damage[:, None] + damages).ravel()
        reduced = new_damage + multiplier * new_size - spent
        unused = np.maximum(capacity - new_size - most[layer], 0)
        fits = new_size + fewest[layer] <= capacity
        keep = np.flatnonzero(fits & (reduced + multiplier * unused <= gap))
        keep = keep[_undominated(new_size[keep], new_damage[keep])]
        if len(keep) > states:
            exact = False
            order = np.argsort(reduced[keep], kind="stable")[:states]
            keep = keep[np.sort(order)]
        size, damage = new_size[keep], new_damage[keep]
        trail.append((keep // len(sizes), keep % len(sizes)))
        if not len(keep):
            return kept, high, exact
    state = int(np.argmin(damage))
    best_kept, best_high = kept.copy(), high.copy()
    for layer in range(len(kept) - 1, -1, -1):
        parents, choices = trail[layer]
        choice = choices[state]
        best_kept[layer], best_high[layer] = options[layer][2][choice], options[layer][3][choice]
        state = int(parents[state])
    if problem.damage(best_kept, best_high).sum() < now:
        return best_kept, best_high, exact
    return kept, high, exact


def _options(
    problem: Problem, layer: int, multiplier: float, least: float, gap: float
) -> tuple[tuple[Ints, Floats, Ints, Ints], bool]:
    """(bytes, damage, n, h) of a layer's choices with reduced cost ≤ gap, by rising bytes."""
    steps = problem.steps
    kept = problem.keep[layer] + multiplier * (problem.low_bytes[layer] * steps)
    lifted = problem.lift[layer] + multiplier * (problem.lift_bytes[layer] * steps)
    near = np.flatnonzero(kept + lifted.min() - least <= gap)
    reduced = kept[near, None] + lifted[None, :] - least
    least_high = np.full_like(near, problem.least[layer])
    row, h = np.nonzero((reduced <= gap) & problem.splits(near, least_high))
    n, reduced = near[row], reduced[row, h]
    size = problem.low_bytes[layer] * n + problem.lift_bytes[layer] * h
    damage = problem.keep[layer, n] + problem.lift[layer, h]
    order = _undominated(size, damage)
    complete = len(order) <= MAX_OPTIONS
    if not complete:
        order = order[np.sort(np.argsort(reduced[order], kind="stable")[:MAX_OPTIONS])]
    return (size[order], damage[order], n[order], h[order]), complete


def _after(sizes: Ints) -> Ints:
    """Sum of the entries behind each."""
    return np.cumsum(sizes[::-1])[::-1] - sizes


def _undominated(size: Ints, damage: Floats) -> Ints:
    """Indices, by rising size, of those with less damage than all that are no larger."""
    order = np.lexsort((damage, size))
    ranked = damage[order]
    before = np.minimum.accumulate(np.append(np.inf, ranked[:-1]))
    return order[ranked < before]

"""Experts that a plan may neither drop nor store in low bits.

Super experts have rare, extreme outputs that the attention sinks of later layers rest on; pruning
three of 6,144 makes Qwen3-30B-A3B repeat itself (arXiv 2507.23279). They are found by the largest
‖f‖ an expert ever gave, relative to its layer: the residual stream grows with depth.

None is protected by default. Σg²‖f‖² ranks a super expert first in its layer already, so it is the
last to be dropped; and an expert that must be in the high bank rules out storing its layer in low
bits alone, which is the best stock layout there is for some models. A plan that does drop a super
expert, or rounds one, warns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reap.artifacts.saliency import Saliency
from reap.errors import ReapError
from reap.planning.settings import Pairs, PlanSettings

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SUPER_RATIO = 10.0
"""From this ratio to its layer's median an expert counts as super; in the paper its largest output
is a tenth or more of the model's largest, with ordinary experts far below."""


def outlier_ratio(saliency: Saliency) -> Floats:
    """max ‖f‖ of every expert over the median of its layer's routed experts, float64 [L, E]."""
    largest = saliency.max_norm.max(axis=(0, 1))
    routed = saliency.count.sum(axis=(0, 1)) > 0
    median = np.array([np.median(row[seen]) for row, seen in zip(largest, routed)])
    ratio = largest / np.maximum(median, np.finfo(np.float64).tiny)[:, None]
    return np.asarray(np.where(routed, ratio, 0.0))


def super_experts(saliency: Saliency, count: int | None = None) -> Pairs:
    """(layer, expert) by falling ratio: `count` of them, or all from SUPER_RATIO on."""
    ratio = outlier_ratio(saliency)
    if count is None:
        count = int((ratio >= SUPER_RATIO).sum())
    order = np.argsort(-ratio, axis=None, kind="stable")[:count]
    rows, experts = np.unravel_index(order, ratio.shape)
    return tuple((saliency.layers[row], int(expert)) for row, expert in zip(rows, experts))


def protected(saliency: Saliency, settings: PlanSettings) -> Bools:
    """Which experts must be in the high bank, bool [L, E]. Raises ReapError for unknown ones."""
    mask = np.zeros((len(saliency.layers), saliency.spec.num_experts), dtype=bool)
    row = {layer: index for index, layer in enumerate(saliency.layers)}
    for layer, expert in settings.pairs:
        if layer not in row:
            raise ReapError(
                f"layer {layer}, of which expert {expert} is to be kept, has no experts.",
                f"MoE layers: {_ranges(saliency.layers)}",
            )
        if not 0 <= expert < saliency.spec.num_experts:
            raise ReapError(
                f"layer {layer} has no expert {expert}.", f"0 to {saliency.spec.num_experts - 1}"
            )
        mask[row[layer], expert] = True
    for layer, expert in super_experts(saliency, settings.protect_super):
        mask[row[layer], expert] = True
    return mask


def _ranges(numbers: tuple[int, ...]) -> str:
    """ "1-92" or "1-3, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)

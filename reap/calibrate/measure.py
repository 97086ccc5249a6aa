"""Measuring what dropping experts and low bits cost, while a layer is resident.

Both are measured at the MoE block's output on the inputs the layer really got. A dropped expert's
row is taken out of the router, which then picks again among the rest: zeroing its output instead
would not be what a pruned model does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from reap.artifacts import Format
from reap.calibrate.observe import energy_by_position
from reap.errors import CalibrationError
from reap.models.hooks import hooked, submodule
from reap.models.ranks import Ranks
from reap.models.source import SourceModel
from reap.models.tap import ExpertTap

# Kept shares of the drop curve's grid; denser where most plans lie.
_SHARES = (0.9375, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)


@dataclass(frozen=True)
class BlockInput:
    """What one batch feeds into the MoE block: x [sequences, tokens, hidden] and its mask."""

    x: mx.array
    mask: np.ndarray


@dataclass(frozen=True)
class LayerMeasurement:
    """One layer's part of `reap.artifacts.Measurement`."""

    tokens: int
    order: np.ndarray
    output_energy: float
    drop_error: np.ndarray
    low_error: np.ndarray
    low_expert_error: np.ndarray

    def total(self, ranks: Ranks) -> LayerMeasurement:
        """The sums of all ranks, which have the same order."""
        sums = {name: np.asarray(value) for name, value in vars(self).items() if name != "order"}
        total: dict[str, Any] = dict(ranks.total(sums))
        total["tokens"] = int(total["tokens"])
        total["output_energy"] = float(total["output_energy"])
        return replace(self, **total)


def kept_grid(num_experts: int, min_experts: int, n_group: int) -> np.ndarray:
    """Experts kept at each point of the drop curve, falling, int64 [G]."""
    counts = {round(share * num_experts) // n_group * n_group for share in _SHARES}
    counts.add(min_experts)
    return np.array(sorted((n for n in counts if n >= min_experts), reverse=True), np.int64)


def keep_best(order: np.ndarray, count: int, n_group: int) -> list[int]:
    """The first `count` experts of `order`; with router groups, equally many of each group.

    Grouped routers need their rows group by group.
    """
    if n_group == 1:
        return [int(e) for e in order[:count]]
    size = len(order) // n_group
    best: list[int] = []
    for group in range(n_group):
        best += [int(e) for e in order[order // size == group][: count // n_group]]
    return best


@contextmanager
def restricted_router(source: SourceModel, index: int, kept: Sequence[int]) -> Iterator[None]:
    """While the block runs, layer `index` routes among `kept` experts only, as if pruned.

    The router's rows are really taken out; its answers are mapped back to the experts' slots.
    """
    layer = source.layers[index]
    rows = mx.array(np.asarray(kept, dtype=np.uint32))
    with ExitStack() as restore:
        for name in source.family.router:
            owner, _, leaf = name.rpartition(".")
            module = submodule(layer, owner)
            leaves = [leaf, *(("scales", "biases") if leaf == "weight" else ())]
            for key in leaves:
                array = module.get(key)
                if isinstance(array, mx.array):
                    restore.callback(module.__setitem__, key, array)
                    module[key] = mx.contiguous(array[rows])

        def remapped(original: Any, x: mx.array, indices: mx.array) -> Any:
            return original(x, rows[indices])

        restore.enter_context(hooked(source.experts(index), remapped))
        yield


def measure_layer(
    source: SourceModel,
    index: int,
    inputs: Sequence[BlockInput],
    *,
    energy: np.ndarray,
    grid: np.ndarray,
    formats: Sequence[Format],
    low_bank: Callable[[Format], nn.Module],
) -> LayerMeasurement:
    """The drop curve and low-bit errors of a resident layer.

    energy: Σg²‖f‖² of each expert, float64 [E], gives the order in which experts are dropped.
    low_bank: the layer's experts stored in a format, as an export would store them.
    """
    block = source.block(index)
    n_group, _ = source.groups()
    order = np.argsort(-energy, kind="stable").astype(np.int64)
    reference = [_evaluated(block(item.x)) for item in inputs]
    output_energy = sum(_energy(y, item) for y, item in zip(reference, inputs))
    drop_error = np.zeros(len(grid))
    for point, count in enumerate(grid):
        with restricted_router(source, index, keep_best(order, int(count), n_group)):
            drop_error[point] = _error(block, inputs, reference)
    low_error = np.zeros(len(formats))
    low_expert_error = np.zeros((len(formats), source.num_experts))
    for which, format in enumerate(formats):
        errors = low_expert_error[which]
        low_error[which] = _low_error(source, index, inputs, reference, low_bank(format), errors)
    measured = LayerMeasurement(
        tokens=sum(int(item.mask.sum()) for item in inputs),
        order=order,
        output_energy=output_energy,
        drop_error=drop_error,
        low_error=low_error,
        low_expert_error=low_expert_error,
    )
    if not all(np.isfinite(a).all() for a in (drop_error, low_error, low_expert_error)):
        raise CalibrationError(f"a measured error in layer {index} is not finite.")
    return measured


def _evaluated(y: mx.array) -> mx.array:
    mx.eval(y)
    return y


def _energy(y: mx.array, item: BlockInput) -> float:
    return float(energy_by_position(y)[item.mask].sum())


def _error(block: nn.Module, inputs: Sequence[BlockInput], reference: Sequence[mx.array]) -> float:
    return sum(_energy(block(item.x) - y, item) for item, y in zip(inputs, reference))


def _low_error(
    source: SourceModel,
    index: int,
    inputs: Sequence[BlockInput],
    reference: Sequence[mx.array],
    low: nn.Module,
    expert_error: np.ndarray,
) -> float:
    """Error at the block's output with `low` as its experts; adds up `expert_error` [E]."""
    experts = source.experts(index)
    total = 0.0
    for item, y in zip(inputs, reference):
        outputs: list[mx.array] = []

        def replace(x: mx.array, indices: mx.array, keep: list[mx.array] = outputs) -> mx.array:
            keep.append(low(x, indices))
            return keep[-1]

        def observe(
            x: mx.array,
            indices: mx.array,
            weights: mx.array,
            exact: mx.array,
            mask: np.ndarray = item.mask,
            keep: list[mx.array] = outputs,
        ) -> None:
            difference = energy_by_position(keep[-1] - exact)
            g = np.array(weights.astype(mx.float32), dtype=np.float64)
            error = (g * g * difference).reshape(-1, g.shape[-1])[mask.reshape(-1)]
            expert = np.array(indices).reshape(-1, g.shape[-1])[mask.reshape(-1)]
            expert_error[:] += np.bincount(
                expert.reshape(-1), weights=error.reshape(-1), minlength=len(expert_error)
            )

        with ExpertTap(index, observe, replace=replace).on(experts):
            total += _energy(source.block(index)(item.x) - y, item)
    return total

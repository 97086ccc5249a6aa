"""Adding up what one layer's experts do, per domain and half."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from reap.errors import CalibrationError
from reap.models.ranks import Ranks
from reap.models.text import Batch

SUMS = ("gate", "norm", "gate_norm", "gate2_norm2", "norm2")


class LayerSums:
    """The sums of one layer; see `reap.artifacts.Saliency` for their meaning.

    Arrays [2 halves, domains, experts] and [2, domains]. Norms are taken in float32 by MLX (the
    outputs' own precision or better) and added up in float64.
    """

    def __init__(self, layer: int, domains: int, experts: int) -> None:
        shape = (2, domains, experts)
        self.layer = layer
        self.experts = experts
        self.count = np.zeros(shape, np.int64)
        self.max_norm = np.zeros(shape)
        self.sums = {name: np.zeros(shape) for name in SUMS}
        self.tokens = np.zeros(shape[:2], np.int64)
        self.residual_energy = np.zeros(shape[:2])
        self.output_energy = np.zeros(shape[:2])

    def add(self, batch: Batch, indices: mx.array, weights: mx.array, outputs: mx.array) -> None:
        """indices, weights [..., K] and outputs [..., K, D] of all positions of a batch."""
        k = indices.shape[-1]
        norm2 = mx.square(outputs.astype(mx.float32)).sum(axis=-1)
        real = batch.mask.reshape(-1)
        expert = np.array(indices).reshape(-1, k)[real].reshape(-1).astype(np.int64)
        g = _float64(weights).reshape(-1, k)[real].reshape(-1)
        squared = _float64(norm2).reshape(-1, k)[real].reshape(-1)
        bad = np.flatnonzero(~np.isfinite(squared) | ~np.isfinite(g))
        if bad.size:
            raise CalibrationError(
                f"expert {expert[bad[0]]} in layer {self.layer} gives a value that is not finite.",
                "its weights are damaged or its activations overflow; check the checkpoint",
            )
        norm = np.sqrt(squared)
        at = (batch.half, batch.domain)
        self.count[at] += np.bincount(expert, minlength=self.experts)
        np.maximum.at(self.max_norm[at], expert, norm)
        terms = (g, norm, g * norm, g * g * squared, squared)
        for name, term in zip(SUMS, terms):
            self.sums[name][at] += np.bincount(expert, weights=term, minlength=self.experts)
        self.tokens[at] += int(real.sum())

    def add_energy(self, name: str, batch: Batch, hidden: mx.array) -> None:
        """Add Σ‖h‖² over the batch's real positions to residual_energy or output_energy."""
        energy = energy_by_position(hidden).reshape(-1)[batch.mask.reshape(-1)].sum()
        if not np.isfinite(energy):
            raise CalibrationError(
                f"layer {self.layer} gives a value that is not finite ({name}).",
                "its weights are damaged or its activations overflow; check the checkpoint",
            )
        getattr(self, name)[batch.half, batch.domain] += energy

    def add_up(self, ranks: Ranks) -> None:
        """Make these the sums of all ranks."""
        names = ("count", "max_norm", "tokens", "residual_energy", "output_energy")
        mine = {name: getattr(self, name) for name in names} | self.sums
        for name, total in ranks.total(mine, greatest=("max_norm",)).items():
            mine[name][...] = total


def energy_by_position(hidden: mx.array) -> np.ndarray:
    """‖h‖² over the last axis, float64."""
    return _float64(mx.square(hidden.astype(mx.float32)).sum(axis=-1))


def _float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), dtype=np.float64)


def first_array(out: Any) -> mx.array:
    """A decoder layer returns its hidden state, alone or first in a tuple."""
    return out[0] if isinstance(out, tuple) else out

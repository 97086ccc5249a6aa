"""How strongly each input channel of the experts' matrices is driven: what rounding minds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROWS, _SUMS = "moments.rows.", "moments.sums."


@dataclass(frozen=True)
class SecondMoments:
    """Σx² of every input channel over the routed tokens, shared by the experts of a layer.

    By projection name: sums float64 [L, columns] and rows int64 [L], how many inputs were added
    up (a token counts once for each expert it is routed to).
    """

    sums: dict[str, Floats]
    rows: dict[str, Ints]

    def mean(self, projection: str, layer: int) -> Floats:
        """E[x²] float64 [columns]; `layer` counts MoE layers from 0."""
        return np.asarray(self.sums[projection][layer] / max(1, self.rows[projection][layer]))

    def merged(self, other: SecondMoments) -> SecondMoments:
        """Those of both runs; raises KeyError or ValueError if they are not of the same model."""
        return SecondMoments(
            sums={name: array + other.sums[name] for name, array in self.sums.items()},
            rows={name: array + other.rows[name] for name, array in self.rows.items()},
        )

    def to_arrays(self) -> dict[str, NDArray]:
        """By the names they have in a saliency file."""
        sums = {_SUMS + name: array for name, array in self.sums.items()}
        return {**sums, **{_ROWS + name: array for name, array in self.rows.items()}}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray]) -> SecondMoments | None:
        """None if there are none among the arrays of a saliency file."""

        def named(prefix: str) -> dict[str, NDArray]:
            return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}

        sums, rows = named(_SUMS), named(_ROWS)
        if sums.keys() != rows.keys():
            raise ValueError("second moments without the number of their rows")
        return cls(sums, rows) if sums else None

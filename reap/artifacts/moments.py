"""How strongly each input channel of the experts' matrices is driven: what rounding minds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROWS, _SUMS, _PRODUCTS = "moments.rows.", "moments.sums.", "moments.products."


@dataclass(frozen=True)
class SecondMoments:
    """Σx² of every input channel over the routed tokens, shared by the experts of a layer.

    By projection name: sums float64 [L, columns] and rows int64 [L], how many inputs were added
    up (a token counts once for each expert it is routed to). products float32 [L, columns,
    columns]: Σ x xᵀ; empty if it was not asked for.
    """

    sums: dict[str, Floats]
    rows: dict[str, Ints]
    products: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def mean(self, projection: str, layer: int) -> Floats:
        """E[x²] float64 [columns]; `layer` counts MoE layers from 0."""
        return np.asarray(self.sums[projection][layer] / max(1, self.rows[projection][layer]))

    def covariance(self, projection: str, layer: int) -> Floats:
        """E[x xᵀ] float64 [columns, columns]; raises KeyError if there are no products."""
        product = self.products[projection][layer].astype(np.float64)
        return np.asarray(product / max(1, self.rows[projection][layer]))

    def merged(self, other: SecondMoments) -> SecondMoments:
        """Those of both runs, products only if both have them.

        Raises KeyError or ValueError if they are not of the same model.
        """
        products: dict[str, NDArray[np.float32]] = {}
        if self.products and other.products:
            for names, array in _shared(self.products).items():
                products |= dict.fromkeys(names, array + other.products[names[0]])
        return SecondMoments(
            sums={name: array + other.sums[name] for name, array in self.sums.items()},
            rows={name: array + other.rows[name] for name, array in self.rows.items()},
            products=products,
        )

    def to_arrays(self) -> dict[str, NDArray]:
        """By the names they have in a saliency file."""
        sums = {_SUMS + name: array for name, array in self.sums.items()}
        rows = {_ROWS + name: array for name, array in self.rows.items()}
        products = {_PRODUCTS + "+".join(n): a for n, a in _shared(self.products).items()}
        return {**sums, **rows, **products}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray]) -> SecondMoments | None:
        """None if there are none among the arrays of a saliency file."""

        def named(prefix: str) -> dict[str, NDArray]:
            return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}

        sums, rows = named(_SUMS), named(_ROWS)
        if sums.keys() != rows.keys():
            raise ValueError("second moments without the number of their rows")
        products = {
            name: array for names, array in named(_PRODUCTS).items() for name in names.split("+")
        }
        return cls(sums, rows, products) if sums else None


def _shared(arrays: Mapping[str, NDArray]) -> dict[tuple[str, ...], NDArray]:
    """Each array once, by all its names: projections with the same input share one."""
    names: dict[int, list[str]] = {}
    for name, array in arrays.items():
        names.setdefault(id(array), []).append(name)
    return {tuple(group): arrays[group[0]] for group in names.values()}

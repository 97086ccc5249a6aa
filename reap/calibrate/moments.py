"""Second moments of what enters the experts' projections, one layer at a time.

Rows of padded positions are left out. They are told apart by the order in which mlx-lm's switch
layers sort rows by expert; experts that hand on other rows (two banks) count padded ones, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from reap.artifacts import SecondMoments
from reap.errors import CalibrationError
from reap.models.hooks import hooked
from reap.models.ranks import Ranks


class LayerMoments:
    """Σx² float64 [columns] and rows of every projection of one layer, by its name."""

    def __init__(self, layer: int, experts: nn.Module, *, products: bool = False) -> None:
        """products: whether to add up x xᵀ, too."""
        self.layer = layer
        self._experts = experts
        self._projections = {n: part for n, part in experts.named_modules() if "weight" in part}
        self.sums: dict[str, np.ndarray] = {}
        self.rows = dict.fromkeys(self._projections, 0)
        self.with_products = products
        # Projections that get the same input share one array.
        self._products: dict[str, np.ndarray] = {}
        self._first = {name: name for name in self._projections}

    def mean(self, projection: str) -> np.ndarray:
        """E[x²] float64 [columns]."""
        return self.sums[projection] / max(1, self.rows[projection])

    def product(self, projection: str) -> np.ndarray:
        """Σ x xᵀ float32 [columns, columns]; the same array for the same input."""
        return self._products[self._first[projection]]

    def covariance(self, projection: str) -> np.ndarray:
        """E[x xᵀ] float64 [columns, columns]."""
        return self.product(projection).astype(np.float64) / max(1, self.rows[projection])

    @contextmanager
    def observed(self, mask: np.ndarray) -> Iterator[None]:
        """While the block runs, calls of the experts are added; mask [sequences, tokens]."""
        call: dict[str, Any] = {}

        def experts_call(original: Any, x: mx.array, indices: mx.array) -> Any:
            call.update(indices=indices, seen={})
            return original(x, indices)

        def projection_call(name: str) -> Callable[..., Any]:
            def observe(original: Any, x: mx.array, chosen: mx.array, **options: Any) -> Any:
                # Gate and up projection get the same array; it is kept, so its id stays its own.
                if id(x) not in call["seen"]:
                    rows = x.reshape(-1, x.shape[-1])
                    counts = _times_counted(mask, call["indices"], chosen, len(rows))
                    call["seen"][id(x)] = (x, name, *_sums(rows, counts))
                    if self.with_products:
                        self._products[name] = self._products.get(name, 0.0) + _product(
                            rows, counts
                        )
                _, self._first[name], sums, count = call["seen"][id(x)]
                self._add(name, sums, count)
                return original(x, chosen, **options)

            return observe

        with ExitStack() as hooks:
            hooks.enter_context(hooked(self._experts, experts_call))
            for name, projection in self._projections.items():
                hooks.enter_context(hooked(projection, projection_call(name)))
            yield
        # Only now: whoever observes the experts' outputs can name the expert.
        for name, sums in self.sums.items():
            if not np.isfinite(sums).all():
                raise CalibrationError(
                    f"the input of {name} in layer {self.layer} has a value that is not finite.",
                    "its weights are damaged or its activations overflow; check the checkpoint",
                )

    def found(self) -> SecondMoments:
        """Sums [columns], rows [] and products [columns, columns] of this layer."""
        return SecondMoments(
            sums=dict(self.sums),
            rows={name: np.array(rows, np.int64) for name, rows in self.rows.items()},
            products={n: self.product(n) for n in self.sums} if self.with_products else {},
        )

    def add_up(self, ranks: Ranks) -> None:
        """Make these the sums of all ranks, one of which may have seen nothing."""
        if ranks.size == 1:
            return
        total = SecondMoments.from_arrays(ranks.total(self.found().to_arrays()))
        assert total is not None  # some rank has seen something
        # Projections in the order they ran in, which shared products are named by.
        self.sums = {name: total.sums[name] for name in (*total.products, *total.sums)}
        self.rows = {name: int(rows) for name, rows in total.rows.items()}
        self._products = total.products
        self._first = {name: name for name in self._projections}

    def _add(self, name: str, sums: np.ndarray, count: int) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + sums
        self.rows[name] += count


def stacked(layers: Sequence[SecondMoments]) -> SecondMoments | None:
    """The moments of each layer as the saliency file has them; None if there are none."""
    if not layers:
        return None
    first = layers[0]
    products: dict[str, np.ndarray] = {}
    for name, product in first.products.items():
        same = next((n for n in products if first.products[n] is product), None)
        products[name] = (
            np.stack([m.products[name] for m in layers]) if same is None else products[same]
        )
    return SecondMoments(
        sums={name: np.stack([m.sums[name] for m in layers]) for name in first.sums},
        rows={name: np.array([m.rows[name] for m in layers], np.int64) for name in first.sums},
        products=products,
    )


def _sums(rows: mx.array, counts: mx.array) -> tuple[np.ndarray, int]:
    """Σ counts x² [columns], and Σ counts."""
    squares = counts[None] @ mx.square(rows.astype(mx.float32))
    return np.array(squares[0], dtype=np.float64), int(np.array(counts.sum()))


def _product(rows: mx.array, counts: mx.array) -> np.ndarray:
    """Σ counts x xᵀ, float32 [columns, columns]."""
    x = rows.astype(mx.float32)
    return np.array((x * counts[:, None]).T @ x)


def _times_counted(mask: np.ndarray, indices: mx.array, chosen: mx.array, rows: int) -> mx.array:
    """How often each of a projection's input rows counts, float32 [rows].

    indices [..., K] are the experts' of every position, `chosen` those of the rows.
    """
    real = mx.array(mask.reshape(-1).astype(np.float32))
    pairs, k = indices.flatten(), indices.shape[-1]
    if rows == pairs.size == real.size * k:
        real = mx.repeat(real, k)
        if mx.array_equal(chosen.flatten(), pairs):
            return real
        order = mx.argsort(pairs)
        if mx.array_equal(chosen.flatten(), pairs[order]):
            return real[order]
    elif rows == real.size:
        return real * k
    return mx.ones(rows)

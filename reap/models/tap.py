"""Observing the experts: their outputs and the very coefficients the block multiplies them by.

Every mlx-lm MoE block calls `experts(x, indices)` and multiplies the result by the router's
weights `w[..., None]`. A tapped experts module returns a stand-in that sees this multiplication.
So the gate is what the block uses, whatever its router does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from reap.errors import CalibrationError
from reap.models.hooks import hooked

Observer = Callable[[mx.array, mx.array, mx.array, mx.array], None]
"""observe(x [..., inputs], indices [..., K], weights [..., K], outputs [..., K, D])"""


class _Unweighted:
    """The experts' outputs [..., K, D] until the block multiplies them by the router's weights."""

    def __init__(self, outputs: mx.array, layer: int, weighted: Callable[[mx.array], None]) -> None:
        self._outputs = outputs
        self._layer = layer
        self._weighted = weighted
        # Blocks read these, e.g. `(y * scores[..., None]).sum(axis=-2).astype(y.dtype)`.
        self.dtype = outputs.dtype
        self.shape = outputs.shape
        self.ndim = outputs.ndim

    def __mul__(self, weights: Any) -> mx.array:
        shape = getattr(weights, "shape", ())
        if shape != (*self.shape[:-1], 1):
            raise _unobserved(
                self._layer,
                f"multiplies the experts' outputs {self.shape} by {shape}, not by one weight for "
                "each of them",
            )
        self._weighted(weights.squeeze(-1))
        return self._outputs * weights

    def __getattr__(self, name: str) -> Any:
        raise _unobserved(self._layer, f"uses the experts' outputs ({name}) before weighting them")


class ExpertTap:
    """Shows what the experts of one layer are used for.

    `replace` may compute other outputs, which the block gets instead; observers see the real ones.
    """

    def __init__(
        self,
        layer: int,
        observe: Observer,
        *,
        replace: Callable[[mx.array, mx.array], mx.array] | None = None,
    ) -> None:
        self._layer = layer
        self._observe = observe
        self._replace = replace
        self._pending = 0

    @contextmanager
    def on(self, experts: nn.Module) -> Iterator[None]:
        """Observe an experts module while the block runs.

        Raises CalibrationError if its outputs were used without weights that could be seen.
        """
        try:
            with hooked(experts, self._call):
                yield
        except (TypeError, ValueError, RuntimeError) as error:
            # The stand-in is no array: MLX refuses it in ways of its own.
            if self._pending:
                raise _unobserved(self._layer, "does not multiply them in a known way") from error
            raise
        if self._pending:
            raise _unobserved(self._layer, "never multiplies by them")

    def _call(self, original: Any, x: mx.array, indices: mx.array) -> Any:
        outputs = original(x, indices)

        def weighted(weights: mx.array) -> None:
            self._pending -= 1
            self._observe(x, indices, weights, outputs)

        self._pending += 1
        shown = self._replace(x, indices) if self._replace else outputs
        return _Unweighted(shown, self._layer, weighted)


def _unobserved(layer: int, why: str) -> CalibrationError:
    return CalibrationError(
        f"the router's weights in layer {layer} cannot be observed: the MoE block {why}.",
        "this architecture is not supported by reap",
    )

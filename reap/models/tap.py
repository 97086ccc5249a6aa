"""Observing the experts: their outputs and the very coefficients the block multiplies them by.

Every mlx-lm MoE block calls `experts(x, indices)` and multiplies the result by the router's
weights `w[..., None]`. A tapped experts module returns a stand-in that sees this multiplication.
So the gate is what the block uses, whatever its router does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from reap.errors import CalibrationError

Observer = Callable[[mx.array, mx.array, mx.array, mx.array], None]
"""observe(x [..., inputs], indices [..., K], weights [..., K], outputs [..., K, D])"""


class _Unweighted:
    """The experts' outputs [..., K, D] until the block multiplies them by the router's weights."""

    def __init__(self, outputs: mx.array, weighted: Callable[[mx.array], None]) -> None:
        self._outputs = outputs
        self._weighted = weighted
        # Blocks read these, e.g. `(y * scores[..., None]).sum(axis=-2).astype(y.dtype)`.
        self.dtype = outputs.dtype
        self.shape = outputs.shape
        self.ndim = outputs.ndim

    def __mul__(self, weights: mx.array) -> mx.array:
        if weights.shape[-1] != 1 or weights.shape[:-1] != self.shape[:-1]:
            raise CalibrationError(
                f"the MoE block multiplies the experts' outputs {self.shape} by {weights.shape}, "
                "which are not one weight per routed expert."
            )
        self._weighted(weights.squeeze(-1))
        return self._outputs * weights

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        raise CalibrationError(
            f"the MoE block uses the experts' outputs ({name}) before weighting them, so their "
            "router weights cannot be observed.",
            "this architecture is not supported by reap",
        )


class ExpertTap:
    """A hook for an experts module; see `hooked`. `replace` may compute other outputs instead."""

    def __init__(
        self,
        observe: Observer,
        *,
        replace: Callable[[mx.array, mx.array], mx.array] | None = None,
    ) -> None:
        self._observe = observe
        self._replace = replace
        self._pending = 0

    def __call__(self, original: Any, x: mx.array, indices: mx.array) -> Any:
        outputs = original(x, indices)

        def weighted(weights: mx.array) -> None:
            self._pending -= 1
            self._observe(x, indices, weights, outputs)

        self._pending += 1
        shown = self._replace(x, indices) if self._replace else outputs
        return _Unweighted(shown, weighted)

    def check(self, layer: int) -> None:
        """Raise CalibrationError if outputs were used without a weight that could be seen."""
        if self._pending:
            raise CalibrationError(
                f"the router's weights in layer {layer} could not be observed.",
                "this architecture is not supported by reap",
            )

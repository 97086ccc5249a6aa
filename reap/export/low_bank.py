"""How the experts of the low bank are rounded: as the plan says, with what calibration saw."""

from __future__ import annotations

from pathlib import Path

from reap.artifacts import Plan, Saliency, SecondMoments
from reap.artifacts.files import sha256
from reap.errors import ReapError
from reap.models.lowbit import NEEDS_MOMENTS, quantizer
from reap.models.quantize import Quantizer


class LowBank:
    """The quantizers of a plan's low bank; reads the saliency file if the plan needs it.

    Raises ReapError unless that is the file the plan was made from.
    """

    def __init__(self, plan: Plan, saliency: Path | None) -> None:
        self._rounding = plan.low_rounding
        self._position = {layer.layer: position for position, layer in enumerate(plan.layers)}
        affine = any(format.mode == "affine" for format in plan.low.values())
        has_low = any(layer.low for layer in plan.layers)
        self._weighted = plan.low_rounding in NEEDS_MOMENTS and affine and has_low
        self.sha256 = plan.provenance.inputs.get("saliency", "") if self._weighted else None
        """Of the saliency file, if what is written depends on it."""
        self.saliency: Saliency | None = None
        """What is known of the experts, to check them by; None if the plan's file is not there."""
        if self._weighted:
            self.saliency = _needed(plan, saliency)
        elif has_low and saliency is not None and saliency.exists():
            planned = plan.provenance.inputs.get("saliency")
            self.saliency = Saliency.load(saliency) if sha256(saliency) == planned else None

    @property
    def _moments(self) -> SecondMoments | None:
        return self.saliency.moments if self._weighted and self.saliency else None

    def quantizer(self, layer: int, projection: str) -> Quantizer:
        """For one projection of the experts in a decoder layer."""
        moments, position = self._moments, self._position[layer]
        if moments is None:
            return quantizer("plain" if self._rounding in NEEDS_MOMENTS else self._rounding)
        return quantizer(
            self._rounding,
            moments.mean(projection, position),
            lambda: moments.covariance(projection, position),
        )


def _needed(plan: Plan, saliency: Path | None) -> Saliency:
    if saliency is None or not saliency.exists():
        where = "" if saliency is None else f", but {saliency} does not exist"
        raise ReapError(
            "the plan rounds its low bank by what calibration saw, so export needs the saliency "
            f"file{where}.",
            "give it with --saliency, or plan with low_rounding search",
        )
    loaded = Saliency.load(saliency)
    digest, planned = sha256(saliency), plan.provenance.inputs.get("saliency", "")
    if digest != planned:
        raise ReapError(
            f"the plan was made from another saliency file ({planned[:12]}) than {saliency} "
            f"({digest[:12]}).",
            "give that file with --saliency, or plan again",
        )
    lacking = "second moments" if loaded.moments is None else ""
    if plan.low_rounding == "feedback" and not (loaded.moments and loaded.moments.products):
        lacking = "covariances"
    if loaded.moments is None or lacking:
        raise ReapError(
            f"{saliency} has no {lacking} to round the low bank by.",
            "calibrate again, or plan with low_rounding search",
        )
    return loaded

"""Whether a low bank pays, by the rule that one can check by hand.

Between dropping an expert (b = 0 bytes, damage kappa per energy), storing it in few bits (b_low,
weight · rho) and storing it in many (b_high, weight · rho_high), the low bank is worth its bytes if
it lies below the line between the other two:

    weight · rho / kappa  <  1 - b_low / b_high + weight · rho_high / kappa · b_low / b_high

The last term is 0 if the high bank is exact. kappa is that at the plan's count, weight what a
rounding error costs relative to an equally large error of dropping (1 if it was not measured). It
holds for the mean expert of a layer; the solver looks at every expert and may use a low bank for
the coldest where the rule says no.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reap.planning.damage import DamageModel
from reap.planning.precision import Precision

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class LowBankRule:
    """The terms of the rule by MoE layer, float64 [L] each; `format` in words."""

    format: str
    rho: Floats
    kappa: Floats
    weight: Floats
    break_even: Floats

    @property
    def ratio(self) -> Floats:
        """weight · rho / kappa."""
        return np.asarray(self.weight * self.rho / self.kappa)

    @property
    def pays(self) -> NDArray[np.bool_]:
        return np.asarray(self.ratio < self.break_even)

    @classmethod
    def of(cls, model: DamageModel, precision: Precision, kept: Ints) -> LowBankRule | None:
        """For a plan that keeps kept [L] experts; None if there is no low bank to take."""
        if not precision.low:
            return None
        tiny = np.finfo(np.float64).tiny
        energy = np.maximum(model.energy.sum(axis=1), tiny)
        kappa = np.maximum(model.kappa[np.arange(len(kept)), kept], tiny)
        rho = model.low[:, -1] / model.round_weight / energy
        rho_high = model.high[:, -1] / model.round_weight / energy
        weight = model.round_weight / model.drop_weight
        share = (precision.low_bytes + precision.router_bytes) / (
            precision.high_bytes + precision.router_bytes
        )
        labels = {format.label: None for format in precision.low.values()}
        return cls(
            format="/".join(labels),
            rho=rho,
            kappa=kappa,
            weight=weight,
            break_even=1 - share + weight * rho_high / kappa * share,
        )

    def summary(self) -> dict[str, Any]:
        """Medians over the layers and in how many the bank pays, for a plan's settings."""
        names = ("rho", "kappa", "weight", "ratio", "break_even")
        medians = {name: float(f"{np.median(getattr(self, name)):.4g}") for name in names}
        return {
            "format": self.format,
            **medians,
            "pays_in": int(self.pays.sum()),
            "layers": len(self.rho),
            "rule": str(self),
        }

    def __str__(self) -> str:
        ratio, pays = self.ratio, int(self.pays.sum())
        return (
            f"A {self.format} bank pays below a ratio of {np.median(self.break_even):.2f}; here it "
            f"is {np.median(ratio):.2g} ({ratio.min():.2g} to {ratio.max():.2g}): it pays in "
            f"{pays} of {len(ratio)} layers."
        )

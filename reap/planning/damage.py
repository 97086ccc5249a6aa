"""What dropping experts and storing them in fewer bits is predicted to cost, layer by layer.

The damage of a plan is a sum over layers of squared errors E‖y'_l - y_l‖² at the output of the
MoE block, which add up when they are independent (second order of the KL divergence). Experts of a
layer are ranked once; a plan keeps the first n and stores the first h of them in the high bank:

    D_l(h, n) = a_l · drop_l(n) + b_l · [Q_low(n) - Q_low(h) + Q_high(h)]

a_l and b_l turn an error of layer l into nats of KL divergence at the model's output. Calibration
measures them by changing one layer at a time: a_l with fewer experts, b_l with low bits, because
dropping shifts the output while rounding only blurs it. Where they were not measured, both are
the inverse of the residual stream's energy, and damage is a squared relative error.
A bank whose matrices differ in format is taken to have the mean of the errors that the whole expert
has in each format, by their share of the matrices. On synthetic experts (Gaussian weights through
mxfp4, SiLU) that is 12 % too little to 4 % too much for all pairs of 2 to 4 bits; with clip search
gate and up at 2-bit g64 and down at 3-bit g64 measured .227, the mean is .221.

Not seen: that errors of one layer change what later layers do, and the trunk's precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reap.artifacts.saliency import Measurement, Saliency
from reap.artifacts.spec import Format
from reap.errors import CalibrationError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ASSUMED_KAPPA = 1.0

KL_FLOOR = 1e-7
"""Nats; about what float32 logits resolve."""

ASSUMED_RHO = {
    (2, 32, "affine"): 0.385,
    (2, 64, "affine"): 0.465,
    (2, 128, "affine"): 0.541,
    (3, 32, "affine"): 0.105,
    (3, 64, "affine"): 0.135,
    (3, 128, "affine"): 0.166,
    (4, 32, "affine"): 0.024,
    (4, 64, "affine"): 0.029,
    (4, 128, "affine"): 0.035,
    (4, 32, "mxfp4"): 0.045,
    (4, 16, "nvfp4"): 0.029,
    (8, 32, "mxfp8"): 0.003,
}
"""E‖f' - f‖² / E‖f‖² of a whole expert rounded to nearest, used where nothing was measured.

2 and 3 bits and 4-bit g64: measured on synthetic experts with mlx 0.32.4. The rest: that of
4-bit g64 times the ratio of the weights' errors.
"""


@dataclass(frozen=True)
class DamageModel:
    """The terms of D_l(h, n) per token, layer weights included.

    order int64 [L, E]: experts by falling saliency, ties by id; with router groups the best of
    every group, then the second of every group, and so on. drop, low, high float64 [L, E + 1]:
    a_l · drop_l(n), b_l · Q_low(k), b_l · Q_high(k) by number of experts. Of what these are made:
    energy [L, E] per token, kappa [L, E + 1], drop_weight and round_weight [L]. unit: of the
    damage. assumed: what was not measured, in words.
    """

    order: Ints
    drop: Floats
    low: Floats
    high: Floats
    energy: Floats
    kappa: Floats
    drop_weight: Floats
    round_weight: Floats
    unit: str
    assumed: tuple[str, ...]

    def damage(self, kept: Ints, high: Ints) -> Floats:
        """D_l float64 [L] with kept[l] experts of which high[l] are in the high bank."""
        rows = np.arange(len(kept))
        low = self.low[rows, kept] - self.low[rows, high]
        return np.asarray(self.drop[rows, kept] + low + self.high[rows, high])


def rank(scores: Floats, groups: int = 1, first: Bools | None = None) -> Ints:
    """Expert ids int64 [L, E] by falling score [L, E], ties by id; those of `first` [L, E] first.

    With `groups` > 1 the router picks groups of consecutive experts first, and a prefix must hold
    equally many of each: the best expert of every group, then every second best, …
    """
    layers, experts = scores.shape
    size = experts // groups
    by_group = np.argsort(-scores.reshape(layers, groups, size), axis=2, kind="stable")
    if first is not None and first.any():
        ahead = np.take_along_axis(first.reshape(layers, groups, size), by_group, axis=2)
        back = np.argsort(~ahead, axis=2, kind="stable")
        by_group = np.take_along_axis(by_group, back, axis=2)
    ids = by_group + size * np.arange(groups)[:, None]
    return ids.transpose(0, 2, 1).reshape(layers, experts).astype(np.int64)


def damage_model(
    saliency: Saliency,
    *,
    scores: Floats,
    high: Mapping[Format, float],
    low: Mapping[Format, float],
    energy: Floats | None = None,
    first: Bools | None = None,
) -> DamageModel:
    """The model for experts ranked by `scores` [L, E], those of `first` ahead of all others.

    high, low: share of each format in an expert's matrices, without those that are stored exactly.
    energy: that of the domains as the plan weighs them, [L, E]; default: of all tokens.
    """
    measured = saliency.measurement
    total = saliency.score("energy")
    order = rank(scores, saliency.spec.n_group, first)
    curve = _kappa(measured, total)
    assumed = [] if measured is not None else [f"kappa = {ASSUMED_KAPPA:g}"]
    drop_weight, round_weight, unit = _layer_weights(saliency)
    weighed = total if energy is None else energy
    if measured is not None and not np.array_equal(weighed, total):
        assumed.append("what was measured on all domains together holds for each")
    # An expert that no token reached has no error to scale.
    scale = np.divide(weighed, total, out=np.ones_like(total), where=total > 0)

    def quantization(mix: Mapping[Format, float]) -> Floats:
        errors = np.zeros_like(total)
        for format, share in mix.items():
            of_format, note = _expert_errors(measured, total, curve, format)
            errors += share * of_format
            if note and note not in assumed:
                assumed.append(note)
        if len(mix) > 1 or any(share < 1 - 1e-9 for share in mix.values()):
            parts = (f"{share:.2f} × {format.label}" for format, share in mix.items())
            assumed.append(f"errors of matrices add up: {' + '.join(parts)}")
        ranked = np.take_along_axis(errors * scale, order, axis=1)
        return round_weight[:, None] * _prefix_sums(ranked)

    ranked = np.take_along_axis(weighed, order, axis=1)
    return DamageModel(
        order=order,
        drop=drop_weight[:, None] * _drop(curve, ranked),
        low=quantization(low),
        high=quantization(high),
        energy=weighed,
        kappa=curve,
        drop_weight=drop_weight,
        round_weight=round_weight,
        unit=unit,
        assumed=tuple(assumed),
    )


def _layer_weights(saliency: Saliency) -> tuple[Floats, Floats, str]:
    """(a_l, b_l, unit), float64 [L]; see the module docstring."""
    measured = saliency.measurement
    if sensitivity_measured(saliency):
        assert measured is not None
        at = int(np.flatnonzero(measured.kept == measured.kl_kept[0])[0])
        drop = _nats_per_error(measured.drop_kl, measured.drop_error[:, at], measured.tokens)
        blur = _nats_per_error(measured.low_kl, measured.low_error[0], measured.tokens)
        return drop, blur, "nats"
    tokens = saliency.tokens.sum(axis=(0, 1))
    energy = saliency.residual_energy.sum(axis=(0, 1))
    if (energy <= 0).any():
        layer = saliency.layers[int(np.argmin(energy))]
        raise CalibrationError(
            f"the residual stream after layer {layer} has no energy: the layers cannot be compared."
        )
    return tokens / energy, tokens / energy, "relative squared error"


def sensitivity_measured(saliency: Saliency) -> bool:
    """Whether the layers are compared by KL divergence."""
    measured = saliency.measurement
    return measured is not None and measured.drop_kl.size > 0 and len(measured.formats) > 0


def _nats_per_error(kl: Floats, error: Floats, tokens: Ints) -> Floats:
    """KL per mean squared error. A layer whose KL drowns in rounding is not taken to be free.

    A layer in which the change made no error (all that was dropped had never been routed) tells
    nothing: it counts as the median layer does.
    """
    known = error > 0
    per_token = np.where(known, error / tokens, 1.0)
    weights = np.maximum(kl, KL_FLOOR) / per_token
    return np.where(known, weights, np.median(weights[known]) if known.any() else 1.0)


def _prefix_sums(values: Floats) -> Floats:
    """[L, E] → [L, E + 1], sums of the first 0, 1, …, E."""
    return np.pad(np.cumsum(values, axis=1), ((0, 0), (1, 0)))


def _suffix_sums(values: Floats) -> Floats:
    """[L, E] → [L, E + 1], sums of all but the first 0, 1, …, E."""
    return np.pad(np.cumsum(values[:, ::-1], axis=1), ((0, 0), (1, 0)))[:, ::-1]


def _kappa(measured: Measurement | None, energy: Floats) -> Floats:
    """kappa_l(n) float64 [L, E + 1]: error at the block's output per dropped energy.

    The router picks substitutes for what was dropped, so the error is not the dropped energy.
    Measured at some n for experts ranked by energy; linear in n between, constant beyond.
    """
    layers, experts = energy.shape
    kappa = np.full((layers, experts + 1), ASSUMED_KAPPA)
    if measured is None:
        return kappa
    dropped = _suffix_sums(np.take_along_axis(energy, measured.order, axis=1))
    grid = np.argsort(measured.kept, kind="stable")
    kept = measured.kept[grid]
    for layer in range(layers):
        known = dropped[layer, kept] > 0
        if known.any():
            error = measured.drop_error[layer, grid] / measured.tokens[layer]
            points = error[known] / dropped[layer, kept[known]]
            kappa[layer] = np.interp(np.arange(experts + 1), kept[known], points)
    return kappa


def _drop(kappa: Floats, ranked_energy: Floats) -> Floats:
    """drop_l(n) float64 [L, E + 1], falling in n and 0 with all experts."""
    drop = kappa * _suffix_sums(ranked_energy)
    return np.maximum.accumulate(drop[:, ::-1], axis=1)[:, ::-1]


def _expert_errors(
    measured: Measurement | None, energy: Floats, kappa: Floats, format: Format
) -> tuple[Floats, str | None]:
    """What storing each expert in `format` adds to E‖y' - y‖², [L, E], and what was assumed.

    Measured per expert before the sum over experts and scaled to the error that was measured at
    the block's output. A format that was not measured is derived from the measured one nearest to
    it, or else from the experts' energy, by the ratio of ASSUMED_RHO.
    """
    rho = assumed_rho(format)
    if measured is None or not measured.formats:
        # kappa also converts between energy before and after a norm that follows the experts.
        scale = np.ones(len(energy)) if measured is None else kappa.mean(axis=1)
        return rho * scale[:, None] * energy, f"rho = {rho:.3g} for {format.label}"
    if format in measured.formats:
        return _measured_errors(measured, energy, measured.formats.index(format)), None
    distance = [abs(np.log(assumed_rho(other) / rho)) for other in measured.formats]
    nearest = int(np.argmin(distance))
    other = measured.formats[nearest]
    ratio = rho / assumed_rho(other)
    note = f"error of {format.label} = {ratio:.3g} times that of {other.label}"
    return ratio * _measured_errors(measured, energy, nearest), note


def _measured_errors(measured: Measurement, energy: Floats, index: int) -> Floats:
    per_expert = measured.low_expert_error[index]
    per_layer = per_expert.sum(axis=1, keepdims=True)
    share = np.where(per_layer > 0, per_expert, energy)
    share = share / np.maximum(share.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return np.asarray(share * (measured.low_error[index] / measured.tokens)[:, None])


def assumed_rho(format: Format) -> float:
    """ASSUMED_RHO of a quantized format; every bit above the table's last divides it by four."""
    known = ASSUMED_RHO.get((format.bits, format.group_size, format.mode))
    if known is not None:
        return known
    return ASSUMED_RHO[4, format.group_size, "affine"] / 4.0 ** (format.bits - 4)

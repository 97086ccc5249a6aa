"""How the calibration domains count: one saliency of every expert from those of the domains.

sum: every token counts the same. The drop curve, the low-bit errors and the layers' sensitivity
are measured on the domains together and evaluation asks for their mean, so this is the default:
the other two extrapolate. weights: the domains' means per token in these proportions. worst: the
largest share of a domain's energy that an expert carries, max_d E_dj / Σ_k E_dk, times the layer's
energy. Experts that only a small domain needs are then not erased (the experts that code and
Chinese prose need overlap less than by chance), and a damage that is bounded bounds every domain.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from reap.artifacts.saliency import Saliency
from reap.errors import ReapError
from reap.planning.settings import SUM, WORST

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def combined(
    saliency: Saliency, criterion: str, domains: str | Mapping[str, float] = SUM
) -> Floats:
    """Score of every expert over all domains, float64 [L, E]."""
    if domains == SUM:
        return saliency.score(criterion)
    if isinstance(domains, Mapping):
        weights = _weights(saliency, domains)
        total = sum(weights.values())
        scores = [saliency.score(criterion, domain=name) * w for name, w in weights.items() if w]
        return np.asarray(np.sum(scores, axis=0) / total)
    assert domains == WORST
    layers = saliency.score(criterion).sum(axis=1, keepdims=True)
    shares = [_shares(saliency.score(criterion, domain=name)) for name in saliency.domains]
    return np.asarray(np.max(shares, axis=0) * layers)


def kept_energy(saliency: Saliency, kept: Bools) -> dict[str, float]:
    """Share of each domain's routed energy that the `kept` experts [L, E] carry, mean of layers."""
    shares = {}
    for name in saliency.domains:
        share = _shares(saliency.score("energy", domain=name))
        seen = share.any(axis=1)
        if seen.any():
            shares[name] = float((share * kept).sum(axis=1)[seen].mean())
    return shares


def _weights(saliency: Saliency, domains: Mapping[str, float]) -> dict[str, float]:
    given, known = set(domains), set(saliency.domains)
    if given != known:
        wrong = sorted(given - known) or sorted(known - given)
        what = "is not a domain" if given - known else "has no weight; write 0 to leave it out"
        raise ReapError(
            f"{wrong[0]} {what} of the calibration.", f"domains: {', '.join(saliency.domains)}"
        )
    return {name: domains[name] for name in saliency.domains}


def _shares(scores: Floats) -> Floats:
    """Each expert's share of its layer's sum; 0 in a layer that a domain did not reach."""
    total = scores.sum(axis=1, keepdims=True)
    return np.divide(scores, total, out=np.zeros_like(scores), where=total > 0)

"""What a person should look at before exporting a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reap.artifacts.plan import LayerPlan
from reap.artifacts.saliency import Saliency
from reap.planning.damage import sensitivity_measured
from reap.planning.domains import kept_energy
from reap.planning.protect import outlier_ratio, super_experts
from reap.planning.settings import CLAMP

UNEVEN = 1.5
"""A domain is named if it loses this many times the energy that the domains lose on average."""


def warnings(saliency: Saliency, layers: Sequence[LayerPlan]) -> list[str]:
    """Sentences; empty if there is nothing to say."""
    # Counts far from the mean are meant where the layers' sensitivity was measured.
    counts = [] if sensitivity_measured(saliency) else _counts(layers)
    return [*counts, *_super(saliency, layers), *_domains(saliency, layers)]


def domains_kept(saliency: Saliency, layers: Sequence[LayerPlan]) -> dict[str, float]:
    """Share of each domain's routed energy that the kept experts carry, mean of the layers."""
    kept = np.zeros((len(layers), saliency.spec.num_experts), dtype=bool)
    for row, layer in enumerate(layers):
        kept[row, list(layer.kept)] = True
    return {name: round(share, 6) for name, share in kept_energy(saliency, kept).items()}


def _counts(layers: Sequence[LayerPlan]) -> list[str]:
    counts = [len(layer.kept) for layer in layers]
    mean = sum(counts) / len(counts)
    least, most = CLAMP
    found = []
    few = [f"{x.layer} ({n})" for x, n in zip(layers, counts) if n < least * mean]
    many = [f"{x.layer} ({n})" for x, n in zip(layers, counts) if n > most * mean]
    for names, limit, word in ((few, least, "fewer"), (many, most, "more")):
        if names:
            found.append(
                f"{word} experts than {limit:g} × the mean of {mean:.0f} in layers (experts) "
                f"{_some(names)}. Published plans stay within {least:g} to {most:g} of it; "
                f"--clamp {least:g}:{most:g} does, too."
            )
    return found


def _super(saliency: Saliency, layers: Sequence[LayerPlan]) -> list[str]:
    ratio = outlier_ratio(saliency)
    row = {layer.layer: index for index, layer in enumerate(layers)}
    gone, rounded = [], []
    for layer, expert in super_experts(saliency):
        entry = layers[row[layer]]
        text = f"{layer}/{expert} ({ratio[row[layer], expert]:.0f}×)"
        if expert not in entry.kept:
            gone.append(text)
        elif expert not in entry.kept[: entry.high]:
            rounded.append(text)
    return [
        f"super experts {_some(names)} are {what}: their largest output is far above their "
        "layer's median; --protect-super keeps them in the high bank."
        for names, what in ((gone, "dropped"), (rounded, "in the low bank"))
        if names
    ]


def _domains(saliency: Saliency, layers: Sequence[LayerPlan]) -> list[str]:
    kept = domains_kept(saliency, layers)
    lost = {name: 1 - share for name, share in kept.items()}
    mean = sum(lost.values()) / max(len(lost), 1)
    return [
        f"domain {name} loses {share:.1%} of its routed energy, the domains on average "
        f"{mean:.1%}: --domains worst, or a weight there, keeps more of it."
        for name, share in lost.items()
        if share > UNEVEN * mean and share > 0.01
    ]


def _some(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

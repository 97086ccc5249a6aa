"""Which tokens are measured on.

The model's answer with one layer changed takes most of the time: what is changed in one layer goes
through all later ones, so the work of a token grows with the square of the depth. It therefore has
a number of tokens of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reap.artifacts import Format
from reap.models.source import SourceModel
from reap.models.text import Batch, TokenSequence, batches

if TYPE_CHECKING:
    from reap.calibrate.calibrate import CalibrationSettings

_LEAST = 64
"""Tokens of each domain that the model's answer is measured on, however much work that is."""


@dataclass(frozen=True)
class Probes:
    """What the layers' own errors are measured on, and the model's answer with one layer `changed`:
    the same list, or the beginnings of each domain's; empty if it is not measured."""

    parts: list[TokenSequence]
    changed: list[TokenSequence]

    @classmethod
    def choose(
        cls,
        parts: Sequence[TokenSequence],
        settings: CalibrationSettings,
        source: SourceModel,
        formats: Sequence[Format],
        domains: int,
    ) -> Probes:
        """Of all `parts` of the text, as the settings say."""
        probes = _chosen(parts, settings.probe_tokens, domains)
        tokens = settings.sensitivity_tokens
        if not settings.sensitivity:
            return cls(probes, [])
        if tokens is None:
            passes = variant_passes(source, formats)
            work = len(source.layers) * (_total(parts) + _total(probes))
            tokens = max(work // passes, _LEAST * domains)
        elif tokens == settings.probe_tokens:
            return cls(probes, probes)  # whole sequences, so they may be more
        return cls(probes, _shortened(probes, tokens, domains))

    def batches(self, tokens_per_batch: int) -> tuple[list[Batch], list[Batch]]:
        """Of the parts and of the changed, which are one list if those are."""
        made = batches(self.parts, tokens_per_batch=tokens_per_batch)
        if self.changed is self.parts:
            return made, made
        return made, batches(self.changed, tokens_per_batch=tokens_per_batch)


def _chosen(parts: Sequence[TokenSequence], tokens: int, domains: int) -> list[TokenSequence]:
    """About an equal share of `tokens` from each domain, in whole sequences."""
    chosen: list[TokenSequence] = []
    for domain in range(domains):
        left = tokens / domains
        for part in (p for p in parts if p.domain == domain):
            if left <= 0:
                break
            chosen.append(part)
            left -= len(part.tokens)
    return chosen


def _shortened(parts: list[TokenSequence], tokens: int, domains: int) -> list[TokenSequence]:
    """All if there are no more than `tokens`; else an equal share from each domain, at least one
    token, the last sequence cut off."""
    if _total(parts) <= tokens:
        return parts
    share = max(1, tokens // domains)
    chosen: list[TokenSequence] = []
    for domain in range(domains):
        left = share
        for part in (p for p in parts if p.domain == domain):
            if left > 0:
                chosen.append(replace(part, tokens=part.tokens[:left]))
            left -= len(part.tokens)
    return chosen


def variants(formats: Sequence[Format]) -> tuple[str, ...]:
    """Kinds of change; no low bits if no format divides the experts' columns."""
    return ("drop", "low") if formats else ("drop",)


def variant_passes(source: SourceModel, formats: Sequence[Format]) -> int:
    """Layers that one token goes through in all variants: in one of layer i that and all after it,
    and the head, which in a large model is about as much work as a layer."""
    layers = len(source.layers)
    return len(variants(formats)) * sum(layers - i + 1 for i in source.moe_layers)


def _total(parts: Sequence[TokenSequence]) -> int:
    return sum(len(part.tokens) for part in parts)

"""Formats of the banks and of the trunk, as far as the shapes of the model allow them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reap.artifacts.plan import Bank
from reap.artifacts.spec import Format, ModelSpec, ModuleSpec
from reap.errors import ReapError
from reap.planning.settings import PlanSettings
from reap.planning.size import format_size

Ints = NDArray[np.int64]

GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Precision:
    """What a plan stores in which format, and what that weighs.

    low is empty if the model has no smaller format to offer. high_format and low_format are what
    the damage depends on: None means as in the source. Per MoE layer, int64 [L]: high_bytes and
    low_bytes of one expert, router_bytes of its rows in the router. trunk_bytes: all the rest.
    """

    trunk: dict[str, Format]
    high: Bank
    low: Bank
    high_format: Format | None
    low_format: Format | None
    high_bytes: Ints
    low_bytes: Ints
    router_bytes: Ints
    trunk_bytes: int


def choose_precision(spec: ModelSpec, settings: PlanSettings) -> Precision:
    """Resolve the settings' formats; raises ReapError if they do not fit the model's shapes."""
    source = source_bank(spec)
    trunk = trunk_formats(spec, settings.trunk)
    source_bytes = _expert_bytes(spec, source)
    high, high_format, high_bytes = source, None, source_bytes
    if settings.high != "source":
        chosen = _fitting(spec, "high", settings.high)
        if chosen is None:
            raise _no_group(spec, "high", Format.parse(settings.high))
        bank = dict.fromkeys(source, chosen)
        if bank != source:
            high, high_format, high_bytes = bank, chosen, _expert_bytes(spec, bank)
            _need_smaller("high", chosen, high_bytes, source_bytes, "the source")
    low: Bank = {}
    low_format = _fitting(spec, "low", settings.low)
    low_bytes = np.zeros_like(high_bytes)
    if low_format is not None:
        low = dict.fromkeys(source, low_format)
        low_bytes = _expert_bytes(spec, low)
        if (low_bytes >= high_bytes).any():
            if settings.low != PlanSettings.low:
                _need_smaller("low", low_format, low_bytes, high_bytes, "the high bank")
            low, low_format, low_bytes = {}, None, np.zeros_like(high_bytes)
    elif settings.low != PlanSettings.low:
        raise _no_group(spec, "low", Format.parse(settings.low))
    return Precision(
        trunk=trunk,
        high=high,
        low=low,
        high_format=high_format,
        low_format=low_format,
        high_bytes=high_bytes,
        low_bytes=low_bytes,
        router_bytes=np.array(
            [spec.router_row_bytes(layer, trunk) for layer in spec.moe_layers], dtype=np.int64
        ),
        trunk_bytes=spec.trunk_bytes(trunk),
    )


def source_bank(spec: ModelSpec) -> Bank:
    """The formats in which the source stores its experts, by projection name."""
    bank: Bank = {}
    for layer in spec.moe_layers:
        for projection in layer.projections:
            known = bank.setdefault(projection.name, projection.format)
            if known != projection.format:
                raise ReapError(
                    f"{layer.experts}.{projection.name} is stored as {projection.format.label}, "
                    f"in earlier layers as {known.label}; a bank has one format for all layers.",
                    "name one for the high bank, e.g. --high 4bit",
                )
    return bank


def trunk_formats(spec: ModelSpec, trunk: str) -> dict[str, Format]:
    """Format by module path of everything outside the experts that becomes smaller than it is.

    Router matrices stay at 8 bits or more: at 4 bits they send tokens to the wrong experts.
    """
    if trunk == "source":
        return {}
    formats: dict[str, Format] = {}
    for module in spec.modules:
        if module.role == "fixed":
            continue
        wanted = Format.parse("8bit" if module.role == "router" else trunk)
        chosen = _fitting_module(module, wanted)
        if chosen is not None and module.bytes(chosen) < module.bytes():
            formats[module.path] = chosen
    return formats


def _fitting_module(module: ModuleSpec, wanted: Format) -> Format | None:
    for group in (g for g in GROUPS if g <= wanted.group_size):
        if module.accepts(replace(wanted, group_size=group)):
            return replace(wanted, group_size=group)
    return None


def _fitting(spec: ModelSpec, bank: str, text: str) -> Format | None:
    """The format for all expert matrices, None if no group size fits; explicit ones must fit."""
    wanted = Format.parse(text)
    explicit = wanted.mode != "affine" or "-g" in text.strip().lower().replace(" ", "-")
    groups = (
        (wanted.group_size,) if explicit else tuple(g for g in GROUPS if g <= wanted.group_size)
    )
    columns = [p.columns for layer in spec.moe_layers for p in layer.projections]
    for group in groups:
        if all(width % group == 0 for width in columns):
            return replace(wanted, group_size=group)
    if explicit:
        raise _no_group(spec, bank, wanted)
    return None


def _no_group(spec: ModelSpec, bank: str, wanted: Format) -> ReapError:
    layer, projection = next(
        (layer, p)
        for layer in spec.moe_layers
        for p in layer.projections
        if p.columns % wanted.group_size
    )
    return ReapError(
        f"{bank} precision {wanted.label} does not fit: {layer.experts}.{projection.name} has "
        f"{projection.columns} columns, not a multiple of {wanted.group_size}.",
        "choose a smaller group, e.g. 2bit-g32",
    )


def _expert_bytes(spec: ModelSpec, bank: Bank) -> Ints:
    return np.array([spec.expert_bytes(layer, bank) for layer in spec.moe_layers], dtype=np.int64)


def _need_smaller(bank: str, chosen: Format, sizes: Ints, limits: Ints, than: str) -> None:
    too_large = np.flatnonzero(sizes >= limits)
    if too_large.size:
        size, limit = int(sizes[too_large[0]]), int(limits[too_large[0]])
        raise ReapError(
            f"{bank} precision {chosen.label} is lossy and not smaller than {than}: "
            f"{format_size(size)} for an expert against {format_size(limit)}.",
            f"choose fewer bits or leave --{bank} out",
        )

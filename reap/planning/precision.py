"""Formats of the banks and of the trunk, as far as the shapes of the model allow them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reap.artifacts.plan import Bank
from reap.artifacts.spec import Format, ModelSpec, ModuleSpec, Projection
from reap.errors import ReapError
from reap.planning.settings import NO_LOW, PlanSettings
from reap.planning.size import MOST, format_size, parse_percent, parse_size

Ints = NDArray[np.int64]

Mix = dict[Format, float]

GROUPS = (128, 64, 32)

DOWN = ("down_proj", "fc2")
"""Names of the projection back to the model's width, in mlx-lm's SwitchGLU and SwitchMLP."""


@dataclass(frozen=True)
class Precision:
    """What a plan stores in which format, and what that weighs.

    low is empty if the model has no smaller format to offer. high_mix and low_mix
    are what the damage depends on: the share of each format in a bank's lossy matrices; nothing if
    the bank is as in the source. Per MoE layer, int64 [L]: high_bytes and low_bytes of one expert,
    router_bytes of its rows in the router. trunk_bytes: all the rest.
    """

    trunk: dict[str, Format]
    high: Bank
    low: Bank
    high_mix: Mix
    low_mix: Mix
    high_bytes: Ints
    low_bytes: Ints
    router_bytes: Ints
    trunk_bytes: int


def choose_precision(spec: ModelSpec, settings: PlanSettings) -> Precision:
    """Resolve the settings' formats; raises ReapError if they do not fit the model's shapes."""
    names = tuple(dict.fromkeys(p.name for layer in spec.moe_layers for p in layer.projections))
    trunk = trunk_formats(spec, settings.trunk)
    high = source_bank(spec) if settings.high == "source" else _high_bank(spec, settings.high)
    low = {} if settings.low == NO_LOW else _low_bank(spec, settings, names, high)
    high_bytes = _expert_bytes(spec, high)
    return Precision(
        trunk=trunk,
        high=high,
        low=low,
        high_mix=_mix(spec, high),
        low_mix=_mix(spec, low),
        high_bytes=high_bytes,
        low_bytes=_expert_bytes(spec, low) if low else np.zeros_like(high_bytes),
        router_bytes=np.array(
            [spec.router_row_bytes(layer, trunk) for layer in spec.moe_layers], dtype=np.int64
        ),
        trunk_bytes=spec.trunk_bytes(trunk),
    )


def _high_bank(spec: ModelSpec, text: str) -> Bank:
    names = tuple(dict.fromkeys(p.name for layer in spec.moe_layers for p in layer.projections))
    high = _fitting(spec, "high", dict.fromkeys(names, text)) or {}
    if not high:
        raise _no_group(spec, "high", names, Format.parse(text))
    _need_smaller(spec, "high", high, None, "the source")
    return high


def _low_bank(spec: ModelSpec, settings: PlanSettings, names: tuple[str, ...], high: Bank) -> Bank:
    """Empty if the default does not fit the shapes or is not smaller than the high bank."""
    wanted = dict.fromkeys(names, settings.low)
    if settings.low_down is not None:
        down = [name for name in names if name in DOWN]
        if not down:
            raise ReapError(
                f"the experts of {spec.model_type} have no down projection: "
                f"they have {', '.join(names)}.",
                "leave --low-down out",
            )
        wanted |= dict.fromkeys(down, settings.low_down)
    chosen = settings.low != PlanSettings.low or settings.low_down is not None
    low = _fitting(spec, "low", wanted) or {}
    if chosen:
        for text in () if low else dict.fromkeys(wanted.values()):
            part = tuple(name for name in names if wanted[name] == text)
            if not _fitting(spec, "low", dict.fromkeys(part, text)):
                raise _no_group(spec, "low", part, Format.parse(text))
        _need_smaller(spec, "low", low, high, "the high bank")
    elif not _smaller(spec, low, high):
        return {}
    return low


def settings_of(values: Mapping[str, Any], spec: Callable[[], ModelSpec]) -> PlanSettings:
    """Settings by name; a `size` may be text, also in percent of the model's expert bytes."""
    size = values.get("size")
    if not isinstance(size, str):
        return PlanSettings(**values)
    share = parse_percent(size)
    if share is None:
        return PlanSettings(**{**values, "size": parse_size(size)})
    # More than any model has, until its trunk's precision is known.
    settings = PlanSettings(**{**values, "size": MOST})
    return replace(settings, size=size_with(spec(), settings, share))


def size_with(spec: ModelSpec, settings: PlanSettings, share: Decimal) -> int:
    """Bytes of the weights with at most `share` of what all experts take in the source, beside the
    trunk and all rows of the routers as the settings have them."""
    precision = choose_precision(spec, settings)
    routers = spec.num_experts * int(precision.router_bytes.sum())
    return precision.trunk_bytes + routers + int(share * spec.experts_bytes)


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
                    f"name one for the high bank, {_one_for_all(spec)}",
                )
    return bank


def _one_for_all(spec: ModelSpec) -> str:
    """The high bank of most bits that fits a source whose layers differ, as an option."""
    formats = {p.format for layer in spec.moe_layers for p in layer.projections}
    stored = [f.label.replace("-bit g", "bit-g") for f in formats if f.mode != "dense"]
    for text in sorted([*stored, "8bit", "4bit"], key=lambda t: -Format.parse(t).bits_per_weight):
        with suppress(ReapError):
            _high_bank(spec, text)
            return f"e.g. --high {text}"
    return "--high, of fewer bits than the source has anywhere"


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


def _fitting(spec: ModelSpec, bank: str, wanted: dict[str, str]) -> Bank | None:
    """The bank with `wanted` formats by projection, None if no group size fits.

    Projections of the same text share one group size. A group size that is written must fit.
    """
    formats: Bank = {}
    for text in dict.fromkeys(wanted.values()):
        names = tuple(name for name in wanted if wanted[name] == text)
        format = Format.parse(text)
        written = format.mode != "affine" or "-g" in text.strip().lower().replace(" ", "-")
        groups = [g for g in GROUPS if g <= format.group_size]
        if written:
            groups = [format.group_size]
        columns = [p.columns for p in _projections(spec, names)]
        fits = [g for g in groups if all(width % g == 0 for width in columns)]
        if not fits and written:
            raise _no_group(spec, bank, names, format)
        if not fits:
            return None
        formats |= dict.fromkeys(names, replace(format, group_size=fits[0]))
    return {name: formats[name] for name in wanted}


def _projections(spec: ModelSpec, names: tuple[str, ...]) -> list[Projection]:
    return [p for layer in spec.moe_layers for p in layer.projections if p.name in names]


def _no_group(spec: ModelSpec, bank: str, names: tuple[str, ...], wanted: Format) -> ReapError:
    layer, projection = next(
        (layer, p)
        for layer in spec.moe_layers
        for p in layer.projections
        if p.name in names and p.columns % wanted.group_size
    )
    return ReapError(
        f"{bank} precision {wanted.label} does not fit: {layer.experts}.{projection.name} has "
        f"{projection.columns} columns, not a multiple of {wanted.group_size}.",
        "choose a smaller group, e.g. 2bit-g32",
    )


def _expert_bytes(spec: ModelSpec, bank: Bank) -> Ints:
    return np.array([spec.expert_bytes(layer, bank) for layer in spec.moe_layers], dtype=np.int64)


def _smaller(spec: ModelSpec, bank: Bank, than: Bank) -> bool:
    return bool(bank) and all(
        p.bytes(bank[p.name]) < p.bytes(than[p.name]) for p in _projections(spec, tuple(bank))
    )


def _need_smaller(spec: ModelSpec, bank: str, chosen: Bank, limits: Bank | None, than: str) -> None:
    """A matrix that is lossy and not smaller would be wrong by any measure; limits None: source."""
    for projection in _projections(spec, tuple(chosen)):
        format = chosen[projection.name]
        allowed = limits[projection.name] if limits else projection.format
        size, limit = projection.bytes(format), projection.bytes(allowed)
        if size >= limit and (format != allowed or chosen == limits):
            raise ReapError(
                f"{bank} precision {format.label} is lossy and not smaller than {than}: "
                f"{format_size(size)} for an expert's {projection.name} against "
                f"{format_size(limit)}.",
                f"choose fewer bits or leave --{bank} out",
            )


def _mix(spec: ModelSpec, bank: Bank) -> Mix:
    """Shares of the matrices of an expert that `bank` does not store as the source does."""
    same = {
        name: all(p.format == format for p in _projections(spec, (name,)))
        for name, format in bank.items()
    }
    mix: Mix = {}
    for name, format in bank.items():
        if not same[name]:
            mix[format] = mix.get(format, 0.0) + 1 / len(bank)
    return mix

"""The report's charts, drawn from ReportData, and the packed expert map."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence

import numpy as np

from reap.artifacts.saliency import Floats
from reap.formatting import (
    count,
    decimal,
    nats,
    percent,
    plus_minus,
    practically,
    significant,
    tick,
)
from reap.report.charts import (
    WIDE,
    Dot,
    Figure,
    Frame,
    Line,
    Mark,
    Reference,
    Row,
    Stack,
    bars,
    dots,
    lines,
    scatter,
    spread,
    stacked_bar,
)
from reap.report.data import BANDS, ReportData, band

KL_BANDS = tuple(
    (low, high, name)
    for (low, _), (high, name) in zip(((0.0, ""), *BANDS), BANDS)
    if not name.startswith("between")
)
_SERIES = ("c1", "c2", "c3")


def draw(data: ReportData) -> dict[str, Figure]:
    """All charts that the data allows, by name."""
    figures = {
        "budget": budget(data),
        "kept": kept_per_layer(data),
        "saliency": saliency_curves(data),
        "concentration": concentration(data),
        "coverage": coverage(data),
    }
    if data.domains:
        figures["domains"] = domain_masses(data)
    if any(layer.agreement is not None for layer in data.layers):
        figures["stability"] = stability(data)
    if data.measured is not None:
        figures["drop"] = drop_curves(data)
        if data.measured.trials:
            figures["trial"] = equal_bytes(data)
        if data.measured.drop_kl.size:
            figures["layer_kl"] = layer_kl(data)
    if data.alternatives:
        figures["damage"] = damage(data)
    if any(score.kl for score in data.scores):
        figures["kl"] = domain_kl(data)
        figures["perplexity"] = domain_perplexity(data)
    if any(value > 0 for _, value in data.kl_quantiles):
        figures["quantiles"] = quantiles(data)
    if data.contenders and data.contenders[0].own:
        if sum(c.comparable for c in data.contenders) > 1:
            figures["rivals"] = rivals(data)
        if len(data.predictions) > 1:
            figures["predictions"] = predictions(data)
    return figures


def budget(data: ReportData) -> Figure:
    unit = data.unit
    shown = [part for part in data.slices if part.bytes > 0]
    parts = [
        (
            unit.text(part.bytes),
            f"p-{part.key}",
            float(part.bytes),
            f"{part.name}: {unit.text(part.bytes)} ({percent(part.bytes / data.budget)})",
        )
        for part in shown
    ]
    frame = Frame(
        "Where the bytes go",
        "; ".join(tip for *_, tip in parts),
        width=WIDE,
        height=46,
    )
    legend = tuple((f"p-{part.key}", part.name) for part in shown)
    return Figure(frame.title, stacked_bar(frame, parts), legend, wide=True)


def kept_per_layer(data: ReportData) -> Figure:
    stacks = []
    legend = []
    if data.has_high:
        stacks.append(Stack("high", "s-high", [layer.high for layer in data.layers]))
        legend.append(("s-high", f"high bank ({data.high_format})"))
    if data.has_low:
        stacks.append(Stack("low", "s-low", [layer.low for layer in data.layers]))
        legend.append(("s-low", f"low bank ({data.low_format})"))
    tips = [
        f"Layer {x.layer}: {x.kept} kept, {x.high} high + {x.low} low, "
        f"{percent(x.mass)} of the energy"
        for x in data.layers
    ]
    frame = Frame(
        "Experts kept in each layer",
        f"Between {min(x.kept for x in data.layers)} and {max(x.kept for x in data.layers)} of "
        f"{data.spec.num_experts} experts; {data.uniform:.1f} if spread evenly.",
        "layer",
        "experts",
        WIDE,
        280,
    )
    svg = bars(
        frame,
        [str(x.layer) for x in data.layers],
        stacks,
        tips,
        reference=Reference(data.uniform),
    )
    legend.append(("dash", f"uniform: {decimal(data.uniform, 1)} in each layer"))
    return Figure(frame.title, svg, tuple(legend), wide=True)


def saliency_curves(data: ReportData) -> Figure:
    series, references = [], []
    positive = [float(v) for curve in data.curves for v in curve.scores if v > 0]
    for css, curve in zip(_SERIES, data.curves):
        points = [(float(i + 1), float(v)) for i, v in enumerate(curve.scores)]
        series.append(Line(f"layer {curve.layer}", points, css))
        if curve.kept < data.spec.num_experts:
            references.append(Reference(curve.kept + 0.5, css=f"cut {css}", vertical=True))
    frame = Frame(
        "Saliency of the experts, sorted",
        f"Experts by falling {data.criterion} in an early, a middle and a late layer; a dashed "
        "line marks where each layer is cut.",
        "expert by rank",
        f"{data.criterion}, log scale",
    )
    svg = lines(
        frame,
        series,
        x=(1, max(data.spec.num_experts, 2)),
        y=_floor(spread(positive, log=True), 1e-8),
        log_y=True,
        references=references,
    )
    return Figure(frame.title, svg, _curve_legend(data))


def _floor(limits: tuple[float, float], part: float) -> tuple[float, float]:
    """Cut a log range below `part` of its top, so that outliers do not flatten the rest."""
    return max(limits[0], limits[1] * part), limits[1]


def _curve_legend(data: ReportData) -> tuple[tuple[str, str], ...]:
    return tuple(
        (css, f"layer {curve.layer} (keeps {count(curve.kept)})")
        for css, curve in zip(_SERIES, data.curves)
    )


def concentration(data: ReportData) -> Figure:
    total = data.spec.num_experts
    series = []
    for css, curve in zip(_SERIES, data.curves):
        rank = [(0.0, 0.0)] + [((i + 1) / total, float(v)) for i, v in enumerate(curve.cumulative)]
        series.append(Line(f"layer {curve.layer}", rank, css))
        at = curve.kept / total
        value = float(curve.cumulative[curve.kept - 1]) if curve.kept else 0.0
        tip = (
            f"Layer {curve.layer}: the best {curve.kept} experts ({percent(at, 0)}) hold "
            f"{percent(value)}"
        )
        series.append(Line("", [(at, value)], css, dots=True, tips=[tip]))
    frame = Frame(
        "How concentrated the saliency is",
        f"Share of a layer's summed {data.criterion} that its best experts hold. The diagonal is "
        "what equal experts would give; a dot marks the plan's cut.",
        "share of experts",
        f"share of {data.criterion}",
    )
    diagonal = Line("equal experts", [(0.0, 0.0), (1.0, 1.0)], "reference")
    svg = lines(
        frame,
        [diagonal, *series],
        x=(0, 1),
        y=(0, 1.02),
        x_format=_whole_percent,
        y_format=_whole_percent,
    )
    return Figure(frame.title, svg, _curve_legend(data))


def _whole_percent(value: float) -> str:
    return f"{tick(100 * value)} %"


def coverage(data: ReportData) -> Figure:
    frame = Frame(
        "Experts the calibration text hardly reached",
        f"{sum(x.never for x in data.layers)} experts were never routed to, "
        f"{sum(x.rare for x in data.layers)} rarely.",
        "layer",
        "experts",
        WIDE,
        220,
    )
    svg = bars(
        frame,
        [str(x.layer) for x in data.layers],
        [
            Stack("never", "s-never", [x.never for x in data.layers]),
            Stack("rarely", "s-rare", [x.rare for x in data.layers]),
        ],
        [f"Layer {x.layer}: {x.never} never routed, {x.rare} rarely" for x in data.layers],
        y_max=max(4.0, 1.15 * max(x.never + x.rare for x in data.layers)),
    )
    return Figure(
        frame.title,
        svg,
        (("s-never", "never routed"), ("s-rare", "routed by fewer than 30 tokens")),
        wide=True,
    )


def domain_masses(data: ReportData) -> Figure:
    low = ("s-low", "low bank") if data.has_low else None
    high = ("s-high", "high bank") if data.has_high else None
    rows = []
    for mass in data.domains:
        # The high bank's bar is drawn over the one of both banks.
        parts = []
        if low:
            parts.append(Dot(mass.kept, low[0], f"{mass.domain}: both banks {percent(mass.kept)}"))
        if high:
            parts.append(Dot(mass.high, high[0], f"{mass.domain}: high bank {percent(mass.high)}"))
        rows.append(Row(mass.domain, parts, percent(mass.kept)))
    frame = Frame(
        "Energy kept in each domain",
        "; ".join(f"{mass.domain} {percent(mass.kept)}" for mass in data.domains),
        "share of the domain's energy",
    )
    svg = dots(frame, rows, x=(0, 1), bars_from_zero=True, x_format=_whole_percent)
    return Figure(frame.title, svg, tuple(bank for bank in (high, low) if bank))


def stability(data: ReportData) -> Figure:
    known = [(x.layer, x.agreement, x) for x in data.layers if x.agreement is not None]
    agreements = [agreement for _, agreement, _ in known]
    chance = sum(x.chance for _, _, x in known) / len(known)
    tips = [f"Layer {x.layer}: Jaccard {decimal(a, 2)} of the best {x.kept}" for _, a, x in known]
    by_chance = [f"Layer {x.layer}: {decimal(x.chance, 2)} by chance" for _, _, x in known]
    frame = Frame(
        "Would half the text have kept the same experts?",
        f"Jaccard index of the experts that each half of the calibration text would keep: mean "
        f"{decimal(sum(agreements) / len(agreements), 2)}, by chance {decimal(chance, 2)}.",
        "layer",
        "Jaccard index",
        WIDE,
        220,
    )
    first, last = data.layers[0].layer, data.layers[-1].layer
    svg = lines(
        frame,
        [
            Line(
                "by chance",
                [(float(x.layer), x.chance) for _, _, x in known],
                "s-other",
                dashed=True,
                dots=True,
                tips=by_chance,
            ),
            Line(
                "agreement of the halves",
                [(float(layer), agreement) for layer, agreement, _ in known],
                "c1",
                dots=True,
                tips=tips,
            ),
        ],
        whole_x=True,
        x=(first - 0.5, last + 0.5),
        y=(0, 1.05),
    )
    legend = (
        ("c1", "agreement"),
        ("dash", f"chance at the layer's count, mean {decimal(chance, 2)}"),
    )
    return Figure(frame.title, svg, legend, wide=True)


def drop_curves(data: ReportData) -> Figure:
    measured = data.measured
    assert measured is not None
    shown = {curve.layer: css for css, curve in zip(_SERIES, data.curves)}
    faint, strong = [], []
    everything = [float(v) for v in measured.drop.ravel()]
    for index, facts in enumerate(data.layers):
        errors = [float(v) for v in measured.drop[index]]
        points = [(float(n), e) for n, e in zip(measured.kept, errors)]
        css = shown.get(facts.layer)
        name = f"layer {facts.layer}"
        if css is None:
            faint.append(Line(name, points, "faint"))
            continue
        tips = [
            f"Layer {facts.layer}, {n} kept: {practically(e, 3)}"
            for n, e in zip(measured.kept.tolist(), errors)
        ]
        strong.append(Line(name, points, css, dots=True, tips=tips))
        for trial in measured.trials:
            low = float(trial.low[index])
            everything.append(low)
            across = [(float(measured.kept.min()), low), (float(data.spec.num_experts), low)]
            strong.append(
                Line(f"{name}: every expert at {trial.label}: {significant(low)}", across, css,
                     dashed=True)
            )  # fmt: skip
    frame = Frame(
        "What dropping costs",
        "Relative squared error of the MoE block's output against the experts kept, measured with "
        "re-routing; dashed: every expert stored in low bits instead.",
        "experts kept",
        "relative squared error, log scale",
        height=300,
    )
    svg = lines(
        frame,
        [*faint, *strong],
        x=(float(measured.kept.min()), float(data.spec.num_experts)),
        y=_floor(spread(everything, log=True), 1e-5),
        log_y=True,
    )
    legend = [(css, f"layer {layer}") for layer, css in shown.items()]
    if faint:
        legend.append(("faint", "other layers"))
    if measured.trials:
        labels = ", ".join(trial.label for trial in measured.trials)
        legend.append(("dash", f"all experts at {labels}"))
    return Figure(frame.title, svg, tuple(legend))


def equal_bytes(data: ReportData) -> Figure:
    measured = data.measured
    assert measured is not None
    series, legend, values = [], [], []
    for css, trial in zip(_SERIES, measured.trials):
        for errors, dashed, what in (
            (trial.drop, False, "dropping to the same bytes"),
            (trial.low, True, f"every expert at {trial.label}"),
        ):
            points = [(float(x.layer), float(e)) for x, e in zip(data.layers, errors)]
            tips = [f"Layer {x:.0f}, {what}: {significant(e)}" for x, e in points]
            series.append(Line(what, points, css, dashed, dots=len(points) <= 30, tips=tips))
            values += [e for _, e in points]
        legend.append((css, f"bytes of {trial.label} ({percent(trial.bytes_share, 0)})"))
    first, last = data.layers[0].layer, data.layers[-1].layer
    frame = Frame(
        "Drop or low bits, at the same bytes",
        "By layer, relative squared error of dropping down to the bytes of a low-bit format "
        "(solid) and of storing every expert in it (dashed).",
        "layer",
        "relative squared error, log scale",
        height=300,
    )
    svg = lines(
        frame,
        series,
        whole_x=True,
        x=(first - 0.5, last + 0.5),
        y=spread(values, log=True),
        log_y=True,
    )
    return Figure(frame.title, svg, (*legend, ("solid", "dropping"), ("dash", "low bits")))


def layer_kl(data: ReportData) -> Figure:
    measured = data.measured
    assert measured is not None
    kinds = [("c1", f"keeps {count(measured.kl_kept)} experts", measured.drop_kl)]
    if measured.low_kl.size and measured.trials:
        kinds.append(("c2", f"every expert at {measured.trials[0].label}", measured.low_kl))
    series, values = [], []
    for css, what, divergence in kinds:
        points = [(float(x.layer), float(v)) for x, v in zip(data.layers, divergence)]
        tips = [f"Layer {x:.0f} alone, {what}: {significant(v)} nats" for x, v in points]
        series.append(Line(what, points, css, dots=True, tips=tips))
        values += [v for _, v in points]
    first, last = data.layers[0].layer, data.layers[-1].layer
    frame = Frame(
        "How much one layer alone changes the answer",
        "Mean KL divergence from the original when only this layer is changed.",
        "layer",
        "nats per token, log scale",
        WIDE,
        240,
    )
    limits = _floor(spread(values, log=True), 1e-8)
    svg = lines(frame, series, whole_x=True, x=(first - 0.5, last + 0.5), y=limits, log_y=True)
    legend = tuple((css, what) for css, what, _ in kinds)
    return Figure(frame.title, svg, legend, wide=True)


def damage(data: ReportData) -> Figure:
    def row(name: str, value: float, css: str) -> Row:
        return Row(name, [Dot(value, css, f"{name}: {significant(value)}")], significant(value))

    rows = [row("this plan", data.damage, "s-high")]
    rows += [row(name, value, "s-other") for name, value in data.alternatives]
    highest = max(data.damage, *(value for _, value in data.alternatives))
    frame = Frame(
        "Predicted damage of other plans at no more bytes",
        "; ".join(f"{row.label} {significant(row.dots[0].value)}" for row in rows),
        _damage_axis(data),
        width=WIDE,
    )
    svg = dots(
        frame,
        rows,
        x=(0, highest * 1.05 or 1.0),
        bars_from_zero=True,
        reference=None
        if data.lower_bound is None
        else Reference(data.lower_bound, "no plan can be below"),
    )
    return Figure(frame.title, svg, wide=True)


def _damage_axis(data: ReportData) -> str:
    return "predicted damage" + (f", {data.damage_unit}" if data.damage_unit else "")


def domain_kl(data: ReportData) -> Figure:
    rows = []
    values = []
    for score in data.scores:
        if score.kl is None:
            continue
        tip = f"{score.domain}: {nats(score.kl)} nats, {band(score.kl.value)}"
        rows.append(Row(score.domain, [Dot(score.kl.value, "c1", tip, score.kl.error)]))
        values.append(score.kl.value)
    if data.mean_kl is not None:
        mean = data.mean_kl
        tip = f"mean over domains: {nats(mean)} nats, {band(mean.value)}"
        rows.append(Row("all domains", [Dot(mean.value, "s-high", tip, mean.error)]))
    frame = Frame(
        "KL divergence from the original, by domain",
        "; ".join(f"{row.label} {significant(row.dots[0].value)} nats" for row in rows),
        "nats per token, log scale",
    )
    return Figure(frame.title, dots(frame, rows, x=_kl_range(values), log=True, bands=KL_BANDS))


def _kl_range(values: Sequence[float]) -> tuple[float, float]:
    """Whole decades around the values that reach from “very close” to “substantial”."""
    low, high = _floor(spread(values, log=True), 1e-8)
    return min(10.0 ** math.floor(math.log10(low)), 1e-3), max(
        10.0 ** math.ceil(math.log10(high)), 0.3
    )


def domain_perplexity(data: ReportData) -> Figure:
    rows, values = [], []
    for score in data.scores:
        if score.base_perplexity is None:
            continue
        base, pruned = score.base_perplexity, score.perplexity
        rows.append(
            Row(
                score.domain,
                [
                    Dot(
                        base.value,
                        "s-base",
                        f"{score.domain}, original: {plus_minus(base, 3)}",
                        shift=-5.0,
                    ),
                    Dot(
                        pruned.value,
                        "s-high",
                        f"{score.domain}, this plan: {plus_minus(pruned, 3)}",
                        shift=5.0,
                    ),
                ],
            )
        )
        values += [base.value, pruned.value]
    frame = Frame(
        "Perplexity by domain",
        "; ".join(
            f"{row.label} from {decimal(row.dots[0].value, 2)} to {decimal(row.dots[1].value, 2)}"
            for row in rows
        ),
        "perplexity, log scale",
    )
    svg = dots(frame, rows, x=spread(values, log=True), log=True, joined=True)
    return Figure(frame.title, svg, (("s-base", "original"), ("s-high", "this plan")))


def quantiles(data: ReportData) -> Figure:
    points = [(value, percentage / 100) for percentage, value in data.kl_quantiles]
    positive = [value for value, _ in points if value > 0]
    tips = [
        f"{percentage:g} % of the tokens diverge by {significant(value)} nats or less"
        for percentage, value in data.kl_quantiles
    ]
    frame = Frame(
        "How the divergence is spread over tokens",
        "Share of tokens whose KL divergence is at most the value on the x axis.",
        "nats, log scale",
        "share of tokens",
    )
    svg = lines(
        frame,
        [Line("cumulative share of tokens", points, "c1", dots=True, tips=tips)],
        x=_floor(spread(positive, log=True), 1e-8),
        y=(0, 1.02),
        log_x=True,
        y_format=_whole_percent,
    )
    return Figure(frame.title, svg)


def rivals(data: ReportData) -> Figure:
    unit = data.unit
    marks = [
        Mark(
            c.weight_bytes / unit.factor,
            c.kl.value,
            c.kl.error,
            c.label,
            "s-high" if c.own else "s-other",
            f"{c.label}: {unit.text(c.weight_bytes)}, {nats(c.kl)} nats",
        )
        for c in data.contenders
        if c.comparable and c.kl is not None
    ]
    frame = Frame(
        "Size against divergence",
        "; ".join(mark.tip for mark in marks),
        f"size of the weights, {unit.name}",
        "mean KL divergence in nats, log scale",
        WIDE,
        380,
    )
    svg = scatter(
        frame,
        marks,
        x=(0.94 * min(mark.x for mark in marks), 1.06 * max(mark.x for mark in marks)),
        y=_measured_range(marks),
        bands=KL_BANDS,
    )
    return Figure(frame.title, svg, _whose(data), wide=True)


def _measured_range(marks: Sequence[Mark]) -> tuple[float, float]:
    """Holds every mark within eight decades of the largest, and the bands' names."""
    low, high = _floor(spread([mark.y for mark in marks], log=True), 1e-8)
    return min(low / 1.4, 5e-5), max(high * 1.4, 0.3)


def _whose(data: ReportData) -> tuple[tuple[str, str], ...]:
    others = "plain recipes" if data.rivals_are_plain else "other plans"
    return ("s-high", "this plan"), ("s-other", others)


def predictions(data: ReportData) -> Figure:
    marks = [
        Mark(
            c.predicted,
            c.kl.value,
            c.kl.error,
            c.label,
            "s-high" if c.own else "s-other",
            f"{c.label}: predicted {significant(c.predicted)} {data.damage_unit}, "
            f"measured {nats(c.kl)} nats",
        )
        for c in data.predictions
        if c.kl is not None and c.predicted is not None
    ]
    frame = Frame(
        "Predicted damage against measured divergence",
        "; ".join(mark.tip for mark in marks),
        f"{_damage_axis(data)}, log scale",
        "mean KL divergence in nats, log scale",
        WIDE,
        380,
    )
    low, high = _floor(spread([mark.x for mark in marks], log=True), 1e-8)
    in_nats = data.damage_unit == "nats"
    svg = scatter(
        frame,
        marks,
        x=(low / 1.4, high * 1.4),
        y=_measured_range(marks),
        bands=KL_BANDS,
        log_x=True,
        diagonal=in_nats,
    )
    same = (("dash", "measured as predicted"),) if in_nats else ()
    return Figure(frame.title, svg, (*_whose(data), *same), wide=True)


def packed_map(data: ReportData) -> dict[str, object]:
    """The expert map for the page's script: base64 of little-endian uint16 arrays.

    `cells` is id + 16384 × state; `saliency` and `share` are logarithmic codes (see `_encode`).
    """
    grid = data.map
    saliency, saliency_range = _encode(grid.saliency)
    share, share_range = _encode(grid.share)
    # The state has the two bits above the id.
    cells = (grid.ids | grid.state << 14).astype("<u2")
    return {
        "layers": [facts.layer for facts in data.layers],
        "experts": data.spec.num_experts,
        "cells": base64.b64encode(cells.tobytes()).decode(),
        "saliency": saliency,
        "saliencyRange": saliency_range,
        "share": share,
        "shareRange": share_range,
        "states": [
            "dropped",
            f"low bank ({data.low_format})",
            f"high bank ({data.high_format})",
        ],
    }


def _encode(values: Floats) -> tuple[str, list[float]]:
    """uint16 codes: 0 is zero, 1…65535 are evenly spaced logarithms between the two ends."""
    positive = values[values > 0]
    if not positive.size:
        return base64.b64encode(np.zeros(values.shape, "<u2").tobytes()).decode(), [0.0, 1.0]
    low, high = float(np.log10(positive.min())), float(np.log10(positive.max()))
    logs = np.log10(np.where(values > 0, values, positive.min()))
    codes = 1 + np.rint((logs - low) / ((high - low) or 1.0) * 65534)
    packed = np.where(values > 0, codes, 0).astype("<u2")
    return base64.b64encode(packed.tobytes()).decode(), [round(low, 6), round(high, 6)]

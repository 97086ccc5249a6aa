"""The report's tables: every chart has its numbers in one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reap.artifacts.evaluation import Estimate
from reap.artifacts.provenance import Corpus
from reap.formatting import (
    MISSING,
    count,
    decimal,
    digits_for,
    nats,
    percent,
    plus_minus,
    practically,
    significant,
)
from reap.report.data import ReportData


@dataclass(frozen=True)
class Table:
    """Cells as text; the first `text_columns` columns (and `wrapped` ones) are words. `strong`
    names the rows to stress."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1
    strong: frozenset[int] = frozenset()


def tabulate(data: ReportData) -> dict[str, Table]:
    """All tables that the data allows, by name."""
    tables = {
        "budget": _budget(data),
        "layers": _layers(data),
        "curves": _curves(data),
        "domains": _domains(data),
        "calibration": _corpora("Calibration text", data.calibration, "tokens"),
        "files": _files(data),
        "settings": Table("Settings of the plan", ("setting", "value"), data.settings, 2),
    }
    if data.scores:
        tables["scores"] = _scores(data)
        tables["evaluation"] = _corpora("Evaluation text", data.evaluation_text, "tokens read")
    if data.kl_quantiles:
        tables["quantiles"] = Table(
            "Quantiles of the KL divergence over tokens",
            ("percentile", "nats"),
            tuple((f"{p:g} %", significant(value)) for p, value in data.kl_quantiles),
        )
    if len(data.contenders) > 1 or (data.contenders and not data.contenders[0].own):
        tables["rivals"] = _rivals(data)
    if data.measured is not None:
        tables["drop"] = _drop(data)
    if data.alternatives:
        tables["damage"] = _damage(data)
    return tables


def _budget(data: ReportData) -> Table:
    rows = [
        (part.name, data.unit.number(part.bytes), percent(part.bytes / data.budget),
         count(part.bytes))
        for part in data.slices
    ]  # fmt: skip
    whole = "Size" if data.by_size else "Budget"
    rows.append((whole, data.unit.number(data.budget), percent(1.0), count(data.budget)))
    return Table(
        "Size of the weights" if data.by_size else "Memory budget",
        ("part", data.unit.name, "share", "bytes"),
        tuple(rows),
        strong=frozenset({len(rows) - 1}),
    )


def _layers(data: ReportData) -> Table:
    rows = tuple(
        (
            str(x.layer),
            count(x.kept),
            count(x.high),
            count(x.low),
            percent(x.kept / data.spec.num_experts, 0),
            percent(x.mass),
            MISSING if x.agreement is None else decimal(x.agreement, 2),
            MISSING if x.agreement is None else decimal(x.chance, 2),
            count(x.never),
            count(x.rare),
        )
        for x in data.layers
    )
    columns = ("layer", "kept", "high", "low", "of experts", "of energy", "halves agree",
               "by chance", "never routed", "rarely routed")  # fmt: skip
    return Table("Every layer", columns, rows)


def _curves(data: ReportData) -> Table:
    parts = (0.1, 0.25, 0.5, 0.75)
    rows = tuple(
        (
            f"layer {curve.layer}",
            *(
                percent(float(curve.cumulative[max(round(p * len(curve.cumulative)), 1) - 1]))
                for p in parts
            ),
            percent(float(curve.cumulative[curve.kept - 1]) if curve.kept else 0.0),
        )
        for curve in data.curves
    )
    columns = ("share of saliency in", *(f"best {percent(p, 0)}" for p in parts), "kept")
    return Table("Concentration of the saliency", columns, rows)


def _domains(data: ReportData) -> Table:
    rows = tuple(
        (
            mass.domain,
            count(mass.tokens),
            percent(mass.kept),
            percent(mass.high),
            percent(mass.low),
            percent(mass.worst),
            str(mass.worst_layer) if mass.worst_layer >= 0 else MISSING,
        )
        for mass in data.domains
    )
    columns = ("domain", "tokens", "energy kept", "high bank", "low bank", "worst layer", "which")
    return Table("Energy kept in each domain", columns, rows)


def _corpora(caption: str, corpora: Sequence[Corpus], tokens: str) -> Table:
    rows = tuple(
        (c.domain, c.source, c.sha256, count(c.documents), count(c.tokens)) for c in corpora
    )
    return Table(caption, ("domain", "source", "sha256", "documents", tokens), rows, 3)


def _files(data: ReportData) -> Table:
    rows = tuple(
        (file.kind, file.name, file.provenance.reap_version, file.provenance.command,
         file.sha256 or MISSING)
        for file in data.files
    )  # fmt: skip
    return Table("Files", ("kind", "file", "reap", "command", "sha256"), rows, 5)


def _scores(data: ReportData) -> Table:
    rows = [
        (
            score.domain,
            count(score.documents),
            count(score.tokens),
            _perplexity(score.base_perplexity),
            _perplexity(score.perplexity),
            plus_minus(ratio, 4),
            nats(score.kl),
            plus_minus(score.same_top, 2, 100),
        )
        for score, ratio in zip(data.scores, data.ratios, strict=True)
    ]
    rows.append(
        (
            "all",
            count(data.evaluated_documents),
            count(data.evaluated_tokens),
            _perplexity(data.base_perplexity),
            _perplexity(data.perplexity),
            plus_minus(data.ratio, 4),
            nats(data.mean_kl),
            plus_minus(data.same_top, 2),
        )
    )
    columns = ("domain", "documents", "tokens scored", "perplexity, original",
               "perplexity, this plan", "ratio, paired", "KL, nats",
               "same top token, %")  # fmt: skip
    return Table("Quality by domain", columns, tuple(rows), strong=frozenset({len(rows) - 1}))


def _perplexity(estimate: Estimate | None) -> str:
    return plus_minus(estimate, digits_for([10 * estimate.error] if estimate else [], 2, 4))


def _rivals(data: ReportData) -> Table:
    digits = digits_for([2 * c.difference.error for c in data.contenders if c.difference], 4)
    predicted = data.rivals_predict
    own = data.contenders[0] if data.contenders[0].own else None
    rows = []
    for c in data.contenders:
        interval = MISSING
        if c.interval is not None:
            low, high = c.interval
            interval = f"{_signed(low, digits)} … {_signed(high, digits)}"
        rows.append(
            (
                c.label,
                data.unit.number(c.weight_bytes),
                data.unit.number(c.expert_bytes),
                decimal(c.perplexity.value, 2),
                *([MISSING if c.predicted is None else nats(Estimate(c.predicted, math.nan))]
                  if predicted else []),
                nats(c.kl),
                _signed(c.difference.value, digits) if c.difference else MISSING,
                interval,
                c.outcome or MISSING,
            )
        )  # fmt: skip
    unit = data.unit.name
    damage = (f"predicted{f', {data.damage_unit}' if data.damage_unit else ''}",)
    columns = ("plan", f"weights, {unit}", f"experts, {unit}", "perplexity",
               *(damage if predicted else ()), "mean KL, nats", "this − other",
               "95 % interval", "this plan is")  # fmt: skip
    return Table(
        f"This plan and {'plain recipes' if data.rivals_are_plain else 'other plans'}",
        columns,
        tuple(rows),
        strong=frozenset({0}) if own else frozenset(),
    )


def _signed(value: float, digits: int) -> str:
    text = decimal(value, digits)
    if value and not float(text.replace(",", "").replace("−", "-")):
        text = significant(value, 2)
        return f"+{text}" if value > 0 else text
    return f"+{text}" if value > 0 and float(text.replace(",", "")) > 0 else text


def _drop(data: ReportData) -> Table:
    measured = data.measured
    assert measured is not None
    columns = [
        "layer",
        *(f"{count(n)} kept" for n in measured.kept.tolist()),
        "at the plan's count",
    ]
    for trial in measured.trials:
        columns += [f"all at {trial.label}", "dropping, same bytes"]
    if measured.drop_kl.size:
        columns.append(f"KL alone, {count(measured.kl_kept)} kept")
    if measured.low_kl.size:
        columns.append("KL alone, low bits")
    rows = []
    for index, facts in enumerate(data.layers):
        cells = [str(facts.layer)]
        cells += [practically(float(e)) for e in measured.drop[index]]
        cells.append(practically(float(measured.at_plan[index])))
        for trial in measured.trials:
            cells += [
                practically(float(trial.low[index])),
                practically(float(trial.drop[index])),
            ]
        cells += [
            practically(float(divergence[index]))
            for divergence in (measured.drop_kl, measured.low_kl)
            if divergence.size
        ]
        rows.append(tuple(cells))
    return Table("Relative squared error of each layer's output", tuple(columns), tuple(rows))


def _damage(data: ReportData) -> Table:
    def row(name: str, value: float) -> tuple[str, str, str]:
        ratio = value / data.damage if data.damage > 0 else float("nan")
        return name, practically(value, 4), practically(ratio, 3)

    bound = [] if data.lower_bound is None else [row("no plan can be below", data.lower_bound)]
    others = (row(name, value) for name, value in data.alternatives)
    unit = f", {data.damage_unit}" if data.damage_unit else ""
    return Table(
        "Predicted damage",
        ("plan", f"damage{unit}", "× this plan"),
        (*bound, row("this plan", data.damage), *others),
        strong=frozenset({len(bound)}),
    )

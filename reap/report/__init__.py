"""From the stages' files to one self-contained HTML page; reads files only, no mlx."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from reap import __version__, formatting
from reap.artifacts.evaluation import Estimate, Evaluation
from reap.artifacts.files import refuse_existing, sha256, written_whole
from reap.artifacts.plan import Plan
from reap.artifacts.saliency import CRITERIA, Saliency
from reap.errors import ArtifactError
from reap.report.data import InputFile, ReportData
from reap.report.figures import draw, packed_map
from reap.report.tables import tabulate

__all__ = ["ReportData", "render", "write_report"]


def write_report(
    out: Path,
    *,
    saliency: Path,
    plan: Path,
    evaluation: Path | None,
    rivals: Sequence[Path] = (),
    rival_plans: Sequence[Path] = (),
    force: bool = False,
) -> ReportData:
    """Write the report of these files to `out`, one HTML file that needs nothing else.

    `rivals` are evaluations of other plans on the same text, `rival_plans` those plans in any
    order. The same inputs give the same bytes. Raises ArtifactError for files that cannot be read
    or do not belong together, ReapError if `out` exists and `force` is not set.
    """
    refuse_existing(out, force)
    loaded_saliency, loaded_plan = Saliency.load(saliency), Plan.load(plan)
    loaded_evaluation = Evaluation.load(evaluation) if evaluation is not None else None
    loaded_rivals = [Evaluation.load(path) for path in rivals]
    loaded_plans = [(sha256(path), Plan.load(path)) for path in rival_plans]
    if evaluation is not None and loaded_evaluation is not None:
        measured = loaded_evaluation.provenance.inputs.get("plan")
        if measured is not None and measured != sha256(plan):
            raise ArtifactError(
                f"{evaluation} is of a checkpoint with another plan than {plan}.",
                "evaluate the checkpoint of this plan, or give the plan of that checkpoint",
            )
    files = [
        InputFile("saliency", saliency.name, sha256(saliency), loaded_saliency.provenance),
        InputFile("plan", plan.name, sha256(plan), loaded_plan.provenance),
    ]
    if evaluation is not None and loaded_evaluation is not None:
        files.append(
            InputFile(
                "evaluation", evaluation.name, sha256(evaluation), loaded_evaluation.provenance
            )
        )
    files += [
        InputFile("other evaluation", path.name, sha256(path), rival.provenance)
        for path, rival in zip(rivals, loaded_rivals, strict=True)
    ]
    files += [
        InputFile("other plan", path.name, sha, other.provenance)
        for path, (sha, other) in zip(rival_plans, loaded_plans, strict=True)
    ]
    data = ReportData.build(
        loaded_saliency, loaded_plan, loaded_evaluation, loaded_rivals, files, loaded_plans
    )
    html = render(data)
    with written_whole(out, force=force) as partial:
        partial.write_text(html, encoding="utf-8", newline="\n")
    return data


def render(data: ReportData) -> str:
    """The HTML page of `data`."""
    environment = Environment(
        loader=PackageLoader("reap.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=formatting.count,
        decimal=formatting.decimal,
        percent=formatting.percent,
        significant=formatting.significant,
        practically=formatting.practically,
        plus_minus=formatting.plus_minus,
    )
    return environment.get_template("template.html.jinja").render(
        data=data,
        figures=draw(data),
        tables=tabulate(data),
        map=packed_map(data),
        summary=_llama_block(data),
        criterion=CRITERIA[data.criterion],
        kl=formatting.nats(Estimate(data.mean_kl.value, math.nan)) if data.mean_kl else "",
        version=__version__,
    )


def _llama_block(data: ReportData) -> str:
    """The statistics in the words and the order of `llama-perplexity --kl-divergence`."""
    percentages = {"Cor(ln(PPL(Q)), ln(PPL(base)))", "Mean Δp", "RMS Δp", "Same top p"}
    names = {100.0: "Maximum KLD", 50.0: "Median  KLD", 0.0: "Minimum KLD"}
    blocks: dict[str, list[str]] = {}
    for name, estimate in data.summary:
        if "KLD" in name:
            title = "KL divergence statistics"
        elif "p" in name and "PPL" not in name:
            title = "Token probability statistics"
        else:
            title = "Perplexity statistics"
        unit = " %" if name in percentages else ""
        blocks.setdefault(title, []).append(_llama_line(name, estimate, unit))
        if name == "Mean KLD":
            for percentage, nats in reversed(data.kl_quantiles):
                label = names.get(percentage, f"{percentage:.1f}%   KLD")
                blocks[title].append(_llama_line(label, Estimate(nats, math.nan), ""))
    return "\n\n".join(
        "\n".join((f"====== {title} ======", *rows)) for title, rows in blocks.items()
    )


def _llama_line(name: str, estimate: Estimate, unit: str) -> str:
    digits = 3 if unit else 6
    if not math.isfinite(estimate.value):
        return f"{name:<30} : {formatting.MISSING:>11}"
    if not unit and 0 < abs(estimate.value) < 1e-5:
        text = f"{name:<30} : {estimate.value:11.2e}"
        return text + (f" ± {estimate.error:10.1e}" if math.isfinite(estimate.error) else "")
    text = f"{name:<30} : {estimate.value:11.{digits}f}"
    if estimate.error == estimate.error:
        text += f" ± {estimate.error:10.{digits}f}"
    return text + unit

"""What the files say, as tables on stderr and as figures for --json."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reap.artifacts import Evaluation, Format, Plan, Saliency
from reap.artifacts.evaluation import Estimate
from reap.cli.output import say, table
from reap.planning import format_size

if TYPE_CHECKING:
    from reap.artifacts.manifest import FileCheck
    from reap.export import Outline
    from reap.models.source import SourceModel
    from reap.planning import PlanDiff, PlanSettings

Figures = dict[str, Any]


def say_left_out(layers: int, nbytes: int) -> None:
    """What of a checkpoint is neither calibrated nor planned nor exported, if there is any."""
    if layers:
        what = "layer" if layers == 1 else "layers"
        say(
            f"Leaves out {layers} multi-token-prediction {what} ({format_size(nbytes)}), which "
            "mlx-lm does not run."
        )


def saliency_figures(saliency: Saliency) -> Figures:
    """Tokens of each domain, and per layer how unevenly the experts carry the output."""
    count = saliency.count.sum(axis=(0, 1))
    tokens = saliency.tokens.sum(axis=(0, 2)) // len(saliency.layers)
    falling = -np.sort(-saliency.score("energy"), axis=1)
    total = falling.sum(axis=1)
    experts = falling.shape[1]

    def carried(busiest: int) -> list[float]:
        return (falling[:, :busiest].sum(axis=1) / np.where(total > 0, total, 1)).tolist()

    quarter, half = carried(max(1, experts // 4)), carried(max(1, experts // 2))
    measured = saliency.measurement
    return {
        "model": saliency.spec.model,
        "domains": dict(zip(saliency.domains, tokens.tolist())),
        "never_routed": int((count == 0).sum()),
        "measured_tokens": 0 if measured is None else int(measured.tokens.max()),
        "sensitivity_tokens": 0 if measured is None else measured.sensitivity_tokens,
        "layers": [
            {
                "layer": layer,
                "never_routed": int((count[row] == 0).sum()),
                "top_quarter_energy": quarter[row],
                "top_half_energy": half[row],
            }
            for row, layer in enumerate(saliency.layers)
        ],
    }


def show_saliency(saliency: Saliency) -> None:
    spec, figures = saliency.spec, saliency_figures(saliency)
    say(
        f"{spec.model} ({spec.model_type}): {spec.parameters:,} parameters, "
        f"{len(spec.moe_layers)} MoE layers of {spec.num_experts} experts, top {spec.top_k}."
    )
    table(
        "Tokens",
        ["domain", "tokens"],
        [[name, f"{number:,}"] for name, number in figures["domains"].items()],
    )
    say(
        f"Drops and low bits were measured on {figures['measured_tokens']:,} tokens, sensitivity "
        f"on {figures['sensitivity_tokens']:,}."
    )
    table(
        "Energy Σg²‖f‖² carried by the busiest experts",
        ["layer", "top quarter", "top half", "never routed"],
        [
            [
                str(layer["layer"]),
                f"{100 * layer['top_quarter_energy']:.1f} %",
                f"{100 * layer['top_half_energy']:.1f} %",
                str(layer["never_routed"]),
            ]
            for layer in figures["layers"]
        ],
    )


def plan_figures(plan: Plan) -> Figures:
    water = plan.waterfall
    return {
        "layout": plan.layout,
        "kept": sum(plan.expert_counts),
        "of": plan.num_experts * len(plan.layers),
        "high": sum(layer.high for layer in plan.layers),
        "bytes": {**vars(water), "weights": water.weights, "slack": water.slack},
        "damage": plan.damage,
        "lower_bound": plan.lower_bound,
        "alternatives": plan.alternatives,
    }


def show_plan(plan: Plan) -> None:
    """The byte waterfall and the counts."""
    from reap.report.settings import low_bank_rule

    water = plan.waterfall

    def line(name: str, value: int, sign: str = "") -> list[str]:
        share = f"{100 * value / water.budget:.1f} %" if water.budget else ""
        return [name, f"{sign}{value:,}", format_size(value), share]

    by_size = not water.reserve and not water.state
    high = "/".join(dict.fromkeys(f.label for f in plan.high.values()))
    low = "/".join(dict.fromkeys(f.label for f in plan.low.values()))
    rows = [
        line("size of the weights" if by_size else "budget", water.budget),
        line("trunk", water.trunk, "-"),
        line("routers", water.router, "-"),
    ]
    if water.high:
        rows.append(line(f"experts, high bank ({high})", water.high, "-"))
    if water.low:
        rows.append(line(f"experts, low bank ({low})", water.low, "-"))
    if not by_size:
        rows += [
            line(f"state of {water.context:,} tokens", water.state, "-"),
            line("reserve", water.reserve, "-"),
        ]
    rows.append(line("slack", water.slack))
    table("Bytes", ["", "bytes", "", "share"], rows)
    kept = [len(layer.kept) for layer in plan.layers]
    highs = [layer.high for layer in plan.layers]
    say(
        f"{plan.layout}: {sum(kept):,} of {plan.num_experts * len(kept):,} experts kept, "
        f"{sum(highs):,} high and {sum(kept) - sum(highs):,} low; "
        f"{_range(kept)} in a layer."
    )
    if plan.settings.get("identity"):
        say("All experts fit: nothing needs pruning.")
        _say_warnings(plan)
        return
    unit = plan.settings.get("damage_unit", "")
    line_of_damage = f"Predicted damage {plan.damage:.4g} {unit}".rstrip()
    if "recipe" not in plan.settings:  # a plain recipe is not the best of anything
        line_of_damage += f", no plan under the same constraints is below {plan.lower_bound:.4g}"
    say(f"{line_of_damage}{f'; {plan.uncounted} not counted' if plan.uncounted else ''}.")
    if plan.alternatives:
        say("Others at no more bytes:")
    for name, damage in plan.alternatives.items():
        say(f"  {name}: {damage:.4g}")
    for assumed in plan.settings.get("assumed", ()):
        say(f"assumed, not measured: {assumed}")
    rule = low_bank_rule(plan)
    if rule:
        say(rule)
    _say_warnings(plan)


def _say_warnings(plan: Plan) -> None:
    for warning in plan.settings.get("warnings", ()):
        say(f"warning: {warning}")


def _range(counts: list[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


def plan_diff(before: Path, after: Path) -> PlanDiff:
    """What the plan in `after` does differently from that in `before`."""
    from reap.planning import diff

    return diff(Plan.load(before), Plan.load(after))


def diff_figures(found: PlanDiff) -> Figures:
    return asdict(found) | {"jaccard": found.jaccard}


def sweep(saliency: Path, settings: PlanSettings, extra: str | None, *, quiet: bool) -> Figures:
    """The frontier of sizes and what `extra` more bytes buy; a table on stderr unless `quiet`."""
    from reap.planning import frontier, next_bytes, parse_size

    measured = Saliency.load(saliency)
    points = frontier(measured, settings)
    more = next_bytes(measured, settings, parse_size(extra) if extra else None)
    if not quiet:
        rows = []
        for point in points:
            best = min(point.plain, key=lambda name: point.plain[name], default="")
            rows.append(
                [
                    "asked" if point.amount == settings.amount else "",
                    format_size(point.amount),
                    format_size(point.weights),
                    f"{point.kept:,}",
                    f"{point.high:,}",
                    point.layout,
                    f"{point.damage:.4g}",
                    f"{point.lower_bound:.4g}",
                    f"{point.plain[best]:.4g} {best}" if best else "-",
                ]
            )
        what = "size" if settings.budget is None else "budget"
        table(
            "Predicted damage",
            ["", what, "weights", "kept", "high", "layout", "damage", "bound", "best plain recipe"],
            rows,
        )
        say(str(more))
    return {
        "asked": settings.amount,
        "frontier": [asdict(point) for point in points],
        "more": asdict(more) | {"gain": more.gain},
    }


def evaluation_figures(evaluation: Evaluation) -> Figures:
    """Values and standard errors."""

    def pair(estimate: Estimate | None) -> dict[str, float] | None:
        return None if estimate is None else dict(vars(estimate))

    domains = {}
    for domain in evaluation.domains:
        score = evaluation.domain_score(domain)
        domains[domain] = {
            "tokens": score.tokens,
            "documents": score.documents,
            "perplexity": pair(score.perplexity),
            "base_perplexity": pair(score.base_perplexity),
            "kl": pair(score.kl),
            "same_top": pair(score.same_top),
        }
    figures: Figures = {"label": evaluation.label, "domains": domains}
    if evaluation.reference is not None:
        figures["mean_kl"] = pair(evaluation.mean_kl)
    return figures


def show_evaluation(evaluation: Evaluation) -> None:
    from reap.formatting import nats, plus_minus

    compared = evaluation.reference is not None
    rows = []
    for domain in evaluation.domains:
        score = evaluation.domain_score(domain)
        row = [
            domain,
            f"{score.tokens:,}",
            plus_minus(score.perplexity, 3) + _of_one(score.perplexity),
        ]
        if score.base_perplexity and score.kl and score.same_top:
            row += [
                f"{score.base_perplexity.value:.3f}",
                nats(score.kl) + _of_one(score.kl),
                f"{100 * score.same_top.value:.1f} %",
            ]
        rows.append(row)
    columns = ["domain", "tokens scored", "perplexity ± SE"]
    if compared:
        columns += ["source's", "KL ± SE (nats)", "same top token"]
    table(evaluation.label, columns, rows)
    if compared:
        mean = evaluation.mean_kl
        say(f"Mean KL over the domains: {nats(mean)}{_of_one(mean)} nats.")


def _of_one(estimate: Estimate) -> str:
    return "" if math.isfinite(estimate.error) else " (one document)"


def checkpoint_figures(source: SourceModel) -> Figures:
    """Bytes, and the experts of every decoder layer with their banks' formats."""
    config = source.config
    count = len(source.layers)
    counts = config.get("expert_counts") or [
        source.num_experts if index in source.moe_layers else 0 for index in range(count)
    ]
    tensors = source.checkpoint.tensors
    splits = config.get("expert_bank_split") or [0] * count
    return {
        "model_type": config["model_type"],
        "bytes": source.checkpoint.nbytes,
        "loaded_bytes": sum(tensors[name].nbytes for name in source.loaded_names()),
        "prediction_layers": len(source.prediction_layers),
        "prediction_bytes": source.prediction_bytes,
        "tensors": len(tensors),
        "expert_counts": counts,
        "expert_bank_split": splits,
        "expert_formats": _bank_formats(source, splits),
    }


def _bank_formats(source: SourceModel, splits: Sequence[int]) -> dict[int, list[str]]:
    """Formats of every layer's banks, the high one first: the config's, else the tensors'."""
    from reap.models.formats import mlx_format

    quantization = source.config.get("quantization") or {}
    stored: dict[int, str] = {}
    if "model_file" not in source.config:
        for layer in source.spec().moe_layers:
            stored[layer.layer] = _joined(p.format for p in layer.projections)

    def label(index: int, bank: str) -> str:
        path = f"{source.layer_prefix(index)}.{source.family.experts}{bank}"
        entries = [value for name, value in quantization.items() if name.rpartition(".")[0] == path]
        named = _joined(mlx_format(entry) for entry in entries)
        return named or stored.get(index, "as stored")

    return {
        index: [label(index, bank) for bank in ((".high", ".low") if splits[index] else ("",))]
        for index in source.moe_layers
    }


def _joined(formats: Iterable[Format]) -> str:
    return "/".join(dict.fromkeys(format.label for format in formats))


def show_checkpoint(source: SourceModel) -> None:
    figures = checkpoint_figures(source)
    say(
        f"{source.checkpoint.path}: {figures['model_type']}, {format_size(figures['bytes'])} in "
        f"{figures['tensors']:,} tensors, of which mlx-lm loads "
        f"{format_size(figures['loaded_bytes'])}."
    )
    say_left_out(figures["prediction_layers"], figures["prediction_bytes"])
    rows = []
    for layer, (kept, split) in enumerate(
        zip(figures["expert_counts"], figures["expert_bank_split"])
    ):
        if kept:
            formats = figures["expert_formats"][layer]
            sizes = [split, kept - split] if split else [kept]
            banks = " + ".join(f"{size} {format}" for size, format in zip(sizes, formats))
            rows.append([str(layer), str(kept), banks])
    table("Experts", ["layer", "kept", "banks"], rows)


def outline_figures(outline: Outline, plan: Plan, out: Path, done: Sequence[str] = ()) -> Figures:
    """Files, bytes by bank, bytes to write and read, and the room that there is.

    `done` are the shards that are there already.
    """
    from reap.export import free_space

    water = plan.waterfall
    parts = ("trunk", "router", "high", "low", "carried")
    return {
        "checkpoint": str(out),
        "shards": [
            {
                "file": shard.name,
                "bytes": shard.nbytes,
                "tensors": len(shard.tensors),
                "done": shard.name in done,
            }
            for shard in outline.shards
        ],
        "copied": [{"file": name, "bytes": size} for name, size in outline.copied.items()],
        "tensors": outline.tensors,
        "bytes": {name: getattr(water, name) for name in parts} | {"total": outline.nbytes},
        "write_bytes": outline.need(done),
        "read_bytes": outline.read_bytes,
        "free_bytes": free_space(out)[1],
    }


def show_outline(outline: Outline, plan: Plan, out: Path, done: Sequence[str] = ()) -> None:
    figures = outline_figures(outline, plan, out, done)
    shards = [
        [s["file"], str(s["tensors"]), f"{s['bytes']:,}", "done" if s["done"] else ""]
        for s in figures["shards"]
    ]
    copied = [[f["file"], "", f"{f['bytes']:,}", ""] for f in figures["copied"]]
    table(f"{out} would hold", ["file", "tensors", "bytes", ""], shards + copied)
    names = {
        "trunk": "trunk",
        "router": "routers",
        "high": "experts, high bank",
        "low": "experts, low bank",
        "carried": "carried, not loaded",
        "total": "all tensors",
    }
    sizes = [(names[name], size) for name, size in figures["bytes"].items()]
    table("Bytes", ["", "bytes", ""], [[n, f"{size:,}", format_size(size)] for n, size in sizes])
    say(
        f"{figures['tensors']:,} tensors, {format_size(figures['write_bytes'])} to write with the "
        "copied files, and a config, an index, a card and checksums; "
        f"{'at most ' if done else ''}{format_size(outline.read_bytes)} to read; "
        f"{format_size(figures['free_bytes'])} free."
    )


def files_figures(files: Sequence[FileCheck]) -> list[Figures]:
    return [asdict(file) for file in files]


def show_files(files: Sequence[FileCheck]) -> None:
    if not files:
        say("There is no SHA256SUMS: the files were not checked.")
        return
    rows = [[f.path, f"{f.nbytes:,}", f.sha256[:16], f.status] for f in files]
    table("Files", ["file", "bytes", "sha256", ""], rows)

"""reap inspect: what is in a file that reap wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reap.cli.options import Json

if TYPE_CHECKING:
    from reap.artifacts import Saliency


def inspect(
    file: Annotated[
        Path, typer.Argument(help="Saliency, plan or evaluation file, or a checkpoint directory.")
    ],
    json: Json = False,
) -> None:
    """Print what is in FILE."""
    from reap.artifacts import Evaluation, Plan, Saliency
    from reap.cli import evaluate, plan
    from reap.cli.output import print_json
    from reap.errors import ArtifactError

    if not file.exists():
        raise ArtifactError(f"{file} does not exist.")
    if file.is_dir():
        data = _checkpoint(file)
    elif file.suffix == ".safetensors":
        data = _saliency(Saliency.load(file), show=not json)
    else:
        kind = _kind(file)
        if kind == "reap.plan":
            loaded = Plan.load(file)
            data = plan.summary(loaded)
            if not json:
                plan.show(loaded)
        elif kind == "reap.evaluation":
            scored = Evaluation.load(file)
            data = evaluate.summary(scored)
            if not json:
                evaluate.show(scored)
        else:
            raise ArtifactError(f"{file} is not a file that reap wrote.")
    if json:
        print_json(data)


def _kind(file: Path) -> str:
    import json

    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["format"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _saliency(saliency: Saliency, *, show: bool) -> dict[str, object]:
    import numpy as np

    from reap.cli.output import say, table

    count = saliency.count.sum(axis=(0, 1))
    tokens = saliency.tokens.sum(axis=(0, 2)) // len(saliency.layers)
    energy = saliency.score("energy")
    share = np.sort(energy, axis=1)
    mass = share[:, ::-1].cumsum(axis=1) / share.sum(axis=1, keepdims=True)
    quarter, half = mass.shape[1] // 4 - 1, mass.shape[1] // 2 - 1
    layers = [
        {
            "layer": layer,
            "never_routed": int((count[row] == 0).sum()),
            "top_quarter_energy": float(mass[row, quarter]),
            "top_half_energy": float(mass[row, half]),
        }
        for row, layer in enumerate(saliency.layers)
    ]
    if show:
        spec = saliency.spec
        say(
            f"{spec.model} ({spec.model_type}): {spec.parameters:,} parameters, "
            f"{len(spec.moe_layers)} MoE layers of {spec.num_experts} experts, top {spec.top_k}."
        )
        table(
            "Tokens",
            ["domain", "tokens"],
            [[name, f"{number:,}"] for name, number in zip(saliency.domains, tokens)],
        )
        table(
            "Energy Σg²‖f‖² carried by the busiest experts",
            ["layer", "top quarter", "top half", "never routed"],
            [
                [
                    str(entry["layer"]),
                    f"{100 * float(entry['top_quarter_energy']):.1f} %",
                    f"{100 * float(entry['top_half_energy']):.1f} %",
                    str(entry["never_routed"]),
                ]
                for entry in layers
            ],
        )
    return {
        "model": saliency.spec.model,
        "domains": dict(zip(saliency.domains, map(int, tokens))),
        "layers": layers,
    }


def _checkpoint(directory: Path) -> dict[str, object]:
    from reap.cli.output import say, table
    from reap.models.source import open_source
    from reap.planning import format_size

    source = open_source(str(directory))
    spec = source.spec()
    config = source.config
    counts = config.get("expert_counts") or [
        spec.num_experts if index in source.moe_layers else 0 for index in range(spec.num_layers)
    ]
    splits = config.get("expert_bank_split") or [0] * spec.num_layers
    total = source.checkpoint.nbytes
    say(f"{directory}: {config['model_type']}, {format_size(total)} in {len(source.checkpoint.tensors):,} tensors.")
    rows = [
        [str(i), str(n), str(s or n), str(n - (s or n))]
        for i, (n, s) in enumerate(zip(counts, splits))
        if n
    ]
    table("Experts", ["layer", "kept", "first bank", "low bank"], rows)
    return {"bytes": total, "expert_counts": counts, "expert_bank_split": splits}

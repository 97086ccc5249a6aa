"""reap export: write the pruned checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reap.cli.options import Force, Json, Run, Trust


def export(
    out: Annotated[
        Path | None,
        typer.Option(help="Checkpoint directory; default: the run's.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Source model; default: the run's.", show_default=False)
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Plan file; default: the run's.", show_default=False)
    ] = None,
    saliency: Annotated[
        Path | None, typer.Option(help="Saliency file; default: the run's.", show_default=False)
    ] = None,
    run: Run = None,
    trust_remote_code: Trust = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write the checkpoint that the plan describes, and check it."""
    from reap.artifacts import Plan
    from reap.artifacts.files import refuse_existing
    from reap.cli.output import print_json, progress_bar, say
    from reap.cli.rundir import RunDirectory
    from reap.export import export as write
    from reap.models.source import open_source
    from reap.planning import format_size

    directory = None if plan and model and out else RunDirectory.newest(run)
    plan_file = plan or directory.plan  # type: ignore[union-attr]
    target = out or directory.checkpoint  # type: ignore[union-attr]
    refuse_existing(target, force)
    made = Plan.load(plan_file)
    source = open_source(
        model or directory.model,  # type: ignore[union-attr]
        trust_remote_code=trust_remote_code,
    )
    with progress_bar("layers") as progress:
        result = write(
            source,
            made,
            target,
            plan_file=plan_file,
            saliency=saliency or (directory.saliency if directory else None),
            force=force,
            progress=progress,
        )
    if json:
        print_json({"checkpoint": str(target), "bytes": result.nbytes, "tensors": result.tensors})
    flag = "" if made.layout == "stock" else " --trust-remote-code"
    say(
        f"{format_size(result.loaded_bytes)} of weights in {result.tensors:,} tensors, "
        "loaded again and checked."
    )
    say(f'Try: mlx_lm.generate --model {target}{flag} --prompt "Hello"')
    say(f"Wrote {target}")

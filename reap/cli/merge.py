"""reap merge: add up calibrations of one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from reap.cli.options import Force, Json


def merge(
    files: Annotated[list[Path], typer.Argument(help="Saliency files of the same model.")],
    out: Annotated[Path, typer.Option(help="File to write.", show_default=False)],
    force: Force = False,
    json: Json = False,
) -> None:
    """Add up the saliency of one model over different texts or machines."""
    from reap import __version__
    from reap.artifacts import Provenance, Saliency
    from reap.artifacts.files import refuse_existing, sha256
    from reap.cli.output import print_json, say
    from reap.cli.rundir import command_line

    refuse_existing(out, force)
    parts = [Saliency.load(file) for file in files]
    digests = [sha256(file) for file in files]
    corpora = sorted(
        (corpus for part in parts for corpus in part.provenance.corpora),
        key=lambda corpus: (corpus.domain, corpus.sha256, corpus.tokens),
    )
    provenance = Provenance(
        reap_version=__version__,
        command=command_line(),
        model=parts[0].spec.model,
        revision=parts[0].spec.revision,
        config_sha256=parts[0].spec.config_sha256,
        inputs={str(file): digest for file, digest in sorted(zip(files, digests))},
        corpora=tuple(corpora),
    )
    total = parts[0]
    for part in parts[1:]:
        total = total.merged(part, provenance=provenance)
    total.save(out, force=force)
    tokens = int(total.tokens[:, :, 0].sum())
    if json:
        print_json({"saliency": str(out), "tokens": tokens, "domains": list(total.domains)})
    say(f"{len(parts)} files, {tokens:,} tokens, domains {', '.join(total.domains)}.")
    say(f"Wrote {out}")

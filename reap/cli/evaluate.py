"""reap evaluate: measure what a checkpoint lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reap.cli.options import Force, Json, Run, SequenceLength, Texts, Tokens, Trust

if TYPE_CHECKING:
    from reap.artifacts import Evaluation


def evaluate(
    checkpoint: Annotated[
        str | None,
        typer.Argument(help="Checkpoint directory or hub id; default: the run's.", show_default=False),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Model to compare with; default: the run's source.", show_default=False),
    ] = None,
    no_reference: Annotated[bool, typer.Option("--no-reference", help="Perplexity only.")] = False,
    text: Texts = None,
    tokens: Tokens = None,
    sequence_length: SequenceLength = 512,
    label: Annotated[
        str | None, typer.Option(help="Name in reports.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Evaluation file; default: the run's.", show_default=False)
    ] = None,
    run: Run = None,
    trust_remote_code: Trust = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure perplexity, and KL divergence and top-1 agreement with the source model."""
    from reap.artifacts.files import refuse_existing
    from reap.cli.output import print_json, progress_bar, say
    from reap.cli.rundir import RunDirectory, command_line
    from reap.evaluate import EvaluationSettings
    from reap.evaluate import evaluate as measure
    from reap.export.card import add_measurement
    from reap.models.source import open_source
    from reap.models.text import load_texts

    explicit = checkpoint and out and (reference or no_reference)
    directory = None if explicit else RunDirectory.newest(run)
    target = out or directory.evaluation  # type: ignore[union-attr]
    refuse_existing(target, force)
    texts = load_texts(text or (), split="evaluation")
    chosen = checkpoint or str(directory.checkpoint)  # type: ignore[union-attr]
    model = open_source(chosen, trust_remote_code=trust_remote_code)
    base = None
    if not no_reference:
        base = open_source(
            reference or directory.model,  # type: ignore[union-attr]
            trust_remote_code=trust_remote_code,
        )
    with progress_bar("tok") as progress:
        result = measure(
            model,
            texts,
            EvaluationSettings(tokens=tokens, sequence_length=sequence_length),
            reference=base,
            label=label or "",
            command=command_line(),
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    result.save(target, force=force)
    add_measurement(Path(chosen), result)
    if json:
        print_json(summary(result) | {"evaluation": str(target)})
    show(result)
    say(f"Wrote {target}")


def summary(evaluation: Evaluation) -> dict[str, object]:
    """The figures for --json: values and standard errors."""

    def pair(estimate: object) -> dict[str, float] | None:
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
    result: dict[str, object] = {"label": evaluation.label, "domains": domains}
    if evaluation.reference is not None:
        result["mean_kl"] = pair(evaluation.mean_kl)
    return result


def show(evaluation: Evaluation) -> None:
    """A table per domain on stderr."""
    from reap.cli.output import say, table

    compared = evaluation.reference is not None
    rows = []
    for domain in evaluation.domains:
        score = evaluation.domain_score(domain)
        row = [domain, f"{score.tokens:,}"]
        row.append(f"{score.perplexity.value:.3f} ± {score.perplexity.error:.3f}")
        if score.base_perplexity and score.kl and score.same_top:
            row += [
                f"{score.base_perplexity.value:.3f}",
                f"{score.kl.value:.5f} ± {score.kl.error:.5f}",
                f"{100 * score.same_top.value:.1f} %",
            ]
        rows.append(row)
    columns = ["domain", "tokens", "perplexity ± SE"]
    table(
        evaluation.label,
        [*columns, "source's", "KL ± SE (nats)", "same top token"] if compared else columns,
        rows,
    )
    if compared:
        kl = evaluation.mean_kl
        say(f"Mean KL over the domains: {kl.value:.5f} ± {kl.error:.5f} nats.")

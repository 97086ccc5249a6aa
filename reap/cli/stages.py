"""The stages with their files: what a command does and `reap run` does, too.

Each checks what it can before the work, shows progress, and writes its output whole or not at
all. Raises ReapError throughout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from reap.artifacts import Evaluation, Format, ModelSpec, Plan, Provenance, Saliency
from reap.artifacts.files import refuse_existing, sha256
from reap.artifacts.manifest import MANIFEST, read_manifest
from reap.artifacts.partial import held
from reap.artifacts.provenance import Corpus
from reap.cli import command_line
from reap.cli.output import progress_bar, say
from reap.cli.rundir import RunDirectory
from reap.cli.show import say_left_out
from reap.errors import ReapError
from reap.progress import silent

if TYPE_CHECKING:
    from reap.calibrate import CalibrationSettings
    from reap.calibrate.estimate import Estimate
    from reap.evaluate import EvaluationSettings
    from reap.export import ExportResult, Outline
    from reap.models.ranks import Ranks
    from reap.planning import PlanSettings


def calibrate(
    model: str,
    texts: Sequence[str],
    settings: CalibrationSettings,
    directory: RunDirectory,
    *,
    trust: bool = False,
    force: bool = False,
    resume: bool = False,
    memory: int | None = None,
    ranks: Ranks | None = None,
) -> Saliency:
    """Model and text → the saliency file of a run. `texts`: names or files, all sets if empty.

    A run that was cut off leaves `calibration.partial`, which `resume` takes up and
    `force` removes. Of several `ranks` the first writes the file and shows progress.
    """
    from reap.calibrate import calibrate as measure
    from reap.calibrate.resume import own_directory, remove, unfinished
    from reap.models.ranks import Ranks
    from reap.models.source import open_source
    from reap.models.text import load_texts

    ranks = ranks or Ranks()
    if ranks.rank == 0:
        check_output(directory.saliency, force)
    partial = directory.partial
    own = own_directory(partial, ranks)
    made = [folder for folder in own.parents if not folder.exists()]
    with ExitStack() as ending:
        # A run that did nothing leaves nothing.
        for folder in reversed([partial, *([directory.path] if ranks.rank else []), *made]):
            ending.callback(_remove_if_empty, folder)
        if ranks.rank == 0:
            directory.path.mkdir(parents=True, exist_ok=True)
            ending.enter_context(held(directory.path))
        if partial.exists() and not resume and not force:
            raise unfinished(partial)
        ranks.gather()  # all have looked, so the directories may come and go
        loaded = load_texts(texts, split="calibration")
        source = open_source(model, trust_remote_code=trust)
        if ranks.rank == 0:
            say_left_out(len(source.prediction_layers), source.prediction_bytes)
        for turn in range(ranks.size):  # they may share a disk
            if turn == ranks.rank and not resume:
                remove(partial)
            ranks.gather()
        with progress_bar("tok") if ranks.rank == 0 else nullcontext(silent) as progress:
            saliency = measure(
                source,
                loaded,
                settings,
                command=command_line(without=("--resume",)),
                trust_remote_code=trust,
                progress=progress,
                partial=partial,
                resume=resume,
                memory=memory,
                ranks=ranks,
            )
        if ranks.rank == 0:
            _write(saliency, directory, model, force=force)
        ranks.gather()  # it is written
        remove(own)
    return saliency


def _write(saliency: Saliency, directory: RunDirectory, model: str, *, force: bool) -> None:
    """The files of a finished calibration; if they cannot be written, what it kept stays."""
    try:
        saliency.save(directory.saliency, force=force)
        directory.start(model)
    except ReapError as error:
        replaces = directory.saliency.exists()
        how = "--resume --force" if replaces else "--resume (`reap run` does so by itself)"
        hint = f"nothing that was measured is lost: make room, then go on with {how}"
        raise ReapError(error.message, hint) from error


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def estimate(
    model: str,
    texts: Sequence[str],
    settings: CalibrationSettings,
    *,
    trust: bool = False,
    memory: int | None = None,
    ranks: int = 1,
) -> Estimate:
    """What `calibrate` would take on each of `ranks`; writes nothing."""
    from reap.calibrate.estimate import estimate as measure
    from reap.models.source import open_source
    from reap.models.text import load_texts

    loaded = load_texts(texts, split="calibration")
    source = open_source(model, trust_remote_code=trust)
    say_left_out(len(source.prediction_layers), source.prediction_bytes)
    return measure(source, loaded, settings, trust_remote_code=trust, memory=memory, ranks=ranks)


def merge(files: Sequence[Path], out: Path, *, force: bool = False) -> Saliency:
    """The sum of saliency files of one model, the same in whatever order they are given."""
    check_output(out, force)
    loaded = {file: Saliency.load(file) for file in files}
    inputs = {str(file): sha256(file) for file in files}
    if len(set(inputs.values())) < len(files):
        raise ReapError("the same file is given twice: its text would count twice.")
    parts = [loaded[file] for file in sorted(loaded, key=lambda file: inputs[str(file)])]
    corpora = sorted(
        (corpus for part in parts for corpus in part.provenance.corpora),
        key=lambda corpus: (corpus.domain, corpus.sha256, corpus.tokens),
    )
    provenance = _provenance(parts[0].spec, dict(sorted(inputs.items())), corpora)
    total = replace(parts[0], provenance=provenance)
    for part in parts[1:]:
        total = total.merged(part, provenance=provenance)
    _refuse_shared_text(loaded)  # if they are of one model
    total.save(out, force=force)
    return total


def _refuse_shared_text(runs: Mapping[Path, Saliency]) -> None:
    """Raise ReapError if two of the runs were calibrated on the same text."""
    seen: dict[str, str] = {}
    for file, run in runs.items():
        for corpus in run.provenance.corpora:
            if corpus.sha256 in seen:
                raise ReapError(
                    f"{seen[corpus.sha256]} and {corpus.source} of {file} are the same text "
                    f"(domain {corpus.domain}): it would count twice.",
                    "leave one of them out, or calibrate them on different texts",
                )
        seen |= {c.sha256: f"{c.source} of {file}" for c in run.provenance.corpora}


def plan(
    saliency: Path,
    settings: PlanSettings,
    out: Path,
    *,
    plain: str | None = None,
    seed: int = 0,
    force: bool = False,
) -> Plan:
    """Saliency file → plan file. `plain`: a plain recipe to compare with instead of the best."""
    from reap.planning import make_plan, plain_plan

    check_output(out, force)
    measured = Saliency.load(saliency)
    say_left_out(measured.spec.prediction_layers, measured.spec.prediction_bytes)
    inputs = {"saliency": sha256(saliency)}
    provenance = _provenance(measured.spec, inputs, measured.provenance.corpora)
    if plain is None:
        made = make_plan(measured, settings, provenance=provenance)
    else:
        made = plain_plan(measured, settings, recipe=plain, seed=seed, provenance=provenance)
    made.save(out, force=force)
    return made


def export(
    model: str,
    plan_file: Path,
    saliency: Path,
    out: Path,
    *,
    plan: Plan | None = None,
    format: str = "mlx",
    trust: bool = False,
    force: bool = False,
    resume: bool = False,
) -> ExportResult:
    """Source model, plan file and, if the plan needs it, saliency file → checkpoint directory.

    `plan`: what is in `plan_file`, if it is loaded already. `format`: "mlx" or "hf". An export that
    was cut off leaves `<out>.partial`, which `resume` takes up and `force` removes.
    """
    check_output(out, force, directory=True)
    made = plan or Plan.load(plan_file)

    from reap.export import export as write_mlx
    from reap.export import export_hf
    from reap.models.source import open_source

    source = open_source(model, trust_remote_code=trust)
    if out.resolve() == source.checkpoint.path.resolve():
        raise ReapError(f"{out} is the source model.", "name another directory with --out")
    with progress_bar("layers") as progress:
        if format == "hf":
            return export_hf(
                source,
                made,
                out,
                plan_file=plan_file,
                force=force,
                resume=resume,
                progress=progress,
            )
        return write_mlx(
            source,
            made,
            out,
            plan_file=plan_file,
            saliency=saliency,
            force=force,
            resume=resume,
            progress=progress,
        )


def outline(
    model: str, plan: Plan, saliency: Path, *, format: str = "mlx", trust: bool = False
) -> Outline:
    """What `export` would write; writes nothing."""
    from reap.export import outline as outline_mlx
    from reap.export import outline_hf
    from reap.models.source import open_source

    source = open_source(model, trust_remote_code=trust)
    if format == "hf":
        return outline_hf(source, plan)
    return outline_mlx(source, plan, saliency=saliency)


def evaluate(
    checkpoint: str,
    reference: str | None,
    texts: Sequence[str],
    settings: EvaluationSettings,
    out: Path,
    *,
    label: str = "",
    trust: bool = False,
    force: bool = False,
) -> Evaluation:
    """Checkpoint, text and a model to compare with → evaluation file, and figures on the card."""
    from reap.evaluate import evaluate as measure
    from reap.export import add_measurement
    from reap.models.source import open_source
    from reap.models.text import load_texts

    check_output(out, force)
    loaded = load_texts(texts, split="evaluation")
    model = open_source(checkpoint, trust_remote_code=trust)
    base = None if reference is None else open_source(reference, trust_remote_code=trust)
    if (model.checkpoint.path / MANIFEST).exists():
        read_manifest(model.checkpoint.path)  # it is renewed with the card, when all is measured
    with progress_bar("tok") as progress:
        result = measure(
            model,
            loaded,
            settings,
            reference=base,
            label=label,
            command=command_line(),
            trust_remote_code=trust,
            progress=progress,
        )
    result.save(out, force=force)
    try:
        add_measurement(model.checkpoint.path, result)
    except OSError as error:
        say(f"The checkpoint's README.md was left as it is: {error}")
    return result


def parse_format(text: str) -> Format:
    """Raises ReapError for what is not a format."""
    try:
        return Format.parse(text)
    except ValueError:
        raise ReapError(f"unknown format {text!r}.", "e.g. 2bit, 3bit-g64, 8bit, mxfp4") from None


def check_output(path: Path, force: bool, *, directory: bool = False) -> None:
    """Refuse, before any work, an output that must not be replaced or cannot be written."""
    refuse_existing(path, force)
    if path.is_dir() and not directory:
        raise ReapError(f"{path} is a directory, not a file to replace.", "name a file")
    if directory and path.exists() and not (path / "config.json").exists():
        raise ReapError(
            f"{path} is not a checkpoint, so it is not replaced.", "name another directory"
        )
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        reason = "not writable" if above.is_dir() else "not a directory"
        raise ReapError(f"could not write {path}: {above} is {reason}.", "name another place")


def _provenance(spec: ModelSpec, inputs: dict[str, str], corpora: Sequence[Corpus]) -> Provenance:
    from reap import __version__

    return Provenance(
        reap_version=__version__,
        command=command_line(),
        model=spec.model,
        revision=spec.revision,
        model_sha256=spec.model_sha256,
        inputs=inputs,
        corpora=tuple(corpora),
    )

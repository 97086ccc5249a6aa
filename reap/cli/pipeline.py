"""All stages of a recipe in one run directory; what is finished and still fits is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reap.artifacts import Evaluation, Plan, Provenance, Saliency
from reap.artifacts.files import sha256
from reap.cli import show, stages
from reap.cli.output import say
from reap.cli.rundir import RunDirectory
from reap.errors import ReapError
from reap.planning import PlanSettings
from reap.recipes import Recipe

if TYPE_CHECKING:
    from reap.calibrate import CalibrationSettings
    from reap.evaluate import EvaluationSettings
    from reap.models.text import Text


@dataclass(frozen=True)
class Stage:
    """`misfit` says why `output` does not belong to the recipe, in words; "" if it does."""

    name: str
    output: Path
    misfit: Callable[[], str]
    make: Callable[[], object]


class Pipeline:
    """The stages of one recipe in one run directory."""

    def __init__(
        self, recipe: Recipe, directory: RunDirectory, *, trust: bool = False, force: bool = False
    ) -> None:
        self.recipe = recipe
        self.directory = directory
        self.trust = trust
        self.force = force

    def run(self) -> None:
        """Raises ReapError, before any work, if a finished file does not belong to the recipe."""
        from reap.models.checkpoint import open_checkpoint
        from reap.models.text import load_texts
        from reap.report import write_report

        recipe, directory = self.recipe, self.directory
        self.texts = load_texts(recipe.texts, split="calibration")
        self.evaluation_texts = load_texts(recipe.evaluation_texts, split="evaluation")
        self.model_sha256 = open_checkpoint(recipe.model).model_sha256
        todo = [
            Stage("calibrate", directory.saliency, self._saliency_misfit, self._calibrate),
            Stage("plan", directory.plan, self._plan_misfit, self._plan),
            Stage("export", directory.checkpoint, self._checkpoint_misfit, self._export),
            Stage("evaluate", directory.evaluation, self._evaluation_misfit, self._evaluate),
        ]
        first = self._first(todo)
        for number, stage in enumerate(todo):
            if number < first:
                say(f"{stage.name}: {stage.output} is there already")
            else:
                say(f"{stage.name} …")
                stage.make()
            if stage.name == "plan":
                show.show_plan(Plan.load(directory.plan))
        show.show_evaluation(Evaluation.load(directory.evaluation))
        stages.check_output(directory.report, force=True)
        # Cheap, and always made from the files as they are now.
        write_report(
            directory.report,
            saliency=directory.saliency,
            plan=directory.plan,
            evaluation=directory.evaluation,
            force=True,
        )

    def _first(self, todo: Sequence[Stage]) -> int:
        """The stage to start with; what comes after it may only exist if it is to be replaced."""
        for number, stage in enumerate(todo):
            reason = _reason(stage) if stage.output.exists() else ""
            if stage.output.exists() and not reason:
                continue
            if not reason:
                reason = f"it was not made from {stage.output}, which is not there"
                later = (after.output for after in todo[number:] if after.output.exists())
                output = next(later, None)
            else:
                output = stage.output
            if output is not None and not self.force:
                raise ReapError(
                    f"{output} does not belong to this recipe: {reason}.",
                    f"pass --force to run again from `{stage.name}` on, "
                    "or --run for another directory",
                )
            return number
        return 0 if self.force else len(todo)

    def _calibrate(self) -> None:
        stages.calibrate(
            self.recipe.model,
            self.recipe.texts,
            self._calibration(),
            self.directory,
            trust=self.trust,
            force=self.force,
            resume=not self.force,
        )

    def _calibration(self) -> CalibrationSettings:
        from reap.calibrate import CalibrationSettings

        settings = dict(self.recipe.calibration)
        if "low" in settings:
            settings["low_formats"] = tuple(map(stages.parse_format, settings.pop("low")))
        return CalibrationSettings(**settings)

    def _saliency_misfit(self) -> str:
        saliency = Saliency.load(self.directory.saliency)
        if saliency.spec.model_sha256 != self.model_sha256:
            return f"it is of {saliency.spec.model}, not of {self.recipe.model}"
        settings = self._calibration()
        return _changed(saliency.provenance.settings, settings.to_json()) or _texts_changed(
            saliency.provenance, self._read(self.texts, settings)
        )

    def _plan(self) -> None:
        stages.plan(
            self.directory.saliency,
            self._plan_settings(),
            self.directory.plan,
            force=self.force,
        )

    def _plan_misfit(self) -> str:
        plan = Plan.load(self.directory.plan)
        if plan.provenance.inputs.get("saliency") != sha256(self.directory.saliency):
            return "it was made from another saliency file"
        if "recipe" in plan.settings:
            return f"it was made with --plain {plan.settings['recipe']}"
        return _changed(plan.settings, self._plan_settings().to_json())

    def _plan_settings(self) -> PlanSettings:
        from reap.planning.precision import settings_of

        return settings_of(self.recipe.plan, lambda: Saliency.load(self.directory.saliency).spec)

    def _export(self) -> None:
        stages.export(
            self.recipe.model,
            self.directory.plan,
            self.directory.saliency,
            self.directory.checkpoint,
            trust=self.trust,
            force=self.force,
            resume=not self.force,
        )

    def _checkpoint_misfit(self) -> str:
        from reap.models.checkpoint import open_checkpoint

        made_of = open_checkpoint(str(self.directory.checkpoint)).origin
        if made_of.get("plan_sha256") != sha256(self.directory.plan):
            return "it was not exported from plan.json as it is now"
        return ""

    def _evaluation(self) -> EvaluationSettings:
        from reap.evaluate import EvaluationSettings

        return EvaluationSettings(**self.recipe.evaluation)

    def _evaluate(self) -> None:
        stages.evaluate(
            str(self.directory.checkpoint),
            self.recipe.model,
            self.recipe.evaluation_texts,
            self._evaluation(),
            self.directory.evaluation,
            label=self.recipe.name,
            trust=self.trust,
            force=self.force,
        )

    def _evaluation_misfit(self) -> str:
        from reap.models.checkpoint import open_checkpoint

        provenance = Evaluation.load(self.directory.evaluation).provenance
        if provenance.model_sha256 != open_checkpoint(str(self.directory.checkpoint)).model_sha256:
            return "it is of another checkpoint"
        if provenance.inputs.get("reference model") != self.model_sha256:
            return f"its reference is not {self.recipe.model}"
        settings = self._evaluation()
        return _changed(provenance.settings, asdict(settings)) or _texts_changed(
            provenance, self._read(self.evaluation_texts, settings)
        )

    def _read(
        self, texts: Sequence[Text], settings: CalibrationSettings | EvaluationSettings
    ) -> Sequence[Text]:
        """The texts with what they hash to, for which datasets must be read once more."""
        if all(text.sha256 for text in texts):
            return texts
        from reap.models.checkpoint import open_checkpoint
        from reap.models.text import load_tokenizer, read_texts

        path = open_checkpoint(self.recipe.model).path
        return read_texts(
            texts,
            load_tokenizer(path, trust_remote_code=self.trust),
            sequence_length=settings.sequence_length,
            tokens=settings.tokens,
            documents=settings.documents,
        )


def _reason(stage: Stage) -> str:
    """A file that cannot be read belongs to no recipe."""
    try:
        return stage.misfit()
    except ReapError as error:
        return error.message.rstrip(".")


def _changed(made: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Which settings a file was made with that are not the recipe's."""
    if not made:
        return "it does not say with which settings it was made"
    different = [name for name in wanted if made.get(name) != wanted[name]]
    return ", ".join(
        f"{name} is {made.get(name)}, the recipe says {wanted[name]}" for name in different
    )


def _texts_changed(provenance: Provenance, texts: Sequence[Text]) -> str:
    used = {corpus.source: corpus.sha256 for corpus in provenance.corpora}
    wanted = {text.source: text.sha256 for text in texts}
    if used.keys() != wanted.keys():
        return f"its texts are {', '.join(used)}, the recipe says {', '.join(wanted)}"
    changed = [source for source in used if used[source] != wanted[source]]
    return f"the text of {', '.join(changed)} has changed" if changed else ""

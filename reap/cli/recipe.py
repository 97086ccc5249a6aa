"""reap run: all stages of a recipe, each skipped if its output is there and still fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reap.cli.options import Force, Json, Run, Trust

if TYPE_CHECKING:
    from reap.artifacts import Evaluation, Plan, Saliency
    from reap.cli.rundir import RunDirectory
    from reap.recipes import Recipe


def run(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe or a YAML file.")],
    model: Annotated[
        str | None, typer.Option(help="Model instead of the recipe's.", show_default=False)
    ] = None,
    run: Run = None,
    trust_remote_code: Trust = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Run all stages of RECIPE; what is finished already is not done again."""
    from dataclasses import replace

    from reap.cli.output import print_json, say
    from reap.cli.rundir import RunDirectory
    from reap.recipes import load_recipe

    chosen = load_recipe(recipe)
    if model is not None:
        chosen = replace(chosen, model=model)
    directory = RunDirectory.for_model(chosen.model, run)
    Pipeline(chosen, directory, trust_remote_code=trust_remote_code, force=force).run()
    if json:
        print_json({"run": str(directory.path), "report": str(directory.report)})
    say(f"Report: {directory.report.resolve()}")


class Pipeline:
    """The stages of one recipe in one run directory."""

    def __init__(
        self,
        recipe: Recipe,
        directory: RunDirectory,
        *,
        trust_remote_code: bool = False,
        force: bool = False,
    ) -> None:
        self.recipe = recipe
        self.directory = directory
        self.trust = trust_remote_code
        self.force = force

    def run(self) -> None:
        """Raises ReapError if a finished file does not belong to this recipe."""
        from reap.cli import evaluate, plan
        from reap.report import write_report

        directory = self.directory
        self._stage("calibrate", directory.saliency, self._saliency_fits, self._calibrate)
        self._stage("plan", directory.plan, self._plan_fits, self._plan)
        plan.show(self._loaded_plan())
        self._stage("export", directory.checkpoint, self._checkpoint_fits, self._export)
        self._stage("evaluate", directory.evaluation, self._evaluation_fits, self._evaluate)
        evaluate.show(self._loaded_evaluation())
        # Cheap, and always made from the files as they are now.
        write_report(
            directory.report,
            saliency=directory.saliency,
            plan=directory.plan,
            evaluation=directory.evaluation,
            force=True,
        )

    def _stage(
        self, name: str, output: Path, fits: Callable[[], str], make: Callable[[], None]
    ) -> None:
        from reap.cli.output import say
        from reap.errors import ReapError

        if output.exists() and not self.force:
            reason = fits()
            if reason:
                raise ReapError(
                    f"{output} does not belong to this recipe: {reason}.",
                    "pass --force to do everything again, or --run for another directory",
                )
            say(f"{name}: {output} is there already")
            return
        say(f"{name} …")
        make()

    def _calibrate(self) -> None:
        from reap.calibrate import CalibrationSettings, calibrate
        from reap.cli.output import progress_bar
        from reap.cli.rundir import command_line
        from reap.models.source import open_source
        from reap.models.text import load_texts

        texts = load_texts(self.recipe.texts, split="calibration")
        source = open_source(self.recipe.model, trust_remote_code=self.trust)
        with progress_bar("tok") as progress:
            saliency = calibrate(
                source,
                texts,
                CalibrationSettings(**self.recipe.calibration),
                command=command_line(),
                trust_remote_code=self.trust,
                progress=progress,
            )
        saliency.save(self.directory.saliency, force=self.force)
        self.directory.start(self.recipe.model)

    def _saliency_fits(self) -> str:
        from reap.artifacts import Saliency
        from reap.models.source import open_source

        saliency = Saliency.load(self.directory.saliency)
        model = open_source(self.recipe.model, trust_remote_code=self.trust).checkpoint
        if saliency.spec.config_sha256 != model.config_sha256:
            return f"it is of {saliency.spec.model}, not of {model.name}"
        return ""

    def _loaded_plan(self) -> Plan:
        from reap.artifacts import Plan

        return Plan.load(self.directory.plan)

    def _plan(self) -> None:
        from reap import __version__
        from reap.artifacts import Provenance, Saliency
        from reap.artifacts.files import sha256
        from reap.cli.rundir import command_line
        from reap.planning import PlanSettings, make_plan

        saliency = Saliency.load(self.directory.saliency)
        spec = saliency.spec
        provenance = Provenance(
            reap_version=__version__,
            command=command_line(),
            model=spec.model,
            revision=spec.revision,
            config_sha256=spec.config_sha256,
            inputs={"saliency": sha256(self.directory.saliency)},
            corpora=saliency.provenance.corpora,
        )
        made = make_plan(saliency, PlanSettings(**self.recipe.plan), provenance=provenance)
        made.save(self.directory.plan, force=self.force)

    def _plan_fits(self) -> str:
        from reap.artifacts.files import sha256

        if self._loaded_plan().provenance.inputs.get("saliency") != sha256(self.directory.saliency):
            return "it was made from another saliency file"
        return ""

    def _export(self) -> None:
        from reap.cli.output import progress_bar
        from reap.export import export
        from reap.models.source import open_source

        with progress_bar("layers") as progress:
            export(
                open_source(self.recipe.model, trust_remote_code=self.trust),
                self._loaded_plan(),
                self.directory.checkpoint,
                plan_file=self.directory.plan,
                saliency=self.directory.saliency,
                force=self.force,
                progress=progress,
            )

    def _checkpoint_fits(self) -> str:
        import json

        from reap.artifacts.files import sha256

        config = json.loads((self.directory.checkpoint / "config.json").read_text("utf-8"))
        if config.get("reap", {}).get("plan_sha256") != sha256(self.directory.plan):
            return "it was exported from another plan"
        return ""

    def _loaded_evaluation(self) -> Evaluation:
        from reap.artifacts import Evaluation

        return Evaluation.load(self.directory.evaluation)

    def _evaluate(self) -> None:
        from reap.cli.output import progress_bar
        from reap.cli.rundir import command_line
        from reap.evaluate import EvaluationSettings, evaluate
        from reap.export import add_measurement
        from reap.models.source import open_source
        from reap.models.text import load_texts

        with progress_bar("tok") as progress:
            result = evaluate(
                open_source(str(self.directory.checkpoint), trust_remote_code=self.trust),
                load_texts(self.recipe.evaluation_texts, split="evaluation"),
                EvaluationSettings(**self.recipe.evaluation),
                reference=open_source(self.recipe.model, trust_remote_code=self.trust),
                label=self.recipe.name,
                command=command_line(),
                trust_remote_code=self.trust,
                progress=progress,
            )
        result.save(self.directory.evaluation, force=self.force)
        add_measurement(self.directory.checkpoint, result)

    def _evaluation_fits(self) -> str:
        from reap.artifacts.files import sha256

        config = sha256(self.directory.checkpoint / "config.json")
        if self._loaded_evaluation().provenance.config_sha256 != config:
            return "it is of another checkpoint"
        return ""

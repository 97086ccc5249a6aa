"""The command line as a person uses it: in a directory of their own, by way of main(argv)."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest

import reap
from reap.artifacts import Evaluation, Plan, Saliency
from reap.artifacts.files import sha256
from reap.artifacts.manifest import MANIFEST
from reap.artifacts.partial import held
from reap.cli import main
from reap.cli.app import app
from reap.cli.pipeline import Pipeline
from reap.cli.rundir import RunDirectory
from reap.data import embedded_model
from reap.models.source import open_source
from reap.planning import format_size
from reap.recipes import Recipe

MODEL = str(embedded_model())
RUN = Path("runs") / "tiny-k3"
QUICK = ("--probe-tokens", "0", "--no-sensitivity", "--sequence-length", "64")
STAGES = {
    "calibrate": [
        *(MODEL, "--calibration", "math", "--calibration", "code", "--tokens", "600"),
        *("--probe-tokens", "100", "--sequence-length", "64"),
    ],
    "plan": ["--size", "9.6MB"],
    "export": [],
    "evaluate": ["--tokens", "600", "--sequence-length", "64"],
    "report": [],
}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout, strictly: no NaN, nothing before or after."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)

    @property
    def error(self) -> str:
        """The message of `error: …`, which must be all there is but progress and a hint."""
        assert self.code == 1, self
        assert self.out == ""
        assert "Traceback" not in self.err
        found = re.search(r"(?:^|\n)error: (.+)\n(?:\nhint: .+\n)?$", self.err)
        assert found, self.err
        return found[1]


def run(*argv: str | Path) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in argv])
    return Result(code, out.getvalue(), err.getvalue())


def shell(*argv: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """A process of its own: `python -c …`, for what one process cannot show."""
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, **more)


REAP = ("-c", "from reap.cli import run; run()")


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    """Every file below, with what changes when it is written."""
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@contextmanager
def working_in(directory: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    """A directory where every command ran once without a file name; do not write to it."""
    directory = tmp_path_factory.mktemp("finished")
    with working_in(directory):
        results = {name: run(name, *argv, "--json") for name, argv in STAGES.items()}
    return directory, results


@pytest.fixture
def place(
    finished: tuple[Path, dict[str, Result]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The working directory: a copy of the finished run without its checkpoint."""
    shutil.copytree(
        finished[0], tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoint")
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def place_with_checkpoint(place: Path, finished: tuple[Path, dict[str, Result]]) -> Path:
    shutil.copytree(finished[0] / RUN / "checkpoint", place / RUN / "checkpoint")
    return place


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# From the model to the report


def test_all_stages_without_file_names(finished: tuple[Path, dict[str, Result]]) -> None:
    directory, results = finished

    assert {name: result.code for name, result in results.items()} == dict.fromkeys(STAGES, 0)
    assert sorted(path.name for path in (directory / RUN).iterdir()) == [
        "checkpoint",
        "evaluation.json",
        "plan.json",
        "report.html",
        "run.json",
        "saliency.safetensors",
    ]
    plan = Plan.load(directory / RUN / "plan.json")
    evaluation = Evaluation.load(directory / RUN / "evaluation.json")
    assert plan.provenance.inputs["saliency"] == sha256(directory / RUN / "saliency.safetensors")
    assert evaluation.provenance.inputs["plan"] == sha256(directory / RUN / "plan.json")
    assert "Mean KL over the domains" in (directory / RUN / "checkpoint" / "README.md").read_text()


def test_files_say_by_which_command_and_settings_they_were_made(
    finished: tuple[Path, dict[str, Result]],
) -> None:
    run_directory = finished[0] / RUN

    saliency = Saliency.load(run_directory / "saliency.safetensors").provenance
    evaluation = Evaluation.load(run_directory / "evaluation.json").provenance

    assert saliency.command.startswith(f"reap calibrate {MODEL} --calibration math ")
    assert saliency.settings == {
        "tokens": 600,
        "sequence_length": 64,
        "documents": "split",
        "batch_tokens": 4096,
        "probe_tokens": 100,
        "sensitivity": True,
        "sensitivity_tokens": None,
        "low_formats": ["2-bit g128", "3-bit g128"],
        "low_rounding": "weighted",
    }
    assert evaluation.command.startswith("reap evaluate --tokens 600 ")
    assert evaluation.settings["sequence_length"] == 64


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("calibrate", {"saliency", "domains", "layers"}),
        ("plan", {"plan", "kept", "bytes", "damage"}),
        ("export", {"checkpoint", "bytes", "tensors"}),
        ("evaluate", {"evaluation", "domains", "mean_kl"}),
        ("report", {"report"}),
    ],
)
def test_json_is_all_there_is_on_stdout(
    finished: tuple[Path, dict[str, Result]], name: str, keys: set[str]
) -> None:
    result = finished[1][name]

    assert keys <= result.json.keys()
    assert "Wrote runs/tiny-k3/" in result.err
    written = result.json.get({"calibrate": "saliency", "export": "checkpoint"}.get(name, name))
    assert written is None or (finished[0] / written).exists() or name == "evaluate"


def test_without_json_stdout_stays_empty(place: Path) -> None:
    result = run("plan", "--size", "9.5MB", "--force")

    assert (result.code, result.out) == (0, "")
    assert "high bank (mxfp4)" in result.err


def test_figures_without_a_standard_error_are_null_in_json(place: Path) -> None:
    file = RUN / "evaluation.json"
    evaluation = Evaluation.load(file)
    replace(evaluation, documents=evaluation.documents[:1]).save(file, force=True)

    result = run("inspect", file, "--json")

    (domain,) = result.json["domains"].values()
    assert domain["perplexity"]["error"] is None
    assert "(one document)" in run("inspect", file).out


def test_small_divergences_keep_their_digits(place: Path) -> None:
    file = RUN / "evaluation.json"
    evaluation = Evaluation.load(file)
    small = [
        replace(d, kl=1e-6 * (1 + i % 2) * d.tokens) for i, d in enumerate(evaluation.documents)
    ]
    replace(evaluation, documents=tuple(small)).save(file, force=True)

    line = run("inspect", file).out.splitlines()[-1]

    kl = Evaluation.load(file).mean_kl
    value, error = (float(part) for part in re.findall(r"0\.\d+", line))
    assert value == pytest.approx(kl.value, rel=0.05)
    assert error == pytest.approx(kl.error, rel=0.5)


# Which run


def test_newest_calibration_is_the_run(place: Path) -> None:
    other = place / "runs" / "other"
    shutil.copytree(RUN, other)
    for file in ("plan.json", "evaluation.json", "report.html"):
        (other / file).unlink()
    old, new = 1_000_000_000, 2_000_000_000
    os.utime(RUN / "saliency.safetensors", (old, old))
    os.utime(other / "saliency.safetensors", (new, new))

    assert run("plan", "--size", "9.6MB", "--json").json["plan"] == "runs/other/plan.json"
    result = run("report", "--json")
    assert result.json["report"] == "runs/other/report.html"
    assert result.err.count("run: runs/other\n") == 1
    assert "run: " not in run("report", "--run", "runs/other").err

    os.utime(RUN / "saliency.safetensors", (new + 1, new + 1))
    assert "runs/tiny-k3/plan.json exists already" in run("plan", "--size", "9.6MB").error


def test_run_option_names_the_run(place: Path) -> None:
    shutil.copytree(RUN, place / "elsewhere")
    (place / "elsewhere" / "plan.json").unlink()
    (place / "elsewhere" / "report.html").unlink()

    assert run("plan", "--size", "9.6MB", "--run", "elsewhere").code == 0
    (place / "elsewhere" / "evaluation.json").unlink()
    assert run("report", "--run", "elsewhere", "--json").json["report"] == "elsewhere/report.html"


def test_explicit_files_need_no_run(place: Path) -> None:
    shutil.move(place / RUN, place / "files")
    shutil.rmtree(place / "runs")
    shutil.move(place / "files" / "saliency.safetensors", place / "s")
    made = run("plan", "--size", "9.6MB", "--saliency", "s", "--out", "made/p", "--json")
    html = run("report", "--saliency", "s", "--plan", "made/p", "--out", "r.html", "--json")

    assert made.json["plan"] == "made/p"
    assert html.json["report"] == "r.html"
    assert run("inspect", "s", "--json").json["model"] == "tiny-k3"
    assert run("inspect", "made/p", "--json").json["layout"] == made.json["layout"]


def test_results_lie_beside_the_file_that_was_given(place: Path) -> None:
    shutil.copytree(RUN, place / "b")
    for name in ("plan.json", "report.html"):
        (place / "b" / name).unlink()

    made = run("plan", "--size", "9.5MB", "--saliency", "b/saliency.safetensors", "--json")
    assert made.json["plan"] == "b/plan.json"
    assert "another plan than b/plan.json" in run("report", "--plan", "b/plan.json").error

    (place / "b" / "evaluation.json").unlink()
    assert run("report", "--plan", "b/plan.json", "--json").json["report"] == "b/report.html"


def test_report_refuses_the_evaluation_of_an_older_plan(place: Path) -> None:
    assert run("plan", "--size", "9.5MB", "--force").code == 0

    result = run("report", "--force")
    assert "evaluation.json is of a checkpoint with another plan" in result.error

    result = run("report", "--force", "--evaluation", RUN / "evaluation.json")
    assert "evaluation.json is of a checkpoint with another plan" in result.error


def test_commands_outside_a_run_say_what_to_name(place_with_checkpoint: Path) -> None:
    (place_with_checkpoint / RUN / "run.json").unlink()

    assert "does not say which model it belongs to" in run("export", "--out", "new").error
    assert "does not say which model" in run("evaluate", "--out", "e.json").error
    assert "does not say which model" in run("evaluate", RUN / "checkpoint", "--force").error
    assert not Path("new").exists()


def test_a_plan_outside_the_run_needs_a_place_for_what_is_made_of_it(place: Path) -> None:
    assert run("plan", "--size", "9MB", "--layout", "stock", "--out", "other.json").code == 0

    for command in ("export", "report"):
        result = run(command, "--plan", "other.json")
        assert "other.json is not the plan.json of runs/tiny-k3" in result.error
    assert run("export", "--plan", "other.json", "--out", "made").code == 0
    assert run("evaluate", "made", "--out", "e.json", "--tokens", 100).code == 0
    files = ("--plan", "other.json", "--evaluation", "e.json")
    assert run("report", *files, "--out", "r.html").code == 0
    rival = ("--rival", "e.json", "--rival-plan", "other.json", "--out", "both.html")
    assert run("report", *rival).code == 0
    predicted = '<th scope="col">predicted, nats</th>'
    assert predicted in Path("both.html").read_text("utf-8")
    assert run("report", *rival[:2], "--out", "one.html").code == 0
    result = run("report", *rival[:3], "nowhere.json", "--out", "none.html")
    assert result.code == 1 and "nowhere.json does not exist" in result.error
    assert predicted not in Path("one.html").read_text("utf-8")


def test_report_says_what_its_page_warns_of(place: Path) -> None:
    assert run("plan", "--size", "8MB", "--out", "other.json").code == 0
    shorter = json.loads((RUN / "evaluation.json").read_text("utf-8")) | {"sequence_length": 99}
    Path("e.json").write_text(json.dumps(shorter | {"label": "rival"}), "utf-8")
    page = ("report", "--rival", "e.json", "--rival-plan", "other.json", "--out", "r.html")
    warned = [line for line in run(*page).err.splitlines() if line.startswith("warning: ")]
    assert any("belong to none of the evaluations" in line for line in warned)
    assert "warning: “rival” is not comparable: another sequence length." in warned

    (RUN / "evaluation.json").unlink()
    alone = run(*page, "--force").err
    assert "warning: Nothing is compared: there is no evaluation of this plan." in alone


def test_a_run_s_own_report_is_renewed(place: Path) -> None:
    first = run("report")
    assert first.code == 0 and "run: " not in first.err  # there is no other
    assert run("report").code == 0


def test_planner_options_reach_the_plan(place: Path) -> None:
    size = ("--size", "9.5MB", "--out", "p.json")
    chosen = ("--keep", "3:17,40", "--keep", "4:1", "--domains", "worst", "--clamp", "0.4:1.9")
    assert run("plan", *size, *chosen, "--low-down", "3bit", "--protect-super", 1).code == 0

    plan = Plan.load(Path("p.json"))
    third = next(layer for layer in plan.layers if layer.layer == 3)
    assert {17, 40} <= set(third.kept[: third.high])
    assert plan.low["down_proj"].bits == 3 and plan.low["up_proj"].bits == 2
    settings = plan.settings
    assert settings["domains"] == "worst" and settings["protect_super"] == 1
    assert settings["clamp"] == [0.4, 1.9] and settings["keep"] == [[3, 17], [3, 40], [4, 1]]
    weights = ("--domains", "code=2,math=1")
    assert "domains:" in run("plan", *size, "--force", "--domains", "nope=1").err
    assert run("plan", *size, "--force", *weights, "--clamp", "none").code == 0
    assert Plan.load(Path("p.json")).settings["clamp"] is None


@pytest.mark.parametrize("trunk", ["source", "8bit"])
def test_a_size_in_percent_is_of_the_experts_beside_all_router_rows(
    place: Path, trunk: str
) -> None:
    command = ("plan", "--size", "40%", "--trunk", trunk, "--out", "p.json", "--force")
    assert run(*command).code == 0

    plan = Plan.load(Path("p.json"))
    expert = 3 * 128 * 128 * 17 // 32  # three matrices in mxfp4: 4.25 bits a weight
    router_row = plan.waterfall.router / sum(plan.expert_counts)
    limit = 5 * 64 * (0.4 * expert + router_row)
    left = limit - (plan.waterfall.weights - plan.waterfall.trunk)
    assert 0 <= left < expert + router_row
    assert plan.settings["size"] == plan.waterfall.trunk + int(limit)


def test_a_plan_says_that_the_trunks_rounding_is_not_counted(place: Path) -> None:
    command = ("plan", "--trunk", "6bit", "--out", "p.json", "--force", "--size")
    counted = "nats, no plan under the same constraints is below"
    some = run(*command, "40%").err
    assert counted in some and "; rounding the trunk to 6 and 8 bits not counted." in some
    assert "All experts fit: nothing needs pruning.\nwarning: rounding the trunk is no part of" in (
        run(*command, "100%").err
    )
    plain = run("plan", "--size", "40%", "--out", "p.json", "--force").err
    assert counted in plain and "trunk to" not in plain


def test_sweep_and_diff_write_nothing(place: Path) -> None:
    before = sorted(Path().rglob("*"))
    found = run("plan", "--size", "9MB", "--sweep", "--extra", "500KB", "--json").json
    damages = [point["damage"] for point in found["frontier"]]
    assert damages == sorted(damages, reverse=True) and damages[-1] == 0
    assert found["more"]["extra"] == 500_000 and found["more"]["gain"] > 0
    assert found["asked"] == 9_000_000
    assert 9_000_000 in [point["amount"] for point in found["frontier"]]
    table = run("plan", "--size", "9MB", "--sweep").err
    assert "best plain recipe" in table and "450.0 KB more" in table
    (asked,) = (line for line in table.splitlines() if "asked" in line)
    assert asked.split()[1:3] == ["9.0", "MB"]
    assert sorted(Path().rglob("*")) == before

    assert run("plan", "--size", "8MB", "--out", "other.json").code == 0
    assert run("plan", "--diff", "other.json", "--json").json["weights"][0] <= 8_000_000
    assert "in both" in run("plan", "--diff", "other.json").err


def test_typed_choice_goes_before_the_recipe_s(place: Path) -> None:
    Path("r.yaml").write_text("model: a/b\nplan: {budget: 1GB, reserve: 0.5, layout: stock}\n")

    made = run("plan", "--recipe", "r.yaml", "--size", "9.6MB", "--reserve", "0.08", "--force")

    settings = Plan.load(RUN / "plan.json").settings
    assert made.code == 0
    assert (settings["size"], settings["budget"]) == (9_600_000, None)
    assert (settings["reserve"], settings["layout"], settings["context"]) == (0.08, "stock", 8192)


@pytest.mark.parametrize("written", ["with space/my model", "with space/my model/", "./m"])
def test_model_is_found_however_it_is_written(empty: Path, written: str) -> None:
    (empty / "with space").mkdir()
    (empty / "with space" / "my model").symlink_to(MODEL)
    (empty / "m").symlink_to(MODEL)

    directory = RunDirectory.for_model(written, None)
    directory.start(written)

    assert directory.path == RUN
    assert directory.model == MODEL


# Inspect


def test_inspect_shows_every_kind_of_file(place_with_checkpoint: Path) -> None:
    expected = {
        "saliency.safetensors": ("never_routed", "5 MoE layers of 64 experts"),
        "plan.json": ("alternatives", "over that of dropping it (kappa)."),
        "evaluation.json": ("mean_kl", "same top token"),
        "checkpoint": ("expert_counts", "2-bit g128"),
    }
    for name, (key, text) in expected.items():
        shown, data = run("inspect", RUN / name), run("inspect", RUN / name, "--json")
        told = "checking files\n" if name == "checkpoint" else ""
        assert (shown.code, shown.err, data.err) == (0, told, told)
        assert text in shown.out
        assert key in data.json

    saliency = Saliency.load(RUN / "saliency.safetensors")
    assert saliency.measurement is not None
    measured = int(saliency.measurement.tokens.max()), int(saliency.measurement.kl_tokens[0])
    found = run("inspect", RUN / "saliency.safetensors", "--json").json
    assert (found["measured_tokens"], found["sensitivity_tokens"]) == measured
    said = "were measured on {:,} tokens, sensitivity on {:,}.".format(*measured)
    assert said in run("inspect", RUN / "saliency.safetensors").out
    plan = Plan.load(RUN / "plan.json")
    found = run("inspect", RUN / "checkpoint", "--json").json
    assert found["expert_counts"] == plan.expert_counts
    assert found["expert_bank_split"] == plan.expert_bank_split
    embedded = run("inspect", MODEL, "--json").json
    assert embedded["expert_counts"] == [0, 64, 64, 64, 64, 64]
    assert embedded["expert_formats"] == {str(layer): ["mxfp4"] for layer in range(1, 6)}


def test_inspect_names_the_files_of_a_run(place_with_checkpoint: Path) -> None:
    result = run("inspect", RUN)
    assert (result.code, result.error) == (1, f"{RUN} is a run, not a checkpoint.")
    files = f"{RUN / 'plan.json'}, {RUN / 'evaluation.json'}, {RUN / 'checkpoint'}"
    assert files in result.err
    runs, settings = run("inspect", "runs"), run("inspect", RUN / "run.json")
    assert runs.error == "runs holds runs, it is not a checkpoint."
    assert f"a file of {RUN}; e.g. {RUN / 'saliency.safetensors'}" in runs.err
    assert settings.error == f"{RUN / 'run.json'} says only which model the run is of."
    assert files in settings.err


def test_inspect_names_all_that_is_wrong_with_a_checkpoint(place_with_checkpoint: Path) -> None:
    checkpoint = place_with_checkpoint / RUN / "checkpoint"
    (checkpoint / "notes.txt").write_text("mine")
    shown = run("inspect", checkpoint, "--json")  # no weights, so it is only told
    extra = [file["path"] for file in shown.json["files"] if file["status"] == "extra"]
    assert (shown.code, extra) == (0, ["notes.txt"])
    (checkpoint / "generation_config.json").unlink()
    said = run("inspect", checkpoint).error
    assert "generation_config.json is missing, notes.txt is extra." in said


# Merge


@pytest.fixture(scope="session")
def domains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saliency of two domains, one at a time and together; do not write to it."""
    directory = tmp_path_factory.mktemp("domains")
    runs = {"math": 200, "code": 200, "both": 400}
    with working_in(directory):
        for name, tokens in runs.items():
            sets = [name] if name != "both" else ["math", "code"]
            chosen = [word for one in sets for word in ("--calibration", one)]
            result = run(
                "calibrate", MODEL, *chosen, "--tokens", str(tokens), *QUICK, "--run", name
            )
            assert result.code == 0, result
    return directory


def test_merged_runs_are_one_run_over_both(domains: Path, empty: Path) -> None:
    parts = [domains / name / "saliency.safetensors" for name in ("math", "code")]

    result = run("merge", *parts, "--out", "merged.safetensors", "--json")

    merged = Saliency.load(Path("merged.safetensors"))
    both = Saliency.load(domains / "both" / "saliency.safetensors")
    assert result.json["domains"] == {"code": 200, "math": 200}
    order = [both.domains.index(domain) for domain in merged.domains]
    for name, array in vars(both).items():
        if isinstance(array, np.ndarray):
            assert np.array_equal(getattr(merged, name), array[:, order]), name
    assert sorted(merged.provenance.inputs.values()) == sorted(map(sha256, parts))
    assert {c.domain: c.tokens for c in merged.provenance.corpora} == {"code": 200, "math": 200}
    assert run("merge", *parts, "--out", "merged.safetensors").error.endswith("exists already.")


def test_merge_refuses_what_does_not_add_up(domains: Path, empty: Path) -> None:
    one = domains / "math" / "saliency.safetensors"
    saliency = Saliency.load(one)
    spec = replace(saliency.spec, model_sha256="c0ffee", model="other")
    replace(saliency, spec=spec).save(empty / "other.safetensors")
    before = snapshot(empty)

    assert "are not the same model" in run("merge", one, "other.safetensors", "--out", "m").error
    assert "same file is given twice" in run("merge", one, one, "--out", "m").error
    assert "nope does not exist." in run("merge", one, "nope", "--out", "m").error
    assert snapshot(empty) == before


def test_merge_refuses_text_that_would_count_twice(domains: Path, empty: Path) -> None:
    math, both = (domains / name / "saliency.safetensors" for name in ("math", "both"))

    result = run("merge", math, both, "--out", "m")

    assert result.error == (
        f"math of {math} and math of {both} are the same text (domain math): it would count twice."
    )
    assert not list(empty.iterdir())


def test_merge_gives_the_same_in_any_order(domains: Path, empty: Path) -> None:
    one = Saliency.load(domains / "math" / "saliency.safetensors")
    (corpus,) = one.provenance.corpora
    for name, factor in {"a": 1.0, "b": 1 / 3, "c": 0.7}.items():
        sums = {n: getattr(one, n) * factor for n in ("gate", "norm", "gate2_norm2")}
        corpora = (replace(corpus, sha256=name * 64),)
        provenance = replace(one.provenance, corpora=corpora)
        replace(one, provenance=provenance, **sums).save(empty / name)
    found = []
    for order in itertools.permutations("abc"):
        assert run("merge", *order, "--out", "m", "--force").code == 0
        merged = Saliency.load(Path("m"))
        replace(merged, provenance=replace(merged.provenance, command="")).save(Path("plain"))
        found.append(Path("plain").read_bytes())
        Path("plain").unlink()
    assert len(set(found)) == 1


def test_single_file_can_be_merged_and_says_so(domains: Path, empty: Path) -> None:
    one = domains / "math" / "saliency.safetensors"

    assert run("merge", one, "--out", "copy.safetensors").code == 0

    assert Saliency.load(Path("copy.safetensors")).provenance.command.startswith("reap merge")


# run and demo

RECIPE = """\
name: small
model: MODEL
texts: [TEXT]
evaluation_texts: [math]
calibration: {tokens: 200, sequence_length: 64, probe_tokens: 0, sensitivity: false}
plan: {size: 9.6MB}
evaluation: {tokens: 200, sequence_length: 64}
"""


@pytest.fixture(scope="session")
def recipe_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """`reap run` of a small recipe; do not write to it."""
    directory = tmp_path_factory.mktemp("recipe")
    text = directory / "own.txt"
    text.write_text("Some text about experts and tokens.\n" * 40)
    (directory / "r.yaml").write_text(RECIPE.replace("MODEL", MODEL).replace("TEXT", "own.txt"))
    with working_in(directory):
        result = run("run", "r.yaml", "--run", "made", "--json")
    return directory, result


@pytest.fixture
def resumed(
    recipe_run: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    assert recipe_run[1].code == 0, recipe_run[1]
    shutil.copytree(recipe_run[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stages_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages that a pipeline would do again; nothing is done."""
    done: list[str] = []
    for name in ("calibrate", "plan", "export", "evaluate"):
        monkeypatch.setattr(
            f"reap.cli.stages.{name}", lambda *args, name=name, **more: done.append(name)
        )
    return done


def edit(old: str, new: str) -> None:
    text = Path("r.yaml").read_text()
    assert old in text
    Path("r.yaml").write_text(text.replace(old, new))


def again(*more: str) -> Result:
    return run("run", "r.yaml", "--run", "made", *more)


def test_run_does_all_stages(recipe_run: tuple[Path, Result]) -> None:
    directory, result = recipe_run

    assert result.json == {"run": "made", "report": "made/report.html"}
    assert "small" in (directory / "made" / "report.html").read_text()


def test_run_again_does_nothing_but_the_report(resumed: Path) -> None:
    before = snapshot(resumed)

    result = again()

    after = snapshot(resumed)
    assert result.code == 0
    assert result.err.count("is there already") == 4
    assert {name for name in before if before[name] != after[name]} <= {"made/report.html"}
    assert before.keys() == after.keys()


@pytest.mark.parametrize(
    ("old", "new", "message", "first"),
    [
        ("tokens: 200, sequence_length: 64, p", "tokens: 90, sequence_length: 64, p",
         "saliency.safetensors does not belong to this recipe: tokens is 200, the recipe says 90.",
         "calibrate"),
        ("probe_tokens: 0", "probe_tokens: 5", "probe_tokens is 0, the recipe says 5.",
         "calibrate"),
        ("sensitivity: false", "low: [4bit], batch_tokens: 7",
         "batch_tokens is 4096, the recipe says 7, sensitivity is False, the recipe says True, "
         "low_formats is ['2-bit g128', '3-bit g128'], the recipe says ['4-bit g64'].",
         "calibrate"),
        ("texts: [own.txt]", "texts: [own.txt, code]",
         "its texts are own.txt, the recipe says own.txt, code.", "calibrate"),
        ("size: 9.6MB", "size: 9.5MB",
         "plan.json does not belong to this recipe: size is 9600000, the recipe says 9500000.",
         "plan"),
        ("size: 9.6MB", "size: 9.6MB, trunk: 8bit", "trunk is source, the recipe says 8bit.",
         "plan"),
        ("evaluation: {tokens: 200", "evaluation: {tokens: 100",
         "evaluation.json does not belong to this recipe: tokens is 200, the recipe says 100.",
         "evaluate"),
        ("evaluation_texts: [math]", "evaluation_texts: [code]",
         "its texts are math, the recipe says code.", "evaluate"),
    ],
)  # fmt: skip
def test_changed_recipe_is_noticed_by_name(
    resumed: Path, stages_run: list[str], old: str, new: str, message: str, first: str
) -> None:
    edit(old, new)
    before = snapshot(resumed)

    result = again()

    assert message in result.error
    assert f"--force to run again from `{first}` on" in result.err
    assert snapshot(resumed) == before
    assert stages_run == []

    assert again("--force").code == 0
    order = ["calibrate", "plan", "export", "evaluate"]
    assert stages_run == order[order.index(first) :]


def test_changed_text_is_noticed(resumed: Path) -> None:
    Path("own.txt").write_text("Other text altogether.\n" * 40)

    assert "the text of own.txt has changed" in again().error


def test_changed_files_are_noticed(resumed: Path, stages_run: list[str]) -> None:
    made = Path("made")
    plan = Plan.load(made / "plan.json")
    replace(plan, damage=0.5).save(made / "plan.json", force=True)
    assert "checkpoint does not belong to this recipe: it was not exported from" in again().error

    saliency = Saliency.load(made / "saliency.safetensors")
    replace(saliency, gate=saliency.gate * 2).save(made / "saliency.safetensors", force=True)
    assert "plan.json does not belong to this recipe: it was made from another" in again().error

    (made / "saliency.safetensors").write_bytes(b"damaged")
    assert "saliency.safetensors does not belong" in again().error

    (made / "saliency.safetensors").unlink()
    assert "not made from made/saliency.safetensors, which is not there" in again().error
    assert stages_run == []


def test_plain_plan_is_not_the_recipe_s(resumed: Path) -> None:
    assert run("plan", "--run", "made", "--size", "9.6MB", "--plain", "random", "--force").code == 0

    assert "it was made with --plain random" in again().error


def test_another_model_is_noticed(resumed: Path) -> None:
    edit(MODEL, str(other_model(resumed / "other")))

    assert "saliency.safetensors does not belong to this recipe: it is of tiny-k3" in again().error


def test_interrupted_run_goes_on_where_it_stopped(resumed: Path, stages_run: list[str]) -> None:
    shutil.move("made/evaluation.json", "kept.json")

    with pytest.raises(Exception, match=r"evaluation\.json does not exist"):
        # The evaluation is not really made again here.
        Pipeline(load("r.yaml"), RunDirectory(Path("made"))).run()

    assert stages_run == ["evaluate"]


def load(name: str) -> Recipe:
    from reap.recipes import load_recipe

    return load_recipe(name)


def test_force_does_everything_again_if_all_fits(resumed: Path, stages_run: list[str]) -> None:
    assert again("--force").code == 0

    assert stages_run == ["calibrate", "plan", "export", "evaluate"]


def test_recipe_is_checked_before_the_work(resumed: Path, stages_run: list[str]) -> None:
    shutil.rmtree("made")
    edit("evaluation_texts: [math]", "evaluation_texts: [nope]")

    assert "nope is neither a shipped text set nor a file." in again().error
    assert not Path("made").exists()


def test_demo_runs_its_recipe(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("r.yaml")
    asked: list[str] = []

    def small(name: str) -> Recipe:
        asked.append(name)
        return recipe

    monkeypatch.setattr("reap.recipes.load_recipe", small)

    result = run("demo", "--out", "made", "--json")

    assert asked == ["demo"]
    assert result.json == {"run": "made", "report": "made/report.html"}
    assert f"Report: {resumed / 'made' / 'report.html'}" in result.err


# Faults: an error and a hint, nothing written


def other_model(directory: Path, **changes: Any) -> Path:
    """The embedded model with another config.json; shards are links."""
    shutil.copytree(MODEL, directory, copy_function=os.symlink)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= changes
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def broken(finished: tuple[Path, dict[str, Result]], tmp_path_factory: Any) -> Path:
    """The finished run beside everything that can be wrong with a file."""
    directory = tmp_path_factory.mktemp("broken")
    shutil.copytree(finished[0], directory, dirs_exist_ok=True)
    other_model(directory / "other")
    other_model(directory / "dense", num_experts=0)
    shard = "model-00003-of-000009.safetensors"
    for name in ("missing", "truncated"):
        other_model(directory / name)
        (directory / name / shard).unlink()
    (directory / "truncated" / shard).write_bytes((Path(MODEL) / shard).read_bytes()[:-100])
    (directory / "folder").mkdir()
    (directory / "folder" / "keep").write_text("precious")
    (directory / "file").write_text("precious")
    (directory / "empty.txt").write_text(" \n")
    (directory / "bad.jsonl").write_text("{}\n")
    (directory / "picture.png").write_bytes(b"\x89PNG")
    (directory / "list.json").write_text("[1]")
    (directory / "foreign.json").write_text('{"format": "gguf"}')
    plan = json.loads((directory / RUN / "plan.json").read_text())
    (directory / "newer.json").write_text(json.dumps(plan | {"format_version": 99}))
    (directory / "damaged.json").write_text(json.dumps(plan | {"layers": 3}))
    saliency = (directory / RUN / "saliency.safetensors").read_bytes()
    (directory / "half.safetensors").write_bytes(saliency[: len(saliency) // 2])
    return directory


SHARD = "model-00003-of-000009.safetensors"
PLAN = ("plan", "--size", "9.6MB", "--force")
CALIBRATE = ("calibrate", "--run", "new")
FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "no run": (("plan", "--size", "9.6MB", "--run", "none"), "none/saliency.safetensors does not"),
    "plan exists": (("plan", "--size", "9.6MB"), "runs/tiny-k3/plan.json exists already."),
    "saliency exists": (("calibrate", MODEL), "runs/tiny-k3/saliency.safetensors exists already."),
    "checkpoint exists": (("export",), "runs/tiny-k3/checkpoint exists already."),
    "evaluation exists": (("evaluate",), "runs/tiny-k3/evaluation.json exists already."),
    "report exists": (
        ("report", "--out", "runs/tiny-k3/report.html"),
        "runs/tiny-k3/report.html exists already.",
    ),
    "no budget": (("plan", "--force"), "give exactly one of a budget and a size."),
    "two budgets": ((*PLAN, "--budget", "1GB"), "give exactly one of a budget and a size."),
    "unit": (("plan", "--budget", "512G", "--force"), "'512G' is not a size."),
    "size too small": (
        ("plan", "--size", "1MB", "--force"),
        "1.0 MB (1,000,000 bytes) of weights are too few: the smallest plan",
    ),
    "budget too small": (
        ("plan", "--budget", "2MB", "--context", "100", "--force"),
        "needs a budget of",
    ),
    "percent": (("plan", "--size", "101%", "--force"), "101% is not a share of the experts."),
    "percent too small": (("plan", "--size", "5%", "--force"), "of weights are too few"),
    "percent and budget": (
        ("plan", "--size", "50%", "--budget", "1GB", "--force"),
        "give exactly one of a budget and a size.",
    ),
    "percent of a budget": (("plan", "--budget", "50%", "--force"), "'50%' is not a size."),
    "saliency of another run": (
        ("plan", "--size", "9.6MB", "--saliency", "foreign.safetensors"),
        "foreign.safetensors is not the saliency.safetensors of runs/tiny-k3.",
    ),
    "diff and a size": (
        ("plan", "--diff", "runs/tiny-k3/plan.json", "--size", "9.6MB"),
        "--diff has no use for --size.",
    ),
    "sweep and out": (
        ("plan", "--size", "9.6MB", "--sweep", "--out", "x"),
        "--sweep has no use for --out.",
    ),
    "extra alone": (
        ("plan", "--size", "9.6MB", "--extra", "1MB", "--out", "x"),
        "--extra has no use without --sweep.",
    ),
    "sweep without covariances": (
        ("plan", "--size", "9.6MB", "--sweep", "--low-rounding", "feedback"),
        "rounding with feedback needs covariances",
    ),
    "rival's plan alone": (
        ("report", "--rival-plan", "runs/tiny-k3/plan.json", "--out", "r"),
        "--rival-plan has no use without --rival.",
    ),
    "layout": ((*PLAN, "--layout", "x"), "unknown layout 'x'."),
    "format": ((*PLAN, "--low", "9bit"), "unknown low precision '9bit'."),
    "trunk": ((*PLAN, "--trunk", "2bit"), "unknown trunk '2bit'."),
    "criterion": ((*PLAN, "--criterion", "x"), "unknown criterion 'x'."),
    "plain": ((*PLAN, "--plain", "x"), "unknown recipe 'x'."),
    "recipe": (("plan", "--recipe", "x", "--force"), "there is no recipe x."),
    "recipe to run": (("run", "x"), "there is no recipe x."),
    "text set": ((*CALIBRATE, MODEL, "--calibration", "x"), "x is neither a shipped text set nor"),
    "text without text": ((*CALIBRATE, MODEL, "--calibration", "empty.txt"), "has no text"),
    "text of a kind": ((*CALIBRATE, MODEL, "--calibration", "picture.png"), "of a kind that reap"),
    "bad lines": ((*CALIBRATE, MODEL, "--calibration", "bad.jsonl"), "bad.jsonl has no column"),
    "evaluation text": (("evaluate", "--text", "x", "--out", "e"), "x is neither a shipped text"),
    "format to measure": ((*CALIBRATE, MODEL, "--low", "2bit-gx"), "unknown format '2bit-gx'."),
    "no tokens": ((*CALIBRATE, MODEL, "--tokens", "1"), "0 tokens to work on"),
    "dense": ((*CALIBRATE, "dense"), "this kimi_k3 model is dense"),
    "missing shard": (
        (*CALIBRATE, "missing"),
        f"1 of 9 shards are missing from missing, first {SHARD}.",
    ),
    "truncated shard": ((*CALIBRATE, "truncated"), "it is truncated."),
    "no model": ((*CALIBRATE, "nowhere"), "nowhere is not a directory."),
    "no checkpoint": ((*CALIBRATE, "folder"), "folder has no config.json."),
    "unknown home": ((*CALIBRATE, "~no-such-user/m"), "~no-such-user/m"),
    "model is a file": ((*CALIBRATE, "file"), "file is not a directory."),
    "another model": (
        ("export", "--model", "other", "--out", "new"),
        "the plan was made for tiny-k3 (",
    ),
    "source as output": (
        ("export", "--model", "other", "--out", "./other", "--force"),
        "other is the source model.",
    ),
    "folder as checkpoint": (("export", "--out", "folder", "--force"), "is not a checkpoint"),
    "file as checkpoint": (("export", "--out", "file", "--force"), "is not a checkpoint"),
    "folder as plan": ((*PLAN, "--out", "folder"), "folder is a directory, not a file"),
    "folder as report": (("report", "--out", "folder", "--force"), "folder is a directory"),
    "plan below a file": ((*PLAN, "--out", "file/p"), "/file is not a directory."),
    "report below a file": (("report", "--out", "file/a/r"), "/file is not a directory."),
    "export below a file": (("export", "--out", "file/c"), "/file is not a directory."),
    "evaluate below a file": (("evaluate", "--out", "file/e"), "/file is not a directory."),
    "calibrate below a file": (
        ("calibrate", MODEL, "--run", "file"),
        "could not write file/saliency.safetensors: ",
    ),
    "merge below a file": (("merge", "half.safetensors", "--out", "file/m"), "not a directory."),
    "run below a file": (("run", "demo", "--run", "file/x"), "/file is not a directory."),
    "half a file": (("inspect", "half.safetensors"), "is not a readable safetensors file"),
    "shard as saliency": (
        (*PLAN, "--saliency", f"{MODEL}/{SHARD}", "--out", "x"),
        "is not a reap file",
    ),
    "folder as saliency": (
        (*PLAN, "--saliency", "folder", "--out", "x"),
        "folder is not a readable",
    ),
    "list": (("inspect", "list.json"), "list.json is not a file that reap wrote."),
    "foreign": (("inspect", "foreign.json"), "foreign.json is not a file that reap wrote."),
    "foreign plan": (("export", "--plan", "foreign.json"), "expected reap.plan."),
    "newer": (("inspect", "newer.json"), "newer.json has reap.plan version 99; this reap reads"),
    "newer plan": (("export", "--plan", "newer.json"), "has reap.plan version 99"),
    "damaged": (("inspect", "damaged.json"), "damaged.json is damaged"),
    "nothing": (("inspect", "nothing"), "nothing does not exist."),
    "folder as diff": (
        ("plan", "--diff", "folder", "--out", f"{RUN}/plan.json"),
        "folder is a directory, not a file.",
    ),
    "no such plan": (("export", "--plan", "no.json", "--model", MODEL), "no.json does not exist."),
    "no such saliency": (
        ("export", "--saliency", "no.safetensors", "--out", "new"),
        "so export needs the saliency file, but no.safetensors does not exist.",
    ),
    "folder as file": (("inspect", "folder"), "folder has no config.json."),
    "evaluation as plan": (
        ("report", "--plan", f"{RUN}/evaluation.json", "--out", "r"),
        "is a reap.evaluation file; expected reap.plan.",
    ),
    "no rival": (("report", "--rival", "no.json", "--out", "r"), "no.json does not exist."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_an_error_and_nothing_is_written(broken: Path, fault: str) -> None:
    argv, message = FAULTS[fault]
    with working_in(broken):
        before = snapshot(broken)

        result = run(*argv)

        assert message in result.error
        assert snapshot(broken) == before
        assert not Path("new").exists()


def test_too_small_a_budget_names_the_smallest(broken: Path) -> None:
    with working_in(broken):
        message = run("plan", "--size", "1MB", "--out", "p.json").error
        smallest = int(re.findall(r"\(([\d,]+) bytes\)", message)[-1].replace(",", ""))

        assert "are too few" in run("plan", "--size", str(smallest - 1), "--out", "p.json").error
        assert run("plan", "--size", str(smallest), "--out", "p.json").code == 0
        Path("p.json").unlink()


def test_no_run_at_all(empty: Path) -> None:
    for command in (["plan", "--size", "9MB"], ["export"], ["evaluate"], ["report"]):
        assert run(*command).error == "there is no run below runs/."
    assert not list(empty.iterdir())


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file can grow beyond `limit` bytes; the same error path as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("argv", "limit"),
    [
        (("plan", "--size", "9.5MB", "--force"), 1000),
        (("export", "--force"), 100_000),
        (("evaluate", "--tokens", "100", "--no-reference", "--text", "math", "--force"), 100),
        (("report", "--force"), 1000),
        (("merge", str(RUN / "saliency.safetensors"), "--out", "m"), 1000),
        (("calibrate", MODEL, "--tokens", "40", "--calibration", "math", *QUICK, "--force"), 1000),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_full_disk_leaves_all_as_it_was(
    place_with_checkpoint: Path, argv: tuple[str, ...], limit: int
) -> None:
    before = snapshot(place_with_checkpoint)

    with full_disk(limit):
        result = run(*argv)

    assert "could not write" in result.error
    assert snapshot(place_with_checkpoint) == before


def test_full_disk_at_the_very_end_of_a_calibration_loses_nothing(empty: Path) -> None:
    argv = ("calibrate", MODEL, "--tokens", "40", "--calibration", "math", *QUICK)
    assert run(*argv, "--run", "whole").code == 0
    whole = Path("whole/saliency.safetensors").read_bytes()

    with full_disk(len(whole) - 64):  # the name of the run is in the file, too
        result = run(*argv, "--run", "r")

    assert result.error.startswith("could not write r/saliency.safetensors")
    assert "is lost: make room, then go on with --resume (" in result.err
    assert [file.name for file in Path("r").iterdir()] == ["calibration.partial"]
    shutil.copy("whole/saliency.safetensors", "r")
    with full_disk(len(whole) - 64):  # the name of the run is in the file, too
        result = run(*argv, "--run", "r", "--resume", "--force")
    assert result.err.endswith("is lost: make room, then go on with --resume --force\n")
    assert Path("r/saliency.safetensors").read_bytes() == whole
    again = run(*argv, "--run", "r", "--resume", "--force")
    assert again.code == 0 and "layer 0" not in again.err
    first, found = (Saliency.load(Path(name) / "saliency.safetensors") for name in ("whole", "r"))
    assert found.score().tobytes() == first.score().tobytes()


@pytest.mark.parametrize(
    ("argv", "after"),
    [
        (("export", "--force"), "writing layer 3"),
        (("calibrate", MODEL, "--tokens", "300", "--force", *QUICK), "layer 2"),
    ],
    ids=["export", "calibrate"],
)
def test_ctrl_c_leaves_all_as_it_was(
    place_with_checkpoint: Path, argv: tuple[str, ...], after: str
) -> None:
    before = snapshot(place_with_checkpoint)
    process = subprocess.Popen(
        [sys.executable, *REAP, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if after in line:
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate()

    assert (process.returncode, out) == (130, "")
    assert err.endswith("\nerror: interrupted\n")
    assert "Traceback" not in err
    # But for what --resume takes up.
    for name in ("calibration.partial", "checkpoint.partial"):
        shutil.rmtree(place_with_checkpoint / RUN / name, ignore_errors=True)
    assert snapshot(place_with_checkpoint) == before


def test_a_run_that_is_being_calibrated_is_left_alone(place: Path) -> None:
    before = snapshot(place)
    with held(place / RUN):
        result = run("calibrate", MODEL, "--force", "--tokens", "40", *QUICK)
        assert result.error == "another process is calibrating in runs/tiny-k3."
    assert snapshot(place) == before


def test_evaluating_before_exporting(place: Path) -> None:
    result = run("evaluate", "--force")
    assert result.code == 1
    assert "runs/tiny-k3 has no checkpoint yet" in result.err and "reap export" in result.err


def test_layers_that_are_left_out_are_told_once_by_every_command(empty: Path) -> None:
    plain = models.write_deepseek_v3(empty / "plain")
    source = models.with_prediction_layers(plain, empty / "mtp", 1, num_nextn_predict_layers=1)
    size = format_size(open_source(str(source)).prediction_bytes)
    said = f"Leaves out 1 multi-token-prediction layer ({size}), which mlx-lm does not run.\n"
    calibrate = ("calibrate", source, "--run", "r", "--tokens", "40", *QUICK)
    calibrate += ("--calibration", "math")
    for argv in ((*calibrate, "--dry-run"), calibrate, ("plan", "--run", "r", "--size", "60%")):
        result = run(*argv)
        assert result.code == 0 and result.err.count(said) == 1, result
    assert run("inspect", source).out.count(said) == 1
    found = run("inspect", source, "--json").json
    assert found["prediction_layers"] == 1 and format_size(found["prediction_bytes"]) == size
    assert "Leaves out" not in run("inspect", plain).out


def test_the_embedded_model_by_name(empty: Path) -> None:
    assert run("calibrate", "embedded", "--tokens", "40", "--calibration", "math", *QUICK).code == 0
    assert (empty / "runs" / "tiny-k3" / "saliency.safetensors").exists()


def test_a_damaged_manifest_stops_an_evaluation_before_it_begins(
    place_with_checkpoint: Path,
) -> None:
    manifest = place_with_checkpoint / RUN / "checkpoint" / MANIFEST
    with open(manifest, "a", encoding="utf-8") as file:
        file.write("junk\n")
    before = snapshot(place_with_checkpoint)
    result = run("evaluate", "--tokens", "100", "--text", "math", "--force")
    assert "SHA256SUMS is damaged" in result.error
    assert snapshot(place_with_checkpoint) == before


def test_inspect_says_that_there_is_no_manifest(place_with_checkpoint: Path) -> None:
    (place_with_checkpoint / RUN / "checkpoint" / MANIFEST).unlink()
    result = run("inspect", str(RUN / "checkpoint"))
    assert result.code == 0 and "There is no SHA256SUMS" in result.out


def test_bug_keeps_its_traceback(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*args: Any, **more: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("reap.cli.stages.plan", bug)

    with pytest.raises(ZeroDivisionError):
        run("plan", "--size", "9.6MB", "--force")


@pytest.mark.parametrize(
    "argv",
    [
        ("nonsense",),
        ("plan", "--nonsense"),
        ("plan", "--context", "many"),
        ("plan", "--context", "-1"),
        ("calibrate",),
        ("calibrate", MODEL, "--tokens", "0"),
        ("calibrate", MODEL, "--sequence-length", "1"),
        ("merge", "a"),
        ("merge", "--out", "a"),
        ("inspect", "a", "b"),
        ("run",),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(empty: Path, argv: tuple[str, ...]) -> None:
    result = run(*argv)

    assert (result.code, result.out) == (2, "")
    assert "Usage: reap" in result.err
    assert not list(empty.iterdir())


# Processes of their own: imports, streams, the environment


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        *([name, "--help"] for name in ("plan", "calibrate", "export", "run")),
        ["plan", "--size", "9.6MB", "--force"],
        ["plan", "--recipe", "demo", "--force"],
        ["report", "--force"],
        ["inspect", str(RUN / "plan.json")],
        ["inspect", str(RUN / "saliency.safetensors")],
        ["merge", str(RUN / "saliency.safetensors"), "--out", "m"],
    ],
    ids=" ".join,
)
def test_light_commands_do_not_load_mlx(place: Path, argv: list[str]) -> None:
    (place / RUN / "evaluation.json").unlink()
    code = (
        "import sys; from reap.cli import main; code = main(sys.argv[1:]); "
        "print(code, *sorted({'mlx', 'mlx_lm', 'transformers', 'torch'} & set(sys.modules)))"
    )

    result = shell("-c", code, *argv)

    assert result.stdout.splitlines()[-1] == "0", result.stderr


def test_help_does_not_load_what_only_one_command_needs() -> None:
    code = "import sys; from reap.cli import main; main(['--help']); print(*sys.modules)"

    loaded = set(shell("-c", code).stdout.splitlines()[-1].split())

    assert not {"jinja2", "yaml", "rich.progress", "reap.planning.planner"} & loaded


def test_exit_codes_and_streams_of_a_process(place: Path) -> None:
    done = shell(*REAP, "inspect", str(RUN / "plan.json"), "--json")
    refused = shell(*REAP, "plan", "--size", "9.6MB")

    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["kept"] > 0
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == (
        "error: runs/tiny-k3/plan.json exists already.\n\n"
        "hint: pass --force to replace it, or name another place\n"
    )
    assert shell(*REAP, "nonsense").returncode == 2


@pytest.mark.parametrize("argv", [("--help",), ("inspect", str(RUN / "plan.json"), "--json")])
def test_reader_that_goes_away_is_no_error(
    place: Path, argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    process = subprocess.Popen(
        [sys.executable, *REAP, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()

    assert process.wait() in (0, 1)
    assert err == ""


def test_export_without_a_home_directory(place: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}

    result = shell(*REAP, "export", "--out", "a b/c d", "--json", env=environment)

    assert result.returncode == 0, result.stderr
    assert "mlx_lm.generate --model 'a b/c d'" in result.stderr
    assert not list(place.rglob("*.partial"))


def test_version() -> None:
    assert run("--version") == Result(0, f"reap {reap.__version__}\n", "")


def test_every_command_is_tested_for_json() -> None:
    from typer.main import get_command

    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    assert set(commands) == {*STAGES, "merge", "inspect", "run", "demo"}
    for command in commands.values():
        assert any(parameter.name == "json" for parameter in command.params)


def test_a_run_calibrated_again_must_be_planned_again(place: Path) -> None:
    assert run("calibrate", MODEL, "--tokens", "300", *QUICK, "--force").code == 0

    assert "was not made from runs/tiny-k3/saliency" in run("export", "--force").error

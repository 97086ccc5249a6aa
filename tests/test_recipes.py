"""Recipes: what ships loads, and whatever is wrong in one is named with its key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from reap import recipes
from reap.data import data_directory
from reap.errors import ReapError
from reap.models.source import open_source
from reap.planning import PlanSettings
from reap.planning.precision import settings_of
from reap.recipes import Recipe, load_recipe

GOOD = """\
name: mine
model: org/name
description: A test.
texts: [math, code]
evaluation_texts: [docs]
calibration:
  {tokens: 100, sequence_length: 64, probe_tokens: 0, sensitivity: false, low: [2bit],
   low_rounding: search}
plan: {size: 9.6MB, reserve: 0.1, layout: stock, low_rounding: plain}
evaluation: {tokens: 50}
"""


def write(directory: Path, text: str) -> str:
    file = directory / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("file", sorted(data_directory("recipes").glob("*.yaml")), ids=str)
def test_shipped_recipe_loads_by_name(file: Path) -> None:
    recipe = load_recipe(file.stem)

    assert recipe.name == file.stem
    assert recipe.description
    settings_of(recipe.plan, lambda: open_source("embedded").spec())


def test_all_settings_are_read(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, GOOD)) == Recipe(
        name="mine",
        model="org/name",
        description="A test.",
        texts=("math", "code"),
        evaluation_texts=("docs",),
        calibration={
            "tokens": 100,
            "sequence_length": 64,
            "probe_tokens": 0,
            "sensitivity": False,
            "low": ("2bit",),
            "low_rounding": "search",
        },
        plan={"size": 9_600_000, "reserve": 0.1, "layout": "stock", "low_rounding": "plain"},
        evaluation={"tokens": 50},
    )


def test_name_is_that_of_the_file_and_the_embedded_model_is_found(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "model: embedded\nplan: {budget: 1GB}\n"))

    assert (recipe.name, recipe.model) == ("mine", "embedded")
    assert recipe.texts == recipe.evaluation_texts == ()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("9600000", 9_600_000),
        ("9.6MB", 9_600_000),
        ("1GiB", 2**30),
        ("5.12e+11", 512 * 10**9),
        ("512e9", 512 * 10**9),
    ],
)
def test_sizes_as_yaml_reads_them(tmp_path: Path, size: str, expected: int) -> None:
    text = f"model: org/name\nplan: {{budget: {size}}}\n"

    assert load_recipe(write(tmp_path, text)).plan == {"budget": expected}


def test_a_size_in_percent_waits_for_the_model(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "model: org/name\nplan: {size: 55%}\n"))
    assert recipe.plan == {"size": "55%"}
    spec = open_source("embedded").spec()
    size = settings_of(recipe.plan, lambda: spec).size
    routers = sum(spec.num_experts * spec.router_row_bytes(layer) for layer in spec.moe_layers)
    share = (size - spec.trunk_bytes() - routers) / spec.experts_bytes
    assert share == pytest.approx(0.55, abs=1e-6)
    with pytest.raises(ReapError, match="101% is not a share"):
        load_recipe(write(tmp_path, "model: org/name\nplan: {size: 101%}\n"))


def test_every_setting_of_a_stage_can_be_in_a_recipe() -> None:
    from reap.calibrate import CalibrationSettings
    from reap.evaluate import EvaluationSettings

    assert list(recipes._PLAN) == [field.name for field in fields(PlanSettings)]
    calibration = {name.replace("low_formats", "low") for name in _names(CalibrationSettings)}
    assert recipes._CALIBRATION.keys() == calibration
    assert recipes._EVALUATION.keys() <= set(_names(EvaluationSettings))


def _names(settings: type) -> list[str]:
    return [field.name for field in fields(settings)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: mine", "nome: mine", "nome is not a setting of a recipe."),
        ("tokens: 100", "token: 100", "calibration.token is not a setting of a recipe."),
        ("tokens: 100", "tokens: 0", "calibration.tokens must be a whole number of at least 1"),
        ("tokens: 100", "tokens: 1e2", "calibration.tokens must be a whole number"),
        ("tokens: 100", "tokens: true", "calibration.tokens must be a whole number"),
        ("probe_tokens: 0", "probe_tokens: -1", "calibration.probe_tokens must be a whole number"),
        (
            "sensitivity: false",
            "sensitivity_tokens: 0",
            "calibration.sensitivity_tokens must be a whole number of at least 1, not 0.",
        ),
        ("tokens: 50", "tokens: many", "evaluation.tokens must be a whole number"),
        ("sensitivity: false", "sensitivity: 0", "calibration.sensitivity must be true or false"),
        (
            "low_rounding: search",
            "low_rounding: [search]",
            "calibration.low_rounding must be one of plain, search, weighted, feedback",
        ),
        ("low_rounding: plain", "low_rounding: up", "plan.low_rounding must be one of plain, "),
        ("low: [2bit]", "low: 2bit", "calibration.low must be a list of names, not '2bit'."),
        ("texts: [math, code]", "texts: math", "texts must be a list of names, not 'math'."),
        ("texts: [math, code]", "texts: [1]", "texts must be a list of names, not [1]."),
        ("size: 9.6MB", "size: 9.6M", "plan.size: '9.6M' is not a size."),
        ("size: 9.6MB", "size: [1]", "plan.size must be a size like 512GB, not [1]."),
        ("size: 9.6MB", "size: -1", "plan.size: a size must be positive"),
        ("size: 9.6MB", "size: 9MB, budget: 1GB", "give exactly one of a budget and a size."),
        ("size: 9.6MB", "context: 1", "give exactly one of a budget and a size."),
        ("reserve: 0.1", "reserve: 10%", "plan.reserve must be a number, not '10%'."),
        ("reserve: 0.1", "reserve: 2", "the reserve is a share of the budget below 1"),
        ("layout: stock", "layout: none", "unknown layout 'none'."),
        ("layout: stock", "layout: 3", "plan.layout must be a name, not 3."),
        ("layout: stock", "min_experts: 0", "plan.min_experts must be a whole number of at least"),
        ("model: org/name", "model: 3", "model must be a name, not 3."),
        ("model: org/name", "model:", "does not name a model."),
        ("plan: {", "plan: [{", "is not valid YAML"),
        (GOOD, "plan: [1]\nmodel: a/b\n", "plan must be a mapping of settings."),
        (GOOD, "- 1\n", "is not a recipe: it must be a mapping."),
        (GOOD, "", "is not a recipe: it must be a mapping."),
        (GOOD, "1: 2\nmodel: a/b\n", "1 is not a setting of a recipe."),
    ],
)
def test_wrong_recipe_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in GOOD
    file = write(tmp_path, GOOD.replace(old, new, 1))

    with pytest.raises(ReapError) as caught:
        load_recipe(file)

    assert message in caught.value.message
    assert caught.value.message.startswith(file)
    assert "\n" not in caught.value.message


def test_unknown_recipe_names_the_shipped_ones() -> None:
    with pytest.raises(ReapError, match="there is no recipe nope") as caught:
        load_recipe("nope")

    assert caught.value.hint is not None
    assert caught.value.hint.startswith("shipped: demo, ")
    assert "kimi-k3-512gb" in caught.value.hint and caught.value.hint.endswith("; or a file")


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.yaml").mkdir()

    with pytest.raises(ReapError, match=r"binary\.yaml is not valid YAML"):
        load_recipe(str(tmp_path / "binary.yaml"))
    with pytest.raises(ReapError, match=r"folder\.yaml cannot be read: Is a directory"):
        load_recipe(str(tmp_path / "folder.yaml"))

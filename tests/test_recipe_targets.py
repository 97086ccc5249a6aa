"""Shipped recipes: valid, and solved to a plan for models of the real shape."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from shapes import SHAPES, published_saliency

from reap.data import data_directory
from reap.planning import PlanSettings, make_plan
from reap.recipes import load_recipe

RECIPES = sorted(data_directory("recipes").glob("*.yaml"))
SUPPORTED = {"kimi_k3", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"}


def test_shapes_are_the_models() -> None:
    """Against published figures: Kimi-K3's exact bytes, the others' parameters and file sizes."""
    spec = SHAPES["moonshotai/Kimi-K3"]()
    assert spec.experts_bytes == 1_446_456_066_048
    routers = sum(spec.num_experts * spec.router_row_bytes(layer) for layer in spec.moe_layers)
    assert spec.trunk_bytes() + routers == 113_509_540_864
    parameters = {name: shape().parameters / 1e9 for name, shape in SHAPES.items()}
    assert parameters == pytest.approx(
        {
            "moonshotai/Kimi-K3": 2780,
            "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480.2,
            "zai-org/GLM-4.5-Air": 106.9,
            "openai/gpt-oss-120b": 116.8,
        },
        rel=1e-3,
    )
    spec = SHAPES["openai/gpt-oss-120b"]()
    assert spec.trunk_bytes() + spec.experts_bytes == pytest.approx(65.25e9, rel=1e-3)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipe_is_valid(file: Path) -> None:
    recipe = load_recipe(file.stem)
    assert recipe.name == file.stem
    assert recipe.description.endswith(".")
    if recipe.model in SHAPES:
        needs = "eeds architecture support" in " ".join(recipe.description.split())
        assert needs == (SHAPES[recipe.model]().model_type not in SUPPORTED)


@pytest.mark.parametrize("sensitivity", [True, False])
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipe_has_a_plan(file: Path, sensitivity: bool) -> None:
    recipe = load_recipe(file.stem)
    if recipe.model not in SHAPES:
        assert file.stem == "demo"
        return
    saliency = published_saliency(SHAPES[recipe.model](), sensitivity=sensitivity)
    settings = PlanSettings(**recipe.plan)
    plan = make_plan(saliency, settings, provenance=saliency.provenance)
    spec, water = saliency.spec, plan.waterfall
    assert water.slack >= 0
    assert water.weights + water.state + water.reserve <= settings.budget
    # Less than one expert of the high bank in each layer is left over.
    assert water.slack < len(spec.moe_layers) * spec.expert_bytes(spec.moe_layers[0], plan.high)
    counts = [len(layer.kept) for layer in plan.layers]
    assert min(counts) >= 4 * spec.top_k >= spec.min_experts
    assert plan.lower_bound <= plan.damage <= min(plan.alternatives.values()) * 1.02
    assert plan.settings["low_bank"]["layers"] == len(counts)


def test_planning_at_the_size_of_kimi_k3() -> None:
    """Generous for a busy machine; benchmarks/planner.py has the real targets."""
    saliency = published_saliency(SHAPES["moonshotai/Kimi-K3"](), seed=1)
    settings = PlanSettings(budget=512 * 10**9, trunk="8bit", layout="two-bank")
    start = time.process_time()
    plan = make_plan(saliency, settings, provenance=saliency.provenance)
    assert time.process_time() - start < 3
    assert plan.lower_bound <= plan.damage <= plan.lower_bound * 1.001


def test_recipes_cover_the_named_machines() -> None:
    named = {file.stem for file in RECIPES}
    assert named >= {
        "demo",
        "kimi-k3-256gb",
        "kimi-k3-512gb",
        "kimi-k3-2x512gb",
        "qwen3-coder-480b-128gb",
        "qwen3-coder-480b-192gb",
        "qwen3-coder-480b-256gb",
        "glm-4.5-air-64gb",
        "glm-4.5-air-96gb",
        "gpt-oss-120b-64gb",
    }

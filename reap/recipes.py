"""Recipes: one YAML file that names a model, a calibration, a budget and precisions."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from reap.data import data_directory, embedded_model
from reap.errors import ReapError


@dataclass(frozen=True)
class Recipe:
    """`calibration`, `plan` and `evaluation` hold options of the commands of those names, with
    sizes in bytes; `texts` are the calibration sets, `evaluation_texts` those for evaluation."""

    name: str
    model: str
    description: str = ""
    texts: tuple[str, ...] = ()
    evaluation_texts: tuple[str, ...] = ()
    calibration: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)


_CALIBRATION = ("tokens", "sequence_length", "batch_tokens", "probe_tokens")
_EVALUATION = ("tokens", "sequence_length")


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by name, or a YAML file. Raises ReapError naming the key that is wrong."""
    from reap.planning import PlanSettings, parse_size

    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = data_directory("recipes") / f"{name}.yaml"
    if not path.exists():
        shipped = sorted(file.stem for file in data_directory("recipes").glob("*.yaml"))
        raise ReapError(f"there is no recipe {name}.", f"shipped: {', '.join(shipped)}; or a file")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ReapError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ReapError(f"{path} is not a recipe: it must be a mapping.")
    _only(path, data, tuple(f.name for f in fields(Recipe)))
    _only(path, data.get("calibration") or {}, _CALIBRATION, "calibration.")
    _only(path, data.get("evaluation") or {}, _EVALUATION, "evaluation.")
    plan = dict(data.get("plan") or {})
    _only(path, plan, tuple(f.name for f in fields(PlanSettings)), "plan.")
    for key in ("budget", "size"):
        if key in plan:
            plan[key] = parse_size(plan[key])
    if "model" not in data:
        raise ReapError(f"{path} does not name a model.", "add `model: ORG/NAME`")
    PlanSettings(**plan)
    return Recipe(
        name=str(data.get("name", path.stem)),
        model=str(embedded_model()) if data["model"] == "embedded" else str(data["model"]),
        description=str(data.get("description", "")),
        texts=tuple(data.get("texts") or ()),
        evaluation_texts=tuple(data.get("evaluation_texts") or ()),
        calibration=dict(data.get("calibration") or {}),
        plan=plan,
        evaluation=dict(data.get("evaluation") or {}),
    )


def _only(path: Path, data: dict[str, Any], allowed: tuple[str, ...], prefix: str = "") -> None:
    unknown = sorted(set(data) - set(allowed))
    if unknown:
        raise ReapError(
            f"{path}: {prefix}{unknown[0]} is not a setting of a recipe.",
            f"known: {', '.join(prefix + name for name in allowed)}",
        )

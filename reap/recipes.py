"""Recipes: one YAML file that names a model, a calibration, a budget and precisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import yaml

from reap.artifacts.plan import Rounding
from reap.data import data_directory
from reap.errors import ReapError
from reap.planning.size import MOST, parse_percent, parse_size


@dataclass(frozen=True)
class Recipe:
    """`calibration`, `plan` and `evaluation` hold options of the commands of those names, with
    sizes in bytes; `texts` are the calibration sets, `evaluation_texts` those for evaluation, all
    shipped sets if there are none."""

    name: str
    model: str
    description: str = ""
    texts: tuple[str, ...] = ()
    evaluation_texts: tuple[str, ...] = ()
    calibration: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)


Check = Callable[[Any], Any]
"""Returns the value to use; raises ValueError saying what it must be, or ReapError."""


def _whole(least: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or value < least:
            raise ValueError(f"a whole number of at least {least}")
        return value

    return check


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _word(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a name")
    return value


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("a list of names")
    return tuple(value)


def _rounding(value: Any) -> str:
    if value not in get_args(Rounding):
        raise ValueError(f"one of {', '.join(get_args(Rounding))}")
    return str(value)


def _as_it_is(value: Any) -> Any:
    """PlanSettings checks it."""
    return value


def _size_or_percent(value: Any) -> int | str:
    """Percent stay as they are: what of is known with the model."""
    if isinstance(value, str) and parse_percent(value) is not None:
        return value
    return _size(value)


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a size like 512GB")
    return parse_size(value if isinstance(value, int) else str(value))


def _cut(value: Any) -> str:
    if value not in ("split", "truncate"):
        raise ValueError("split or truncate")
    return str(value)


_EVALUATION: dict[str, Check] = {
    "tokens": _whole(1),
    "sequence_length": _whole(2),
    "documents": _cut,
}
_CALIBRATION: dict[str, Check] = {
    **_EVALUATION,
    "batch_tokens": _whole(1),
    "probe_tokens": _whole(0),
    "sensitivity": _flag,
    "sensitivity_tokens": _whole(1),
    "low": _names,
    "low_rounding": _rounding,
}
_PLAN: dict[str, Check] = {
    "budget": _size,
    "size": _size_or_percent,
    "context": _whole(0),
    "reserve": _share,
    "layout": _word,
    "trunk": _word,
    "high": _word,
    "low": _word,
    "low_down": _word,
    "min_experts": _whole(1),
    "min_bank": _whole(1),
    "criterion": _word,
    "low_rounding": _rounding,
    "keep": _as_it_is,
    "protect_super": _whole(0),
    "domains": _as_it_is,
    "clamp": _as_it_is,
}


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by name, or a YAML file. Raises ReapError naming the key that is wrong."""
    from reap.planning import PlanSettings

    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = data_directory("recipes") / f"{name}.yaml"
    if not path.exists():
        shipped = sorted(file.stem for file in data_directory("recipes").glob("*.yaml"))
        raise ReapError(f"there is no recipe {name}.", f"shipped: {', '.join(shipped)}; or a file")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ReapError(f"{path} is not valid YAML: {reason}") from None
    except OSError as error:
        raise ReapError(f"{path} cannot be read: {error.strerror}.") from None
    if not isinstance(data, dict):
        raise ReapError(f"{path} is not a recipe: it must be a mapping.")
    _only(path, data, [f.name for f in fields(Recipe)])
    if not data.get("model"):
        raise ReapError(f"{path} does not name a model.", "add `model: ORG/NAME`")
    model = _checked(path, "model", _word, data["model"])
    plan = _section(path, data, "plan", _PLAN)
    try:
        PlanSettings(**(plan | {"size": MOST} if isinstance(plan.get("size"), str) else plan))
    except ReapError as error:
        raise ReapError(f"{path}: {error.message}", error.hint) from None
    return Recipe(
        name=str(data.get("name") or path.stem),
        model=model,
        description=str(data.get("description") or ""),
        texts=_checked(path, "texts", _names, data.get("texts") or []),
        evaluation_texts=_checked(
            path, "evaluation_texts", _names, data.get("evaluation_texts") or []
        ),
        calibration=_section(path, data, "calibration", _CALIBRATION),
        plan=plan,
        evaluation=_section(path, data, "evaluation", _EVALUATION),
    )


def _section(
    path: Path, data: Mapping[str, Any], name: str, checks: Mapping[str, Check]
) -> dict[str, Any]:
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise ReapError(f"{path}: {name} must be a mapping of settings.")
    _only(path, section, checks, f"{name}.")
    return {
        key: _checked(path, f"{name}.{key}", checks[key], value) for key, value in section.items()
    }


def _checked(path: Path, name: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ReapError(f"{path}: {name} must be {error}, not {value!r}.") from None
    except ReapError as error:
        raise ReapError(f"{path}: {name}: {error.message}", error.hint) from None


def _only(path: Path, data: Mapping[Any, Any], allowed: Iterable[str], prefix: str = "") -> None:
    known = list(allowed)
    unknown = sorted(str(key) for key in data if key not in known)
    if unknown:
        raise ReapError(
            f"{path}: {prefix}{unknown[0]} is not a setting of a recipe.",
            f"known: {', '.join(prefix + name for name in known)}",
        )

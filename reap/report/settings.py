"""A plan's settings in plain words: what is empty or had no effect is left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from reap.artifacts.plan import Plan
from reap.artifacts.saliency import CRITERIA
from reap.formatting import Unit, count, decimal, percent

RATIO = (
    "the ratio is the error of storing an expert in low bits (rho) over that of dropping it (kappa)"
)
_SHOWN_ELSEWHERE = frozenset({"identity", "warnings", "clamp", "seed"})
_WITH_BUDGET = frozenset({"context", "reserve"})


def by_size(plan: Plan) -> bool:
    """Whether the plan was made for a size of the weights, not for a memory to run in."""
    return plan.settings.get("size") is not None and plan.settings.get("budget") is None


def in_words(plan: Plan, unit: Unit) -> tuple[tuple[str, str], ...]:
    """(name, value) of every setting that says something."""
    settings = plan.settings
    rows = []
    for key in sorted(settings, key=_place):
        value = settings[key]
        if _says_nothing(key, value, settings):
            continue
        name, words = _WORDS.get(key, (key, _plain))
        try:
            text = unit.text(value) if key in ("size", "budget") else words(value)
        except (AttributeError, KeyError, TypeError, ValueError):
            text = _plain(value)
        if key == "layout" and value == "auto":
            text = f"chosen by the planner: {plan.layout}"
        if key == "recipe" and value == "random":
            text = f"random, seed {settings.get('seed', 0)}"
        rows.append((name, text))
    return tuple(rows)


def assumption(text: str) -> str:
    """One of the planner's assumptions, with its Greek letter explained."""
    if text.startswith("kappa ="):
        return f"{text} (dropping an expert costs the block's output this many times its energy)"
    if text.startswith("rho ="):
        return f"{text} (storing an expert so costs the block's output this part of its energy)"
    return text


def low_bank_rule(plan: Plan) -> str:
    """Whether a low bank pays, in a sentence; "" if the plan does not say."""
    noted = plan.settings.get("low_bank")
    rule = noted.get("rule") if isinstance(noted, Mapping) else None
    return f"{rule.rstrip('.')}; {RATIO}." if isinstance(rule, str) and rule else ""


def _place(key: str) -> tuple[int, str]:
    known = list(_WORDS)
    return (known.index(key), "") if key in _WORDS else (len(known), key)


def _says_nothing(key: str, value: object, settings: Mapping[str, Any]) -> bool:
    empty = value is None or value is False or value in ("", [], {})
    alone = (key == "min_bank" and value == 1) or (key == "protect_super" and value == 0)
    without = key in _WITH_BUDGET and settings.get("budget") is None and "size" in settings
    return empty or alone or without or (key in _SHOWN_ELSEWHERE and key in settings)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _source(value: Any) -> str:
    return "as in the source" if value == "source" else _plain(value)


def _low_bank(value: Any) -> str:
    rule = value["rule"]
    return f"{rule.rstrip('.')}; {RATIO}."


def _domains(value: Any) -> str:
    if value == "sum":
        return "by their tokens"
    if value == "worst":
        return "each expert by the domain that needs it most"
    return ", ".join(f"{name} × {weight:g}" for name, weight in sorted(value.items()))


def _keep(value: Any) -> str:
    return ", ".join(f"layer {layer}: {expert}" for layer, expert in value)


def _limits(value: Any) -> str:
    least, most = value
    return f"{count(least)} to {count(most)} experts"


def _domains_kept(value: Any) -> str:
    return ", ".join(f"{name} {percent(share)}" for name, share in sorted(value.items()))


_WORDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "recipe": ("Plain recipe", _plain),
    "budget": ("Memory budget", _plain),
    "size": ("Size of the weights", _plain),
    "context": ("Room for a context of", lambda n: f"{count(n)} tokens"),
    "reserve": ("Reserve for the system", lambda part: percent(part, 0)),
    "layout": ("Layout", _plain),
    "trunk": ("Trunk", _source),
    "high": ("High bank", _source),
    "low": ("Low bank", _source),
    "low_down": ("Down projections of the low bank", _plain),
    "low_bank": ("Does a low bank pay?", _low_bank),
    "criterion": (
        "Experts ranked by",
        lambda name: f"{name}: {CRITERIA[name]}" if name in CRITERIA else name,
    ),
    "domains": ("Calibration domains weighed", _domains),
    "domains_kept": ("Energy kept of each domain", _domains_kept),
    "min_experts": ("At least in each layer", lambda n: f"{count(n)} experts"),
    "min_bank": ("At least in each bank", lambda n: f"{count(n)} experts"),
    "keep": ("Experts kept on demand", _keep),
    "protect_super": ("Super experts protected", lambda n: decimal(n, 0)),
    "clamped": ("Limits of a layer's count", _limits),
    "assumed": (
        "Assumed, not measured",
        lambda notes: "; ".join(assumption(str(note)) for note in notes),
    ),
    "damage_unit": ("Unit of the predicted damage", _plain),
}

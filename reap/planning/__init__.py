"""Saliency and a byte budget → plan. Pure: numpy only, no model is touched.

Names are imported on first use, so that `reap.planning.size` does not load numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reap.planning.planner import RECIPES, make_plan, plain_plan
    from reap.planning.settings import PlanSettings
    from reap.planning.size import format_size, parse_size

__all__ = ["RECIPES", "PlanSettings", "format_size", "make_plan", "parse_size", "plain_plan"]

_MODULES = {
    "RECIPES": "planner",
    "PlanSettings": "settings",
    "format_size": "size",
    "make_plan": "planner",
    "parse_size": "size",
    "plain_plan": "planner",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

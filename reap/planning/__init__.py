"""Saliency and a byte budget → plan. Pure: numpy only, no model is touched.

Names are imported on first use, so that `reap.planning.size` does not load numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reap.planning.compare import LayerDiff, PlanDiff, diff
    from reap.planning.planner import RECIPES, low_bank_rule, make_plan, plain_plan
    from reap.planning.protect import super_experts
    from reap.planning.rule import LowBankRule
    from reap.planning.settings import PlanSettings
    from reap.planning.size import format_size, parse_size
    from reap.planning.whatif import FrontierPoint, LayerChange, NextBytes, frontier, next_bytes

__all__ = [
    "RECIPES",
    "FrontierPoint",
    "LayerChange",
    "LayerDiff",
    "LowBankRule",
    "NextBytes",
    "PlanDiff",
    "PlanSettings",
    "diff",
    "format_size",
    "frontier",
    "low_bank_rule",
    "make_plan",
    "next_bytes",
    "parse_size",
    "plain_plan",
    "super_experts",
]

_MODULES = {
    "RECIPES": "planner",
    "FrontierPoint": "whatif",
    "LayerChange": "whatif",
    "LayerDiff": "compare",
    "LowBankRule": "rule",
    "NextBytes": "whatif",
    "PlanDiff": "compare",
    "PlanSettings": "settings",
    "diff": "compare",
    "format_size": "size",
    "frontier": "whatif",
    "low_bank_rule": "planner",
    "make_plan": "planner",
    "next_bytes": "whatif",
    "parse_size": "size",
    "plain_plan": "planner",
    "super_experts": "protect",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

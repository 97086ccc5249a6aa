"""The choices a plan is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from reap.artifacts.plan import Layout, Rounding
from reap.artifacts.saliency import CRITERIA
from reap.artifacts.spec import Format
from reap.errors import ReapError

TRUNKS = ("source", "8bit", "6bit", "4bit")


@dataclass(frozen=True)
class PlanSettings:
    """Exactly one of `budget` (memory to run in) and `size` (bytes of the weights) is given.

    `context` tokens of state and `reserve` (a share of the budget) are taken off a budget, not off
    a size. `trunk` is the precision of everything but experts. `high` and `low` are the formats of
    the two banks: "source", or what Format.parse reads; `low` is affine at 2 to 4 bits. A format
    without a group size takes the largest group that fits every matrix. `min_experts` is the least
    number of experts in a layer (default 4 × top_k), `min_bank` of those in a bank that is not
    empty. `criterion` ranks the experts of a layer. `low_rounding` is the plan's; None: as
    the low bits' errors were measured.
    """

    budget: int | None = None
    size: int | None = None
    context: int = 8192
    reserve: float = 0.08
    layout: Literal["auto"] | Layout = "auto"
    trunk: str = "source"
    high: str = "source"
    low: str = "2bit"
    min_experts: int | None = None
    min_bank: int = 1
    criterion: str = "energy"
    low_rounding: str | None = None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.size is None):
            raise ReapError("give exactly one of a budget and a size.", "e.g. --budget 512GB")
        if self.context < 0:
            raise ReapError(f"the context must be at least 0 tokens, not {self.context}.")
        if not 0 <= self.reserve < 1:
            raise ReapError(f"the reserve is a share of the budget below 1, not {self.reserve}.")
        if self.min_bank < 1:
            raise ReapError(f"a bank holds at least 1 expert, not {self.min_bank}.")
        _one_of("layout", self.layout, ("auto", *get_args(Layout)))
        _one_of("trunk", self.trunk, TRUNKS)
        _one_of("criterion", self.criterion, tuple(CRITERIA))
        if self.low_rounding is not None:
            _one_of("low_rounding", self.low_rounding, get_args(Rounding))
        if self.high != "source":
            _parse("high", self.high)
        low = _parse("low", self.low)
        if low.mode != "affine" or low.bits > 4:
            raise ReapError(
                f"low precision {self.low!r} is not an affine format of 2, 3 or 4 bits.",
                "e.g. --low 2bit or --low 3bit-g64",
            )

    def usable(self, state: int) -> int:
        """Bytes left for weights when a sequence's state takes `state` bytes; may be negative."""
        if self.size is not None:
            return self.size
        assert self.budget is not None
        return self.budget - state - reserved(self.budget, self.reserve)


def reserved(budget: int, share: float) -> int:
    """Bytes of the reserve."""
    return round(budget * share)


def budget_for(weights: int, state: int, share: float) -> int:
    """The smallest budget that leaves room for `weights` and `state` beside its reserve."""
    need = weights + state
    budget = round(need / (1 - share))
    while budget - reserved(budget, share) < need:
        budget += 1
    while budget - 1 - reserved(budget - 1, share) >= need:
        budget -= 1
    return budget


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ReapError(f"unknown {name} {value!r}.", f"one of {', '.join(choices)}")


def _parse(name: str, text: str) -> Format:
    try:
        return Format.parse(text)
    except ValueError:
        raise ReapError(
            f"unknown {name} precision {text!r}.", "e.g. mxfp4, 2bit, 3bit-g64, 8bit"
        ) from None

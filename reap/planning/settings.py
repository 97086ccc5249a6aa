"""The choices a plan is made with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from reap.artifacts.plan import Layout, Rounding
from reap.artifacts.saliency import CRITERIA
from reap.artifacts.spec import Format
from reap.errors import ReapError

NO_LOW = "none"
"""`low` of plans with a high bank alone."""

TRUNKS = ("source", "8bit", "6bit", "4bit")


CLAMP = (0.5, 1.6)
"""Where layers' counts lie in good non-uniform plans, relative to the uniform count.

The counts that a search by measured quality found for Qwen3-Coder-Next (ISTA-DASLab, RCO) lie
within 0.73-1.43 of the mean; a layer far outside is more often a fault of the model of damage.
"""

SUM, WORST = "sum", "worst"

Pairs = tuple[tuple[int, int], ...]
"""(decoder layer, expert id)."""


@dataclass(frozen=True)
class PlanSettings:
    """Exactly one of `budget` (memory to run in) and `size` (bytes of the weights) is given.

    `context` tokens of state and `reserve` (a share of the budget) are taken off a budget, not off
    a size. `trunk` is the precision of everything but experts. `high` and `low` are the formats of
    the two banks: `high` is "source" or at least 4 bits of what Format.parse reads, `low` is affine
    at 2 to 4 bits or "none", `low_down` that of the low bank's down projections if it differs. A
    format without a group size takes the largest group that fits every matrix. `min_experts` is the
    least number of experts in a layer (default 4 × top_k), `min_bank` of those in a bank that is
    not empty. `criterion` ranks the experts of a layer. `low_rounding` is the plan's; None: as
    the low bits' errors were measured.

    `keep`: experts that must be in the high bank, as {layer: [expert, …]} or (layer, expert) pairs.
    `protect_super`: how many super experts of the model must be, see reap.planning.protect for why
    none by default. `domains`: "sum" weighs the calibration domains by their tokens, a mapping
    {domain: weight} by its numbers, "worst" takes for each expert the domain that needs it most;
    see reap.planning.domains. `clamp`: least and largest count of a layer relative to the uniform
    plans' counts, None for no limit; "auto" is CLAMP unless the layers' sensitivity was measured.
    """

    budget: int | None = None
    size: int | None = None
    context: int = 8192
    reserve: float = 0.08
    layout: Literal["auto"] | Layout = "auto"
    trunk: str = "source"
    high: str = "source"
    low: str = "2bit"
    low_down: str | None = None
    min_experts: int | None = None
    min_bank: int = 1
    criterion: str = "energy"
    low_rounding: str | None = None
    keep: Mapping[int, Iterable[int]] | Iterable[Iterable[int]] = ()
    protect_super: int = 0
    domains: str | Mapping[str, float] = SUM
    clamp: Literal["auto"] | tuple[float, float] | None = "auto"

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.size is None):
            raise ReapError("give exactly one of a budget and a size.", "e.g. --budget 512GB")
        if self.context < 0:
            raise ReapError(f"the context must be at least 0 tokens, not {self.context}.")
        if not 0 <= self.reserve < 1:
            raise ReapError(f"the reserve is a share of the budget below 1, not {self.reserve}.")
        if self.min_bank < 1:
            raise ReapError(f"a bank holds at least 1 expert, not {self.min_bank}.")
        if self.protect_super < 0:
            raise ReapError(f"at least 0 super experts are protected, not {self.protect_super}.")
        _one_of("layout", self.layout, ("auto", *get_args(Layout)))
        _one_of("trunk", self.trunk, TRUNKS)
        _one_of("criterion", self.criterion, tuple(CRITERIA))
        if self.low_rounding is not None:
            _one_of("low_rounding", self.low_rounding, get_args(Rounding))
        if self.high != "source" and _parse("high", self.high).bits < 4:
            raise ReapError(
                f"high precision {self.high!r} has fewer than 4 bits.",
                "e.g. --high 4bit or --high mxfp4; fewer bits are for the low bank",
            )
        for name in ("low", "low_down"):
            text = getattr(self, name)
            if text is None or (name, text) == ("low", NO_LOW):
                continue
            low = _parse(name, text)
            if low.mode != "affine" or low.bits > 4:
                raise ReapError(
                    f"{name} precision {text!r} is not an affine format of 2, 3 or 4 bits.",
                    "e.g. --low 2bit or --low 3bit-g64",
                )
        if self.low == NO_LOW and self.low_down is not None:
            raise ReapError(
                f"low precision {NO_LOW!r} leaves no bank for low_down {self.low_down!r}.",
                "leave one of them out",
            )
        object.__setattr__(self, "keep", _pairs(self.keep))
        object.__setattr__(self, "domains", _domains(self.domains))
        object.__setattr__(self, "clamp", _clamp(self.clamp))

    @property
    def pairs(self) -> Pairs:
        """`keep` as sorted (layer, expert) pairs."""
        assert isinstance(self.keep, tuple)
        return self.keep

    @property
    def amount(self) -> int:
        """The budget or the size."""
        amount = self.size if self.budget is None else self.budget
        assert amount is not None
        return amount

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values["keep"] = [list(pair) for pair in self.pairs]
        if isinstance(self.clamp, tuple):
            values["clamp"] = list(self.clamp)
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanSettings:
        """From the `settings` of a plan, whatever else is recorded there."""
        return cls(**{field.name: data[field.name] for field in fields(cls) if field.name in data})

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


def _pairs(keep: Any) -> Pairs:
    try:
        if isinstance(keep, Mapping):
            pairs = [(layer, expert) for layer, experts in keep.items() for expert in experts]
        else:
            pairs = [(layer, expert) for layer, expert in keep]
        # Keys of a JSON object are text.
        return tuple(sorted({(int(layer), int(expert)) for layer, expert in pairs}))
    except (TypeError, ValueError):
        raise ReapError(
            f"the experts to keep are not pairs of a layer and an expert: {keep!r}.",
            "e.g. {3: [17, 40]} or [[3, 17], [3, 40]]",
        ) from None


def _domains(domains: Any) -> str | dict[str, float]:
    if isinstance(domains, str):
        _one_of("domains", domains, (SUM, WORST))
        return domains
    try:
        weights = {str(name): float(weight) for name, weight in domains.items()}
    except (AttributeError, TypeError, ValueError):
        raise ReapError(
            f"the weights of the domains are not numbers by name: {domains!r}.",
            'e.g. {"code": 2, "prose": 1}, or one of sum, worst',
        ) from None
    if not all(0 <= weight < math.inf for weight in weights.values()) or not sum(weights.values()):
        raise ReapError(
            "the weights of the domains are at least 0, and not all 0.", "e.g. code=2 prose=1"
        )
    return weights


def _clamp(clamp: Any) -> Any:
    if clamp is None or clamp == "auto":
        return clamp
    try:
        least, most = (float(value) for value in clamp)
    except (TypeError, ValueError):
        raise ReapError(f"the clamp is not two numbers: {clamp!r}.", "e.g. 0.5 and 1.6") from None
    if not 0 <= least <= 1 <= most:
        raise ReapError(
            f"the clamp {least:g}-{most:g} does not contain 1, the uniform count.",
            "e.g. 0.5 and 1.6",
        )
    return least, most

"""How numbers are printed in reports, model cards and tables: one way for each kind."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from reap.artifacts.evaluation import Estimate

MISSING = "–"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Unit:
    """The decimal unit in which one report prints all its sizes."""

    name: str
    factor: int

    @classmethod
    def for_bytes(cls, largest: int) -> Unit:
        """The unit in which the largest size of the report is at least 1."""
        for name, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
            if largest >= factor:
                return cls(name, factor)
        return cls("B", 1)

    def number(self, size: int) -> str:
        return decimal(size / self.factor, 0 if self.factor == 1 else 2)

    def text(self, size: int) -> str:
        return f"{self.number(size)}\N{NO-BREAK SPACE}{self.name}"


def decimal(value: float, digits: int) -> str:
    """`value` with thousands separators and a real minus sign; "–" if it is not a number."""
    if not math.isfinite(value):
        return MISSING
    text = f"{value:,.{digits}f}"
    if not float(text.replace(",", "")):
        text = text.lstrip("-")
    return text.replace("-", "−")


def count(value: int) -> str:
    return f"{value:,}".replace("-", "−")


def percent(fraction: float, digits: int = 1) -> str:
    return (
        f"{decimal(100 * fraction, digits)}\N{NO-BREAK SPACE}%"
        if math.isfinite(fraction)
        else MISSING
    )


def significant(value: float, digits: int = 3) -> str:
    """`digits` significant digits, as a power of ten where that is shorter."""
    if not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -5 or exponent > 6:
        mantissa = f"{value / 10.0**exponent:.{digits - 1}f}".replace("-", "−")
        return f"{mantissa} × 10{str(exponent).translate(_SUPERSCRIPT)}"
    return decimal(value, max(digits - 1 - exponent, 0))


def practically(value: float, digits: int = 2) -> str:
    """`significant`, but what rounding alone explains is "≈ 0"."""
    return "≈ 0" if 0 < abs(value) < 1e-9 else significant(value, digits)


def nats_digits(estimates: Iterable[Estimate | None], least: int = 4) -> int:
    """Decimals for a column of divergences: two digits of the least value, one of its error."""
    known = [e for e in estimates if e is not None]
    errors = [10 * e.error for e in known]
    return max(digits_for([e.value for e in known], least), digits_for(errors, least))


def nats(estimate: Estimate | None, least: int = 4) -> str:
    """A divergence by itself, with the digits it needs."""
    return plus_minus(estimate, nats_digits([estimate], least))


def digits_for(values: Iterable[float], least: int, most: int = 7) -> int:
    """Decimals that show two significant digits of the smallest positive value of a column."""
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    if not positive:
        return least
    return min(max(least, 1 - math.floor(math.log10(min(positive)))), most)


def plus_minus(estimate: Estimate | None, digits: int, factor: float = 1) -> str:
    """ "value ± standard error"; without the error where one document gives none.

    As a power of ten if `digits` decimals would show less than two digits of the value.
    """
    if estimate is None:
        return MISSING
    if 0 < abs(factor * estimate.value) < 10.0 ** (1 - digits):
        return _scientific(factor * estimate.value, factor * estimate.error)
    value = decimal(factor * estimate.value, digits)
    if not math.isfinite(estimate.error):
        return value
    return f"{value} ± {decimal(factor * estimate.error, digits)}"


def _scientific(value: float, error: float) -> str:
    exponent = math.floor(math.log10(abs(value)))
    power = f"10{str(exponent).translate(_SUPERSCRIPT)}"
    scale = 10.0**exponent
    if not math.isfinite(error):
        return f"{decimal(value / scale, 1)} × {power}"
    return f"({decimal(value / scale, 1)} ± {decimal(error / scale, 1)}) × {power}"


def tick(value: float) -> str:
    """A tick label: short, and a power of ten outside 0.001 … 99,999."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    if exponent < -3 or exponent > 4:
        mantissa = value / 10.0**exponent
        power = f"10{str(exponent).translate(_SUPERSCRIPT)}"
        return power if abs(mantissa - 1) < 1e-6 else f"{mantissa:g}·{power}".replace("-", "−")
    digits = max(0, 3 - exponent)
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")

"""Byte sizes as people write them. Imports nothing heavy, so that every command can use it."""

from __future__ import annotations

import re
from decimal import Decimal

from reap.errors import ReapError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

MOST = 2**62

_SIZE = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[0-9]+)?\s*([a-z]*)")
_PERCENT = re.compile(r"(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+))\s*%")


def parse_size(text: str | int) -> int:
    """Bytes of "512GB", "512GiB", "300 MB", "451e9" or a number; GB = 10^9 and GiB = 2^30.

    Raises ReapError for anything else, also for units that could mean either ("512G").
    """
    if isinstance(text, int):
        size = text
    else:
        match = _SIZE.fullmatch(text.strip().lower())
        unit = _UNITS.get(match[3]) if match else None
        if match is None or unit is None:
            raise ReapError(
                f"{text!r} is not a size.", "write e.g. 512GB (10^9 bytes) or 512GiB (2^30 bytes)"
            )
        number = Decimal(match[1] + (match[2] or ""))
        # Compared as a decimal: 1e99999999 is no number of bytes to make an integer of.
        size = round(number * unit) if number.adjusted() < 19 else MOST + 1
    if size > MOST:
        raise ReapError(f"{text} is more than any machine has.", "write e.g. 512GB")
    if size <= 0:
        raise ReapError(f"a size must be positive, not {text}.")
    return size


def parse_percent(text: str) -> Decimal | None:
    """0.55 of "55%"; None of anything else. Raises ReapError unless it is above 0 and at most 1."""
    match = _PERCENT.fullmatch(text.strip())
    if match is None:
        return None
    share = Decimal(match[1]) / 100
    if not 0 < share <= 1:
        raise ReapError(f"{text} is not a share of the experts.", "write e.g. 55%: above 0, to 100")
    return share


def format_size(size: int) -> str:
    """Decimal units with one digit, at most GB so that sizes of one plan compare: "451.0 GB"."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if abs(size) >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"

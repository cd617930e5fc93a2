"""Rates as texts: those that stand together have one unit."""

from __future__ import annotations

import math
from collections.abc import Iterable


def format_rate(gb_per_s: float | None, smallest: float) -> str:
    """E.g. 1.2 GB/s; 10^9 bytes. Of rates that stand together, all in the unit that the `smallest` asks for;
    empty where nothing moved."""
    if gb_per_s is None or gb_per_s != gb_per_s:
        return ""
    return f"{gb_per_s:.2f} GB/s" if smallest >= 0.1 else f"{gb_per_s * 1000:,.1f} MB/s"


def smallest_rate(rates: Iterable[float | None]) -> float:
    """Of those that are known, 0 ones left out; infinite without any."""
    return min((rate for rate in rates if rate is not None and rate > 0), default=math.inf)

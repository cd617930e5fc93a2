"""Tell the time: whoever needs it takes a clock, so that a simulation can drive the same code by its own."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]  # nanoseconds since some moment, never going back


def host_clock() -> int:
    """Read this host's monotonic clock, which all of its processes share."""
    return time.monotonic_ns()

"""Says where a loop stands still: writes every thread's stack to stderr, which Ray keeps in the worker's log.

A call into a transport that does not return stops its thread, and with it whatever would tell of it. This
watch is a thread of faulthandler that needs no interpreter: it writes also while another holds the GIL.
"""

from __future__ import annotations

import faulthandler
import time

STILL_S = 10.0
"""A loop that has not come round for so long stands still."""
REARM_S = 1.0
"""Arming it again starts a thread: not at every turn."""
STDERR = 2
"""Ray puts its own object in sys.stderr's place, which has no file."""


class StackWatch:
    """Watches one loop; a process has room for one watch."""

    def __init__(self, still_s: float = STILL_S, rearm_s: float = REARM_S) -> None:
        self._still_s, self._rearm_s = still_s, rearm_s
        self._next_s = 0.0

    def tick(self) -> None:
        """Note that the loop came round."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + self._rearm_s
            faulthandler.dump_traceback_later(self._still_s, file=STDERR)

    def end(self) -> None:
        faulthandler.cancel_dump_traceback_later()

"""Where one request's time goes: stages end to end on the coordinator's clock, each between two moments seen.

Engines stamp what happens to a request with their host's monotonic clock, which all processes of a host
share; of an engine on another host, `EngineHandle.clock_offset_ns` is added first. That is known to half a
message's way there and back: a stage that two hosts delimit (dispatch, handover) is that uncertain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayk.types.rows import RequestRow


class StageClock:
    """Fills a row's `stage_ns`. A stage that comes again, in a later attempt, adds to what it took before."""

    def __init__(self, row: RequestRow) -> None:
        self._row = row
        self._last_ns = row.arrival_ns

    def end(self, stage: str, at_ns: int) -> None:
        """A stage ends at this moment; it began when the one before ended. Where that was later, as clocks of
        two hosts may have it, it took no time."""
        self.lasted(stage, at_ns - self._last_ns)

    def lasted(self, stage: str, length_ns: int) -> None:
        """The same, of a stage whose length is known."""
        length_ns = max(0, length_ns)
        self._row.stage_ns[stage] = self._row.stage_ns.get(stage, 0) + length_ns
        self._last_ns += length_ns

"""What a request is in the midst of on an engine, as spans of `ray timeline`: prefill, transfer, decode.

Taken by rank 0 where RAY_PROFILING is set in the environment of `ray start`. Ray reads that when it is
imported, and drops spans of threads that run no task: the stream of a request is one, an event loop is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rayk.actors.ray_private import profiling
from rayk.engine.leader import RequestEvent

FIRST = {"whole": "prefill", "prefill": "prefill", "decode": "transfer", "reserve": "reserve"}
"""What a request begins with, by what is asked of the engine."""


class Phases(Protocol):
    """The phases of one request on one engine, one at a time."""

    def see(self, events: Sequence[RequestEvent]) -> None:
        """Begin the next phase if these events say so."""
        ...

    def end(self) -> None:
        """End the last phase."""
        ...


class _Nothing:
    """Records no phases."""

    def see(self, events: Sequence[RequestEvent]) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


class _Spans:
    """Records each phase as a profile event of Ray's."""

    def __init__(self, request_id: str, engine: str, mode: str) -> None:
        self._about = {"request": request_id, "engine": engine}
        self._mode = mode
        self._phase = ""
        self._span: Any = None
        self._begin(FIRST[mode])

    def see(self, events: Sequence[RequestEvent]) -> None:
        """End a prefill at its first tokens, and a transfer at its stage times."""
        for event in events:
            is_prefilled = self._phase == "prefill" and self._mode == "whole" and event.token_ids
            has_arrived = self._phase == "transfer" and _arrived(event)
            if is_prefilled or has_arrived:
                self._begin("decode")

    def end(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
        self._span = None

    def _begin(self, phase: str) -> None:
        self.end()
        self._span = profiling.profile(phase, extra_data=self._about)
        self._span.__enter__()
        self._phase = phase


_NOTHING = _Nothing()


def _arrived(event: RequestEvent) -> bool:
    return event.info is not None and event.info.stage_ns is not None and event.error is None


def phases_of(request_id: str, engine: str, mode: str) -> Phases:
    """Make the phases of a request that an engine is about to get. EngineRequest explains `mode`."""
    return _Spans(request_id, engine, mode) if profiling.PROFILING_ENABLED else _NOTHING


def stream_options(engine: str, mode: str) -> dict[str, Any]:
    """Return options with which Ray records a request's stream on an engine only if spans are taken in it."""
    return {"enable_task_events": True, "name": f"{engine}: {mode}"} if profiling.PROFILING_ENABLED else {}

"""A pushed request's way through its engines, as the coordinator sees it: blocks first, then the prompt."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayk.actors.engines import EngineHandle
from rayk.handover.engine_request import EngineRequest
from rayk.transfer.ticket import Reservation
from rayk.types.errors import DeadlineExceeded
from rayk.types.request import Request
from rayk.types.stage_clock import StageClock

if TYPE_CHECKING:  # workers, which read no specs, import this
    from rayk.specs.experiment import TransferSpec


@dataclass(frozen=True, slots=True)
class PushSettings:
    """What a rank that may push is told. The coordinator or fleet fills it."""

    layers: int | None = None
    """Layers per write; None: as the cost model says."""


def push_settings(transfer: TransferSpec) -> PushSettings | None:
    """Return the settings of ranks that prefill; None where nothing is pushed."""
    if transfer.mode != "push":
        return None
    return PushSettings(None if transfer.push_layers == "auto" else transfer.push_layers)


@contextlib.asynccontextmanager
async def reserved(
    limit_s: float, prefill: EngineHandle, decode: EngineHandle, request: Request, stages: StageClock
) -> AsyncIterator[Reservation]:
    """Reserve blocks at the decode engine, for at most `limit_s`, that the prefill engine may write the
    request's KV into. They are given up at the end unless the request is over by then. Raises what ends the
    request."""
    try:
        yield await _reserve(limit_s, prefill, decode, request, stages)
    finally:
        # Where the decode engine took the request in, nothing is left to give up.
        decode.leader.settle.options(concurrency_group="control").remote(request.request_id)


async def _reserve(
    limit_s: float, prefill: EngineHandle, decode: EngineHandle, request: Request, stages: StageClock
) -> Reservation:
    """Ask for the reservation on the way to the prefill engine, which goes on from here."""
    asked = EngineRequest(
        request=request, mode="reserve", producer=prefill.name, reserve_s=limit_s, hold_s=limit_s
    )
    async for events in decode.stream(limit_s, asked):
        for event in events:
            if event.error is not None:
                raise event.error
            if isinstance(event.payload, Reservation):
                offset_ns, info = decode.clock_offset_ns, event.info
                assert info is not None
                assert info.submitted_ns is not None
                assert info.taken_ns is not None
                stages.end("dispatch", info.submitted_ns + offset_ns)
                stages.end("notice", info.taken_ns + offset_ns)
                stages.end("reserve", event.time_ns + offset_ns)
                return event.payload
    raise DeadlineExceeded(f"blocks for {request.request_id} on {decode.name}", limit_s)

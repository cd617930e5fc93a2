"""A worker's requests as streams over its line.

No methods of the worker itself: where one method of an actor's class is a coroutine, Ray runs all of them on
event loops, and those that are none one at a time, each until it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from rayk.actors.lines import Funnel, Last
from rayk.engine.leader import RequestEvent
from rayk.handover.engine_request import EngineRequest
from rayk.types.request import Request


@dataclass(frozen=True, slots=True)
class LineStreams:
    """What rank 0 does for those who call it over a line."""

    prepare: Callable[[Request], object]
    """Loads a tokenizer for the first request that has stop strings."""
    submit: Callable[[EngineRequest, Callable[[RequestEvent], Any]], None]
    """It is Worker._submit."""
    abort: Callable[[str], None]
    """Ends a request whose caller went."""
    flush_s: float
    """Later events are gathered for so long."""

    async def generate(self, asked: EngineRequest) -> AsyncIterator[list[RequestEvent] | Last]:
        """Does on the line's loop what Worker.generate does. A caller who goes aborts the request."""
        request = asked.request
        if request.sampling.stop:  # the first of these loads a tokenizer, while other streams go on
            await asyncio.to_thread(self.prepare, request)
        events = Funnel()
        self.submit(asked, events.put)
        first, is_over = True, False
        try:
            while not is_over:
                await events.wait()
                batch: list[RequestEvent] = events.take()
                if not first and not batch[-1].is_last:
                    await asyncio.sleep(self.flush_s)
                    batch += events.take()
                first = first and not any(event.token_ids for event in batch)
                is_over = batch[-1].is_last
                yield Last(batch) if is_over else batch
        finally:
            if not is_over:
                self.abort(request.request_id)

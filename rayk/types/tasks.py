"""Tasks that nobody waits for, or waits for only beside others: a bug of theirs is never lost in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rayk.types.bugs import bug
from rayk.types.errors import InternalError


def lasting(
    watch: Coroutine[Any, Any, None], where: str, on_bug: Callable[[InternalError], object] = lambda _: None
) -> asyncio.Task[None]:
    """A task that nobody waits for: what it breaks down of is logged, and told to `on_bug`."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            on_bug(bug(where, error))

    task = asyncio.create_task(watch)
    task.add_done_callback(ended)
    return task


async def until(over: asyncio.Future[Any], *watches: Coroutine[Any, Any, None]) -> None:
    """Wait until this is done, while these look out for it. Raises what one of them breaks down of."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(watch) for watch in watches]
    waiting = {over, *tasks}
    try:
        while not over.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {over}:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

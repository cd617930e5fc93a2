"""Engines for callers on any thread: started and kept alive on an event loop of a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from rayk.serve.supervisor import READY_S, Part, Supervisor, stop_parts
from rayk.types.errors import DeadlineExceeded, ServerEnded, UserError
from rayk.types.request import Request, SamplingParams
from rayk.types.serving import Delta, Health, ServerRequest
from rayk.types.waiting import busy

T = TypeVar("T")

READY_POLL_S = 0.05
STOP_S = 60.0
"""The engines must end within this."""

SampledPrompt = tuple[tuple[int, ...], SamplingParams]
"""A prompt, and how it is completed."""


class EngineClient(Protocol):
    """Completes prompts on the engines, as a Router does; see types.serving.Completer."""

    def generate(self, server_request: ServerRequest) -> AsyncIterator[Delta]: ...

    async def health(self) -> Health: ...

    async def close(self) -> None:
        """Abort what is under way."""
        ...


class LLMEngines:
    """Runs the engines of an LLM. `start` it, and `close` it, from any thread."""

    def __init__(self, fleet: Part, front: EngineClient, num_at_once: int) -> None:
        """`num_at_once`: how many requests of one call may be under way."""
        self._fleet = fleet
        self._front = front
        self._num_at_once = num_at_once
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rayk-llm", daemon=True)
        self._entry = threading.Lock()
        self._is_open = False
        self._keeper: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Return once the engines are ready. Raises what kept them from it, DeadlineExceeded after READY_S.
        `close` it then, too."""
        with self._entry:
            self._thread.start()
            self._is_open = True
        self._run(self._begin)

    def complete(self, requests: Sequence[SampledPrompt], cache_salt: str | None = None) -> list[list[Delta]]:
        """Return every request's news. Raises the first error, what the engines were given up of, ServerEnded
        where they are closed meanwhile; an interrupt ends it."""
        return self._run(lambda: self._complete(requests, cache_salt))

    def close(self) -> None:
        """End everything. Call it once."""
        with self._entry:
            was_open, self._is_open = self._is_open, False
        if was_open:
            # Behind all that came in: what is asked later is refused.
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def _run(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        with self._entry:
            if not self._is_open:
                raise UserError("this LLM is closed")
            future = asyncio.run_coroutine_threadsafe(self._call(start), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _call(self, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        try:
            return await start()
        finally:
            self._calls.discard(call)

    async def _begin(self) -> None:
        ready = asyncio.Event()
        self._stop = asyncio.Event()
        supervisor = Supervisor((self._fleet,), self._stop, logging.getLogger("rayk").warning)
        self._keeper = asyncio.create_task(
            supervisor.run(lambda: asyncio.ensure_future(self._until_ready()), ready.set)
        )
        await self._unless_over(asyncio.create_task(ready.wait()))

    async def _until_ready(self) -> None:
        reason = "nobody says how they are"
        try:
            async with asyncio.timeout(READY_S):
                while not (health := await self._front.health()).is_ready:
                    reason = health.reason
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            raise DeadlineExceeded(
                "the start of the engines", READY_S, {"health": reason, **busy()}
            ) from None

    async def _complete(self, requests: Sequence[SampledPrompt], cache_salt: str | None) -> list[list[Delta]]:
        # The waiting room is for strangers: who asks for much here waits in line.
        slots = asyncio.Semaphore(self._num_at_once)
        tasks = [asyncio.create_task(self._follow(slots, cache_salt, *request)) for request in requests]
        try:
            return await self._unless_over(asyncio.gather(*tasks))
        finally:
            # The others, where one has failed.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self,
        slots: asyncio.Semaphore,
        cache_salt: str | None,
        prompt: tuple[int, ...],
        params: SamplingParams,
    ) -> list[Delta]:
        async with slots:
            request = Request(
                request_id=secrets.token_hex(8),
                prompt_token_ids=prompt,
                sampling=params,
                cache_salt=cache_salt,
            )
            return [delta async for delta in self._front.generate(ServerRequest(request=request))]

    async def _unless_over(self, work: asyncio.Future[T]) -> T:
        """Await it. Raises what made the supervisor give the engines up meanwhile, ServerEnded where they
        were told to end."""
        assert self._keeper is not None, "started"
        waiting: set[asyncio.Future[Any]] = {work, self._keeper}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await self._keeper
                raise ServerEnded
            return work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _end(self) -> None:
        if self._keeper is not None:
            self._stop.set()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._front.close()
        await stop_parts((self._fleet,), STOP_S, logging.getLogger("rayk").warning)

"""An engine as the coordinator sees it: its workers' handles, and whether it still lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeGuard, TypeVar

from ray.exceptions import RayError

from rayk.actors.failures import translate
from rayk.actors.naming import loop_name
from rayk.actors.phases import stream_options
from rayk.engine.leader import RequestEvent
from rayk.handover.engine_request import EngineRequest
from rayk.lines.line import Line, LineLost
from rayk.types.bugs import bug
from rayk.types.config import EngineConfig
from rayk.types.errors import (
    CommError,
    DeadlineExceeded,
    EngineDied,
    HandshakeMismatch,
    InternalError,
    RaykError,
    TransferError,
)
from rayk.types.waiting import busy

T = TypeVar("T")

CONTROL_S = 30.0
"""Deadline for a command."""
BLAME_S = 5.0
"""A rank that lost another one is believed after this long: what the other died of says more."""
WHY_S = 2 * BLAME_S
"""How long a request that lost its engine waits for what that died of, where another rank knows."""


@dataclass(eq=False)
class EngineHandle:
    """The workers of one engine, rank 0 first, and the future that fails when one of them does."""

    name: str
    role: str
    epoch: int
    config: EngineConfig
    workers: list[Any]
    node: str = ""
    """Name of its workers' node, for people."""
    facts: dict[str, Any] = field(default_factory=dict)
    descriptions: tuple[Any, ...] = ()
    clock_offset_ns: int = 0
    """The coordinator's clock minus rank 0's."""
    line: Line | None = None
    """The line to rank 0; None where requests go through Ray."""
    tier: Any = None
    """The actor of its host tier; None without one."""
    died: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _watchers: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def leader(self) -> Any:
        """Return rank 0's handle."""
        return self.workers[0]

    def take_role(self, role: str) -> None:
        """Set its role, also the one that its ranks report."""
        self.role = role
        for worker in self.workers:
            worker.take_role.options(concurrency_group="control").remote(role)

    def start(self) -> None:
        """Run every rank's loop and watch it."""
        for rank, worker in enumerate(self.workers):
            name = loop_name(self.name, rank, self.config.num_ranks, self.role, self.config.model)
            # One event in an engine's life; workers' other calls, one or more per request, have none.
            options = {"name": name, "enable_task_events": True, "concurrency_group": "loop"}
            self.watch(rank, worker.run.options(**options).remote())

    def watch(self, rank: int, life: Any) -> None:
        """Start a task that ends when this call of a worker does."""
        self._watchers.append(asyncio.create_task(self._watch(rank, life)))

    async def stopped(self) -> None:
        """Wait until every rank's loop has ended."""
        await asyncio.gather(*self._watchers)

    @property
    def is_running(self) -> bool:
        """Return whether its loops were started (they may have died since)."""
        return bool(self._watchers)

    def declare_dead(self, cause: str) -> None:
        """Fail everything that waits for this engine, whose processes may still be there."""
        if not self.died.done():
            self.died.set_exception(EngineDied(self.name, cause))
            self.died.exception()  # nobody may be waiting

    def raise_if_dead(self) -> None:
        """Raise what the engine died of, if it did."""
        if self.died.done():
            self.died.result()

    async def death(self, within_s: float) -> BaseException | None:
        """Return what it died of, if its watchers find that within this time; None: it lives."""
        await asyncio.wait({self.died}, timeout=within_s)
        return self.died.exception() if self.died.done() else None

    async def guard(self, awaitable: Awaitable[T], what: str, timeout_s: float) -> T:
        """Await a reply from this engine, but no longer than it lives, nor than `timeout_s`."""
        task = asyncio.ensure_future(awaitable)
        waiting: set[asyncio.Future[Any]] = {task, self.died}
        try:
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()  # does nothing to one that is done
        if task in done:
            try:
                return task.result()
            except RayError as error:
                raise translate(error, self.name, node=self.node) from None
        if self.died in done:
            self.died.result()
        raise DeadlineExceeded(f"{what} on {self.name}", timeout_s, busy())

    async def call(self, command: object, timeout_s: float) -> list[Any]:
        """Run a command on every rank."""
        reply = self.leader.call.options(concurrency_group="control").remote(command, timeout_s)
        result: list[Any] = await self.guard(reply, type(command).__name__, timeout_s + 5)
        return result

    async def stream(self, timeout_s: float, asked: EngineRequest) -> AsyncIterator[list[RequestEvent]]:
        """Yield one request's events, batch by batch. `timeout_s` bounds the whole stream."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self.line is not None:
            async with aclosing(self.line.stream("generate", asked)) as batches:
                while (events := await self._over_line(batches, deadline, timeout_s)) is not None:
                    yield events
            return
        options = {"num_returns": "streaming", "concurrency_group": "io"}
        options |= stream_options(self.name, asked.mode)
        generator = self.leader.generate.options(**options).remote(asked)
        while True:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise DeadlineExceeded(f"a request on {self.name}", timeout_s)
            events = await self.guard(_next(generator), "a request", left)
            if events is None:
                return
            yield events

    async def _over_line(
        self, batches: AsyncIterator[list[RequestEvent]], deadline: float, timeout_s: float
    ) -> list[RequestEvent] | None:
        """Return the next events, None at the end. Raises what ends the request."""
        try:
            async with asyncio.timeout_at(deadline):
                return await anext(batches, None)
        except TimeoutError:
            raise DeadlineExceeded(f"a request on {self.name}", timeout_s) from None
        except LineLost:
            where = f" on node {self.node}" if self.node else ""
            raise EngineDied(self.name, f"the worker process{where} cannot be reached", rank=0) from None

    async def _watch(self, rank: int, ref: Any) -> None:
        try:
            await ref
        except RayError as error:
            found = translate(error, self.name, rank, node=self.node)
            if _lost_another(found):
                await asyncio.wait({self.died}, timeout=BLAME_S)
            if not self.died.done():
                self.died.set_exception(found)
                # Nobody may be waiting when the engine dies between requests.
                self.died.exception()
        except Exception as error:  # noqa: BLE001 - this rank would never be missed
            self.declare_dead(str(bug(f"the watch over {self.name} rank {rank}", error)))


async def bug_behind(
    error: RaykError,
    engines: Sequence[EngineHandle],
    death: Callable[[EngineHandle, float], Awaitable[BaseException | None]],
) -> RaykError:
    """Return what ended a request on these engines, one of which may be dead: a bug in an engine's loop, else
    the error itself. It takes at most WHY_S and one answer of `death`, which says what an engine died of as
    EngineHandle.death does."""
    if isinstance(error, EngineDied | TransferError | HandshakeMismatch):
        for engine in {id(e): e for e in engines}.values():  # a push asks for its prefill engine twice
            # Other losses are known where one looks by now: workers of a dead engine are ended only then.
            is_unclear = _lost_another(error) and error.engine == engine.name
            found = await death(engine, WHY_S if is_unclear else 0.0)
            if isinstance(found, InternalError):
                return found
    return error


def _lost_another(error: RaykError) -> TypeGuard[EngineDied]:
    """Return whether a rank says only that it lost another one, which may know more."""
    return isinstance(error, EngineDied) and error.cause.startswith(f"{CommError.__name__}: ")


async def _next(generator: Any) -> list[RequestEvent] | None:
    """Return the generator's next item, None at its end (a coroutine cannot raise StopAsyncIteration)."""
    try:
        ref = await generator.__anext__()
    except StopAsyncIteration:
        return None
    events: list[RequestEvent] = await ref
    return events

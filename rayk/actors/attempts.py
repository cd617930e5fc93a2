"""The engines of one cell as its requests meet them: connected, watched, formed again; where to try again.

Runs inside the coordinator's actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rayk.actors.bugs import until
from rayk.actors.engines import EngineHandle
from rayk.actors.forming import connect, end_reads, see_a_turn, until_it_hangs
from rayk.sched.recovery import Failure, GiveUp, Migrate, Recovery, attempt_id, cause_of
from rayk.specs import Cell
from rayk.types.bugs import bug
from rayk.types.errors import DeadlineExceeded, EngineDied, RaykError, TransferError
from rayk.types.request import Request

WIRE_S = 15.0
"""How long a producer may take to answer a first read. Idle engines look at the network every 50 ms."""

NUM_TRIES = 3
"""A handshake whose messages get lost is tried so often."""


class FormAgain(Protocol):
    """Makes a new engine in place of a lost one."""

    def __call__(self, lost: EngineHandle, *, was_serving: bool) -> Awaitable[EngineHandle]:
        """`was_serving`: whether requests had begun. Raises RaykError."""
        ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way of a request through its engines."""

    request: Request
    """As the engines know it; later attempts have ids of their own."""
    p: int
    """Index of the prefill engine."""
    d: int
    number: int = 0
    computes_all: bool = False
    """The decode engine computes the prompt itself."""


class Engines:
    """Engines of a cell by role and index. A lost one is replaced in its place where that was asked for."""

    def __init__(
        self, cell: Cell, engines: Sequence[EngineHandle], form_again: FormAgain | None = None
    ) -> None:
        self.prefill = [e for e in engines if e.role != "decode"]
        self.decode = [e for e in engines if e.role == "decode"]
        self._cell = cell
        self._form_again = form_again
        self._is_serving = False
        roles = {f.engine_role for f in cell.faults if f.kind == "restart" and form_again is not None}
        self.restarts = frozenset(
            e.name
            for side, role in ((self.prefill, "prefill"), (self.decode, "decode"))
            for e in side
            if role in roles
        )
        """Engines that are formed again when they die, by name."""
        self._formed: dict[str, asyncio.Future[None]] = {
            name: asyncio.get_running_loop().create_future() for name in self.restarts
        }
        """Engines that will be formed again when they die, by name: done when they are, or cannot be."""

    @property
    def _all(self) -> list[EngineHandle]:
        return [*self.prefill, *self.decode]

    async def connect(self) -> None:
        """Handshake every decode engine with every prefill engine, and have the network set up. Raises what
        they refuse, or die of."""
        for d in range(len(self.decode)):
            for p in range(len(self.prefill)):
                for left in reversed(range(NUM_TRIES)):
                    try:
                        pair = await self.live("prefill", p), await self.live("decode", d)
                        await connect(*pair, self._wire_s, is_push=self._is_push)
                    except (TransferError, DeadlineExceeded, EngineDied):
                        if not left:
                            raise
                    else:
                        break
        self._is_serving = True

    @property
    def _wire_s(self) -> float:
        return min(WIRE_S, self._cell.deadlines.transfer_s)

    @property
    def _is_push(self) -> bool:
        return self._cell.spec.transfer.mode == "push"

    def tier_of(self, name: str) -> str:
        """The host tier of the engine that has this name now; empty: it has none."""
        return next(e.tier_name for e in self._all if e.name == name)

    def is_live(self, engine: EngineHandle) -> bool:
        """Whether it takes requests, or will."""
        formed = self._formed.get(engine.name)
        will_be = formed is not None and not (formed.done() and formed.exception() is not None)
        return will_be or not engine.died.done()

    async def live(self, role: str, index: int) -> EngineHandle:
        """An engine, once it is formed. Raises what it, or the forming of it, died of."""
        engines = self.decode if role == "decode" else self.prefill
        if engines[index].died.done() and engines[index].name in self._formed:
            await asyncio.shield(self._formed[engines[index].name])
        engines[index].raise_if_dead()
        return engines[index]

    def abort(self, request_id: str, num_attempts: int) -> None:
        """Stop every attempt of a request, wherever it is."""
        for engine in self._all:
            for number in range(num_attempts):
                name = attempt_id(request_id, number)
                engine.leader.abort.options(concurrency_group="control").remote(name)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Meanwhile, see to engines that die or, where that is looked for, hang."""
        tasks = [asyncio.create_task(self._look_after(e)) for e in self._all]
        try:
            yield
            # A life that has begun is seen through: the next cell gets whole workers.
            if self._looks_for_hangs:
                await asyncio.gather(*(see_a_turn(e, self._cell.deadlines.transfer_s) for e in self._all))
            lost = [e for e in self._all if e.died.done() and e.name in self._formed]
            await asyncio.gather(*(self._formed[e.name] for e in lost), return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _looks_for_hangs(self) -> bool:
        """Where requests can be saved from a hanging engine, or one is planted. Steps may be long: elsewhere
        deadlines suffice."""
        return self._cell.failure_policy != "fail" or any(f.kind == "stop" for f in self._cell.faults)

    async def _look_after(self, engine: EngineHandle) -> None:
        """Until it dies; then replace it or have nobody wait for it."""
        patience_s = self._cell.deadlines.transfer_s
        formed = self._formed.get(engine.name)
        try:
            await until(engine.died, *([until_it_hangs(engine, patience_s)] if self._looks_for_hangs else []))
            if engine.role != "decode":
                await end_reads(engine, self.decode)
            if formed is not None and not formed.done():
                await self._replace(engine)
                formed.set_result(None)
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody may wait for another life
            found = error if isinstance(error, RaykError) else bug(f"the watch over {engine.name}", error)
            engine.declare_dead(str(found))
            if formed is not None and not formed.done():
                formed.set_exception(found)
                formed.exception()  # nobody may be waiting

    async def _replace(self, lost: EngineHandle) -> None:
        """Form a lost engine again and connect it to all its partners."""
        assert self._form_again is not None
        engine = await self._form_again(lost, was_serving=self._is_serving)
        engines = self.decode if lost.role == "decode" else self.prefill
        engines[next(i for i, e in enumerate(engines) if e.name == lost.name)] = engine
        if not self._is_serving:  # `connect` goes on
            return
        if lost.role == "decode":
            pairs = [(p, engine) for p in self.prefill]
        else:
            pairs = [(engine, d) for d in self.decode]
        for p, d in pairs:
            if not p.died.done() and not d.died.done():
                await connect(p, d, self._wire_s, is_push=self._is_push)


def next_attempt(recovery: Recovery, engines: Engines, attempt: Attempt, error: RaykError) -> Attempt | None:
    """Where to try again after an error, as the policy says; None where it gives up."""
    producer, decode = engines.prefill[attempt.p], engines.decode
    consumer = decode[attempt.d].name if decode else ""
    live = [i for i in range(len(decode)) if engines.is_live(decode[(attempt.d + i) % len(decode)])]
    d = (attempt.d + live[0]) % len(decode) if live else attempt.d
    decision = recovery.decide(
        Failure(cause_of(error, producer=producer.name, consumer=consumer), attempt.p),
        producers_live=[engines.is_live(p) for p in engines.prefill],
        consumer_lives=bool(live) or (not decode and recovery.policy == "migrate"),
    )
    if isinstance(decision, GiveUp):
        return None
    number = attempt.number + 1
    name = attempt_id(attempt.request.request_id.partition("~")[0], number)
    again = replace(attempt, request=replace(attempt.request, request_id=name), number=number, d=d)
    if isinstance(decision, Migrate):
        return replace(again, p=decision.producer, computes_all=False)
    return replace(again, computes_all=True)

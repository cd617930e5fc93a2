"""Clock, faults and processes: what every part of a simulated world stands on."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayk.types.fault_table import RANK_KINDS, Fault

if TYPE_CHECKING:
    from tests.transfer.simulator.memory import Memory
    from tests.transfer.simulator.network import SimulatedTransfer

# All times are in units of the world's clock, each of which is so long to the ranks.
UNIT_NS = 10_000_000
LATENCY = 3
"""A message takes 1 to this long."""
BYTES = 5
"""Each half of a read or write takes 1 to this long."""
DELAY = 25
"""A delayed message or transfer takes so much longer."""
REORDER = 9
"""The same of one that others overtake."""
TRANSPORT = 300
"""The transport gives up what was lost after this."""
AFTERLIFE = 3
"""Bytes that a process had under way may still arrive so long after it ended."""
LIMIT = 5000
"""A world that is not over by then hangs."""


@dataclass(slots=True)
class PendingFault:
    """A fault, and when it strikes."""

    fault: Fault
    nth: int
    """It strikes the nth time that something happens at its point."""
    seen: int = 0
    has_hit: bool = False


class Engine:
    """One life of an engine: its processes, all of which end together."""

    role = ""

    def __init__(self, clock: Clock, name: str, epoch: int, tp: int, memory: Memory) -> None:
        self.clock = clock
        self.name = name
        self.epoch = epoch
        self.tp = tp
        self.memory = memory
        self.alive = True
        self.stopped = False
        self.died = 0
        self.transfers: dict[SimulatedTransfer, None] = {}
        """Under way from or to it."""
        self.is_ticking = False
        self.is_woken = False

    @property
    def runs(self) -> bool:
        """Whether its processes do anything."""
        return self.alive and not self.stopped

    def turn(self) -> None:
        """Its ranks look at what has come, and do what follows."""

    def tick(self) -> bool:
        """Time has passed; whether there is anything to wait for."""
        return False

    def wake(self) -> None:
        """Something has come: have its ranks look, soon."""
        if not self.is_woken and self.runs:
            self.is_woken = True
            self.clock.at(0, self._look)

    def _look(self) -> None:
        self.is_woken = False
        if self.runs:
            self.turn()


class Clock:
    """Events in the order of their times. `faults` are drawn to a place by the world's seed."""

    def __init__(self, seed: int, faults: Sequence[Fault], *, tracing: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0
        self.tracing = tracing
        self.trace: list[tuple[int, str]] = []
        self.violations: list[str] = []
        self.faults = [PendingFault(f, self._nth(f)) for f in faults]
        self.can_cancel = self.random.random() < 0.5
        """Whether the transport takes transfers back."""
        self.goes_on_when_stopped = self.random.random() < 0.5
        """Whether bytes of a stopped process move on."""
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._last_call: dict[tuple[str, str], int] = {}

    def _nth(self, fault: Fault) -> int:
        return self.random.randrange(2) if fault.point in ("handshake", "post", "mid_transfer") else 0

    def at(self, delay: int, act: Callable[..., None], *arguments: Any) -> None:
        """Have something happen later."""
        self._num_events += 1
        heapq.heappush(self._events, (self.now + delay, self._num_events, act, arguments))

    def log(self, text: str) -> None:
        """A line of the trace; costly texts are made only when somebody reads them."""
        if self.tracing:
            self.trace.append((self.now, text))

    def violate(self, text: str) -> None:
        """Note what must not happen."""
        self.violations.append(f"at {self.now}: {text}")
        self.log(f"VIOLATION: {text}")

    @property
    def now_ns(self) -> int:
        """As the ranks' clocks say."""
        return self.now * UNIT_NS

    def go(self) -> None:
        """Until nothing happens any more."""
        while self._events:
            self.now, _, act, arguments = heapq.heappop(self._events)
            if self.now > LIMIT:
                self.violate("it hangs")
                return
            act(*arguments)

    def strike(self, point: str, producer: Engine, consumer: Engine) -> str | None:
        """Something happens at a point, between these two: the kind of fault that strikes it now."""
        for pending in self.faults:
            fault = pending.fault
            if fault.point != point or pending.has_hit:
                continue
            pending.seen += 1
            if pending.seen <= pending.nth:
                continue
            pending.has_hit = True
            self.log(f"*** {fault}")
            if fault.kind in RANK_KINDS:
                self.lose(consumer if fault.role == "decode" else producer, fault.kind)
            return fault.kind
        return None

    def lose(self, engine: Engine, kind: str) -> None:
        """A rank of an engine ends or hangs, and the engine with it."""
        raise NotImplementedError

    def end_engine(self, engine: Engine) -> None:
        """Its processes are gone; what they had under way ends."""
        if not engine.alive:
            return
        engine.alive = False
        engine.died = self.now
        self.log(f"{engine.name}/{engine.epoch} is gone")
        for transfer in tuple(engine.transfers):
            if transfer.is_stalled:
                self.at(self.random.randint(1, AFTERLIFE), transfer.end, False)

    def tick_while_busy(self, engine: Engine, period: int) -> None:
        """Have an engine look at its clocks as long as it waits for something."""
        if not engine.is_ticking and engine.runs:
            engine.is_ticking = True
            self.at(period, self._tick, engine, period)

    def _tick(self, engine: Engine, period: int) -> None:
        if not engine.runs:
            engine.is_ticking = False
        elif engine.tick():
            self.at(period, self._tick, engine, period)
        else:
            engine.is_ticking = False

    def latency(self) -> int:
        """Of a message."""
        return 1 + int(self.random.random() * LATENCY)

    def call(self, source: str, to: Engine | None, act: Callable[..., None], *arguments: Any) -> None:
        """Ask an engine for something, or (None) tell the coordinator; calls of one pair keep their order."""
        pair = source, to.name if to is not None else ""
        when = max(self.now + self.latency(), self._last_call.get(pair, 0))
        self._last_call[pair] = when
        self.at(when - self.now, self._answer, to, act, arguments)

    def _answer(self, to: Engine | None, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if to is None or to.runs:
            act(*arguments)


def extra_delay(kind: str | None) -> int:
    """Of what a fault of this kind struck."""
    return DELAY if kind == "delay" else REORDER if kind == "reorder" else 0

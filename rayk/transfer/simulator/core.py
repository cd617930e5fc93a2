"""Clock, faults, processes and the network between them: what every part of a simulated world stands on."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rayk.transfer.simulator.memory import BLOCK_SIZE, CORRUPT, Memory, Place
from rayk.types.fault_table import RANK_KINDS, Fault

# All times are in units of the world's clock, which stands for nanoseconds to the machines.
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
class Strike:
    """A fault, and when it strikes."""

    fault: Fault
    nth: int
    """It strikes the nth time that something happens at its point."""
    seen: int = 0
    struck: bool = False


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
        self.flights: dict[Flight, None] = {}
        """Under way from or to it."""
        self.is_ticking = False

    @property
    def runs(self) -> bool:
        """Whether its processes do anything."""
        return self.alive and not self.stopped

    def heads(self, rank: int) -> tuple[int, ...]:
        """Heads that a rank holds."""
        return (0, 1) if self.tp == 1 else (rank,)

    def tick(self) -> bool:
        """Time has passed; whether there is anything to wait for."""
        return False

    def ends(self) -> None:
        """Its processes are gone."""

    def on_message(self, rank: int, message: bytes) -> None:
        """A notification came to a rank."""


class Clock:
    """Events in the order of their times. `faults` are drawn to a place by the world's seed."""

    def __init__(self, seed: int, faults: Sequence[Fault], *, tracing: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 0
        self.tracing = tracing
        self.trace: list[tuple[int, str]] = []
        self.violations: list[str] = []
        self.strikes = [Strike(f, self._nth(f)) for f in faults]
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
        for strike in self.strikes:
            fault = strike.fault
            if fault.point != point or strike.struck:
                continue
            strike.seen += 1
            if strike.seen <= strike.nth:
                continue
            strike.struck = True
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
        engine.ends()
        for flight in tuple(engine.flights):
            if flight.stalled:
                self.at(self.random.randint(1, AFTERLIFE), flight.end, False)

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

    def notify(
        self, producer: Engine, consumer: Engine, to: Engine, rank: int, message: bytes, point: str | None
    ) -> None:
        """Send a notification between ranks of two engines, to a rank of `to`: as the network pleases."""
        kind = self.strike(point, producer, consumer) if point is not None else None
        sender = consumer if to is producer else producer
        if kind == "drop" or not sender.runs:
            return
        delay = self.latency() + _extra(kind)
        if kind == "corrupt":
            spot = self.random.randrange(len(message))
            message = message[:spot] + bytes([message[spot] ^ 1]) + message[spot + 1 :]
        self.at(delay, self._deliver, to, rank, message)
        if kind == "duplicate":
            self.at(delay + self.latency() + REORDER, self._deliver, to, rank, message)

    def _deliver(self, to: Engine, rank: int, message: bytes) -> None:
        if to.runs:
            self.log(f"{to.name} rank {rank} hears {message[8:].decode(errors='replace')}")
            to.on_message(rank, message)

    def call(self, source: str, to: Engine | None, act: Callable[..., None], *arguments: Any) -> None:
        """Ask an engine for something, or (None) tell the coordinator; calls of one pair keep their order."""
        pair = source, to.name if to is not None else ""
        when = max(self.now + self.latency(), self._last_call.get(pair, 0))
        self._last_call[pair] = when
        self.at(when - self.now, self._answer, to, act, arguments)

    def _answer(self, to: Engine | None, act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if to is None or to.runs:
            act(*arguments)


def _extra(kind: str | None) -> int:
    return DELAY if kind == "delay" else REORDER if kind == "reorder" else 0


Copy = tuple[Place, Place]
"""Where rows come from and where they go."""


@dataclass(eq=False, slots=True)
class Flight:
    """One read or write, or (without copies) a look at the other side: bytes move in two halves, whenever the
    network pleases. `done` is told how it ended, by whoever posted it, unless that is gone."""

    clock: Clock
    source: Engine
    target: Engine
    poster: Engine
    holder: str
    """Whose blocks the poster believes them to be."""
    copies: list[Copy]
    points: tuple[str | None, str | None]
    """Points of its posting and of its middle."""
    done: Callable[[bool], None]
    is_corrupt: bool = False
    stalled: bool = False
    is_over: bool = False
    twice: bool = False

    def post(self) -> Flight:
        """Start it."""
        kind = self._strike(0)
        self.source.flights[self] = self.target.flights[self] = None
        self.stalled = kind == "drop"
        if kind == "corrupt":
            self.is_corrupt = True
            last = len(self.source.memory.holders) - 1
            self.copies = [((p[0], p[1], p[2] % last + 1), to) for p, to in self.copies]
        delay = 1 + int(self.clock.random.random() * BYTES) + _extra(kind)
        self.twice = kind == "duplicate"
        if self.stalled:
            self.clock.at(TRANSPORT, self.end, False)
        else:
            self.clock.at(delay, self.middle)
        return self

    def middle(self) -> None:
        """Half of the bytes arrive."""
        if self.is_over or self._is_cut_off():
            return
        kind = self._strike(1)
        half = len(self.copies) // 2
        self._copy(self.copies[:half])
        if kind == "drop":
            self.stalled = True
            self.clock.at(TRANSPORT, self.end, False)
            return
        self.is_corrupt |= kind == "corrupt"
        self.twice |= kind == "duplicate"
        self.clock.at(1 + int(self.clock.random.random() * BYTES) + _extra(kind), self._last, half, kind)

    def _last(self, half: int, kind: str | None) -> None:
        if self.is_over or self._is_cut_off():
            return
        self._copy(self.copies if self.twice else self.copies[half:])
        if kind == "corrupt" and self.copies:
            _, place = self.clock.random.choice(self.copies)
            self.target.memory.write(self.holder, place, 0, [CORRUPT] * BLOCK_SIZE)
        self.end(True)
        if self.twice and self.poster.runs:
            self.done(True)

    def end(self, is_ok: bool) -> None:
        """Nothing of it moves any more."""
        if self.is_over:
            return
        self.is_over = True
        self.source.flights.pop(self, None)
        self.target.flights.pop(self, None)
        if self.poster.runs:
            self.done(is_ok)

    def cancel(self) -> bool:
        """Take it back, if the transport can."""
        if self.is_over:
            return True
        if not self.clock.can_cancel:
            return False
        self.is_over = True
        self.source.flights.pop(self, None)
        self.target.flights.pop(self, None)
        return True

    def _strike(self, which: int) -> str | None:
        point = self.points[which]
        return self.clock.strike(point, self.source, self.target) if point is not None else None

    def _is_cut_off(self) -> bool:
        """Whether a process at an end is gone, or stopped and its bytes with it."""
        ends = (self.source, self.target)
        if self.source.runs and self.target.runs:
            return False
        if not self.target.alive:
            self.end(False)
            return True
        if any(not e.alive and self.clock.now - e.died > AFTERLIFE for e in ends):
            self.end(False)
            return True
        if any(e.stopped for e in ends) and not self.clock.goes_on_when_stopped:
            self.stalled = True
            return True
        return False

    def _copy(self, copies: Sequence[Copy]) -> None:
        read, write = self.source.memory.rows, self.target.memory.write
        for source, target in copies:
            write(self.holder, target, 0, read(*source))


def num_blocks(num_tokens: int) -> int:
    """Blocks of so many tokens."""
    return -(-num_tokens // BLOCK_SIZE)

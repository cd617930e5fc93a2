"""What is told of whole engines by whoever looks after them: a server's fleet, a cell's coordinator.

It is told also where the engine itself cannot tell any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rayk.actors.engines import EngineHandle
    from rayk.metrics import BufferedSink
    from rayk.sched.dispatcher import Dispatcher


class EngineNow(NamedTuple):
    """One engine as it is meant to be now."""

    name: str
    role: str
    is_up: bool
    """Whether it is meant to turn; else it is being formed."""


class EngineMeter:
    """Engines of one deployment. `engines` is asked at every flush of the sink, and tells of those that it
    still answers for; of others nothing more is told, and Ray forgets them."""

    def __init__(self, sink: BufferedSink, engines: Callable[[], Iterable[EngineNow]]) -> None:
        self._sink = sink
        self._engines = engines
        self._told: set[tuple[str, str]] = set()
        sink.on_flush(self._report)

    def watch(self, dispatcher: Dispatcher) -> None:
        """Also tell how many requests have a place, and how many wait for one."""

        def report() -> None:
            self._sink.set("rayk_waiting_room_requests", dispatcher.num_waiting)
            self._sink.set("rayk_placed_requests", dispatcher.num_running)

        self._sink.on_flush(report)

    def lost(self, engine: str, role: str) -> None:
        """One died or hung."""
        self._sink.add("rayk_engines_lost_total", engine=engine, role=role)

    def tick(self) -> None:
        """Call this about twice a second."""
        self._sink.flush()

    def _report(self) -> None:
        now = {(e.name, e.role): e.is_up for e in self._engines()}
        for engine, role in self._told - now.keys():
            self._sink.forget("rayk_engine_up", engine=engine, role=role)
        self._told = set(now)
        for (engine, role), is_up in now.items():
            self._sink.set("rayk_engine_up", float(is_up), engine=engine, role=role)
            self._sink.add("rayk_engines_lost_total", 0.0, engine=engine, role=role)


class Losses:
    """Engines that a cell lost, each life of them counted once, when it is."""

    def __init__(self, meter: EngineMeter) -> None:
        self.is_over = False
        """Whether the cell ends its engines now: one that dies of that was not lost."""
        self._meter = meter
        self._roles: dict[str, str] = {}
        self._counted: set[str] = set()

    def watch(self, engine: EngineHandle) -> None:
        """Count it when it dies."""
        self._roles[engine.name] = engine.role
        engine.died.add_done_callback(lambda _: None if self.is_over else self._count(engine.name))

    def found_late(self, engine: str) -> None:
        """One turned out to be dead, maybe only when it was to end."""
        if engine in self._roles and engine not in self._counted:
            self._count(engine)

    def _count(self, engine: str) -> None:
        self._counted.add(engine)
        self._meter.lost(engine, self._roles[engine])

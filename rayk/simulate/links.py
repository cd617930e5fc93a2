"""Share what moves between simulated engines: a read goes the slower the more others its engines are at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from rayk.simulate.clock import Event, EventQueue


@dataclass(slots=True, eq=False)
class Flow:
    """A read under way. It moves alone in `left_ns`, and takes k times as long beside k - 1 others at the
    engine of its two that has more."""

    ends: tuple[str, str]  # the engines that it is from and to
    since_ns: int
    left_ns: float  # as of then
    on_end: Callable[[], object]
    on_sooner: Callable[[], object]
    num_sharing: int = 0  # itself included; 0 before it has begun to move
    end_ns: int | None = None
    event: Event | None = None


@dataclass(slots=True)
class SimLinks:
    """The reads under way of all engines of a world."""

    world: EventQueue
    _at: dict[str, dict[Flow, None]] = field(default_factory=dict)
    """Engine -> the reads that are from or to it, in the order in which they began."""

    def begin(
        self,
        ends: tuple[str, str],
        begin_ns: int,
        *,
        fixed_ns: float,
        shared_ns: float,
        on_end: Callable[[], object],
        on_sooner: Callable[[], object] = int,
    ) -> Flow:
        """Start a read, now or later: `fixed_ns` pass, then it moves for `shared_ns` if it is alone.
        `on_sooner` hears that it will end sooner than `expected_ns` said."""
        flow = Flow(ends, round(begin_ns + fixed_ns), shared_ns, on_end, on_sooner)
        flow.event = self.world.at(flow.since_ns, partial(self._enter, flow))
        return flow

    def end(self, flow: Flow, at_ns: int) -> None:
        """Its reader saw the end at this time, which the world has not reached."""
        if flow.end_ns is not None:
            return
        if flow.event is not None:
            self.world.cancel(flow.event)
        flow.end_ns, flow.event = at_ns, None
        self._leave(flow)

    def expected_ns(self, flow: Flow) -> int:
        """Tell when it ends if nobody else comes or goes."""
        if flow.end_ns is not None:
            return flow.end_ns
        sharing = flow.num_sharing or 1 + max(self.num_at(name) for name in flow.ends)
        return round(flow.since_ns + flow.left_ns * sharing)

    def num_at(self, engine: str) -> int:
        """Count the reads under way from or to an engine."""
        return len(self._at.get(engine, ()))

    def _enter(self, flow: Flow) -> None:
        for name in flow.ends:
            self._at.setdefault(name, {})[flow] = None
        self._share(flow.ends)

    def _leave(self, flow: Flow) -> None:
        for name in flow.ends:
            self._at.get(name, {}).pop(flow, None)
        self._share(flow.ends)

    def _share(self, ends: tuple[str, str]) -> None:
        """Reads came or went at these engines: the others there go on at another rate."""
        now_ns = self.world.now_ns
        for flow in {**self._at.get(ends[0], {}), **self._at.get(ends[1], {})}:
            num_sharing = max(self.num_at(name) for name in flow.ends)
            if num_sharing == flow.num_sharing:
                continue
            is_sooner = num_sharing < flow.num_sharing
            if flow.num_sharing:
                flow.left_ns = max(0.0, flow.left_ns - (now_ns - flow.since_ns) / flow.num_sharing)
            flow.since_ns, flow.num_sharing = now_ns, num_sharing
            if flow.event is not None:
                self.world.cancel(flow.event)
            flow.event = self.world.at(self.expected_ns(flow), partial(self._finish, flow))
            if is_sooner:
                flow.on_sooner()

    def _finish(self, flow: Flow) -> None:
        flow.end_ns, flow.event = self.world.now_ns, None
        self._leave(flow)
        flow.on_end()

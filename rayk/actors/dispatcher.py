"""Who goes where: a server's requests, its engines' loads, the policy and the waiting room. No Ray here.

Runs on the fleet's event loop. It sees one call that places an attempt and one that ends it, never a token.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rayk.actors.serving import News
from rayk.sched.loads import LoadBook
from rayk.sched.policy import EngineLoad, Placement, PlacementRequest, Policy
from rayk.sched.waiting_room import NS_PER_S, WaitingRoom
from rayk.types.errors import DeadlineExceeded, EngineDied

MAX_AGAIN = 1 << 20
"""Requests that lost their engines wait without limit: they were admitted before."""
EARLY_KEPT = 4096
"""Requests that were given up before they came are remembered, the last of them."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that has no place yet."""

    front: str
    asked: PlacementRequest
    deadline_s: float
    """As it was told."""
    assignment: asyncio.Future[Placement]


@dataclass(slots=True)
class _Front:
    """Who asks for places."""

    heard_ns: int
    attempts: set[str] = field(default_factory=set)
    """Of its requests, placed or waiting."""


class Dispatcher:
    """Places requests on engines that are open. `limit()`: how many may be on engines now;
    `tier_of`: an engine's host tier."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_waiting: int,
        limit: Callable[[], int],
        tier_of: Callable[[str], str] = lambda engine: "",
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.is_draining = False
        self._policy = policy
        self._limit = limit
        self._clock = clock
        self._loads = LoadBook(tier_of)
        self._known: set[str] = set()
        self._open: dict[str, list[str]] = {"prefill": [], "decode": []}
        self._needs_decode = False
        self._placed: dict[str, tuple[str, Placement]] = {}
        """Attempt -> its front, and where it is."""
        self._rooms = (WaitingRoom[_Waiting](MAX_AGAIN), WaitingRoom[_Waiting](max_waiting))
        """Those who lost their place first."""
        self._fronts: dict[str, _Front] = {}
        self._num_present: Counter[str] = Counter()
        """Connections of each front."""
        self._early: OrderedDict[str, None] = OrderedDict()
        self._alarm: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Attempts that have a place."""
        return len(self._placed)

    @property
    def num_waiting(self) -> int:
        """Attempts that wait for one."""
        return sum(len(room) for room in self._rooms)

    def load(self, engine: str) -> EngineLoad:
        """What an engine has to do."""
        return self._loads.of([engine])[0] if engine in self._known else EngineLoad(name=engine)

    def open(self, engine: str, role: str, tp: int) -> None:
        """An engine takes requests from now on."""
        if engine not in self._known:
            self._known.add(engine)
            self._loads.add(engine, tp)
        self.close(engine)
        self._needs_decode = self._needs_decode or role == "decode"
        side = self._open["decode" if role == "decode" else "prefill"]
        side.append(engine)
        side.sort()
        self._pump()

    def close(self, engine: str) -> None:
        """An engine takes no requests any more."""
        for side in self._open.values():
            if engine in side:
                side.remove(engine)

    def lost(self, engine: str) -> None:
        """An engine died, or a host tier; what it held is no more."""
        self.close(engine)
        self._policy.lost(engine)

    async def place(
        self, front: str, asked: PlacementRequest, *, priority: int, deadline_s: float, again: bool
    ) -> Placement:
        """Engines for an attempt, once there is room. `again`: the request had a place and lost it.

        Raises Overloaded where too many wait or the server is about to end, DeadlineExceeded, and EngineDied
        where the front is taken for gone meanwhile.
        """
        name, now_ns = asked.request_id, self._clock()
        self._hear(front, now_ns)
        if name in self._placed:
            return self._placed[name][1]  # asked twice: the first answer got lost
        if name in self._early:
            raise DeadlineExceeded(f"nobody waits for {name} any more", 0.0)
        room = self._rooms[0 if again else 1]
        if self.is_draining and not again:
            raise room.overloaded(now_ns, "the server is about to end")
        if self._has_room and not self.num_waiting:
            return self._assign(front, asked)
        waiting = _Waiting(front, asked, deadline_s, asyncio.get_running_loop().create_future())
        deadline_ns = now_ns + int(deadline_s * NS_PER_S)
        room.enter(name, waiting, priority=priority, deadline_ns=deadline_ns, now_ns=now_ns)
        self._fronts[front].attempts.add(name)
        self._idle.clear()
        self._pump()
        self._set_alarm()
        return await waiting.assignment

    def tell(self, front: str, news: News) -> None:
        """News of a front's attempts."""
        self._hear(front, self._clock())
        for name in news.prefilled:
            self._loads.prefilled(name)
        for name in news.ended:
            self._end(name)
        self._pump()

    def gone(self, silent_s: float) -> list[tuple[str, Placement]]:
        """Forget the fronts that were not heard of for so long: their attempts, and where these are."""
        before_ns = self._clock() - int(silent_s * NS_PER_S)
        silent = [name for name, front in self._fronts.items() if front.heard_ns < before_ns]
        return [attempt for name in silent for attempt in self.forget(name)]

    def forget(self, front: str) -> list[tuple[str, Placement]]:
        """A front is gone: its attempts, and where these are."""
        known = self._fronts.pop(front, None)
        names = sorted(known.attempts) if known is not None else []
        found = [(name, self._placed[name][1]) for name in names if name in self._placed]
        for name in names:
            self._end(name, taken_for_gone=True)
        self._pump()
        return found

    def arrived(self, front: str) -> None:
        """A front has made a connection, maybe while an older one is about to be missed."""
        self._num_present[front] += 1

    def left(self, front: str) -> list[tuple[str, Placement]]:
        """One of a front's connections has ended. With the last one it is gone: see `forget`."""
        self._num_present[front] -= 1
        if self._num_present[front]:
            return []
        del self._num_present[front]
        return self.forget(front)

    async def drained(self) -> None:
        """Wait until no request has a place or waits for one."""
        await self._idle.wait()

    @property
    def _has_room(self) -> bool:
        can_go = self._open["prefill"] and (self._open["decode"] or not self._needs_decode)
        return bool(can_go) and len(self._placed) < self._limit()

    def _hear(self, front: str, now_ns: int) -> None:
        known = self._fronts.setdefault(front, _Front(now_ns))
        known.heard_ns = now_ns

    def _assign(self, front: str, asked: PlacementRequest) -> Placement:
        placed = self._policy.place(
            asked, self._loads.of(self._open["prefill"]), self._loads.of(self._open["decode"])
        )
        self._loads.placed(asked, placed)
        self._placed[asked.request_id] = (front, placed)
        self._fronts[front].attempts.add(asked.request_id)
        self._idle.clear()
        return placed

    def _pump(self) -> None:
        """Let in whoever there is room for."""
        now_ns = self._clock()
        while self._has_room:
            waiting = next((w for room in self._rooms if (w := room.pop(now_ns)) is not None), None)
            if waiting is None:
                return
            if waiting.assignment.done():  # whoever asked has gone
                self._strike_off(waiting.front, waiting.asked.request_id)
            else:
                waiting.assignment.set_result(self._assign(waiting.front, waiting.asked))

    def _end(self, name: str, *, taken_for_gone: bool = False) -> None:
        """An attempt is over, or not wanted any more; `taken_for_gone`: its front may live all the same, and
        then asks for another place."""
        now_ns = self._clock()
        if name in self._placed:
            front, _ = self._placed.pop(name)
            if (over := self._loads.ended(name)) is not None:
                self._policy.ended(*over)
            self._rooms[1].completed(now_ns)
            self._strike_off(front, name)
            return
        waiting = next((w for room in self._rooms if (w := room.leave(name)) is not None), None)
        if waiting is not None:
            if taken_for_gone and not waiting.assignment.done():
                waiting.assignment.set_exception(EngineDied("fleet", "it took this front for gone"))
            waiting.assignment.cancel()
            self._strike_off(waiting.front, name)
            return
        self._early[name] = None
        while len(self._early) > EARLY_KEPT:
            self._early.popitem(last=False)

    def _strike_off(self, front: str, name: str) -> None:
        if front in self._fronts:
            self._fronts[front].attempts.discard(name)
        if not self._placed and not self.num_waiting:
            self._idle.set()

    def _expire(self) -> None:
        """Turn away whose time is over."""
        self._alarm = None
        now_ns = self._clock()
        for waiting in [w for room in self._rooms for w in room.expire(now_ns)]:
            if not waiting.assignment.done():
                name = waiting.asked.request_id
                waiting.assignment.set_exception(DeadlineExceeded(f"a place for {name}", waiting.deadline_s))
            self._strike_off(waiting.front, waiting.asked.request_id)
        self._set_alarm()

    def _set_alarm(self) -> None:
        deadlines: Iterable[int | None] = (room.next_deadline_ns for room in self._rooms)
        first = min((d for d in deadlines if d is not None), default=None)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if first is not None:
            delay_s = max(0.0, (first - self._clock()) / NS_PER_S)
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._expire)

"""Dispatcher: all that is decided about the requests and engines of one deployment.

Pure: events and the time come in, actions go out. A run's coordinator and a server's fleet own one each and
carry its actions out; a simulation drives the same class by a clock of its own. Times are nanoseconds of one
clock.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from rayk.sched.loads import LoadBook
from rayk.sched.policy import EngineLoad, EngineSet, Placement, PlacementRequest, Policy
from rayk.sched.recovery import Cause, Failure, GiveUp, Migrate, Recovery, attempt_id
from rayk.sched.waiting_room import NS_PER_S, WaitingRoom
from rayk.types.errors import DeadlineExceeded, EngineDied, InternalError, Overloaded, RaykError
from rayk.types.fault_table import FailurePolicy

MAX_AGAIN = 1 << 20
"""Requests that lost their engines wait without limit: they were admitted before."""
EARLY_KEPT = 4096
"""Requests that were given up before they came are remembered, the last of them."""


@dataclass(frozen=True, slots=True)
class Place:
    """A request has a place: it goes to these engines now."""

    name: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class Refuse:
    """A request gets no place, for this reason."""

    name: str
    error: RaykError


@dataclass(frozen=True, slots=True)
class Drop:
    """A request that waited for a place is not wanted any more."""

    name: str


@dataclass(frozen=True, slots=True)
class Abort:
    """A request is not wanted any more: the engines that it is on are to be told."""

    name: str
    placement: Placement


Action = Place | Refuse | Drop | Abort


@dataclass(frozen=True, slots=True)
class FormAgain:
    """A lost engine gets a new life in its place after this pause."""

    engine: str
    pause_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchRules:
    """What holds for a deployment as long as it lasts."""

    hands_over: bool
    """Engines prefill or decode, and a request needs one of each; else each engine does both."""
    max_waiting: int = 0
    """Requests that wait for a place at once."""
    places_at_once: bool = False
    """Requests never wait for a place. One placed on an engine that is being formed again waits for that
    engine. Where no engine lives, a request is placed on a dead one and fails with what that died of."""
    restarts: frozenset[str] | None = None
    """Engines that are formed again when they are lost, each once; None: all, until it succeeds."""
    failure_policy: FailurePolicy = "fail"
    """What happens to requests whose attempts fail."""
    pauses_s: tuple[float, ...] = (0.0,)
    """Pauses before each try to form an engine again; the last one for all that follow."""


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A request that has no place yet."""

    front: str
    asked: PlacementRequest
    deadline_s: float


@dataclass(slots=True, eq=False)
class _Placed:
    """An attempt of a request that is on engines."""

    front: str
    asked: PlacementRequest
    placement: Placement
    recovery: Recovery | None = None
    """Made when the request's first attempt fails."""


@dataclass(slots=True)
class _FrontState:
    """A process that requests come from."""

    heard_ns: int
    requests: set[str] = field(default_factory=set)
    """Placed or waiting."""


class Dispatcher:
    """Admits requests, places them and decides whether a lost engine is formed again."""

    def __init__(
        self,
        policy: Policy,
        rules: DispatchRules,
        *,
        max_running: int = sys.maxsize,
    ) -> None:
        """`max_running`: requests that may have a place at once."""
        self.is_draining = False
        self._policy = policy
        self._rules = rules
        self._max_running = max_running
        self._loads = LoadBook()
        self._sides: dict[str, str] = {}
        """Engine -> prefill or decode, in the order in which they came."""
        self._open: set[str] = set()
        """Engines that take requests."""
        self._takers: dict[str, EngineSet] = {"prefill": EngineSet(), "decode": EngineSet()}
        """The same by side, in the order of `_sides`."""
        self._restarts = rules.restarts
        self._num_tries: Counter[str] = Counter()
        """Tries to form an engine again since it took requests."""
        self._placed: dict[str, _Placed] = {}
        self._waiting_rooms = (
            WaitingRoom[_WaitingRequest](MAX_AGAIN),
            WaitingRoom[_WaitingRequest](rules.max_waiting),
        )
        """Those who lost their place come first."""
        self._fronts: dict[str, _FrontState] = {}
        self._num_lines: Counter[str] = Counter()
        """Connections of each front."""
        self._early: OrderedDict[str, None] = OrderedDict()

    @property
    def num_running(self) -> int:
        """Requests that have a place."""
        return len(self._placed)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting_rooms[0]) + len(self._waiting_rooms[1])

    @property
    def next_deadline_ns(self) -> int | None:
        """When `expire` has something to do; None: nobody waits."""
        if not self.num_waiting:
            return None
        deadlines = [waiting_room.next_deadline_ns for waiting_room in self._waiting_rooms]
        return min((d for d in deadlines if d is not None), default=None)

    def load(self, engine: str) -> EngineLoad:
        """Return what an engine has to do."""
        return self._loads.of([engine])[0] if engine in self._sides else EngineLoad(name=engine)

    # What happens to engines.

    def open(self, engine: str, role: str, num_ranks: int, now_ns: int) -> list[Action]:
        """An engine takes requests from now on."""
        if engine not in self._sides:
            self._loads.add(engine, num_ranks)
        self._sides[engine] = "decode" if role == "decode" else "prefill"
        self._set_open(engine, is_open=True)
        del self._num_tries[engine]
        return self._let_in(now_ns)

    def lost(self, engine: str) -> FormAgain | None:
        """An engine died; what it held is no more."""
        self._policy.lost(engine)
        again = self._next_life(engine)
        if again is None or not self._rules.places_at_once:
            self._set_open(engine, is_open=False)
        return again

    def not_formed(self, engine: str, error: RaykError) -> FormAgain | None:
        """A try to form an engine again failed. After a bug, another try would end the same."""
        again = None if isinstance(error, InternalError) else self._next_life(engine)
        if again is None:
            del self._num_tries[engine]
            self._set_open(engine, is_open=False)
        return again

    def returns(self, engine: str) -> bool:
        """Tell whether an engine is being formed again, or would be if it were lost."""
        return self._restarts is None or engine in self._restarts or engine in self._num_tries

    def allow(self, max_running: int) -> None:
        """From the next event on, so many requests may have a place at once."""
        self._max_running = max_running

    def attached(self, engine: str, tier: str) -> None:
        """An engine has this host tier, and no other."""
        self._loads.attached(engine, tier)

    def detached(self, engine: str) -> None:
        """An engine has no host tier any more."""
        self._loads.detached(engine)

    def tier_lost(self, tier: str) -> None:
        """A host tier died: its engines have none."""
        self._policy.lost(tier)
        self._loads.tier_lost(tier)

    def _set_open(self, engine: str, *, is_open: bool) -> None:
        (self._open.add if is_open else self._open.discard)(engine)
        for side in self._takers:
            takers = [n for n, s in self._sides.items() if s == side and n in self._open]
            self._takers[side] = self._loads.of(takers)

    def _next_life(self, engine: str) -> FormAgain | None:
        if self._restarts is not None:
            if engine not in self._restarts:
                return None
            self._restarts -= {engine}
        pauses, number = self._rules.pauses_s, self._num_tries[engine]
        self._num_tries[engine] += 1
        return FormAgain(engine, pauses[min(number, len(pauses) - 1)])

    # What happens to requests.

    def arrive(
        self,
        front: str,
        asked: PlacementRequest,
        now_ns: int,
        *,
        priority: int = 0,
        deadline_s: float = 0.0,
        again: bool = False,
    ) -> list[Action]:
        """A request wants a place, and waits for it until its deadline if it must; `again`: it had one and
        lost it."""
        name = asked.request_id
        self.heard(front, now_ns)
        if name in self._placed:
            return [Place(name, self._placed[name].placement)]  # asked twice: the first answer got lost
        if name in self._early:
            return [Refuse(name, DeadlineExceeded(f"nobody waits for {name} any more", 0.0))]
        waiting_room = self._waiting_rooms[0 if again else 1]
        if self.is_draining and not again:
            return [Refuse(name, waiting_room.overloaded(now_ns, "the server is about to end"))]
        if self._rules.places_at_once or (self._has_room and not self.num_waiting):
            return [self._place(front, asked)]
        deadline_ns = now_ns + int(deadline_s * NS_PER_S)
        waiting = _WaitingRequest(front, asked, deadline_s)
        try:
            waiting_room.enter(name, waiting, priority=priority, deadline_ns=deadline_ns, now_ns=now_ns)
        except Overloaded as error:
            return [Refuse(name, error)]
        self._fronts[front].requests.add(name)
        return self._let_in(now_ns)

    def prefilled(self, name: str) -> None:
        """A request's first token is there."""
        self._loads.prefilled(name)

    def failed(self, name: str, cause: Cause, now_ns: int) -> Place | None:
        """An attempt of a request failed. Returns where the request goes next, as an attempt of another name;
        None: it ends with its error."""
        placed, sides = self._placed[name], self._sides.items()
        prefill, decode = ([n for n, s in sides if s == side] for side in ("prefill", "decode"))
        p = prefill.index(placed.placement.prefill) if placed.placement.prefill is not None else 0
        d = decode.index(placed.placement.decode) if placed.placement.decode is not None else 0
        live = [n for n in decode[d:] + decode[:d] if n in self._open]
        policy = self._rules.failure_policy
        recovery = placed.recovery or Recovery(policy, len(prefill))
        decision = recovery.decide(
            Failure(cause, p),
            producers_live=[n in self._open for n in prefill],
            consumer_lives=bool(live) or (not decode and policy == "migrate"),
        )
        if isinstance(decision, GiveUp):
            return None
        again = attempt_id(name.partition("~")[0], recovery.num_attempts - 1)
        producer = prefill[decision.producer] if isinstance(decision, Migrate) else None
        self._end(name, now_ns)
        return self._put(
            _Placed(
                placed.front,
                replace(placed.asked, request_id=again),
                Placement(prefill=producer, decode=live[0] if live else None),
                recovery,
            )
        )

    def ended(self, names: Iterable[str], now_ns: int) -> list[Action]:
        """Requests are over, however they ended, or not wanted any more."""
        actions = [action for name in names for action in self._end(name, now_ns)]
        return actions + self._let_in(now_ns)

    def expire(self, now_ns: int) -> list[Action]:
        """Turn away those whose deadline has passed."""
        actions: list[Action] = []
        for waiting in [w for waiting_room in self._waiting_rooms for w in waiting_room.expire(now_ns)]:
            name = waiting.asked.request_id
            actions.append(Refuse(name, DeadlineExceeded(f"a place for {name}", waiting.deadline_s)))
            self._disown(waiting.front, name)
        return actions

    # What happens to fronts.

    def heard(self, front: str, now_ns: int) -> None:
        """A front gave a sign of life."""
        if front in self._fronts:
            self._fronts[front].heard_ns = now_ns
        else:
            self._fronts[front] = _FrontState(now_ns)

    def connected(self, front: str) -> None:
        """A front made a connection, maybe while an older one is about to be missed."""
        self._num_lines[front] += 1

    def disconnected(self, front: str, now_ns: int) -> list[Action]:
        """One of a front's connections has ended. With the last one the front is gone."""
        self._num_lines[front] -= 1
        if self._num_lines[front]:
            return []
        del self._num_lines[front]
        return self.gone(front, now_ns)

    def silent(self, silent_s: float, now_ns: int) -> list[Action]:
        """Fronts that were not heard of for so long are taken for gone."""
        before_ns = now_ns - int(silent_s * NS_PER_S)
        silent = [name for name, front in self._fronts.items() if front.heard_ns < before_ns]
        return [action for name in silent for action in self.gone(name, now_ns)]

    def gone(self, front: str, now_ns: int) -> list[Action]:
        """Nobody wants a front's requests any more. One that was taken for gone asks again for those that
        waited."""
        known = self._fronts.pop(front, None)
        actions: list[Action] = []
        for name in sorted(known.requests) if known is not None else ():
            if name in self._placed:
                actions.append(Abort(name, self._placed[name].placement))
            else:
                actions.append(Refuse(name, EngineDied("fleet", "it took this front for gone")))
            self._end(name, now_ns)
        return actions + self._let_in(now_ns)

    @property
    def _has_room(self) -> bool:
        can_go = self._takers["prefill"] and (self._takers["decode"] or not self._rules.hands_over)
        return bool(can_go) and len(self._placed) < self._max_running

    def _place(self, front: str, asked: PlacementRequest) -> Place:
        prefill, decode = self._candidates("prefill"), self._candidates("decode")
        return self._put(_Placed(front, asked, self._policy.place(asked, prefill, decode)))

    def _put(self, placed: _Placed) -> Place:
        name = placed.asked.request_id
        self._loads.placed(placed.asked, placed.placement)
        self._placed[name] = placed
        self._fronts[placed.front].requests.add(name)
        return Place(name, placed.placement)

    def _candidates(self, side: str) -> EngineSet:
        if self._rules.places_at_once and not self._takers[side]:
            return self._loads.of(n for n, s in self._sides.items() if s == side)
        return self._takers[side]

    def _let_in(self, now_ns: int) -> list[Action]:
        """Whoever waits and there is room for."""
        actions: list[Action] = []
        while self.num_waiting and self._has_room:
            waiting = next(
                (w for waiting_room in self._waiting_rooms if (w := waiting_room.pop(now_ns)) is not None),
                None,
            )
            if waiting is None:
                break
            actions.append(self._place(waiting.front, waiting.asked))
        return actions

    def _end(self, name: str, now_ns: int) -> list[Action]:
        if name in self._placed:
            front = self._placed.pop(name).front
            if (over := self._loads.ended(name)) is not None:
                self._policy.ended(*over)
            self._waiting_rooms[1].completed(now_ns)
            self._disown(front, name)
            return []
        waiting = next(
            (w for waiting_room in self._waiting_rooms if (w := waiting_room.leave(name)) is not None), None
        )
        if waiting is not None:
            self._disown(waiting.front, name)
            return [Drop(name)]
        self._early[name] = None
        while len(self._early) > EARLY_KEPT:
            self._early.popitem(last=False)
        return []

    def _disown(self, front: str, name: str) -> None:
        if front in self._fronts:
            self._fronts[front].requests.discard(name)

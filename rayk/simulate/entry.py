"""Let requests into simulated engines: as a cell's coordinator does, or as a server's front and fleet do.

What actors.cell_run and actors.router await is called back here; the decisions are those of one dispatcher
(sched.dispatcher), of sched.recovery and of the waiting room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from rayk.sched.dispatcher import Action, Dispatcher, Place, Refuse
from rayk.sched.policies import get_policy
from rayk.sched.policy import PlacementRequest, Policy
from rayk.sched.recovery import attempt_id, cause_of, may_place_again, pause_s
from rayk.sched.request_describer import RequestDescriber
from rayk.sched.waiting_room import NS_PER_S
from rayk.simulate.clock import Event, EventQueue
from rayk.simulate.flow import RequestFlow
from rayk.specs.cells import MAX_STREAMS, Cell
from rayk.specs.serving import ServerSettings, cell_rules
from rayk.types.errors import Overloaded, RaykError, UserError
from rayk.types.fault_table import FailurePolicy

SECRET = bytes(32)
"""The key of every digest: nobody guesses at prompts here, and equal runs are to be equal."""
FRONT = "front"


class Entry(Protocol):
    """The way of requests to engines and back."""

    dispatcher: Dispatcher
    failure_policy: FailurePolicy
    waits_for_lives: bool
    """Whether a request waits for an engine that is being formed again, or asks for another place."""

    @property
    def num_streams(self) -> int:
        """Requests that engines are at."""

    def arrive(self, flow: RequestFlow) -> None:
        """A request comes."""

    def failed(self, flow: RequestFlow, error: RaykError) -> None:
        """An attempt met this error."""

    def ended(self, flow: RequestFlow) -> None:
        """A request is over, and whoever asked has its answer."""

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the dispatcher decided."""


class CellEntry:
    """Places requests at once; so many stream at a time as in a run. Implements Entry."""

    waits_for_lives = True

    def __init__(self, cell: Cell, world: EventQueue, restarts: frozenset[str]) -> None:
        self.dispatcher = Dispatcher(_policy(cell), cell_rules(cell, restarts))
        self.failure_policy = cell.spec.failure_policy
        self._cell, self._world = cell, world
        self._describer = RequestDescriber(cell.policy, cell.policy_settings, SECRET)
        self.num_streams = 0
        self._waiting: deque[tuple[RequestFlow, Place]] = deque()
        """Requests that have a place, and wait for others to stop streaming."""

    def arrive(self, flow: RequestFlow) -> None:
        asked = _asked(self._describer, flow)
        (action,) = self.dispatcher.arrive(self._cell.cell_id, asked, self._world.now_ns)
        assert isinstance(action, Place), action
        if self.num_streams < MAX_STREAMS:
            self._stream(flow, action)
        else:
            self._waiting.append((flow, action))

    def _stream(self, flow: RequestFlow, place: Place) -> None:
        self.num_streams += 1
        flow.limit(self._cell.deadlines.request_s)
        flow.attempt(place, 0)

    def failed(self, flow: RequestFlow, error: RaykError) -> None:
        assert flow.place is not None
        engines = flow.place.placement
        cause = cause_of(error, producer=engines.prefill or "", consumer=engines.decode or "")
        again = self.dispatcher.failed(flow.name, cause, self._world.now_ns)
        if again is None:
            flow.end(error)
        else:
            flow.attempt(again, flow.row.num_attempts)

    def ended(self, flow: RequestFlow) -> None:
        self.dispatcher.ended((flow.name,), self._world.now_ns)
        self.num_streams -= 1
        if self._waiting:
            self._stream(*self._waiting.popleft())

    def carry_out(self, actions: Sequence[Action]) -> None:
        assert not actions, "nobody waits for a place in a cell"


class ServerEntry:
    """Lets requests wait for a place, and places them again behind what was delivered. Implements Entry.

    One front, which no request outlives: what fleets decide about fronts that are gone does not come up.
    """

    waits_for_lives = False

    def __init__(self, settings: ServerSettings, world: EventQueue) -> None:
        places = settings.max_places((engine.role, engine.config) for engine in settings.engines)
        self.dispatcher = Dispatcher(_policy(settings), settings.dispatch_rules, max_running=places)
        self.failure_policy = settings.failure_policy
        self._settings, self._world = settings, world
        self._describer = RequestDescriber(settings.policy, settings.policy_settings, SECRET)
        self._asking: dict[str, tuple[RequestFlow, int]] = {}
        """Requests without a place, each with its attempt's number, by the name that it asks under."""
        self._until_ns: dict[str, int] = {}  # when requests must be over
        self._alarm: Event | None = None

    @property
    def num_streams(self) -> int:
        return self.dispatcher.num_running

    def arrive(self, flow: RequestFlow) -> None:
        settings, deadline_s = self._settings, flow.arrival.deadline_s
        limit_s = min(settings.request_s, deadline_s or settings.request_s)
        flow.limit(limit_s)
        self._until_ns[flow.row.request_id] = self._world.now_ns + int(limit_s * NS_PER_S)
        self._ask(flow, 0)

    def _ask(self, flow: RequestFlow, number: int) -> None:
        if flow.is_over:
            return  # its time passed before it could ask again
        flow.name = attempt_id(flow.row.request_id, number)
        self._asking[flow.name] = flow, number
        now_ns = self._world.now_ns
        left_ns = self._until_ns[flow.row.request_id] - now_ns
        self.carry_out(
            self.dispatcher.arrive(
                FRONT,
                _asked(self._describer, flow),
                now_ns,
                priority=flow.arrival.priority,
                deadline_s=left_ns / NS_PER_S,
                again=number > 0,
            )
        )

    def failed(self, flow: RequestFlow, error: RaykError) -> None:
        flow.abort()
        self._ask_again(flow, error, flow.row.num_attempts - 1)

    def _ask_again(self, flow: RequestFlow, error: RaykError, number: int) -> None:
        """End with the error that the attempt of this number met, or have another one after a pause."""
        settings = self._settings
        self.carry_out(self.dispatcher.ended((flow.name,), self._world.now_ns))
        if may_place_again(settings.failure_policy, error, number + 1, settings.max_attempts):
            at_ns = self._world.now_ns + int(pause_s(number) * NS_PER_S)
            self._world.at(at_ns, partial(self._ask, flow, number + 1))
        else:
            flow.end(error, is_refused=isinstance(error, UserError | Overloaded))

    def ended(self, flow: RequestFlow) -> None:
        del self._until_ns[flow.row.request_id]
        self.carry_out(self.dispatcher.ended((flow.name,), self._world.now_ns))

    def carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            asked = self._asking.pop(action.name, None)
            if asked is None or asked[0].is_over:
                continue  # its own time was over as soon
            flow, number = asked
            if isinstance(action, Place):
                flow.attempt(action, number)
            elif isinstance(action, Refuse):
                self._ask_again(flow, action.error, number)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Look when the next of those who wait has waited for too long."""
        due_ns = self.dispatcher.next_deadline_ns
        if self._alarm is not None:
            if self._alarm.at_ns == due_ns:
                return
            self._world.cancel(self._alarm)
        self._alarm = None if due_ns is None else self._world.at(due_ns, self._expire)

    def _expire(self) -> None:
        self._alarm = None
        self.carry_out(self.dispatcher.expire(self._world.now_ns))


def _policy(settings: Cell | ServerSettings) -> Policy:
    return get_policy(settings.policy, settings.policy_settings)


def _asked(describer: RequestDescriber, flow: RequestFlow) -> PlacementRequest:
    """Describe a request under the name that it goes by now."""
    arrival = flow.arrival
    return describer.describe(
        flow.name, arrival.prompt, max_tokens=arrival.max_tokens, session=arrival.session
    )

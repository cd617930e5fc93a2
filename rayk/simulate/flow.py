"""Take one request through simulated engines, as actors.cell_run and actors.request_run take a real one."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from rayk.engine.leader import RequestEvent
from rayk.handover.request_record import RecordLog, RequestRecord, note_failure
from rayk.sched.dispatcher import Dispatcher, Place
from rayk.sched.recovery import cause_of
from rayk.simulate.arrivals import Arrival
from rayk.simulate.clock import Event, EventQueue
from rayk.simulate.engine import SimEngine
from rayk.simulate.tokens import TokenRule
from rayk.specs.cells import Cell
from rayk.types.errors import DeadlineExceeded, RaykError
from rayk.types.request import Request, SamplingParams
from rayk.types.rows import RequestRow


class FlowHost(RecordLog, Protocol):
    """What requests flow through. Implemented by simulate.fleet."""

    cell: Cell
    repeat: int
    world: EventQueue
    rule: TokenRule
    dispatcher: Dispatcher

    def engine(self, name: str | None) -> SimEngine:
        """Find an engine by its name."""
        ...

    def gap_ns(self, name: str) -> int:
        """Tell how long a gap of costs.table.GapTable lasts."""
        ...

    def abort(self, name: str) -> None:
        """Stop an attempt, wherever it is."""
        ...

    def ended(self, flow: RequestFlow) -> None:
        """A request is over, and its place is free."""
        ...


class RequestFlow:
    """A request from its arrival to its end, through all its attempts; its row says what happened."""

    def __init__(self, fleet: FlowHost, arrival: Arrival) -> None:
        cell = fleet.cell
        self.arrival = arrival
        self.row = RequestRow(
            cell_id=cell.cell_id,
            repeat=fleet.repeat,
            request_id=f"{cell.cell_id}/{fleet.repeat}/{arrival.index}",
            prompt_index=arrival.index,
            prompt_token_ids=list(arrival.prompt),
            num_prompt_tokens=len(arrival.prompt),
            arrival_ns=arrival.at_ns,
            due_ns=arrival.at_ns,
        )
        self._fleet = fleet
        self._record = RequestRecord(self.row, fleet, clock=fleet.world)
        self._attempts: list[Place] = []
        self._deadline: Event | None = None
        self._is_over = False

    @property
    def name(self) -> str:
        """The name of the last attempt, by which engines know it."""
        return self._attempts[-1].name if self._attempts else self.row.request_id

    def begin(self, place: Place) -> None:
        """It has a place, and may stream."""
        fleet = self._fleet
        self._attempts.append(place)
        if (num_tokens := self.arrival.num_output_tokens or 0) < self.arrival.max_tokens and num_tokens:
            fleet.rule.begin(self.row.request_id, num_tokens)
        limit_ns = int(fleet.cell.deadlines.request_s * 1e9)
        self._deadline = fleet.world.at(fleet.world.now_ns + limit_ns, self._time_out)
        self._attempt()

    def _attempt(self) -> None:
        """Send the request where it was placed last."""
        place, number = self._attempts[-1], len(self._attempts) - 1
        engine = self._fleet.engine(place.placement.prefill or place.placement.decode)
        self._record.begin(place.name, number)
        self._record.enter(len(self.row.output_token_ids), computes=True)
        self.row.prefill_engine = engine.name
        gap_ns = self._fleet.gap_ns("dispatch")
        self._fleet.world.at(self._fleet.world.now_ns + gap_ns, partial(self._submit, engine, place.name))

    def _submit(self, engine: SimEngine, name: str) -> None:
        """The request is at the engine, which goes on behind the tokens that earlier attempts delivered."""
        request = Request(
            request_id=name,
            prompt_token_ids=self.arrival.prompt,
            sampling=SamplingParams(max_tokens=self.arrival.max_tokens),
        )
        known = tuple(self.row.output_token_ids)
        engine.submit(request, partial(self._hear, engine, name), output_token_ids=known)

    def _hear(self, engine: SimEngine, name: str, event: RequestEvent) -> None:
        if self._is_over or name != self.name:
            return
        self._record.hear(engine, event)
        if event.error is not None:
            self._fail(event.error)
        elif event.finish_reason is not None:
            self.row.decode_engine, self.row.kv_path = engine.name, "local"
            if self.row.failure is not None:
                self.row.recovered_by = self._fleet.cell.failure_policy
            self._end()

    def _fail(self, error: RaykError) -> None:
        """Go where the dispatcher says, or end with the error."""
        place, row = self._attempts[-1], self.row
        engines = place.placement
        cause = cause_of(error, producer=engines.prefill or "", consumer=engines.decode or "")
        again = self._fleet.dispatcher.failed(place.name, cause, self._fleet.world.now_ns)
        row.failure = row.failure or str(error)
        if again is None:
            note_failure(row, error)
            self._end()
            return
        self._attempts.append(again)
        row.num_attempts = len(self._attempts)
        self._attempt()

    def _time_out(self) -> None:
        limit_s = self._fleet.cell.deadlines.request_s
        self._fleet.abort(self.name)
        note_failure(self.row, DeadlineExceeded(f"request {self.row.request_id}", limit_s))
        self._end()

    def _end(self) -> None:
        self._is_over = True
        if self._deadline is not None:
            self._fleet.world.cancel(self._deadline)
        self._fleet.rule.forget(self.row.request_id)
        self._fleet.world.at(
            self._fleet.world.now_ns + self._fleet.gap_ns("answer"), partial(self._fleet.ended, self)
        )

"""Take one request through simulated engines, as actors.cell_run and actors.request_run take a real one."""

from __future__ import annotations

from collections.abc import Callable
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
from rayk.transfer.ticket import TransferTicket
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
        place, number, row = self._attempts[-1], len(self._attempts) - 1, self.row
        engines = place.placement
        self._record.begin(place.name, number)
        if engines.prefill is None:  # the decode engine computes the prompt itself
            row.decode_engine, row.kv_path = engines.decode, "recomputed" if number else "local"
            self._send(engines.decode, "whole")
        else:
            row.prefill_engine = engines.prefill
            self._send(engines.prefill, "whole" if engines.decode is None else "prefill")

    def _send(self, name: str | None, mode: str) -> None:
        """Send the request to its first engine, to end there (mode: whole) or to leave with a ticket."""
        known = tuple(self.row.output_token_ids) if mode == "whole" else ()
        self._record.enter(len(known), computes=True)
        engine, request = self._fleet.engine(name), self._request()
        sink = partial(self._hear, engine, request.request_id, mode)
        how = {"hand_over": mode == "prefill", "output_token_ids": known}
        self._after("dispatch", partial(engine.submit, request, sink, **how))

    def _request(self) -> Request:
        sampling = SamplingParams(max_tokens=self.arrival.max_tokens)
        return Request(request_id=self.name, prompt_token_ids=self.arrival.prompt, sampling=sampling)

    def _after(self, gap: str, action: Callable[[], object]) -> None:
        """Do something when a gap has passed; nothing if the request, or this attempt of it, is over then."""
        name = self.name

        def act() -> None:
            if not self._is_over and name == self.name:
                action()

        self._fleet.world.at(self._fleet.world.now_ns + self._fleet.gap_ns(gap), act)

    def _hear(self, engine: SimEngine, name: str, mode: str, event: RequestEvent) -> None:
        if self._is_over or name != self.name:
            return
        self._record.hear(engine, event)
        if event.info is not None and event.info.failure is not None:
            self._settle()  # where its read never began, nobody releases its lease
        if event.error is not None:
            if mode == "decode":
                self._settle()
            self._fail(event.error)
        elif isinstance(event.payload, TransferTicket):
            self._decode(event.payload)
        elif event.finish_reason is not None:
            self._finish(engine, mode)

    def _decode(self, ticket: TransferTicket) -> None:
        """The prompt is computed: go on where the request is to be decoded."""
        row, fleet, name = self.row, self._fleet, self._attempts[-1].placement.decode
        row.decode_engine, row.kv_path = name, "remote"
        known = tuple(row.output_token_ids)
        self._record.enter(len(known), computes=False)
        engine, request = fleet.engine(name), self._request()
        sink = partial(self._hear, engine, request.request_id, "decode")
        how = {
            "transfer_s": fleet.cell.deadlines.transfer_s,
            "reserve_s": fleet.cell.deadlines.request_s,
            "recompute": fleet.cell.failure_policy == "recompute",
        }
        self._after("handover", partial(engine.submit_decode, request, ticket, known, sink, **how))

    def _settle(self) -> None:
        """Have the engine that lent the request's blocks free them."""
        lender, name = self._attempts[-1].placement.prefill, self.name
        if lender is not None:
            world = self._fleet.world
            settle = lambda: self._fleet.engine(lender).handover.settle(name)  # noqa: E731
            world.at(world.now_ns + self._fleet.gap_ns("release"), settle)

    def _finish(self, engine: SimEngine, mode: str) -> None:
        row, engines = self.row, self._attempts[-1].placement
        if engines.decode is None:
            row.decode_engine, row.kv_path = engine.name, "local"
        elif mode == "prefill":  # its first token was its last
            row.kv_path = "none"
        elif mode == "whole" and len(self._attempts) > 1:
            row.num_valid_tokens = 0
            row.num_recomputed_tokens = max(row.num_recomputed_tokens, row.num_prompt_tokens)
        if row.failure is not None:
            row.recovered_by = self._fleet.cell.failure_policy
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

"""Take one request through simulated engines, as actors.request_run takes a real one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Protocol

from rayk.engine.leader import RequestEvent, Sink
from rayk.handover.request_record import RecordLog, RequestRecord, note_failure
from rayk.sched.dispatcher import Place
from rayk.sched.policy import Placement
from rayk.simulate.arrivals import Arrival
from rayk.simulate.clock import Event, EventQueue
from rayk.simulate.engine import SimEngine
from rayk.simulate.late_sink import TookTokens
from rayk.simulate.tokens import TokenRule
from rayk.specs.cells import Cell
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import DeadlineExceeded, RaykError
from rayk.types.fault_table import FailurePolicy
from rayk.types.request import Request, SamplingParams
from rayk.types.rows import RequestRow


class FlowHost(RecordLog, Protocol):
    """What requests flow through. Implemented by simulate.fleet."""

    cell: Cell
    repeat: int
    world: EventQueue
    rule: TokenRule
    request_s: float
    """A request lasts no longer."""
    transfer_s: float
    """Nor does its hand-over."""

    @property
    def failure_policy(self) -> FailurePolicy: ...

    def epoch(self, name: str) -> int:
        """Tell which life of an engine this is."""
        ...

    def find(
        self, name: str, epoch: int, then: Callable[[SimEngine], object], fail: Callable[[RaykError], object]
    ) -> None:
        """Call `then` with an engine once it takes requests, or `fail` with what it died of. `epoch`: its
        life when the request was placed."""
        ...

    def gap_ns(self, name: str) -> int:
        """Tell how long a gap of costs.table.GapTable lasts."""
        ...

    def failed(self, flow: RequestFlow, error: RaykError) -> None:
        """An attempt failed: the request is to go on elsewhere, or to end."""
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
        self.name = self.row.request_id
        """Names its last attempt, or the one that it asks a place for; engines know it by this."""
        self.place: Place | None = None  # of its last attempt
        self.is_over = False
        self._fleet = fleet
        self._record = RequestRecord(self.row, fleet, clock=fleet.world)
        self._epochs: dict[str, int] = {}  # of the engines of its last attempt
        self._met: list[SimEngine] = []  # by this attempt
        self._lender: SimEngine | None = None  # whose ticket this attempt has
        self._deadline: Event | None = None
        num_tokens = arrival.num_output_tokens
        fleet.rule.begin(
            self.row.request_id,
            prompt=None if cell.sampling.temperature else arrival.prompt,
            num_output_tokens=num_tokens if num_tokens and num_tokens < arrival.max_tokens else None,
            drafts=arrival.drafts,
            drawn_by=f"{fleet.repeat}/{arrival.index}",
        )

    def limit(self, limit_s: float) -> None:
        """From now on it may last so long."""
        at_ns = self._fleet.world.now_ns + int(limit_s * 1e9)
        self._deadline = self._fleet.world.at(at_ns, partial(self._time_out, limit_s))

    def attempt(self, place: Place, number: int) -> None:
        """Go where it was placed, for the time of this number, from 0."""
        fleet, engines = self._fleet, place.placement
        self.place, self.name = place, place.name
        self._epochs = {name: fleet.epoch(name) for name in (engines.prefill, engines.decode) if name}
        self._met.clear()
        self.row.num_attempts = number + 1
        self._lender = None
        self._record.begin(place.name, number)
        mode = "whole" if engines.prefill is None or engines.decode is None else "prefill"
        self._find(engines.prefill or engines.decode, partial(self._send, mode))

    def end(self, error: RaykError | None = None, *, is_refused: bool = False) -> None:
        """It is over, with an error if there is one."""
        self.is_over = True
        if error is not None:
            note_failure(self.row, error)
        if is_refused:
            self.row.finish_reason = "refused"
        if self._deadline is not None:
            self._fleet.world.cancel(self._deadline)
        self._fleet.rule.forget(self.row.request_id)
        answered_ns = self._fleet.world.now_ns + self._fleet.gap_ns("answer")
        self._fleet.world.at(answered_ns, partial(self._fleet.ended, self))

    def abort(self) -> None:
        """Stop what engines that this attempt met may still do for it."""
        for engine in self._met:
            if not engine.is_dead:
                engine.leader.abort(self.name)

    @property
    def _engines(self) -> Placement:
        assert self.place is not None, "it has no place"
        return self.place.placement

    def _find(self, name: str | None, then: Callable[[SimEngine], object]) -> None:
        """Go on with an engine of this attempt once it takes requests."""
        assert name is not None, "a request is placed somewhere"
        attempt = self.name

        def found(engine: SimEngine) -> None:
            if self._is_at(attempt):
                self._met.append(engine)
                then(engine)

        self._fleet.find(name, self._epochs[name], found, self._fail)

    def _send(self, mode: str, engine: SimEngine) -> None:
        """Send the request to its first engine, to end there (mode: whole) or to leave with a ticket."""
        row = self.row
        if self._engines.prefill is None:  # the decode engine computes the prompt itself
            row.decode_engine, row.kv_path = engine.name, "recomputed" if row.num_attempts > 1 else "local"
        else:
            row.prefill_engine = engine.name
        known = tuple(row.output_token_ids) if mode == "whole" else ()
        self._enter(engine, len(known), computes=True)
        submit = partial(engine.submit, self._request(), *self._sinks(engine, mode))
        self._after("dispatch", partial(submit, hand_over=mode == "prefill", output_token_ids=known))

    def _sinks(self, engine: SimEngine, mode: str) -> tuple[Sink, TookTokens]:
        """Return what hears of this attempt, and what takes its mere tokens."""
        name = self.name

        def took(token_ids: list[int], times_ns: list[int]) -> None:
            if self._is_at(name):
                self._record.took(engine, token_ids, times_ns)

        return partial(self._hear, engine, name, mode), took

    def _request(self) -> Request:
        """Return the request under the name of this attempt."""
        arrival = self.arrival
        return Request(
            request_id=self.name,
            prompt_token_ids=arrival.prompt,
            sampling=_sampling_of(arrival.max_tokens),
        )

    def _after(self, gap: str, action: Callable[[], object]) -> None:
        """Do something when a gap has passed; nothing if the request, or this attempt of it, is over then."""
        name = self.name

        def act() -> None:
            if self._is_at(name):
                action()

        self._fleet.world.at(self._fleet.world.now_ns + self._fleet.gap_ns(gap), act)

    def _hear(self, engine: SimEngine, name: str, mode: str, event: RequestEvent) -> None:
        if not self._is_at(name):
            return
        self._record.hear(engine, event)
        if event.info is not None and event.info.failure is not None:
            self._settle()  # where its read never began, nobody releases its lease
        if event.error is not None:
            self._leave(engine)
            self._fail(event.error)
        elif isinstance(event.payload, TransferTicket):
            self._leave(engine)
            self._lender = engine
            self._find(self._engines.decode, partial(self._send_ticket, event.payload))
        elif event.finish_reason is not None:
            self._leave(engine)
            self._finish(engine, mode)

    def _send_ticket(self, ticket: TransferTicket, engine: SimEngine) -> None:
        """The prompt is computed: go on where the request is to be decoded."""
        row, fleet = self.row, self._fleet
        row.decode_engine, row.kv_path = engine.name, "remote"
        known = tuple(row.output_token_ids)
        self._enter(engine, len(known), computes=False)
        submit = partial(
            engine.submit_decode,
            self._request(),
            ticket,
            known,
            *self._sinks(engine, "decode"),
            transfer_s=fleet.transfer_s,
            reserve_s=fleet.request_s,
            recompute=fleet.failure_policy == "recompute",
        )
        self._after("handover", submit)

    def _settle(self) -> None:
        """Have the engine that lent the request's blocks free them."""
        lender, fleet = self._lender, self._fleet
        if lender is not None and not lender.is_dead:
            settle = partial(lender.handover.settle, self.name)
            fleet.world.at(fleet.world.now_ns + fleet.gap_ns("release"), settle)

    def _finish(self, engine: SimEngine, mode: str) -> None:
        row, engines = self.row, self._engines
        if engines.decode is None:
            row.decode_engine, row.kv_path = engine.name, "local"
        elif mode == "prefill":  # its first token was its last
            row.kv_path = "none"
        elif mode == "whole" and row.num_attempts > 1:
            row.num_valid_tokens = 0
            row.num_recomputed_tokens = max(row.num_recomputed_tokens, row.num_prompt_tokens)
        if row.failure is not None:
            row.recovered_by = self._fleet.failure_policy
        self.end()

    def _enter(self, engine: SimEngine, num_told: int, *, computes: bool) -> None:
        """A stream from this engine begins behind so many output tokens; its death ends the attempt."""
        self._record.enter(num_told, computes=computes)
        engine.streams[self.name] = self._fail

    def _leave(self, engine: SimEngine) -> None:
        """The stream from this engine is over."""
        engine.streams.pop(self.name, None)

    def _is_at(self, name: str) -> bool:
        """Tell whether this attempt is under way."""
        return not self.is_over and name == self.name

    def _fail(self, error: RaykError) -> None:
        """Go where the fleet says, or end with the error."""
        self._settle()
        self.row.failure = self.row.failure or str(error)
        self._fleet.failed(self, error)

    def _time_out(self, limit_s: float) -> None:
        for engine in self._met:
            engine.catch_up(self.name)
            self._leave(engine)
        self.abort()
        self._settle()
        self.end(DeadlineExceeded(f"request {self.row.request_id}", limit_s))


@lru_cache(maxsize=256)
def _sampling_of(max_tokens: int) -> SamplingParams:
    """Return what all requests of such a limit share."""
    return SamplingParams(max_tokens=max_tokens)

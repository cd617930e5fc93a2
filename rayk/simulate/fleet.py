"""Run the engines of one cell and place its requests, as actors.cell_run and actors.cell_deployment do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rayk.costs import CostBook, engine_key, windows_of
from rayk.costs.table import Gap
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import CapturedRows
from rayk.models.config import DecoderConfig
from rayk.sched.dispatcher import Dispatcher, DispatchRules, Place
from rayk.sched.policies import get_policy
from rayk.sched.request_describer import RequestDescriber
from rayk.simulate.arrivals import ArrivalSource, InOrder
from rayk.simulate.clock import Event, EventQueue
from rayk.simulate.engine import SimEngine
from rayk.simulate.extension import SimExtension
from rayk.simulate.flow import RequestFlow
from rayk.simulate.network import SimNetwork
from rayk.simulate.outcome import SimOutcome
from rayk.simulate.rank import StepTimer
from rayk.simulate.tokens import TokenRule
from rayk.specs.cells import MAX_STREAMS, Cell
from rayk.types.config import EngineConfig
from rayk.types.rows import RequestRow, TransferRow
from rayk.types.steps import StepRow

MAX_STEP_ROWS = 200_000
"""Steps of a simulation that are kept: the first ones."""
SECRET = bytes(32)
"""The key of every digest: nobody guesses at prompts here, and equal runs are to be equal."""

OnRow = Callable[[RequestRow], object]


class SimFleet:
    """Implements handover.request_record.RecordLog."""

    def __init__(
        self,
        cell: Cell,
        config: DecoderConfig,
        costs: CostBook,
        *,
        repeat: int,
        seed: int,
        noise: bool,
        strict: bool,
        sink: OnRow | None = None,
    ) -> None:
        self.cell, self.repeat = cell, repeat
        self.world = EventQueue()
        self.rule = TokenRule(config)
        self.outcome = SimOutcome()
        self.dispatcher = Dispatcher(
            get_policy(cell.policy, cell.policy_settings),
            DispatchRules(
                hands_over=cell.decode is not None,
                places_at_once=True,
                restarts=frozenset(),
                failure_policy=cell.spec.failure_policy,
            ),
        )
        self._describer = RequestDescriber(cell.policy, cell.policy_settings, SECRET)
        self._gaps = costs.gaps
        self._sink = sink
        self._draw = np.random.default_rng([seed, repeat, 0]) if noise else None
        self._model, self._costs = config, costs
        self._seed, self._noise, self._strict = (seed, repeat), noise, strict
        self._engines: dict[str, SimEngine] = {}
        self._timers: list[StepTimer] = []
        self._arrivals: ArrivalSource = InOrder(())
        self._next: Event | None = None  # the next arrival
        self._num_streams = 0
        self._waiting: deque[tuple[RequestFlow, Place]] = deque()
        """Requests that have a place, and wait for others to stop streaming."""
        self.network: SimNetwork | None = None
        """What joins engines that hand over."""
        if cell.decode is not None:
            self.network = SimNetwork(self.world, cell, config, costs, partial(self.gap_ns, "release"))
        role = "aggregated" if cell.decode is None else "prefill"
        for index in range(cell.num_prefill_engines):
            self._open(f"prefill{index}", role, cell.prefill)
        for index in range(cell.num_decode_engines if cell.decode is not None else 0):
            assert cell.decode is not None
            self._open(f"decode{index}", "decode", cell.decode)

    def run(self, arrivals: ArrivalSource) -> SimOutcome:
        """Let all requests come and end."""
        self._arrivals = arrivals
        self._await_next()
        self.world.run()
        outcome = self.outcome
        outcome.end_ns, outcome.num_events = self.world.now_ns, self.world.num_events
        outcome.num_outside_hull = sum(timer.num_outside_hull for timer in self._timers)
        outcome.engines = {engine.name: engine.account for engine in self._engines.values()}
        for engine in self._engines.values():
            engine.check_over()
        return outcome

    def engine(self, name: str | None) -> SimEngine:
        """Find an engine by its name."""
        assert name is not None, "a request is placed somewhere"
        return self._engines[name]

    @property
    def engines(self) -> Sequence[SimEngine]:
        return list(self._engines.values())

    def gap_ns(self, name: str) -> int:
        """Tell how long a gap lasts: its median, or a draw."""
        share = 0.5 if self._draw is None else float(self._draw.random())
        gap: Gap = getattr(self._gaps, name)
        return round(gap.ns(share, self._num_streams))

    def abort(self, name: str) -> None:
        """Stop an attempt, wherever it is."""
        for engine in self._engines.values():
            engine.leader.abort(name)

    def ended(self, flow: RequestFlow) -> None:
        """A request is over, and its place is free."""
        if self._sink is not None:
            self._sink(flow.row)
        self.dispatcher.ended((flow.name,), self.world.now_ns)
        self._arrivals.ended(flow.arrival.index, self.world.now_ns)
        self._await_next()
        self._num_streams -= 1
        if self._waiting:
            self._stream(*self._waiting.popleft())

    def _open(self, name: str, role: str, config: EngineConfig) -> None:
        draw = np.random.default_rng([*self._seed, 1 + len(self._timers)]) if self._noise else None
        costs = self._costs.find(engine_key(self._model, config))
        timer = StepTimer(costs, windows_of(self._model), draw=draw, strict=self._strict)
        self._timers.append(timer)
        self._engines[name] = SimEngine(
            self.world,
            name,
            role,
            config,
            self._model,
            timer,
            self.rule,
            secret=SECRET,
            join=None if self.network is None else partial(SimExtension, network=self.network),
            on_step=self._note_step,
        )
        self.dispatcher.open(name, role, config.num_ranks, self.world.now_ns)

    def _await_next(self) -> None:
        """Plan the next arrival: never more than one, however many there are."""
        due_ns = self._arrivals.next_due_ns()
        if self._next is not None:
            if self._next.at_ns == due_ns:
                return
            self.world.cancel(self._next)
        self._next = None if due_ns is None else self.world.at(due_ns, self._arrive)

    def _arrive(self) -> None:
        self._next = None
        arrival = self._arrivals.take()
        self._await_next()
        flow = RequestFlow(self, arrival)
        if self._sink is None:
            self.outcome.requests.append(flow.row)
        asked = self._describer.describe(
            flow.row.request_id,
            arrival.prompt,
            max_tokens=arrival.max_tokens,
            session=arrival.session,
        )
        (action,) = self.dispatcher.arrive(self.cell.cell_id, asked, self.world.now_ns)
        assert isinstance(action, Place), action
        if self._num_streams < MAX_STREAMS:
            self._stream(flow, action)
        else:
            self._waiting.append((flow, action))

    def _stream(self, flow: RequestFlow, place: Place) -> None:
        self._num_streams += 1
        flow.begin(place)

    def _note_step(self, row: StepRow) -> None:
        if len(self.outcome.steps) < MAX_STEP_ROWS:
            row.cell_id, row.repeat = self.cell.cell_id, self.repeat
            self.outcome.steps.append(row)

    # handover.request_record.RecordLog.

    def prefilled(self, attempt: str) -> None:
        self.dispatcher.prefilled(attempt)

    def delivered(self, row: RequestRow, event: RequestEvent) -> None:
        """Do nothing: the row has the event already."""

    def transferred(self, rows: Sequence[TransferRow], num_kv_bytes_checked: int) -> None:
        del num_kv_bytes_checked  # none are: no bytes are moved
        if self._sink is None:
            self.outcome.transfers += rows

    def captured(self, row: RequestRow, rows: list[CapturedRows]) -> None:
        """Do nothing: nobody asks for it."""

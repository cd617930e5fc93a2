"""Run simulated engines through all their lives, as actors.deployment does, and the requests on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rayk.costs import CostBook, engine_key, windows_of
from rayk.costs.table import Gap
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import CapturedRows, EndReads
from rayk.models.config import DecoderConfig
from rayk.sched.dispatcher import FormAgain
from rayk.simulate.arrivals import ArrivalSource, InOrder
from rayk.simulate.clock import Event, EventQueue
from rayk.simulate.deaths import EngineDeath
from rayk.simulate.engine import SimEngine
from rayk.simulate.entry import SECRET, CellEntry, Entry, ServerEntry
from rayk.simulate.extension import SimExtension
from rayk.simulate.flow import RequestFlow
from rayk.simulate.host import HostShare, SimHost
from rayk.simulate.network import SimNetwork
from rayk.simulate.outcome import SimEngineAccount, SimOutcome
from rayk.simulate.rank import Slow, StepTimer
from rayk.simulate.tier import SimTierProcess
from rayk.simulate.tokens import TokenRule
from rayk.specs.cells import Cell
from rayk.specs.serving import EngineEntry, ServerSettings, cell_engines
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import EngineDied, RaykError, UserError
from rayk.types.fault_table import FailurePolicy
from rayk.types.rows import RequestRow, TransferRow
from rayk.types.steps import StepRow

MAX_STEP_ROWS = 200_000
"""Steps of a simulation that are kept: the first ones."""
KILLED = "it was killed"

OnRow = Callable[[RequestRow], object]


@dataclass(slots=True, eq=False)
class SimMember:
    """One engine over all its lives."""

    entry: EngineEntry
    timer: StepTimer
    account: SimEngineAccount
    """Counts what the lives that are over did."""
    life: SimEngine | None = None
    """None: it is dead, or being formed again."""
    epoch: int = 0
    """Counts its lives, the current one included."""
    forming: Event | None = None
    """When it takes requests again."""
    waiting: list[Callable[[], object]] = field(default_factory=list)
    """Who goes on once it does."""


class SimFleet:
    """Implements simulate.flow.FlowHost."""

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
        fast: bool = True,
        server: ServerSettings | None = None,
        deaths: Sequence[EngineDeath] = (),
        sink: OnRow | None = None,
        drafts: DraftRates | None = None,
    ) -> None:
        """`server`: the engines and rules are a server's, in place of the cell's own. `drafts`: how often
        what engines draft is right, of requests that do not say so themselves."""
        self.cell, self.repeat = cell, repeat
        self.world = EventQueue()
        self.rule = TokenRule(config)
        self.outcome = SimOutcome()
        restarts = frozenset(death.engine for death in deaths if death.returns)
        self.entry: Entry = (
            CellEntry(cell, self.world, restarts) if server is None else ServerEntry(server, self.world)
        )
        limits = server or cell.deadlines
        self.request_s, self.transfer_s = limits.request_s, limits.transfer_s
        self.network: SimNetwork | None = None
        """What joins engines that hand over."""
        entries = cell_engines(cell) if server is None else server.engines
        spec, first = server or cell.spec, entries[0].config
        offload = spec.offload.settings(transfer_s=self.transfer_s, request_s=self.request_s)
        self._offload = None if offload is None else offload.on(first.device)
        if any(entry.role == "decode" for entry in entries) or offload is not None:
            self.network = SimNetwork(
                self.world,
                config,
                costs,
                spec.transfer,
                lease_s=self.request_s + self.transfer_s,
                release_ns=partial(self.gap_ns, "release"),
            )
        self._gaps, self._form_s = costs.gaps, costs.host.form_s
        self._num_cores = costs.host.num_cores
        self._host = SimHost(self._num_cores) if self._num_cores and len(entries) > 1 else None
        """All engines are on one machine; None: its cores are not shared."""
        self._tier: SimTierProcess | None = None
        if self._offload is not None:
            assert self.network is not None, "engines reach it through that"
            self._tier = SimTierProcess(
                self.world,
                self.network,
                first,
                config,
                self._offload,
                costs.find(engine_key(config, first)),
                secret=SECRET,
                gap_ns=partial(self.gap_ns, "tier"),
            )
        self._sink = sink
        self._draw = np.random.default_rng([seed, repeat, 0]) if noise else None
        self._model, self._fast = config, fast
        self._drafts, self._seed = drafts, seed
        self._members: dict[str, SimMember] = {}
        self._arrivals: ArrivalSource = InOrder(())
        self._next: Event | None = None  # the next arrival
        for entry in entries:
            draw = np.random.default_rng([seed, repeat, 1 + len(self._members)]) if noise else None
            found = costs.of_engine(config, entry.config)
            timer = StepTimer(
                found, windows_of(config), draw=draw, strict=strict, speculative=entry.config.speculative
            )
            account = SimEngineAccount(num_blocks=entry.config.num_blocks)
            member = self._members[entry.name] = SimMember(entry, timer, account)
            self._form(member)
        for death in deaths:
            if death.engine not in self._members:
                raise UserError(f"no engine {death.engine!r} dies", mend=f"one of {', '.join(self._members)}")
            self.world.at(int(death.at_s * 1e9), partial(self._die, self._members[death.engine], death))

    def run(self, arrivals: ArrivalSource) -> SimOutcome:
        """Let all requests come and end."""
        self._arrivals = arrivals
        self._await_next()
        self.world.run()
        outcome = self.outcome
        outcome.end_ns, outcome.num_events = self.world.now_ns, self.world.num_events
        outcome.reads_as_coded = self.network is not None and not self.network.is_measured
        if self._tier is not None:
            self._tier.check_over()
            outcome.tiers[self._tier.name] = self._tier.tier.status()
        for member in self._members.values():
            outcome.num_outside_hull += member.timer.num_outside_hull
            if member.life is not None:
                member.life.check_over()
                member.account.add(member.life.account)
            outcome.engines[member.entry.name] = member.account
        return outcome

    @property
    def engines(self) -> Sequence[SimEngine]:
        """The engines that live."""
        return [m.life for m in self._members.values() if m.life is not None]

    # simulate.flow.FlowHost.

    @property
    def failure_policy(self) -> FailurePolicy:
        return self.entry.failure_policy

    def epoch(self, name: str) -> int:
        """Tell which life of an engine this is."""
        return self._members[name].epoch

    def find(
        self, name: str, epoch: int, then: Callable[[SimEngine], object], fail: Callable[[RaykError], object]
    ) -> None:
        """Call `then` with an engine once it takes requests, or `fail` with what it died of. `epoch`: its
        life when the request was placed."""
        member, waits = self._members[name], self.entry.waits_for_lives
        if member.life is not None and (waits or member.epoch == epoch):
            then(member.life)
        elif waits and member.forming is not None:
            member.waiting.append(partial(self.find, name, epoch, then, fail))
        else:
            fail(EngineDied(name, KILLED))

    def gap_ns(self, name: str) -> int:
        """Tell how long a gap lasts: its median, or a draw."""
        share = 0.5 if self._draw is None else float(self._draw.random())
        gap: Gap = getattr(self._gaps, name)
        return round(gap.ns(share, self.entry.num_streams, num_cores=self._num_cores))

    def failed(self, flow: RequestFlow, error: RaykError) -> None:
        """An attempt failed: the request is to go on elsewhere, or to end."""
        self.entry.failed(flow, error)

    def ended(self, flow: RequestFlow) -> None:
        """A request is over, and its place is free."""
        if self._sink is not None:
            self._sink(flow.row)
        self.entry.ended(flow)
        self._arrivals.ended(flow.arrival.index, self.world.now_ns)
        self._await_next()

    # Lives.

    def _form(self, member: SimMember) -> None:
        """Begin a life of an engine, which takes requests from now on."""
        entry = member.entry
        member.epoch += 1
        member.forming = None
        member.life = SimEngine(
            self.world,
            entry.name,
            entry.role,
            entry.config,
            self._model,
            member.timer,
            self.rule,
            epoch=member.epoch,
            secret=SECRET,
            join=None if self.network is None else partial(SimExtension, network=self.network),
            slow=self._slow(member),
            on_step=self._note_step if self._sink is None else None,
            fast=self._fast,
            offload=self._offload,
            drafts=self._drafts,
            seed=self._seed,
        )
        if self._tier is not None:
            self._tier.attach(member.life)
            self.entry.dispatcher.attached(entry.name, self._tier.name)
        opened = self.entry.dispatcher.open(entry.name, entry.role, entry.config.num_ranks, self.world.now_ns)
        waiting, member.waiting = member.waiting, []
        self.entry.carry_out(opened)
        for go_on in waiting:
            go_on()

    def _slow(self, member: SimMember) -> Slow | None:
        """Return what slows an engine's steps down; None: steps of a device take no core."""
        entry = member.entry
        if self._host is None or entry.config.device != "cpu":
            return None
        return HostShare(self._host, entry.name, entry.config.num_ranks, member.timer.costs.losses)

    def _die(self, member: SimMember, death: EngineDeath) -> None:
        """An engine dies, or is killed again while it is formed."""
        name, lost = member.entry.name, member.life
        dispatcher, error = self.entry.dispatcher, EngineDied(member.entry.name, KILLED)
        if lost is None and member.forming is None:
            return  # it is dead for good
        member.account.num_deaths += 1
        if lost is not None:
            lost.die()
            if self._host is not None:
                self._host.died(name, self.world.now_ns)
            if self._tier is not None:
                self._tier.detach(lost)
                dispatcher.detached(name)
            member.account.add(lost.account)
            member.life = None
            again = dispatcher.lost(name)
        else:
            assert member.forming is not None
            self.world.cancel(member.forming)
            member.forming = None
            again = dispatcher.not_formed(name, error)
        if again is not None:
            self._form_again(member, again, death.back_s)
        if lost is not None:
            self._tell_death(lost, error)
        if member.forming is None:
            waiting, member.waiting = member.waiting, []
            for fail in waiting:
                fail()  # nobody returns

    def _form_again(self, member: SimMember, again: FormAgain, back_s: float | None) -> None:
        form_s = self._form_s if back_s is None else back_s
        at_ns = self.world.now_ns + int((again.pause_s + form_s) * 1e9)
        member.forming = self.world.at(at_ns, partial(self._form, member))

    def _tell_death(self, lost: SimEngine, error: EngineDied) -> None:
        """Whoever had something of an engine that died loses it: streams, and reads of its blocks."""
        for fail in list(lost.streams.values()):
            fail(error)
        if lost.role != "aggregated":
            for engine in self.engines:
                engine.leader.call(EndReads(lost.name, lost.epoch))

    # Requests.

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
        self.entry.arrive(flow)

    def _note_step(self, row: StepRow) -> None:
        if len(self.outcome.steps) < MAX_STEP_ROWS:
            row.cell_id, row.repeat = self.cell.cell_id, self.repeat
            self.outcome.steps.append(row)
            return
        for engine in self.engines:
            engine.on_step = None  # nobody reads more of them

    # handover.request_record.RecordLog.

    def prefilled(self, attempt: str) -> None:
        self.entry.dispatcher.prefilled(attempt)

    def delivered(self, row: RequestRow, event: RequestEvent) -> None:
        """Do nothing: the row has the event already."""

    def transferred(self, rows: Sequence[TransferRow], num_kv_bytes_checked: int) -> None:
        del num_kv_bytes_checked  # none are: no bytes are moved
        if self._sink is None:
            self.outcome.transfers += rows

    def captured(self, row: RequestRow, rows: list[CapturedRows]) -> None:
        """Do nothing: nobody asks for it."""

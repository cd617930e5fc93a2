"""Run one engine in virtual time: the real loop, leader, scheduler, block manager and hand-over.

A turn is atomic: it runs at once when the world reaches its begin, on a clock that runs ahead, and what it
causes elsewhere happens at the times on that clock. So what reaches an engine during a turn is seen at its
next one, where a real engine may see it before its turn ends: at most a step late.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from rayk.costs import StepFeatures
from rayk.engine.leader import BUSY_POLL_S, RequestEvent, Sink
from rayk.engine.loop import EngineLoop, NoExtension
from rayk.engine.speculation import make_drafting
from rayk.handover.handover import TransferHandover
from rayk.kv.manager import KVCacheManager
from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import engine_groups
from rayk.parallel.shard import EngineShape
from rayk.sched.batching import Scheduler
from rayk.simulate.clock import TURNS, Event, EventQueue, LocalClock
from rayk.simulate.drafts import SimDrafter
from rayk.simulate.late_sink import LateSink, TookTokens
from rayk.simulate.leader import SimLeader
from rayk.simulate.outcome import SimEngineAccount
from rayk.simulate.rank import SimRank, Slow, StepTimer
from rayk.simulate.spans import QuietSpan, QuietSpans
from rayk.simulate.tokens import TokenRule
from rayk.types.batch import ScheduledBatch
from rayk.types.config import EngineConfig
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import RaykError
from rayk.types.offload import OffloadSettings
from rayk.types.request import Request
from rayk.types.steps import StepRow

if TYPE_CHECKING:
    from rayk.engine.rank import EngineRank
    from rayk.simulate.extension import SimExtension
    from rayk.transfer.ticket import TransferTicket

POLL_NS = round(BUSY_POLL_S * 1e9)
"""After so long an engine looks again that waits for others, and has no step to run."""

OnStep = Callable[[StepRow], object]


class SimEngine:
    """One life of one engine. Implements handover.request_record.Telling."""

    clock_offset_ns = 0

    def __init__(
        self,
        world: EventQueue,
        name: str,
        role: str,
        config: EngineConfig,
        model: DecoderConfig,
        timer: StepTimer,
        rule: TokenRule,
        *,
        epoch: int = 1,
        secret: bytes = bytes(32),
        join: Callable[[SimEngine], SimExtension] | None = None,
        slow: Slow | None = None,
        on_step: OnStep | None = None,
        fast: bool = True,
        offload: OffloadSettings | None = None,
        drafts: DraftRates | None = None,
        seed: int = 0,
    ) -> None:
        """`secret`: of the keys of its prefix cache; equal ones make equal simulations. `join`: makes what
        answers its hand-over's commands. `slow`: what its host makes of its steps. `on_step` gets a row of
        each step, without its cell. `fast`: quiet steps are taken at once (see spans). `offload`: how it
        uses a host tier. `drafts`, `seed`: how often what it drafts is right, and of draws of that."""
        self.name, self.role, self.epoch = name, role, epoch
        self.config, self.costs = config, timer.costs
        self.is_dead = False
        self.streams: dict[str, Callable[[RaykError], object]] = {}
        """Who is to hear if it dies, by the attempt that it has."""
        self.account = SimEngineAccount(num_blocks=config.num_blocks)
        self.clock = LocalClock(world)
        self.manager = manager = KVCacheManager(
            engine_groups(config, model),
            config.num_blocks,
            prefix_caching=config.prefix_caching,
            secret=secret,
        )
        scheduler = Scheduler(
            manager,
            max_batch_tokens=config.max_batch_tokens,
            max_seqs=config.max_seqs,
            max_positions=model.max_positions,
            eos_token_ids=(rule.end,),
            num_stages=config.pp,
            drafting=make_drafting(
                config, manager, None if config.drafts_on_ranks else _drafter(config, rule, drafts, seed)
            ),
        )
        self.handover = TransferHandover(engine=name, epoch=epoch, shape=EngineShape(), offload=offload)
        self.leader = SimLeader(
            scheduler,
            manager,
            self.handover,
            rule=rule,
            on_post=self.wake,
            vocab_size=model.vocab_size,
            positions_text=model.positions_text,
            fast_prefill=config.fast_prefill,
            clock=self.clock,
        )
        self.leader.proposer = _drafter(config, rule, drafts, seed)
        self.rank = SimRank(
            self.clock,
            timer,
            runs_ahead=runs_ahead(config),
            slow=slow,
            drafts_on_ranks=config.drafts_on_ranks,
        )
        self.extension = None if join is None else join(self)
        self.loop = EngineLoop(
            cast("EngineRank", self.rank),
            self.extension or NoExtension(),
            self.leader,
            stats=self,
            clock=self.clock,
        )
        self.on_step = on_step
        self._world = world
        self._order = world.enlist()
        self._next: Event | None = None  # the turn that is planned, or the end of the span
        self._told: list[tuple[LateSink, RequestEvent]] = []
        self._num_acts = 0  # steps, commands and polls with news, before the turn
        is_fast = fast and slow is None and config.speculative is None
        self._spans = QuietSpans(self.leader, self.rank, self.loop, rule) if is_fast else None
        self._span: QuietSpan | None = None  # what is planned in place of a turn

    @property
    def scheduler(self) -> Scheduler:
        return self.leader.scheduler

    def submit(
        self,
        request: Request,
        sink: Sink,
        took: TookTokens | None = None,
        *,
        hand_over: bool = False,
        **how: Any,
    ) -> None:
        """Run a request here from its first token; `hand_over`: to its first token, and a ticket. The sink
        hears of it when the engine's clock says, not before; see `later`."""
        self.handover.submit(request, self.later(sink, took), hand_over=hand_over, **how)

    def submit_decode(
        self,
        request: Request,
        ticket: TransferTicket,
        tokens: tuple[int, ...],
        sink: Sink,
        took: TookTokens | None = None,
        **how: Any,
    ) -> None:
        """Fetch a request's KV, and go on behind these output tokens; see TransferHandover."""
        self.handover.submit_decode(request, ticket, tokens, sink=self.later(sink, took), **how)

    def later(self, sink: Sink, took: TookTokens | None = None) -> LateSink:
        """Return a sink that hands events on at the times on their stamps, and before the next one, in bulk,
        tokens of which there is no more to say: to `took`, or else as events. See `catch_up`."""
        return LateSink(sink, took, self._told.append, self.clock)

    def catch_up(self, request_id: str) -> None:
        """Tell, of a request, all that has happened before now."""
        self.cut_span()
        sink = self.leader.sink_of(request_id)
        if isinstance(sink, LateSink):
            sink.catch_up(self._world.now_ns)

    def die(self) -> None:
        """Take no turn any more. What it would have told from now on is told to nobody."""
        for name in list(self.streams):
            self.catch_up(name)
        self.cut_span()
        self.is_dead = True
        if self.extension is not None:
            self.extension.close()
        if self._next is not None:
            self._world.cancel(self._next)

    def wake(self, at_ns: int = 0) -> None:
        """Take a turn as soon as the one under way has ended, and not before `at_ns`."""
        if self.is_dead:
            return
        self.cut_span()
        at_ns = max(at_ns, self.clock.end_ns)
        if self._next is not None:
            if self._next.at_ns <= max(at_ns, self._world.now_ns):
                return
            self._world.cancel(self._next)
        self._next = self._world.at(at_ns, self._turn, TURNS + self._order)

    def _turn(self) -> None:
        self._next = None
        if self._plan_span():
            return
        self.clock.begin_turn()
        self.loop.turn()
        self._end_turn()

    def _end_turn(self) -> None:
        self.clock.end_turn()
        self._tell()
        if self._next is None and self.leader.has_work:
            self.wake()
        elif self.extension is not None:
            self._look_again(self.extension)

    def _look_again(self, extension: SimExtension) -> None:
        """Take another turn where this one did something and the hand-over is not over, as an engine without
        a step to run does: what it did may have been waited for."""
        num_acts = extension.num_acts + self.account.num_steps
        has_acted, self._num_acts = num_acts != self._num_acts, num_acts
        if has_acted and self._next is None and self.handover.needs_gather():
            self.wake(self.clock.end_ns + POLL_NS)

    def work(self, length_ns: float) -> int:
        """Take time on every rank, once the steps before have run; return how long."""
        return self.rank.work(length_ns)

    def check_over(self) -> None:
        """Raise AssertionError unless nothing of any request is left here. It takes no longer for a larger
        pool."""
        pool = self.manager.pool
        assert not self.scheduler.has_work, f"{self.name} has requests left"
        assert pool.num_free_blocks == pool.num_blocks - 1, f"{self.name} has not got all its blocks back"
        assert not self.manager.leases, f"{self.name} has leases: {self.manager.leases}"
        assert not self.handover.needs_gather(), f"the hand-over of {self.name} waits for something"

    def _plan_span(self) -> bool:
        """Plan quiet steps in place of a turn; tells whether there are any."""
        if self._spans is None or not self.leader.is_quiet:
            return False
        until_ns = None if self.extension is None else self.extension.next_ns()
        give_up_ns = self.handover.receiving.give_up_ns
        self._span = self._spans.plan(self._world.now_ns, until_ns, give_up_ns)
        if self._span is None:
            return False
        self._next = self._world.at(self._span.ends_ns[-1], self._end_span, self._order)
        return True

    def _end_span(self) -> None:
        assert self._span is not None
        self._carry_out(self._span, len(self._span.ends_ns))

    def cut_span(self) -> None:
        """Take the steps whose turns have begun, of those that are planned: something reaches the engine, or
        somebody looks into it."""
        if (span := self._span) is not None:
            assert self._next is not None
            self._world.cancel(self._next)
            is_over = self._world.has_reached(TURNS + self._order)
            self._carry_out(span, span.num_begun(self._world.now_ns, is_over=is_over))

    def _carry_out(self, span: QuietSpan, num_steps: int) -> None:
        assert self._spans is not None
        self._span = self._next = None
        changes: list[tuple[int, int, int]] = []
        pool = self.leader.manager.pool

        def watch(step: int) -> None:
            changes.append((step, pool.num_free_blocks, pool.num_cached_blocks))

        watch(-1)
        self.clock.end_span(span.ends_ns[num_steps - 1])
        self._spans.carry_out(span, num_steps, watch)
        self._count(num_steps, span.ends_ns[num_steps - 1] - span.since_ns, min(c[1] for c in changes))
        if self.on_step is not None:
            self._write_rows(span, num_steps, changes)
        self._end_turn()

    def _tell(self) -> None:
        """Hand on what the turn told: what has one stamp in one event."""
        told = self._told[:]
        self._told.clear()  # the list itself is shared
        start = 0
        for index in range(1, len(told) + 1):
            if index == len(told) or told[index][1].time_ns != told[start][1].time_ns:
                at_ns = told[start][1].time_ns
                self._world.at(at_ns, partial(self._hand_on, told[start:index]), self._order)
                start = index

    def _hand_on(self, told: list[tuple[LateSink, RequestEvent]]) -> None:
        if not self.is_dead:
            for sink, event in told:
                sink.hand_on(event)

    # engine.loop.TurnStats.

    def stepped(self, batch: ScheduledBatch, busy_ns: int, model_ns: int, num_commands: int) -> None:
        """Count a step."""
        self._count(1, busy_ns, self.leader.manager.pool.num_free_blocks)
        features = self.rank.features.popleft()
        if self.on_step is not None:
            begin_ns = self.clock() - busy_ns
            self.on_step(self._row(features, batch.step, begin_ns, busy_ns, model_ns, num_commands))

    def _count(self, num_steps: int, busy_ns: int, num_free_blocks: int) -> None:
        """Count steps, after one of which so many blocks were free, the fewest."""
        account, scheduler = self.account, self.scheduler
        account.num_steps += num_steps
        account.busy_ns += busy_ns
        account.max_waiting = max(account.max_waiting, scheduler.num_waiting)
        account.max_blocks = max(account.max_blocks, account.num_blocks - 1 - num_free_blocks)
        account.num_preemptions = scheduler.num_preemptions
        account.num_prompt_tokens = scheduler.num_looked_up_tokens
        account.num_cached_tokens = scheduler.num_found_tokens

    def _row(
        self, f: StepFeatures, step: int, begin_ns: int, turn_ns: int, model_ns: int, num_commands: int = 0
    ) -> StepRow:
        """Make the row of a step that ended just now."""
        scheduler, pool = self.scheduler, self.leader.manager.pool
        return StepRow(
            cell_id="",
            repeat=0,
            engine=self.name,
            step=step,
            begin_ns=begin_ns,
            turn_ns=turn_ns,
            model_ns=model_ns,
            num_requests=f.num_requests,
            num_tokens=f.num_tokens,
            num_logits=f.num_logits,
            num_prefills=f.num_prefills,
            num_pairs=f.num_pairs,
            num_seen=f.num_seen,
            num_drafts=f.num_drafts,
            windowed=f.windowed,
            num_commands=num_commands,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_blocks,
        )

    def _write_rows(self, span: QuietSpan, num_steps: int, changes: list[tuple[int, int, int]]) -> None:
        """Make the rows of steps that were taken at once; `changes`: (step, free blocks, cached blocks),
        after each step in which they changed, and before all."""
        on_step = self.on_step  # who gets them may have enough before the last
        assert on_step is not None
        last, at = self.scheduler.num_steps - self.scheduler.num_in_flight, 0
        for i in range(num_steps):
            step = span.settled(i)
            length_ns = step.end_ns - step.begin_ns
            number = last - num_steps + 1 + i
            row = self._row(step.features, number, step.begin_ns, length_ns, step.model_ns, step.num_commands)
            if i < num_steps - 1:
                row.num_running = row.num_requests
            while at + 1 < len(changes) and changes[at + 1][0] <= i:
                at += 1
            _, row.num_free_blocks, row.num_cached_blocks = changes[at]
            on_step(row)

    def turned(self) -> None:
        """Count a turn: nothing to do."""


def runs_ahead(config: EngineConfig) -> bool:
    """Tell whether such an engine begins a step before it knows the tokens of the one before; see
    EngineRank."""
    if config.pp > 1 or config.async_scheduling == "never" or config.compute == "paced":
        return False
    if config.speculative is not None:
        return False
    return config.async_scheduling == "always" or config.device == "cuda"


def _drafter(config: EngineConfig, rule: TokenRule, rates: DraftRates | None, seed: int) -> SimDrafter | None:
    """Make what proposes tokens, as many of them right as `rates` say; None: the engine does not draft."""
    wanted = config.speculative
    return None if wanted is None else SimDrafter(wanted.num_tokens, rule, rates, seed=seed)

"""Run one engine in virtual time: the real loop, leader, scheduler, block manager and hand-over.

A turn is atomic: it runs at once when the world reaches its begin, on a clock that runs ahead, and what it
causes elsewhere happens at the times on that clock. So what reaches an engine during a turn is seen at its
next one, where a real engine may see it before its turn ends: at most a step late.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from rayk.engine.leader import BUSY_POLL_S, RequestEvent, Sink
from rayk.engine.loop import EngineLoop, NoExtension
from rayk.handover.handover import TransferHandover
from rayk.kv.manager import KVCacheManager
from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import engine_groups
from rayk.parallel.shard import EngineShape
from rayk.sched.batching import Scheduler
from rayk.simulate.clock import Event, EventQueue, LocalClock
from rayk.simulate.leader import SimLeader
from rayk.simulate.outcome import SimEngineAccount
from rayk.simulate.rank import SimRank, Slow, StepTimer
from rayk.simulate.tokens import TokenRule
from rayk.types.batch import ScheduledBatch
from rayk.types.config import EngineConfig
from rayk.types.errors import RaykError
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
        on_step: OnStep = id,
    ) -> None:
        """`secret`: of the keys of its prefix cache; equal ones make equal simulations. `join`: makes what
        answers its hand-over's commands. `slow`: what its host makes of its steps. `on_step` gets a row of
        each step, without its cell."""
        self.name, self.role, self.epoch = name, role, epoch
        self.costs = timer.costs
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
        )
        self.handover = TransferHandover(engine=name, epoch=epoch, shape=EngineShape())
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
        self.rank = SimRank(self.clock, timer, runs_ahead=runs_ahead(config), slow=slow)
        self.extension = None if join is None else join(self)
        self.loop = EngineLoop(
            cast("EngineRank", self.rank),
            self.extension or NoExtension(),
            self.leader,
            stats=self,
            clock=self.clock,
        )
        self._world = world
        self._on_step = on_step
        self._next: Event | None = None  # the turn that is planned
        self._told: list[tuple[Sink, RequestEvent]] = []
        self._num_acts = 0  # steps, commands and polls with news, before the turn

    @property
    def scheduler(self) -> Scheduler:
        return self.leader.scheduler

    def submit(self, request: Request, sink: Sink, *, hand_over: bool = False, **how: Any) -> None:
        """Run a request here from its first token; `hand_over`: to its first token, and a ticket. The sink
        hears of it when the engine's clock says, not before."""
        self.handover.submit(request, self.later(sink), hand_over=hand_over, **how)

    def submit_decode(
        self, request: Request, ticket: TransferTicket, tokens: tuple[int, ...], sink: Sink, **how: Any
    ) -> None:
        """Fetch a request's KV, and go on behind these output tokens; see TransferHandover."""
        self.handover.submit_decode(request, ticket, tokens, sink=self.later(sink), **how)

    def later(self, sink: Sink) -> Sink:
        """Return a sink that hands events on at the times on their stamps."""
        return lambda event: self._told.append((sink, event))

    def die(self) -> None:
        """Take no turn any more. What it would have told from now on is told to nobody."""
        self.is_dead = True
        if self.extension is not None:
            self.extension.close()
        if self._next is not None:
            self._world.cancel(self._next)

    def wake(self, at_ns: int = 0) -> None:
        """Take a turn as soon as the one under way has ended, and not before `at_ns`."""
        if self.is_dead:
            return
        at_ns = max(at_ns, self.clock.end_ns)
        if self._next is not None:
            if self._next.at_ns <= max(at_ns, self._world.now_ns):
                return
            self._world.cancel(self._next)
        self._next = self._world.at(at_ns, self._turn)

    def _turn(self) -> None:
        self._next = None
        self.clock.begin_turn()
        self.loop.turn()
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
        """Raise AssertionError unless nothing of any request is left here."""
        self.leader.check_integrity()
        assert not self.leader.manager.leases, f"{self.name} has leases: {self.leader.manager.leases}"
        assert not self.handover.needs_gather(), f"the hand-over of {self.name} waits for something"

    def _tell(self) -> None:
        """Hand on what the turn told: what has one stamp in one event."""
        told, self._told = self._told, []
        start = 0
        for index in range(1, len(told) + 1):
            if index == len(told) or told[index][1].time_ns != told[start][1].time_ns:
                self._world.at(told[start][1].time_ns, partial(self._hand_on, told[start:index]))
                start = index

    def _hand_on(self, told: list[tuple[Sink, RequestEvent]]) -> None:
        if not self.is_dead:
            for sink, event in told:
                sink(event)

    # engine.loop.TurnStats.

    def stepped(self, batch: ScheduledBatch, busy_ns: int, model_ns: int, num_commands: int) -> None:
        """Count a step."""
        account, scheduler, pool = self.account, self.scheduler, self.leader.manager.pool
        account.num_steps += 1
        account.busy_ns += busy_ns
        account.max_waiting = max(account.max_waiting, scheduler.num_waiting)
        account.max_blocks = max(account.max_blocks, pool.num_blocks - 1 - pool.num_free_blocks)
        account.num_preemptions = scheduler.num_preemptions
        account.num_prompt_tokens = scheduler.num_looked_up_tokens
        account.num_cached_tokens = scheduler.num_found_tokens
        features = self.rank.features.popleft()
        self._on_step(
            StepRow(
                cell_id="",
                repeat=0,
                engine=self.name,
                step=batch.step,
                begin_ns=self.clock() - busy_ns,
                turn_ns=busy_ns,
                model_ns=model_ns,
                num_requests=features.num_requests,
                num_tokens=features.num_tokens,
                num_logits=features.num_logits,
                num_prefills=features.num_prefills,
                num_pairs=features.num_pairs,
                num_seen=features.num_seen,
                windowed=features.windowed,
                num_commands=num_commands,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_free_blocks=pool.num_free_blocks,
                num_cached_blocks=pool.num_cached_blocks,
            )
        )

    def turned(self) -> None:
        """Count a turn: nothing to do."""


def runs_ahead(config: EngineConfig) -> bool:
    """Tell whether such an engine begins a step before it knows the tokens of the one before; see
    EngineRank."""
    if config.pp > 1 or config.async_scheduling == "never":
        return False
    return config.async_scheduling == "always" or config.device == "cuda"

"""Record what a simulated P/D cell does in its order, and have real engines do the same by hand.

Real engines compute, digest and read real bytes (LocalAgent); their tokens follow the simulator's rule, and
their turns, submissions and releases come in the order of the simulation. So every decision has to be equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from rayk.engine.loop import EngineLoop
from rayk.engine.rank import EngineRank
from rayk.engine.speculation import make_drafting
from rayk.handover.commands import Connect, Describe, StartRead
from rayk.handover.extension import TransferExtension
from rayk.handover.handover import TransferHandover
from rayk.kv.manager import KVCacheManager
from rayk.models.config import DecoderConfig
from rayk.parallel.local import LocalComm
from rayk.parallel.threads import ThreadComm
from rayk.sched.batching import Scheduler
from rayk.simulate import SimOutcome, simulate_cell
from rayk.simulate import engine as sim_engine
from rayk.simulate.drafts import SimDrafter
from rayk.simulate.extension import SimExtension
from rayk.simulate.leader import SimLeader
from rayk.simulate.tokens import TokenRule
from rayk.specs import Cell
from rayk.transfer.lease import ReleaseMessage
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.token_classes import common_classes
from rayk.types.batch import ScheduledBatch
from rayk.types.clock import Clock, host_clock
from rayk.types.config import EngineConfig
from rayk.types.draft_rates import DraftRates
from rayk.types.offload import OffloadSettings
from rayk.types.rows import TransferRow
from tests.pd import NAN_POISON, shape_of

Act = tuple[str, Any]
"""(what, of what): submit, decode, settle, abort, news (of a lease), turn."""


@dataclass
class Kept:
    """What a turn left behind on an engine."""

    batch: ScheduledBatch | None
    reads: list[StartRead]
    num_free: int
    leases: tuple[str, ...]

    def text(self) -> list[object]:
        """What has to be equal, digests and times aside."""
        reads = [
            (r.ticket.lease_id, r.block_tables, r.first_row, sorted(r.cached_blocks)) for r in self.reads
        ]
        return [self.batch, reads, self.num_free, sorted(self.leases)]


class Watched:
    """Notes the batch and the reads of each turn of an engine's loop."""

    def __init__(self, rank: Any, extension: Any, manager: KVCacheManager) -> None:
        self._manager = manager
        self._batch: ScheduledBatch | None = None
        self._reads: list[StartRead] = []
        step, execute = rank.step, extension.execute

        def noted(batch: ScheduledBatch) -> Any:
            self._batch = batch
            return step(batch)

        def executed(command: object) -> object:
            if isinstance(command, StartRead):
                self._reads.append(command)
            return execute(command)

        rank.step, extension.execute = noted, executed

    def take(self) -> Kept:
        kept = Kept(self._batch, self._reads, self._manager.pool.num_free_blocks, tuple(self._manager.leases))
        self._batch, self._reads = None, []
        return kept


@dataclass
class Recording:
    acts: list[tuple[str, str, Any]] = field(default_factory=list)
    """(engine, what, of what), in order."""
    outcome: SimOutcome = field(default_factory=SimOutcome)
    rules: list[TokenRule] = field(default_factory=list)


def record(monkeypatch: pytest.MonkeyPatch, *args: Any, **settings: Any) -> Recording:
    """Simulate a cell (arguments: simulate_cell's), noting what its engines are told and do."""
    found = Recording()

    class Loop(EngineLoop):
        def __init__(self, rank: Any, extension: Any, leader: Any, **more: Any) -> None:
            self.name, self.watched = leader._handover._engine, Watched(rank, extension, leader.manager)
            super().__init__(rank, extension, leader, **more)

        def turn(self) -> bool:
            going_on = super().turn()
            found.acts.append((self.name, "turn", self.watched.take()))
            return going_on

    def noting(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(self: Any, *args: Any, **named: Any) -> Any:
            found.acts.append((self._engine, what, (args, named)))
            return method(self, *args, **named)

        return noted

    def take(self: SimExtension, message: Any) -> None:
        if isinstance(message, ReleaseMessage):
            found.acts.append((self.name, "news", message.lease_id))
        told(self, message)

    begin, told = TokenRule.begin, SimExtension.take

    def began(self: TokenRule, request_id: str, **how: Any) -> None:
        found.acts.append(("", "begin", (request_id, how)))
        begin(self, request_id, **how)

    with monkeypatch.context() as patched:
        patched.setattr(sim_engine, "EngineLoop", Loop)
        patched.setattr(SimExtension, "take", take)
        patched.setattr(TokenRule, "begin", began)
        for what in ("submit", "submit_decode", "settle"):
            patched.setattr(TransferHandover, what, noting(what, getattr(TransferHandover, what)))
        found.outcome = simulate_cell(*args, **settings)
    return found


class HeldAgent(LocalAgent):
    """News of leases waits until it is delivered."""

    held: list[tuple[str, bytes]]

    def notify(self, peer: str, message: bytes) -> None:
        self.__dict__.setdefault("held", []).append((peer, message))

    def deliver(self, lease_id: str) -> None:
        held, self.held = self.__dict__.get("held", []), []
        for peer, message in held:
            release = ReleaseMessage.decode(message)
            if release is not None and release.lease_id == lease_id:
                super().notify(peer, message)
            else:
                self.held.append((peer, message))


class RealSide:
    """One real engine, turned by hand: its ranks in threads of their own."""

    def __init__(
        self,
        name: str,
        cell: Cell,
        config: EngineConfig,
        network: LocalNetwork,
        rule: TokenRule,
        *,
        offload: OffloadSettings | None = None,
        clock: Clock = host_clock,
        drafts: DraftRates | None = None,
        seed: int = 0,
    ) -> None:
        """`offload`: how it uses a host tier. `drafts`, `seed`: those of the simulation."""
        self.name, self.config = name, config
        self.events: dict[str, list[Any]] = {}
        self.transfers: list[TransferRow] = []
        self.agents: list[HeldAgent] = []
        self.handover = TransferHandover(engine=name, epoch=1, shape=shape_of(config), offload=offload)
        num_ranks, limits = config.num_ranks, cell.deadlines
        comms = ThreadComm.make_group(num_ranks, 60.0) if num_ranks > 1 else [LocalComm()]
        self._threads = [ThreadPoolExecutor(1, f"{name}/{rank}") for rank in range(num_ranks)]
        classes = common_classes(map(shape_of, cell.engines))

        def make(comm: Any) -> tuple[EngineRank, TransferExtension]:
            rank = EngineRank(config, comm, poison=NAN_POISON)
            agent = HeldAgent(f"{name}.{comm.rank}", network)
            self.agents.append(agent)
            lease = {"engine": name, "epoch": 1, "lease_s": limits.request_s + limits.transfer_s}
            return rank, TransferExtension(rank, agent, **lease, token_classes=classes)  # type: ignore[arg-type]

        made = self._all(lambda index: make(comms[index]))
        self.extensions = [extension for _, extension in made]
        rank, model = made[0][0], made[0][0].model_config
        manager = KVCacheManager(
            rank.plan.groups, config.num_blocks, prefix_caching=config.prefix_caching, secret=bytes(32)
        )
        limit = {"max_batch_tokens": config.max_batch_tokens, "max_seqs": config.max_seqs}
        drafting = None
        if config.speculative is not None:
            drafter = SimDrafter(config.speculative.num_tokens, rule, drafts, seed=seed)
            drafting = make_drafting(config, manager, drafter)
        scheduler = Scheduler(
            manager,
            **limit,
            max_positions=model.max_positions,
            eos_token_ids=(rule.end,),
            drafting=drafting,
        )
        self.leader = SimLeader(scheduler, manager, self.handover, rule=rule, clock=clock)
        self.watched = Watched(rank, self.extensions[0], manager)
        leaders = [self.leader, *[None] * (num_ranks - 1)]
        self._loops = [EngineLoop(r, e, leader) for (r, e), leader in zip(made, leaders, strict=True)]

    def _all(self, act: Callable[[int], Any]) -> list[Any]:
        tasks = [thread.submit(act, index) for index, thread in enumerate(self._threads)]
        return [task.result(60) for task in tasks]

    def execute(self, command: object) -> list[Any]:
        """Run a command on every rank."""
        return self._all(lambda index: self.extensions[index].execute(command))

    def turn(self) -> None:
        self._all(lambda index: self._loops[index].turn())

    def hear(self, event: Any) -> None:
        self.events.setdefault(event.request_id, []).append(event)
        if event.info is not None:
            self.transfers += event.info.transfers or ()

    def close(self) -> None:
        for extension in self.extensions:
            extension.close()
        for thread in self._threads:
            thread.shutdown()


def replay(
    recording: Recording,
    cell: Cell,
    model: DecoderConfig,
    *,
    drafts: DraftRates | None = None,
    seed: int = 0,
) -> dict[str, RealSide]:
    """Have real engines do what was recorded; raises AssertionError at the first turn that differs.
    `drafts`, `seed`: those of the simulation."""
    network, rule = LocalNetwork(), TokenRule(model)
    named = [(f"prefill{i}", cell.prefill) for i in range(cell.num_prefill_engines)]
    assert cell.decode is not None
    named += [(f"decode{i}", cell.decode) for i in range(cell.num_decode_engines)]
    sides = {
        name: RealSide(name, cell, config, network, rule, drafts=drafts, seed=seed) for name, config in named
    }
    described = {name: tuple(side.execute(Describe())) for name, side in sides.items()}
    for p in sides:
        for d in (d for d in sides if p.startswith("prefill") and d.startswith("decode")):
            for name in (d, p):
                sides[name].execute(Connect(described[p], described[d]))
    tickets: dict[str, Any] = {}
    for number, (name, what, of) in enumerate(recording.acts):
        if what == "begin":
            rule.begin(of[0], **of[1])
            continue
        side = sides[name]
        if what == "turn":
            side.turn()
            assert side.watched.take().text() == of.text(), f"act {number}: a turn of {name}"
        elif what == "news":
            for agent in (a for s in sides.values() for a in s.agents):
                agent.deliver(of)
        elif what == "submit":
            (request, _), how = of
            side.handover.submit(request, side.hear, **how)
        elif what == "submit_decode":
            (request, *_), how = of
            tokens = of[0][2]
            for events in (s.events.get(request.request_id, ()) for s in sides.values()):
                tickets |= {event.request_id: event.payload for event in events if event.payload}
            how = {key: value for key, value in how.items() if key != "sink"}
            side.handover.submit_decode(request, tickets[request.request_id], tokens, sink=side.hear, **how)
        elif what == "settle":
            side.handover.settle(*of[0])
    return sides

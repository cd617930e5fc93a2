"""Engines and a host tier in this process, without Ray: what an actor does, a thread does.

with Node.open(model, [dict(tp=2), dict(layout="LBNHC")], host_bytes=8 << 20) as node:
    first = node.engines[0].complete([request])
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayk.actors.tier_actor import facts_of, open_tier
from rayk.engine.build import RequestResult, ThreadEngine
from rayk.engine.leader import RequestEvent
from rayk.engine.rank import EngineRank
from rayk.handover.commands import Connect, Describe, DescribeOutbox, WarmUp
from rayk.handover.extension import TransferExtension
from rayk.handover.handover import TransferHandover
from rayk.handover.offloading import Offloading
from rayk.kv.geometry import plan_rank
from rayk.kv.layout import LAYOUTS
from rayk.models.families import load_config
from rayk.models.kv_specs import engine_groups
from rayk.offload.host import HostTier
from rayk.offload.messages import TIER, LoadAnswer, LoadRequest, StoreAnswer, StoreRequest
from rayk.transfer.handshake import CacheDescription, like_engine
from rayk.transfer.ticket import TransferTicket
from rayk.transfer.token_classes import ONE_CLASS, TokenClasses, common_classes
from rayk.types.config import EngineConfig
from rayk.types.offload import OffloadSettings
from rayk.types.request import Request
from rayk.types.waiting import get_within
from tests.pd import NAN_POISON, MakeAgent, local_agents, shape_of, wait_until


class TierThread:
    """Turns a tier; `ask` runs something on its thread."""

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self.error: BaseException | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tier", daemon=True)
        self._thread.start()

    def ask(self, action: Callable[[HostTier], Any]) -> Any:
        """The action's result. Raises what it raises."""
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def act() -> None:
            try:
                answer.put((action(self.tier), None))
            except Exception as error:  # noqa: BLE001 - for whoever asked
                answer.put((None, error))

        self._inbox.put(act)
        found, error = answer.get(timeout=60)
        if error is not None:
            raise error
        return found

    def post(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)

    def close(self) -> None:
        """As an actor's death: nothing is answered any more."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join(30)
            self.tier.close()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                with suppress(queue.Empty):
                    get_within(self._inbox, 0.0005)()
                self.tier.turn()
        except BaseException as error:
            self.error = error
            raise


@dataclass(eq=False)
class ThreadTier:
    """Implements handover.tier_side.Tier over a TierThread."""

    thread: TierThread
    post: Callable[[Callable[[], None]], None]

    def store(self, ask: StoreRequest, done: Callable[[StoreAnswer], None]) -> None:
        self.thread.post(lambda: self.thread.tier.store(ask, lambda a: self.post(lambda: done(a))))

    def load(self, ask: LoadRequest, done: Callable[[LoadAnswer], None]) -> None:
        self.thread.post(lambda: self.thread.tier.load(ask, lambda a: self.post(lambda: done(a))))

    def drop(self, kept_as: str) -> None:
        self.thread.post(lambda: self.thread.tier.drop(kept_as))

    def doubt(self, ticket: TransferTicket) -> None:
        self.thread.post(lambda: self.thread.tier.doubt(ticket))


@dataclass(eq=False)
class NodeEngine:
    """One engine with its hand-over."""

    engine: ThreadEngine
    handover: TransferHandover

    @property
    def offloading(self) -> Offloading:
        assert self.handover.offloading is not None
        return self.handover.offloading

    def call(self, command: object) -> Any:
        """Run a command on every rank."""
        return self.engine.leader.call(command).result(60)

    def run(self, action: Callable[[], object]) -> Any:
        """Run something on the loop's thread and wait for it."""
        answer: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.engine.leader.post(lambda: answer.put(action()))
        return answer.get(timeout=60)

    def start(self, request: Request) -> queue.SimpleQueue[RequestEvent]:
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        self.handover.submit(request, events.put, hand_over=False)
        return events

    def complete(self, requests: Sequence[Request]) -> list[RequestResult]:
        """Run requests together, to their ends. Raises the first error."""
        streams = [self.start(r) for r in requests]
        found = [self.engine.collect(s) for s in streams]
        for completion in found:
            if completion.error is not None:
                raise completion.error
        return found

    def settle(self) -> None:
        """Wait until every store is over, and nobody holds a block."""
        leader, outbox = self.engine.leader, self.offloading.side.outbox

        def is_idle() -> bool:
            if self.engine.error is not None:
                raise self.engine.error
            pool = leader.manager.pool
            pools = [pool] if outbox is None else [pool, outbox.pool]
            is_free = all(p.num_free_blocks == p.num_blocks - 1 for p in pools)
            return not self.offloading.is_busy and is_free

        wait_until(is_idle, 30.0, lambda: f"{self.engine.name}: {self.offloading.status()}")
        self.run(leader.check_integrity)
        if outbox is not None:
            self.run(outbox.pool.check_integrity)


@dataclass(eq=False)
class Node:
    """Engines of one model that share a host tier."""

    engines: list[NodeEngine]
    thread: TierThread
    settings: OffloadSettings
    stack: ExitStack = field(default_factory=ExitStack)

    @classmethod
    @contextmanager
    def open(
        cls,
        model: Path,
        engines: Sequence[dict[str, Any]],
        *,
        make_agent: MakeAgent | None = None,
        poison: int = NAN_POISON,
        tier_agent: Callable[[Any], Any] = lambda agent: agent,
        common: dict[str, Any] | None = None,
        load_vocabulary: Callable[[], str] | None = None,
        **settings: Any,
    ) -> Iterator[Node]:
        """`engines`: settings of each; `settings`: the tier's; `tier_agent`: wraps its agent."""
        make_agent = make_agent or local_agents()
        offload = OffloadSettings(**{"host_bytes": 16 << 20, "load": "always", "swap": "always", **settings})
        with ExitStack() as stack:
            made = []
            configs = [
                EngineConfig(model=str(model), **{"num_blocks": 64, **(common or {}), **own})
                for own in engines
            ]
            classes = common_classes(map(shape_of, configs))
            for i, config in enumerate(configs):
                what = config, make_agent, offload, poison, load_vocabulary
                made.append(_make_engine(stack, f"e{i}", *what, token_classes=classes))
            like = like_engine(made[0].call(Describe()))
            config = made[0].engine._config
            tier = open_tier(tier_agent(make_agent("tier")), config, offload, like, 0)
            thread = TierThread(tier)
            stack.callback(thread.close)
            node = cls(made, thread, offload)
            for engine in made:
                node.attach(engine)
            yield node
            if thread.error is not None:
                raise thread.error

    def attach(self, engine: NodeEngine) -> None:
        """As the coordinator does it."""
        descriptions = tuple(engine.call(Describe()))
        outboxes = [found for found in engine.call(DescribeOutbox()) if found is not None]
        self.thread.ask(lambda tier: tier.attach(descriptions, outboxes))
        engine.call(Connect((self.thread.tier.description,), descriptions))
        name = engine.engine.name
        wait_until(lambda: self.thread.ask(lambda tier: tier.wire(name, 10.0)))
        wait_until(lambda: all(engine.call(WarmUp(TIER, 10.0))))
        leader = engine.engine.leader
        tier, facts = ThreadTier(self.thread, leader.post), facts_of(self.thread.tier)
        engine.run(lambda: engine.offloading.attach(tier, facts))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.thread.ask(HostTier.status)
        return found

    def settle(self) -> None:
        """Wait until nothing is on its way anywhere; blocks add up on all sides."""
        for engine in self.engines:
            engine.settle()
        wait_until(lambda: not self.thread.ask(lambda tier: tier.is_busy), 30.0, lambda: str(self.status()))
        self.thread.ask(HostTier.check_integrity)


def describe(config: EngineConfig) -> CacheDescription:
    """What the ranks of an engine tell of its cache; the engine is formed, and ends."""
    with ExitStack() as stack:
        offload = OffloadSettings(host_bytes=1)
        engine = _make_engine(stack, "e", config, local_agents(), offload, NAN_POISON)
        return like_engine(engine.call(Describe()))


def _make_engine(
    stack: ExitStack,
    name: str,
    config: EngineConfig,
    make_agent: MakeAgent,
    offload: OffloadSettings,
    poison: int,
    load_vocabulary: Callable[[], str] | None = None,
    token_classes: TokenClasses = ONE_CLASS,
) -> NodeEngine:
    handover = TransferHandover(engine=name, epoch=1, shape=shape_of(config), offload=offload)

    def extension(rank: EngineRank) -> TransferExtension:
        agent = make_agent(f"{name}.{rank.comm.rank}")
        made = TransferExtension(
            rank,
            agent,
            engine=name,
            epoch=1,
            lease_s=60.0,
            outbox_bytes=offload.outbox_bytes,
            token_classes=token_classes,
        )
        stack.callback(made.close)
        return made

    engine = ThreadEngine(
        config,
        name=name,
        make_extension=extension,
        handover=handover,
        poison=poison,
        load_vocabulary=load_vocabulary,
    )
    return NodeEngine(stack.enter_context(engine), handover)


def outbox_bytes(path: Path, num_blocks: int, **own: Any) -> int:
    """Size of an outbox of so many blocks, beside the null block, of one rank."""
    groups = engine_groups(EngineConfig(model=str(path), **own), load_config(path))
    one = plan_rank(groups, LAYOUTS["BHLNC"], num_blocks=2).block_bytes
    return (num_blocks + 1) * one


def until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll."""
    wait_until(condition, timeout_s, lambda: what)


def pause(seconds: float) -> None:
    """Let things happen."""
    time.sleep(seconds)

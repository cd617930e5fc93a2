"""Hand-overs through the host tier: the prefill engine's blocks come free before the decode engine begins."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.actors.tiers import relay
from rayk.engine.build import RequestResult
from rayk.engine.leader import RequestEvent
from rayk.offload.host import HostTier
from rayk.offload.messages import LoadRequest, StoreAnswer, StoreRequest
from rayk.offload.outbox import outbox_name
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import DeadlineExceeded, EngineDied, TransferError
from tests.markers import one_per
from tests.offload.faults import Case
from tests.offload.node import Node, NodeEngine, outbox_bytes, until

LENGTHS = (300, 40)


@pytest.fixture(scope="module")
def case(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Case:
    path = checkpoint("qwen3")
    return Case.make(path, reference(path), LENGTHS)


@dataclass
class Method:
    """What Ray makes of an actor's method."""

    call: Callable[..., Any]

    def remote(self, *args: Any) -> Any:
        return asyncio.ensure_future(self.call(*args))


@dataclass(eq=False)
class Actor:
    """A node's tier as its actor would be; `fails` says at which method it ends, or is silent."""

    node: Node
    fails: dict[str, Exception] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    sides: list[Any] = field(default_factory=list)
    """Of the last hand-over."""

    @property
    def store(self) -> Method:
        return Method(lambda ask: self._ask("store", lambda tier, done: tier.store(ask, done)))

    @property
    def load(self) -> Method:
        return Method(lambda ask: self._ask("load", lambda tier, done: tier.load(ask, done)))

    @property
    def drop(self) -> Method:
        async def drop(kept_as: str) -> None:
            self.dropped.append(kept_as)
            self.node.thread.ask(lambda tier: tier.drop(kept_as))

        return Method(drop)

    async def _ask(self, name: str, begin: Callable[[HostTier, Callable[[Any], None]], None]) -> Any:
        if name in self.fails:
            raise self.fails[name]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def done(answer: Any) -> None:
            loop.call_soon_threadsafe(future.set_result, answer)

        self.node.thread.ask(lambda tier: begin(tier, done))
        return await future


def prefill(engine: NodeEngine, case: Case, name: str, index: int) -> RequestResult:
    events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    engine.handover.submit(case.request(name, index), events.put, hand_over=True, via_host=True)
    return engine.engine.collect(events)


def decode(
    engine: NodeEngine, case: Case, index: int, ticket: TransferTicket, first: list[int]
) -> RequestResult:
    events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    request = case.request(ticket.request_id, index)
    engine.handover.submit_decode(request, ticket, tuple(first), 20.0, events.put)
    return engine.engine.collect(events)


def through(
    actor: Actor, case: Case, ticket: Any, index: int, stored: list[StoreAnswer] | None = None
) -> TransferTicket:
    answers: list[StoreAnswer] = [] if stored is None else stored
    actor.sides = sides = [SimpleNamespace(name=f"e{i}", tier=actor) for i in range(2)]

    async def run() -> TransferTicket:
        request = case.request(ticket.request_id, index)
        return await relay(sides[0], sides[1], ticket, request, 20.0, answers.append)

    return asyncio.run(run())


def has_all_blocks(engine: NodeEngine) -> bool:
    pool = engine.engine.leader.manager.pool
    return pool.num_free_blocks == pool.num_blocks - 1


@one_per("outbox_bytes")
@pytest.mark.parametrize("outbox_bytes", [0, 64 << 20])
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_the_prefill_engines_blocks_are_free_before_the_decode_engine_begins(
    case: Case, tp: tuple[int, int], outbox_bytes: int
) -> None:
    """With outboxes before the tier has read anything."""
    engines: list[dict[str, Any]] = [{"tp": tp[0]}, {"tp": tp[1], "layout": "LBNHC", "block_size": 32}]
    with Node.open(case.path, engines, store=False, outbox_bytes=outbox_bytes) as node:
        first, second = node.engines
        actor = Actor(node)
        prefilled = prefill(first, case, "r", 0)
        assert has_all_blocks(first) == bool(outbox_bytes)
        assert isinstance(prefilled.payload, TransferTicket)
        assert prefilled.payload.engine == (outbox_name("e0") if outbox_bytes else "e0")
        stored: list[StoreAnswer] = []
        ticket = through(actor, case, prefilled.payload, 0, stored)
        assert len(stored) == 1
        assert sum(row.bytes for row in stored[0].transfers) == stored[0].num_bytes
        # Whole blocks move; what is digested are the prompt's rows alone.
        assert 0 < stored[0].num_bytes_checked < stored[0].num_bytes
        assert ticket.engine == "host"
        assert ticket.num_tokens == LENGTHS[0]
        until(lambda: has_all_blocks(first), "nobody reads the prefill engine's blocks")
        done = decode(second, case, 0, ticket, prefilled.token_ids)
        assert done.error is None
        assert prefilled.token_ids + done.token_ids == case.expected[0]
        node.settle()
        assert actor.dropped == []
        assert node.status()["num_kept"] == node.status()["num_lent"] == 0


def test_hand_overs_wait_for_room_in_the_outbox(case: Case) -> None:
    """The second one's ticket comes when the tier has read the first, or nobody wants that any more."""
    size = outbox_bytes(case.path, 20)
    with Node.open(case.path, [{"num_blocks": 200}, {}], store=False, outbox_bytes=size) as node:
        first, second = node.engines
        streams: list[queue.SimpleQueue[RequestEvent]] = []
        for number in range(4):
            streams.append(queue.SimpleQueue())
            request = case.request(f"r{number}", 0)
            first.handover.submit(request, streams[-1].put, hand_over=True, via_host=True)
        prefilled = [first.engine.collect(streams[0])]
        until(lambda: len(first.run(lambda: first.handover.lending._for_tier)) == 3, "the others wait")
        first.handover.settle("r0")
        prefilled.append(first.engine.collect(streams[1]))
        first.engine.leader.abort("r2")
        ticket = through(Actor(node), case, prefilled[1].payload, 0)
        prefilled.append(first.engine.collect(streams[3]))
        again = through(Actor(node), case, prefilled[2].payload, 0)
        for number, offered in ((1, ticket), (2, again)):
            done = decode(second, case, 0, offered, prefilled[number].token_ids)
            assert prefilled[number].token_ids + done.token_ids == case.expected[0]
        node.settle()


def test_a_hand_over_that_no_outbox_holds_is_read_past_it(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    with Node.open(case.path, [{}, {}], store=False, outbox_bytes=outbox_bytes(case.path, 10)) as node:
        first, second = node.engines
        prefilled = prefill(first, case, "r", 0)
        assert "it is read past them" in caplog.text
        assert first.offloading.counts["handovers_too_large"] == 1
        ticket = through(Actor(node), case, prefilled.payload, 0)
        done = decode(second, case, 0, ticket, prefilled.token_ids)
        assert prefilled.token_ids + done.token_ids == case.expected[0]
        node.settle()


def test_what_fails_on_the_way_is_an_error_of_the_transfer_and_leaves_nothing(case: Case) -> None:
    with Node.open(case.path, [{}, {}], store=False) as node:
        first, _ = node.engines
        for number, (method, error) in enumerate(
            [("store", EngineDied("host", "killed")), ("load", EngineDied("host", "killed"))]
        ):
            actor = Actor(node, {method: error})
            prefilled = prefill(first, case, f"r{number}", 1)
            with pytest.raises(TransferError, match="killed"):
                through(actor, case, prefilled.payload, 1)
            assert [side.tier for side in actor.sides] == [None, None]
            first.handover.settle(f"r{number}")
        # One that lives and says nothing in time is told that nobody asks for it.
        prefilled = prefill(first, case, "late", 1)
        actor = Actor(node, {"load": DeadlineExceeded("an answer", 0.1)})
        with pytest.raises(DeadlineExceeded):
            through(actor, case, prefilled.payload, 1)
        assert actor.dropped == ["relay/late"]
        first.handover.settle("late")
        node.thread.ask(lambda tier: tier.drop("relay/r1"))
        node.settle()
        assert node.status()["num_kept"] == 0


def test_what_nobody_wants_any_more_is_not_kept_when_it_comes(case: Case) -> None:
    with Node.open(case.path, [{}], store=False) as node:
        (engine,) = node.engines
        prefilled = prefill(engine, case, "r", 0)
        ask = StoreRequest(ticket=prefilled.payload, token_ids=tuple(case.prompts[0]), keep_as="relay/r")
        answers: list[Any] = []

        def begin(tier: HostTier) -> None:
            tier.store(ask, answers.append)
            assert not answers, "it is on its way"
            tier.drop("relay/r")

        node.thread.ask(begin)
        until(lambda: bool(answers), "it is stored")
        assert answers[0].ok
        node.settle()
        assert node.status()["num_kept"] == 0
        assert node.status()["num_used_blocks"] == 0
        found: list[Any] = []
        node.thread.ask(lambda tier: tier.load(LoadRequest(request_id="x", kept_as="relay/r"), found.append))
        assert found[0].ticket is None


def test_engines_of_two_tiers_are_told_apart(case: Case) -> None:
    sides: list[Any] = [SimpleNamespace(name=f"e{i}", tier=object()) for i in range(2)]
    ticket: Any = SimpleNamespace(request_id="r")
    with pytest.raises(TransferError, match="e0 and e1 share no host tier"):
        asyncio.run(relay(sides[0], sides[1], ticket, case.request("r", 0), 1.0, print))

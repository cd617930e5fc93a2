"""Engines that store and swap by way of outboxes, here of a CPU's ranks: tokens equal those of transformers,
and no block is kept anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rayk.handover.commands import Describe, DescribeOutbox
from rayk.offload.outbox import Outbox, outbox_name
from rayk.transfer.ticket import TransferTicket
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.markers import one_per, sweep, thorough
from tests.offload.faults import Case, FaultyAgents, PausedTier
from tests.offload.node import Node, NodeEngine, outbox_bytes, until
from tests.offload.test_swaps import MODELS, STAGES, STATES, crowd, pool_for, too_many
from tests.pd import make_request
from tests.transfer_faults import flip_bit, stall_reads

LENGTHS = (300, 301, 40, 290)
NUM_LENT = 288
"""First tokens of the first prompt that the tier finds: 18 blocks of 16."""


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Case:
    path = checkpoint("qwen3")
    return Case.make(path, reference(path), LENGTHS)


def tickets_of(engine: NodeEngine) -> list[TransferTicket]:
    """Tickets of the engine's stores, from now on."""
    found: list[TransferTicket] = []
    tier = engine.offloading.side.tier
    assert tier is not None
    store = tier.store

    def note(ask: Any, done: Any) -> None:
        found.append(ask.ticket)
        store(ask, done)

    tier.store = note  # type: ignore[method-assign]
    return found


def num_free(engine: NodeEngine) -> int:
    pool = engine.engine.leader.manager.pool
    return pool.num_blocks - 1 - pool.num_free_blocks


def swap(node: Node, asked: list[tuple[list[int], list[int]]]) -> Mapping[str, int]:
    """Have the first engine answer (prompt, answer) pairs that do not fit at once; nothing is computed twice.
    Returns what was counted."""
    engine = node.engines[0]
    requests = [make_request(f"r{i}", prompt, NUM_TOKENS) for i, (prompt, _) in enumerate(asked)]
    found = engine.complete(requests)
    assert [c.token_ids for c in found] == [answer for _, answer in asked]
    node.settle()
    counts = engine.offloading.counts
    assert counts["swaps"] > 0
    assert not counts["swaps_failed"]
    assert sum(c.info["num_recomputed_tokens"] for c in found) == 0
    return counts


@sweep(5)
@one_per()
@pytest.mark.parametrize(
    ("name", "more"),
    [*product(MODELS, ({}, STATES)), ("qwen3", STAGES), ("nemotron_h", STATES | STAGES)],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "in-place",
)
def test_a_crowd_is_swapped_and_right_by_way_of_outboxes(
    name: str, more: dict[str, Any], answers: Callable[[str], Answers]
) -> None:
    """All kinds of caches at two ranks: every ticket is of outboxes, nothing is computed twice."""
    model = answers(name)
    own, asked = too_many(name, model, more)
    with Node.open(model.path, [own], load="never", outbox_bytes=64 << 20) as node:
        (engine,) = node.engines
        tickets = tickets_of(engine)
        counts = swap(node, asked)
        assert not counts["stores_failed"]
        assert len(tickets) >= counts["stores"] > 0
        assert {ticket.engine for ticket in tickets} == {outbox_name("e0")}
        assert engine.call(Describe())[0].engine == "e0"


@thorough
def test_blocks_are_free_when_they_are_copied_not_when_the_tier_has_read_them(qwen3: Case) -> None:
    agents = FaultyAgents()
    how: dict[str, Any] = {"make_agent": agents, "outbox_bytes": 64 << 20, "transfer_s": 1.0}
    with Node.open(qwen3.path, [{"num_blocks": 400}, {}], **how) as node:
        first, second = node.engines
        agents.made["tier"].plant(stall_reads())
        qwen3.complete(first, "a", 0)
        until(lambda: first.run(lambda: num_free(first)) == 0, "the engine's own blocks")
        held = first.run(lambda: first.offloading.storing.in_outboxes)
        assert held
        assert first.run(first.offloading.status)["outbox"]["num_free_blocks"] < 399
        agents.made["tier"].heal()
        node.settle()  # what was stalled is given up
        qwen3.complete(first, "b", 3)
        node.settle()
        (done,) = qwen3.complete(second, "c", 3)
        assert done.info["num_host_tokens"] == NUM_LENT
        node.settle()


@thorough
@pytest.mark.parametrize("shape", [{"tp": 4, "dcp": 2}, {"pp": 2, "pp_layers": (1, 3)}], ids="-".join)
def test_what_ranks_of_any_shape_stored_by_outboxes_one_rank_loads(qwen3: Case, shape: Any) -> None:
    """Blocks of outboxes cover the tokens of two ranks, too, or the layers of a stage, and the leader counts
    as many as all ranks have."""
    size = outbox_bytes(qwen3.path, 30)
    with Node.open(qwen3.path, [shape, {}], outbox_bytes=size) as node:
        first, second = node.engines
        room = first.offloading.side.outbox
        assert room is not None
        told = first.call(DescribeOutbox())
        assert {outbox.geometry.num_blocks for outbox in told} == {room.pool.num_blocks}
        assert len(told) == first.engine._config.num_ranks
        tickets = tickets_of(first)
        qwen3.complete(first, "a", 0)
        node.settle()
        assert {ticket.engine for ticket in tickets} == {outbox_name("e0")}
        (done,) = qwen3.complete(second, "b", 0)
        assert done.info["num_host_tokens"] == NUM_LENT
        node.settle()


@thorough
def test_a_ticket_leaves_when_its_copies_have_run(qwen3: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that run when somebody waits for them stand for a GPU's."""
    queued: list[Callable[[], None]] = []
    copy = Outbox.copy

    @contextmanager
    def copying(*what: Any) -> Iterator[None]:
        queued.append(partial(copy, *what))
        yield
        while queued:
            queued.pop(0)()

    monkeypatch.setattr(Outbox, "copying", copying)
    with Node.open(qwen3.path, [{"num_blocks": 400}, {}], outbox_bytes=64 << 20) as node:
        first, second = node.engines
        qwen3.complete(first, "a", 0)
        node.settle()
        (done,) = qwen3.complete(second, "b", 0)
        assert done.info["num_host_tokens"] == NUM_LENT
        assert not first.offloading.counts["stores_failed"]
        node.settle()


@one_per()
@pytest.mark.parametrize("num_blocks", [17, 18, 30])
def test_a_store_that_is_larger_than_the_outbox_goes_in_parts(qwen3: Case, num_blocks: int) -> None:
    """A part ends where groups of 256 rows do."""
    size = outbox_bytes(qwen3.path, num_blocks)
    with Node.open(qwen3.path, [{"num_blocks": 400}, {"tp": 2}], outbox_bytes=size) as node:
        first, second = node.engines
        tickets = tickets_of(first)
        qwen3.complete(first, "a", 0, 1, 2, 3)
        node.settle()
        of_first = [t for t in tickets if t.request_id.endswith("a0")]
        parts = [(t.first_row, t.num_tokens) for t in of_first]
        assert parts[0] == ((0, 256) if num_blocks < 18 else (0, 288)), parts
        assert [first for first, _ in parts[1:]] == [256] * (len(parts) - 1)
        for ticket in tickets:
            taken = [b for table in ticket.block_tables for b in table if b]
            assert 0 < len(taken) <= num_blocks
            assert max(taken) <= num_blocks
        done = qwen3.complete(second, "b", 0, 1, 2, 3)
        assert done[0].info["num_host_tokens"] == NUM_LENT
        assert all(d.info["num_host_tokens"] for d in done)
        assert not first.offloading.counts["stores_failed"], first.offloading.storing.last_failure
        node.settle()


def test_what_no_part_of_fits_is_not_stored_and_told(qwen3: Case) -> None:
    size = outbox_bytes(qwen3.path, 10)
    with Node.open(qwen3.path, [{"num_blocks": 400}], outbox_bytes=size) as node:
        (engine,) = node.engines
        qwen3.complete(engine, "a", 0, 2)
        node.settle()
        counts, told = engine.offloading.counts, engine.run(engine.offloading.status)
        assert counts["stores_too_large"] > 0
        assert "do not fit into outboxes" in told["last_store_failure"]
        assert counts["stores"] > 0, "the short one is stored"


def test_swaps_of_parts_come_back_whole(answers: Callable[[str], Answers]) -> None:
    model = answers("qwen3")
    own = {"num_blocks": pool_for(model, {}, 6, 1)}
    size = outbox_bytes(model.path, 17)
    with Node.open(model.path, [own], load="never", store=False, outbox_bytes=size) as node:
        (engine,) = node.engines
        tickets = tickets_of(engine)
        counts = swap(node, crowd(model, 6, 1))
        assert not counts["swaps_too_large"]
        assert any(t.first_row for t in tickets), "a part followed another"


@thorough
def test_a_swap_that_no_outbox_holds_is_computed_again(answers: Callable[[str], Answers]) -> None:
    model = answers("qwen3")
    own = {"num_blocks": pool_for(model, {}, 6, 1)}
    size = outbox_bytes(model.path, 2)
    with Node.open(model.path, [own], load="never", outbox_bytes=size) as node:
        (engine,) = node.engines
        asked = crowd(model, 6, 1)
        found = engine.complete(
            [make_request(f"r{i}", prompt, NUM_TOKENS) for i, (prompt, _) in enumerate(asked)]
        )
        assert [c.token_ids for c in found] == [answer for _, answer in asked]
        node.settle()
        assert engine.offloading.counts["swaps_too_large"] > 0
        assert engine.offloading.counts["swaps"] < engine.offloading.counts["swaps_weighed"]


# Faults.


@thorough
def test_stores_wait_for_a_full_outbox_until_it_is_read_or_given_up(qwen3: Case) -> None:
    agents = FaultyAgents()
    size = outbox_bytes(qwen3.path, 20)
    with Node.open(
        qwen3.path, [{"num_blocks": 400}], make_agent=agents, outbox_bytes=size, transfer_s=1.0
    ) as node:
        (engine,) = node.engines
        agents.made["tier"].plant(stall_reads())
        qwen3.complete(engine, "a", 0, 1)
        storing = engine.offloading.storing
        begun = engine.run(lambda: (len(storing._begun), len(storing.open_stores)))
        assert begun[0] == 1 < begun[1], "one is in the outbox, others wait for their turn"
        until(lambda: engine.offloading.counts["stores_failed"] > 0, "the first is given up")
        agents.made["tier"].heal()
        node.settle()
        qwen3.complete(engine, "b", 3)
        node.settle()
        assert engine.offloading.counts["stores"] > 0


@thorough
def test_a_flipped_bit_between_outbox_and_tier_is_found(qwen3: Case) -> None:
    agents = FaultyAgents()
    with Node.open(
        qwen3.path, [{"tp": 2, "num_blocks": 400}], make_agent=agents, outbox_bytes=64 << 20
    ) as node:
        (engine,) = node.engines
        agents.made["tier"].plant(flip_bit(byte=3, bit=1))
        engine.complete([make_request("a", qwen3.prompts[0], 1)])
        node.settle()
        assert node.status()["mismatches"] == 1
        assert engine.offloading.counts["stores_failed"] == 1


def test_a_tier_that_dies_leaves_outboxes_empty(qwen3: Case) -> None:
    agents = FaultyAgents()
    with Node.open(qwen3.path, [{"num_blocks": 400}], make_agent=agents, outbox_bytes=64 << 20) as node:
        (engine,) = node.engines
        agents.made["tier"].plant(stall_reads())
        qwen3.complete(engine, "a", 0, 1)
        until(lambda: bool(engine.run(lambda: engine.offloading.storing.in_outboxes)), "a store")
        node.thread.close()
        engine.run(lambda: engine.offloading.lost("it was ended"))
        engine.settle()
        qwen3.complete(engine, "b", 2)
        engine.settle()


@thorough
def test_who_is_aborted_while_his_swap_waits_leaves_nothing(answers: Callable[[str], Answers]) -> None:
    model = answers("qwen3")
    own = {"num_blocks": pool_for(model, {}, 6, 1)}
    agents = FaultyAgents()
    size = outbox_bytes(model.path, 24)
    how: dict[str, Any] = {"load": "never", "outbox_bytes": size, "transfer_s": 2.0, "make_agent": agents}
    with Node.open(model.path, [own], **how) as node:
        (engine,) = node.engines
        paused = PausedTier.before(engine, "store")
        asked = crowd(model, 6, 1)
        streams = {
            f"r{i}": engine.start(make_request(f"r{i}", prompt, NUM_TOKENS))
            for i, (prompt, _) in enumerate(asked)
        }
        away = engine.engine.leader.scheduler._away
        until(lambda: len(away) > 0, "a swap")
        gone = engine.run(lambda: [s.request_id for s in away._states.values()])
        for request_id in gone:
            engine.engine.leader.abort(request_id)
        engine.run(paused.go)
        for (name, stream), (_, answer) in zip(streams.items(), asked, strict=True):
            done = engine.engine.collect(stream)
            assert done.error is None
            assert done.token_ids == answer[: len(done.token_ids)], name
        node.settle()
        until(lambda: node.status()["num_kept"] == 0, "nothing is kept")

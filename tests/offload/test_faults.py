"""Whatever befalls a host tier: no wrong token, no lost request, and every block is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayk.handover import offloading, storing
from rayk.offload.host import HostTier
from rayk.transfer.agent import Transfer, TransferState
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.types.request import FinishReason
from tests.markers import one_per
from tests.offload.faults import Case, FaultyAgents, PausedTier, kill, reopen
from tests.offload.node import Node, NodeEngine, until
from tests.pd import make_request
from tests.transfer_faults import flip_bit, stall_reads

LENGTHS = (300, 301, 40, 290, 310, 305, 280, 295)
NUM_LENT = 288
"""First tokens of the first prompt that the tier finds: whole blocks of 16, the last token aside."""


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Case:
    path = checkpoint("qwen3")
    return Case.make(path, reference(path), LENGTHS)


def open_node(case: Case, engines: list[dict[str, Any]], **settings: Any) -> AbstractContextManager[Node]:
    """With room for all stores at once: none is put off."""
    return Node.open(case.path, engines, common={"num_blocks": 400}, **settings)


def told(engine: NodeEngine) -> dict[str, Any]:
    return engine.offloading.status()


# What is read is not what was stored, or does not come.


@one_per()
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=lambda t: f"{t[0]}to{t[1]}")
@pytest.mark.parametrize("descriptor", [0, 17])
def test_a_flipped_bit_in_a_load_is_found_and_computed_again(
    qwen3: Case, tp: tuple[int, int], descriptor: int
) -> None:
    agents = FaultyAgents()
    with open_node(qwen3, [{"tp": tp[0]}, {"tp": tp[1]}], make_agent=agents) as node:
        first, second = node.engines
        qwen3.complete(first, "a", 0)
        node.settle()
        # A float's exponent: the answer would be another one.
        agents.made[f"e1.{tp[1] - 1}"].plant(flip_bit(descriptor=descriptor, byte=7, bit=6))
        (done,) = qwen3.complete(second, "b", 0)
        assert "offload_failure" in done.info
        assert done.info["num_host_tokens"] < NUM_LENT
        assert told(second)["loads_failed"] == 1
        node.settle()
        # The tier's own pages are right.
        (done,) = qwen3.complete(second, "c", 0)
        assert done.info["num_host_tokens"] == NUM_LENT
        assert "offload_failure" not in done.info
        node.settle()


def test_a_flipped_bit_in_a_store_is_found_and_nothing_is_kept(qwen3: Case) -> None:
    agents = FaultyAgents()
    with open_node(qwen3, [{"tp": 2}, {}], make_agent=agents) as node:
        first, second = node.engines
        agents.made["tier"].plant(flip_bit(byte=3, bit=1))
        # It ends with its prompt: there is one store.
        first.complete([make_request("a", qwen3.prompts[0], 1)])
        node.settle()
        assert node.status()["mismatches"] == 1
        assert told(first)["stores_failed"] == 1
        (done,) = qwen3.complete(second, "b", 0)
        assert done.info.get("num_host_tokens", 0) == 0
        node.settle()
        (done,) = qwen3.complete(second, "c", 0)
        assert done.info["num_host_tokens"] == NUM_LENT
        node.settle()


class BreakingAgent(LocalAgent):
    """Its link breaks in the middle: after so many reads every other one fails."""

    reads_left: int | None = None

    def poll(self, transfer: Transfer) -> TransferState:
        pending = self._in_flight[transfer]
        if self.reads_left is None or pending.state is not TransferState.PENDING:
            return super().poll(transfer)
        self.reads_left -= 1
        if self.reads_left < 0:
            pending.state = TransferState.FAILED
            return pending.state
        return super().poll(transfer)


def breaking_agents() -> tuple[Callable[[str], BreakingAgent], dict[str, BreakingAgent]]:
    network, made = LocalNetwork(), {}

    def make(name: str) -> BreakingAgent:
        made[name] = BreakingAgent(name, network)
        return made[name]

    return make, made


@pytest.mark.parametrize("reads", [0, 1])
def test_a_load_that_fails_half_way_is_computed_from_what_is_proven(qwen3: Case, reads: int) -> None:
    make, agents = breaking_agents()
    with open_node(qwen3, [{"layout": "LBNHC"}, {"tp": 2, "layout": "LBHNC"}], make_agent=make) as node:
        first, second = node.engines
        qwen3.complete(first, "a", 0, 1)
        node.settle()
        agents["e1.1"].reads_left = reads
        done = qwen3.complete(second, "b", 0, 1)
        assert all("offload_failure" in d.info for d in done)
        agents["e1.1"].reads_left = None
        node.settle()
        done = qwen3.complete(second, "c", 0, 1)
        assert all(d.info["num_host_tokens"] > 0 and "offload_failure" not in d.info for d in done)
        node.settle()


def test_a_store_that_fails_half_way_costs_nothing_but_itself(qwen3: Case) -> None:
    make, agents = breaking_agents()
    with open_node(qwen3, [{"layout": "LBNHC", "tp": 2}, {}], make_agent=make) as node:
        first, second = node.engines
        agents["tier"].reads_left = 1
        qwen3.complete(first, "a", 0, 1)
        node.settle()
        assert told(first)["stores_failed"] >= 1
        agents["tier"].reads_left = None
        qwen3.complete(first, "b", 0, 1)
        node.settle()
        done = qwen3.complete(second, "c", 0, 1)
        assert all(d.info["num_host_tokens"] > 0 for d in done)
        node.settle()


# The tier's process is killed.


@pytest.mark.parametrize("does_reopen", [False, True])
def test_a_tier_that_is_killed_in_the_middle_of_loads(qwen3: Case, does_reopen: bool) -> None:
    agents = FaultyAgents()
    with open_node(qwen3, [{"tp": 2}, {"max_seqs": 4}], make_agent=agents) as node:
        first, second = node.engines
        qwen3.complete(first, "a", 0, 1, 2)
        node.settle()
        agents.made["e1.0"].plant(stall_reads())
        streams = [second.start(qwen3.request(f"b{i}", i)) for i in range(3)]
        until(lambda: bool(second.handover.receiving._reading), "a load begins")
        kill(node)
        agents.made["e1.0"].heal()
        if does_reopen:
            reopen(node, agents)
        done = [second.engine.collect(s) for s in streams]
        assert [d.token_ids for d in done] == qwen3.expected[:3]
        assert any("offload_failure" in d.info for d in done)
        for engine in node.engines:
            engine.settle()
        if does_reopen:
            qwen3.complete(first, "c", 3)
            node.settle()
            (again,) = qwen3.complete(second, "d", 3)
            assert again.info["num_host_tokens"] > 0
            node.settle()


def test_a_tier_that_is_killed_in_the_middle_of_stores(qwen3: Case) -> None:
    agents = FaultyAgents()
    with open_node(qwen3, [{"tp": 2}, {}], make_agent=agents, store_tokens=32) as node:
        first, second = node.engines
        agents.made["tier"].plant(stall_reads())
        streams = [first.start(qwen3.request(f"a{i}", i)) for i in range(3)]
        until(lambda: bool(node.thread.ask(lambda tier: tier.is_busy)), "a store begins")
        kill(node)
        done = [first.engine.collect(s) for s in streams]
        assert [d.token_ids for d in done] == qwen3.expected[:3]
        for engine in node.engines:
            engine.settle()
        assert not first.offloading.storing._asked
        assert not first.offloading.storing._stored
        reopen(node, agents)
        qwen3.complete(first, "b", 0, 1, 2)
        node.settle()
        done = qwen3.complete(second, "c", 0, 1, 2)
        assert all(d.info["num_host_tokens"] > 0 for d in done)
        node.settle()


SMALL: dict[str, Any] = {"num_blocks": 26, "max_seqs": 8}
"""Room for eight prompts of 40 tokens, and for two when they have all of their answers."""


@pytest.fixture(scope="module")
def growing(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Case:
    path = checkpoint("qwen3")
    return Case.make(path, reference(path), [40 + i for i in range(8)], 120)


@one_per()
@pytest.mark.parametrize("stage", ["leaving", "away", "returning"])
def test_a_tier_that_is_killed_in_the_middle_of_swaps(growing: Case, stage: str) -> None:
    agents = FaultyAgents()
    with Node.open(growing.path, [SMALL], make_agent=agents, store=False, load="never") as node:
        (engine,) = node.engines
        swapping = engine.offloading.swapping
        if stage == "leaving":
            agents.made["tier"].plant(stall_reads())
        elif stage == "returning":
            agents.made["e0.0"].plant(stall_reads())
        streams = [engine.start(growing.request(f"a{i}", i)) for i in range(8)]
        reached: dict[str, Callable[[], bool]] = {
            "leaving": lambda: bool(swapping._swapped),
            "away": lambda: any(s.ticket for s in list(swapping._swapped.values())),
            "returning": lambda: any(s.is_read for s in list(swapping._swapped.values())),
        }
        until(reached[stage], stage)
        kill(node)
        agents.made["e0.0"].heal()
        done = [engine.engine.collect(s) for s in streams]
        assert [d.token_ids for d in done] == growing.expected
        assert told(engine)["swaps_failed"] >= 1
        engine.settle()
        assert not swapping._asked


# The tier says nothing, or too late.


def test_an_answer_that_comes_late_is_nobody_elses(qwen3: Case) -> None:
    """It is about the tokens of a request that is gone: its id is not given away until it is here."""
    with open_node(qwen3, [{}, {}]) as node:
        first, second = node.engines
        qwen3.complete(first, "a", 0, 1)
        node.settle()
        paused = PausedTier.before(second, "load")
        gone = second.start(make_request("same", qwen3.prompts[0], 12))
        until(lambda: bool(paused.answers), "it is asked for")
        second.engine.leader.abort("same")
        assert second.engine.collect(gone).finish_reason == FinishReason.ABORT
        refused = second.engine.collect(second.start(make_request("same", qwen3.prompts[1], 12)))
        assert "in use" in str(refused.error)
        second.run(paused.go)
        (done,) = second.complete([make_request("same", qwen3.prompts[1], 12)])
        assert done.token_ids == qwen3.expected[1]
        assert done.info["num_host_tokens"] == NUM_LENT
        node.settle()
        assert node.status()["num_lent"] == 0


def test_answers_of_a_lost_tier_are_nobodys_though_its_ids_are_free(qwen3: Case) -> None:
    agents = FaultyAgents()
    with open_node(qwen3, [{}, {}], make_agent=agents) as node:
        first, second = node.engines
        qwen3.complete(first, "a", 0, 1)
        node.settle()
        paused = PausedTier.before(second, "load")
        stream = second.start(make_request("same", qwen3.prompts[0], 12))
        until(lambda: bool(paused.answers), "it is asked for")
        kill(node)
        assert second.engine.collect(stream).token_ids == qwen3.expected[0]
        reopen(node, agents)
        later = PausedTier.before(second, "load")
        stream = second.start(make_request("same", qwen3.prompts[1], 12))
        until(lambda: bool(later.answers), "it is asked for")
        second.run(paused.go)
        second.run(later.go)
        assert second.engine.collect(stream).token_ids == qwen3.expected[1]
        node.settle()


def test_word_of_a_lost_tiers_end_does_not_end_the_next_one(qwen3: Case) -> None:
    agents = FaultyAgents()
    with open_node(qwen3, [{}], make_agent=agents) as node:
        (engine,) = node.engines
        kill(node)
        reopen(node, agents)
        engine.run(lambda: engine.offloading.lost("heard of late", 0))
        assert engine.offloading.is_on
        engine.run(lambda: engine.offloading.lost("it is this one", 1))
        assert not engine.offloading.is_on
        assert told(engine)["tier_losses"] == 2
        qwen3.complete(engine, "a", 0)
        engine.settle()


def test_a_tier_that_is_silent_is_not_waited_for_and_soon_not_asked(
    qwen3: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "ANSWER_S", 0.05)
    with open_node(qwen3, [{}, {}]) as node:
        first, second = node.engines
        qwen3.complete(first, "a", 0)
        node.settle()
        paused = PausedTier.before(second, "load")
        for i in range(offloading.MAX_UNANSWERED + 2):
            qwen3.complete(second, f"b{i}-", 0)
        assert len(paused.answers) == offloading.MAX_UNANSWERED
        assert told(second)["lookups_late"] == offloading.MAX_UNANSWERED
        second.run(paused.go)
        (done,) = qwen3.complete(second, "c", 0)
        assert done.info["num_host_tokens"] == NUM_LENT
        node.settle()
        assert node.status()["num_lent"] == 0


@pytest.mark.parametrize("kind", ["store", "load"])
def test_requests_that_a_silent_tier_has_are_computed_again(
    growing: Case, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "SLACK_S", 0.1)
    with Node.open(growing.path, [SMALL], store=False, load="never", transfer_s=0.2) as node:
        (engine,) = node.engines
        paused = PausedTier.before(engine, kind)
        done = growing.complete(engine, "a", *range(8))
        assert told(engine)["swaps_failed"] >= 1
        assert sum(d.info["num_swaps"] for d in done) >= 1
        engine.run(paused.go)
        node.settle()
        assert node.status()["num_kept"] == 0
        assert not engine.offloading.swapping._asked


def test_what_is_known_of_requests_goes_with_them(growing: Case) -> None:
    """Loaded, swapped, aborted or finished; whether anything is stored or not."""
    for store in (True, False):
        with Node.open(growing.path, [SMALL, {"num_blocks": 100}], store=store) as node:
            small, large = node.engines
            if not store:
                settings = replace(node.settings, store=True)
                large.run(partial(setattr, large.offloading.side, "settings", settings))
            growing.complete(large, "a", 0, 1, 2)
            node.settle()
            streams = [small.start(growing.request(f"b{i}", i)) for i in range(8)]
            until(lambda e=small: bool(e.offloading.swapping._swapped), "one is away")
            for i in (3, 7):
                small.engine.leader.abort(f"b{i}")
            for i, stream in enumerate(streams):
                completion = small.engine.collect(stream)
                whole = completion.finish_reason != FinishReason.ABORT
                assert completion.token_ids == growing.expected[i][: len(completion.token_ids)]
                assert whole == (len(completion.token_ids) == 120)
            node.settle()
            parts = small.offloading, small.offloading.storing, small.offloading.swapping
            left = {name: v for p in parts for name, v in vars(p).items() if type(v) is dict and v}
            assert left == {}
            assert not small.engine.leader.manager._keys
            assert node.status()["num_kept"] == node.status()["num_lent"] == 0


def test_pages_that_change_in_host_memory_are_computed_again_and_stored_anew(qwen3: Case) -> None:
    with open_node(qwen3, [{"tp": 2}, {}]) as node:
        first, second = node.engines
        qwen3.complete(first, "a", 0)
        node.settle()

        def flip(tier: HostTier) -> None:
            block = min(tier.manager.prefixes.named)  # type: ignore[union-attr]
            tier.caches.buffer[block * tier.caches.geometry.block_bytes + 5] ^= 2

        node.thread.ask(flip)
        (done,) = qwen3.complete(second, "b", 0)
        assert "offload_failure" in done.info
        assert done.info["num_host_tokens"] < NUM_LENT
        node.settle()
        assert node.status()["changed_pages"] == 1
        (done,) = qwen3.complete(second, "c", 0)
        assert "offload_failure" not in done.info
        node.settle()


# What is stored together.


@pytest.mark.parametrize("active_bytes", [storing.ACTIVE_BYTES, 1])
def test_small_stores_go_together_and_large_ones_one_after_the_other(
    qwen3: Case, active_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storing, "ACTIVE_BYTES", active_bytes)
    together = storing.ACTIVE_STORES if active_bytes > 1 else 1
    with open_node(qwen3, [{}]) as node:
        (engine,) = node.engines
        paused = PausedTier.before(engine, "store")
        qwen3.complete(engine, "a", *range(8))
        until(lambda: len(paused.answers) == together, "as many are stored as may be")
        begun = engine.run(lambda: len(engine.offloading.storing._begun))
        assert begun == together
        assert told(engine)["recent_stores"] == []
        engine.run(paused.go)
        node.settle()
        recent, counts = told(engine)["recent_stores"], told(engine)
        assert len(recent) == counts["stores"] >= 8
        assert sum(num_bytes for _, _, num_bytes in recent) == counts["stored_bytes"]

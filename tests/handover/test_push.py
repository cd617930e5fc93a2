"""Push between two engines of this process: the same bytes and tokens as a pull, layer by layer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayk.engine.build import RequestResult
from rayk.engine.leader import RequestEvent
from rayk.transfer.agent import Handle, Ints32, Transfer, TransferState
from rayk.transfer.costs import MAX_DESCRIPTORS
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.push_messages import HelloMessage, StoppedMessage, decode_push
from rayk.transfer.pusher import Pusher
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import DeadlineExceeded, KVMismatch, TransferError
from rayk.types.request import FinishReason
from tests.handover.cases import NUM_TOKENS, Model, stubborn_agents
from tests.pd import Pair, make_request, wait_until


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


def pusher_of(pair: Pair) -> Pusher:
    """That of P's only rank, or its first."""
    pusher = pair.p.extensions[0]._push._pusher
    assert pusher is not None
    return pusher


def wait_until_pushed(pusher: Pusher) -> None:
    """All that its engine has had it push so far has been written."""
    has_begun = threading.Event()
    pusher._post(has_begun.set)  # behind what the engine asked for
    wait_until(lambda: has_begun.is_set() and not pusher.num_pushing)


def rows_of(completion: RequestResult) -> list[Any]:
    return list(completion.info["transfers"])


@pytest.mark.parametrize("tp", [(1, 1), (1, 2), (2, 1), (2, 4)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_pushed_requests_decode_as_pulled_ones(qwen3: Model, tp: tuple[int, int]) -> None:
    with Pair.open(qwen3.path, tp=tp, push=True) as pair:
        requests = [make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(qwen3.prompts)]
        done = pair.complete(requests)
        assert [d.token_ids for d in done] == qwen3.expected
        assert {row.mode for d in done for row in rows_of(d)} == {"push"}
        pair.check_all_free()


def test_early_layers_are_written_before_the_last_is_computed(qwen3: Model) -> None:
    """In order, whatever the times: the last layer waits here until the first ones have been posted."""
    with Pair.open(qwen3.path, push=True, push_layers=1) as pair:
        (rank,) = pair.p.engine.ranks
        (side,) = (e._push for e in pair.p.extensions)
        last = rank.decoder.layers[-1]
        posted_by_then: list[int] = []

        class Waits:
            """The last layer, which computes when all before it are on their way."""

            def forward(self, *arguments: Any) -> Any:
                pusher = side._pusher
                if pusher is not None and pusher._guarded:  # by the engine's thread, at once
                    num_before = len(rank.decoder.layers) - 1
                    wait_until(lambda: pusher.num_posted >= num_before, 30.0)
                    posted_by_then.append(pusher.num_posted)
                return last.forward(*arguments)

        rank.decoder.layers = (*rank.decoder.layers[:-1], Waits())
        (done,) = pair.complete([make_request("r", qwen3.prompts[1], NUM_TOKENS)])
        assert done.token_ids == qwen3.expected[1]
        num_layers = len(rank.decoder.layers)
        assert posted_by_then == [num_layers - 1]
        (row,) = rows_of(done)
        assert (row.num_writes, row.num_early_writes) == (num_layers, num_layers - 1)
        assert (row.num_layers_per_write, row.costs) == (1, "")
        pair.check_all_free()


def test_ranks_that_write_to_each_other_say_hello_first(
    qwen3: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a real network the first message takes long: no request waits for it."""
    told: list[tuple[str, str]] = []
    real = LocalAgent.notify

    def notify(agent: LocalAgent, peer: str, message: bytes) -> None:
        if isinstance(decode_push(message), HelloMessage):
            told.append((agent.name.partition(".")[2], peer.partition(".")[2]))
        real(agent, peer, message)

    monkeypatch.setattr(LocalAgent, "notify", notify)
    with Pair.open(qwen3.path, tp=(2, 4), push=True) as pair:
        assert sorted(told) == [("0-push", "0"), ("0-push", "1"), ("1-push", "2"), ("1-push", "3")]
        pair.check_all_free()


@pytest.mark.parametrize("most", [1, 40])
def test_long_writes_go_in_parts(qwen3: Model, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Of single blocks, or as many as there may be descriptors for; all together bring what one does."""
    posted: list[tuple[int, int]] = []
    real = LocalAgent.write

    def write(agent: LocalAgent, handle: Any, ours: Any, theirs: Any, *more: Any) -> Any:
        posted.append((len(ours), len(np.unique(ours % agent._handles[handle].local.num_blocks))))
        return real(agent, handle, ours, theirs, *more)

    monkeypatch.setattr(LocalAgent, "write", write)
    rows = []
    for limit in (MAX_DESCRIPTORS, most):
        posted.clear()
        monkeypatch.setattr("rayk.transfer.push.MAX_DESCRIPTORS", limit)
        with Pair.open(qwen3.path, tp=(1, 2), layouts=("BLNHC", "BHLNC"), push=True) as pair:
            (done,) = pair.complete([make_request("r", qwen3.prompts[2], NUM_TOKENS)])
            assert done.token_ids == qwen3.expected[2]
            pair.check_all_free()
        assert all(size <= limit or blocks == 1 for size, blocks in posted)
        assert sum(size for size, _ in posted) == sum(row.num_descriptors for row in rows_of(done))
        rows.append([(row.bytes, row.num_descriptors) for row in rows_of(done)])
        assert sum(row.num_writes for row in rows_of(done)) == len(posted)
    assert rows[0] == rows[1]
    assert len(posted) > len(rows[1])


# Preemption


@pytest.mark.parametrize("tp", [(1, 1), (2, 1)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_a_preempted_prompt_is_pushed_again(qwen3: Model, tp: tuple[int, int]) -> None:
    """P holds the long prompt alone, but not beside one that is decoded: each time its blocks are used up, it
    begins anew."""
    small = {"num_blocks": 20, "max_batch_tokens": 8}
    with Pair.open(qwen3.path, tp=tp, push=True, push_layers=1, changes=(small, {})) as pair:
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        other = make_request("other", qwen3.prompts[1], 90)
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        reservation = pair.reserve(request)
        pair.p.handover.submit(other, events.put, hand_over=False)
        done = pair.p.engine.collect(pair.start_prefill(request, reservation=reservation))
        assert isinstance(done.payload, TransferTicket)
        assert done.payload.attempt == pair.p.engine.leader.scheduler.num_preemptions > 0
        assert done.payload.reservation_id == reservation.reservation_id
        done = pair.d.engine.collect(pair.start_decode(request, done), into=done)
        assert done.error is None
        assert done.token_ids == qwen3.expected[2]
        assert pair.p.engine.collect(events).token_ids[:NUM_TOKENS] == qwen3.expected[1]
        pair.check_all_free()


def test_blocks_that_are_read_are_not_handed_out_before_that_ends(qwen3: Model) -> None:
    """The writes of an aborted request do not end: whoever gets its blocks waits for them, and D keeps its
    own."""
    make, made = stubborn_agents()
    small = {"num_blocks": 25, "max_batch_tokens": 64}
    with Pair.open(qwen3.path, make_agent=make, push=True, push_layers=1, changes=(small, {})) as pair:
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        reservation = pair.reserve(request)
        stream = pair.start_prefill(request, reservation=reservation)
        wait_until(lambda: pusher_of(pair).num_posted > 0)
        pair.p.engine.leader.abort("r")
        pair.p.engine.collect(stream)
        pair.d.handover.settle("r")
        other = make_request("other", qwen3.prompts[2][:290], NUM_TOKENS)
        waiting = pair.start_prefill(other)
        worker = pusher_of(pair)._worker
        wait_until(lambda: bool(worker._voiding), what=lambda: "somebody waits for the blocks")
        assert waiting.empty()
        assert pair.d.num_free_blocks == pair.d.num_blocks - 19, "300 tokens stay reserved"
        for agent in made:
            agent.go = True
        done = pair.p.engine.collect(waiting)
        assert done.payload is not None
        assert pair.decode(other, done).error is None
        pair.check_all_free()


# The end of a request, at every stage


def test_a_request_that_waits_for_blocks_is_aborted(qwen3: Model) -> None:
    with Pair.open(qwen3.path, push=True, changes=({}, {"num_blocks": 24})) as pair:
        first = pair.reserve(make_request("first", qwen3.prompts[2], NUM_TOKENS))
        waiting = pair.start_reserve(make_request("r", qwen3.prompts[2], NUM_TOKENS))
        late = pair.start_reserve(make_request("late", qwen3.prompts[2], NUM_TOKENS), reserve_s=0.2)
        assert isinstance(pair.d.engine.collect(late).error, DeadlineExceeded)
        pair.d.engine.leader.abort("r")
        assert pair.d.engine.collect(waiting).finish_reason is FinishReason.ABORT
        pair.d.engine.leader.abort(first.request_id)
        pair.check_all_free()


@pytest.mark.parametrize("tp", [(1, 1), (2, 4)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_a_reservation_that_nobody_uses_is_given_up(qwen3: Model, tp: tuple[int, int]) -> None:
    with Pair.open(qwen3.path, tp=tp, push=True) as pair:
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        for _ in range(2):  # the id is free again each time
            pair.reserve(request)
            assert pair.d.num_free_blocks < pair.d.num_blocks
            pair.d.engine.leader.abort("r")
            pair.check_all_free()
        events = pair.start_reserve(request, hold_s=0.1)
        assert pair.d.engine.collect(events).payload is not None
        pair.check_all_free()


@pytest.mark.parametrize("where", ["p", "d"])
def test_abort_while_layers_are_on_their_way(qwen3: Model, where: str) -> None:
    make, made = stubborn_agents()
    with Pair.open(qwen3.path, make_agent=make, push=True, push_layers=1, max_batch_tokens=8) as pair:
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        stream = pair.start_prefill(request, reservation=pair.reserve(request))
        wait_until(lambda: pusher_of(pair).num_posted > 0)
        side = pair.p if where == "p" else pair.d
        side.engine.leader.abort("r")
        if where == "p":
            assert pair.p.engine.collect(stream).finish_reason is FinishReason.ABORT
            pair.d.engine.leader.abort("r")
        # Nothing says that the writes have ended: D's blocks are nobody's.
        side = pair.d
        side.run(lambda: None)
        assert side.num_free_blocks == side.num_blocks - 19
        for agent in made:
            agent.go = True
        if where == "d":
            done = pair.p.engine.collect(stream)
            late = pair.decode(request, done)
            assert isinstance(late.error, TransferError)
            assert "given up" in late.error.reason
            assert late.token_ids == []
            pair.p.handover.settle("r")
        pair.check_all_free()


def test_d_aborts_while_it_waits_for_arrivals(qwen3: Model) -> None:
    make, made = stubborn_agents()
    with Pair.open(qwen3.path, tp=(2, 1), make_agent=make, push=True) as pair:
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        done = pair.p.engine.collect(pair.start_prefill(request, reservation=pair.reserve(request)))
        events = pair.start_decode(request, done)
        pair.d.engine.leader.abort("r")
        assert pair.d.engine.collect(events).finish_reason is FinishReason.ABORT
        assert pair.d.num_free_blocks == pair.d.num_blocks - 19
        for agent in made:
            agent.go = True
        pair.check_all_free()


def test_arrivals_that_do_not_come_in_time(qwen3: Model) -> None:
    make, made = stubborn_agents()
    with Pair.open(qwen3.path, make_agent=make, push=True) as pair:
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        done = pair.p.engine.collect(pair.start_prefill(request, reservation=pair.reserve(request)))
        late = pair.decode(request, done, transfer_s=0.3)
        assert isinstance(late.error, TransferError)
        assert "deadline" in late.error.reason
        assert late.token_ids == []
        assert pair.d.num_free_blocks == pair.d.num_blocks - 19, "somebody may still write"
        for agent in made:
            agent.go = True
        pair.check_all_free()


def test_a_wrong_byte_is_found(qwen3: Model) -> None:
    """What lies at D after the push is what is digested."""
    with Pair.open(qwen3.path, push=True) as pair:
        request = make_request("r", qwen3.prompts[1], NUM_TOKENS)
        reservation = pair.reserve(request)
        done = pair.p.engine.collect(pair.start_prefill(request, reservation=reservation))
        wait_until_pushed(pusher_of(pair))
        (rank,) = pair.d.engine.ranks
        block = reservation.block_tables[0][1]
        view = rank.caches.view(2, "attention")
        pair.d.run(lambda: view[block].view(torch.int32)[1, 3].bitwise_xor_(1 << 7))
        late = pair.decode(request, done)
        assert isinstance(late.error, KVMismatch)
        assert late.error.layer == 2
        pair.d.handover.settle("r")
        pair.check_all_free()


def test_a_request_that_ends_where_it_was_prefilled(qwen3: Model) -> None:
    with Pair.open(qwen3.path, push=True) as pair:
        (done,) = pair.complete([make_request("r", qwen3.prompts[2], 1)])
        assert done.finish_reason is FinishReason.LENGTH
        assert done.token_ids == qwen3.expected[2][:1]
        pair.check_all_free()


class UnluckyAgent(LocalAgent):
    """Its first write fails. Notes what it writes, and that it says that nothing follows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.said: list[str] = []

    def write(
        self, handle: Handle, ours: Ints32, theirs: Ints32, notification: bytes | None = None
    ) -> Transfer:
        self.said.append("write")
        return super().write(handle, ours, theirs, notification)

    def poll(self, transfer: Transfer) -> TransferState:
        is_first = self.said == ["write"]
        return TransferState.FAILED if is_first else super().poll(transfer)

    def notify(self, peer: str, message: bytes) -> None:
        if isinstance(decode_push(message), StoppedMessage):
            self.said.append("stopped")
        super().notify(peer, message)


def test_nothing_is_written_after_a_rank_said_that_it_stopped(qwen3: Model) -> None:
    """Though the prompt is computed on: D may have handed the blocks out again."""
    network, made = LocalNetwork(), []

    def make(name: str) -> UnluckyAgent:
        made.append(UnluckyAgent(name, network))
        return made[-1]

    with Pair.open(qwen3.path, make_agent=make, push=True, push_layers=4, max_batch_tokens=64) as pair:
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        done = pair.p.engine.collect(pair.start_prefill(request, reservation=pair.reserve(request)))
        late = pair.decode(request, done)
        assert isinstance(late.error, TransferError)
        assert "producer rank 0 stopped: a write to" in late.error.reason
        pair.p.handover.settle("r")
        pair.check_all_free()
    assert [agent.said for agent in made if agent.said] == [["write", "stopped"]]

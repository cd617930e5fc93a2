"""Hand-over between two engines of this process: leases, waits, aborts, refusals, and what ends them."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import RequestResult
from rayk.engine.leader import RequestEvent
from rayk.handover.commands import Capture
from rayk.handover.extension import TransferExtension
from rayk.transfer.ticket_seal import sealed
from rayk.types.errors import DeadlineExceeded, TransferError, UserError
from rayk.types.request import FinishReason
from tests.handover.cases import NUM_TOKENS, Model, stubborn_agents
from tests.markers import nixl
from tests.pd import Clock, Pair, local_agents, make_request, wait_until


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


@pytest.fixture(scope="module")
def mistral(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("mistral")
    return Model(path, reference(path))


def last_event(events: queue.SimpleQueue[RequestEvent], pair: Pair) -> RequestResult:
    return pair.d.engine.collect(events)


# Leases


@pytest.mark.parametrize("tp", [(1, 1), (4, 1), (1, 4), (4, 2), (2, 4)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_every_producer_rank_is_told_also_replicas_nobody_reads(qwen3: Model, tp: tuple[int, int]) -> None:
    with Pair.open(qwen3.path, tp=tp) as pair:
        assert pair.generate(qwen3.prompts) == qwen3.expected
        pair.check_all_free()
        for extension in pair.p.extensions:
            wait_until(lambda e=extension: e.transfer._leases.open_leases == ())  # type: ignore[misc]
        assert pair.p.handover.num_expired_leases == 0


def test_a_ticket_of_other_tokens_is_refused_and_its_lease_released(qwen3: Model) -> None:
    with Pair.open(qwen3.path, tp=(1, 2)) as pair:
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        done = pair.prefill(request)
        wrong = replace(done, payload=sealed(replace(done.payload, num_tokens=10**12)))
        late = pair.decode(request, wrong)
        assert isinstance(late.error, TransferError)
        assert "its ticket is of other tokens" in late.error.reason
        wait_until(lambda: pair.p.extensions[0].transfer._leases.open_leases == ())
        pair.check_all_free()


def test_a_lease_nobody_comes_for_expires(qwen3: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with Pair.open(qwen3.path, tp=(2, 1), lease_s=600.0) as pair:
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        done = pair.prefill(request)
        assert pair.p.num_blocks - pair.p.num_free_blocks == 19, "300 tokens stay leased"
        again = pair.prefill(request)
        assert isinstance(again.error, UserError), "the id is in use while the lease lasts"
        clock.go_on(600.0)
        wait_until(lambda: pair.p.handover.num_expired_leases == 1)
        pair.check_all_free()
        # The blocks are used by others now: whoever comes late is refused, and nothing is decoded.
        other = pair.prefill(make_request("other", qwen3.prompts[2], NUM_TOKENS))
        late = pair.decode(request, done)
        assert isinstance(late.error, TransferError)
        assert "reused" in late.error.reason
        assert late.token_ids == []
        assert pair.decode(make_request("other", qwen3.prompts[2]), other).error is None
        pair.check_all_free()


def test_a_request_may_come_again_under_its_id(qwen3: Model) -> None:
    with Pair.open(qwen3.path) as pair:
        for _ in range(3):
            request = make_request("same", qwen3.prompts[1], NUM_TOKENS)
            prefilled = pair.prefill(request)
            decoded = pair.decode(request, prefilled)
            assert prefilled.token_ids + decoded.token_ids == qwen3.expected[1]
            wait_until(lambda: not pair.p.handover.holds("same"))
        pair.check_all_free()


def test_settling_ends_a_lease(qwen3: Model) -> None:
    with Pair.open(qwen3.path, tp=(2, 1)) as pair:
        pair.prefill(make_request("r", qwen3.prompts[1]))
        assert pair.p.num_free_blocks < pair.p.num_blocks
        pair.p.handover.settle("r")
        pair.p.handover.settle("nobody")
        pair.check_all_free()


def test_blocks_reused_while_they_are_read(qwen3: Model) -> None:
    """P forgets the lease and prefills something else; D's data looks fine, its generations do not."""
    make_agent, agents = stubborn_agents()
    with Pair.open(qwen3.path, make_agent=make_agent, changes=({"num_blocks": 22}, {})) as pair:
        request = make_request("r", qwen3.prompts[2])
        stream = pair.start_decode(request, pair.prefill(request))
        pair.p.engine.leader.abort("r")
        again = pair.prefill(make_request("thief", qwen3.prompts[2]))
        assert again.error is None
        for agent in agents:
            agent.go = True
        done = last_event(stream, pair)
        assert isinstance(done.error, TransferError)
        assert "reused" in done.error.reason
        pair.p.handover.settle("thief")
        pair.check_all_free()


def test_a_lease_lasts_until_every_consumer_rank_is_done(qwen3: Model) -> None:
    make_agent, agents = stubborn_agents()
    with Pair.open(qwen3.path, tp=(2, 2), make_agent=make_agent) as pair:
        request = make_request("r", qwen3.prompts[2], 4)
        stream = pair.start_decode(request, pair.prefill(request))
        # Rank 0 of D reads from rank 0 of P alone, and is done.
        quick = pair.d.extensions[0].transfer.description.agent_name
        next(a for a in agents if a.name == quick).go = True
        wait_until(lambda: pair.p.extensions[0].transfer._leases.open_leases == ())
        time.sleep(0.03)
        assert pair.p.num_blocks - pair.p.num_free_blocks == 19, "rank 1 of D still reads"
        for agent in agents:
            agent.go = True
        assert last_event(stream, pair).error is None
        pair.check_all_free()


def test_a_copy_that_fails_is_its_requests_error(qwen3: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of the request stays behind."""

    def execute(self: Any, command: object) -> object:
        if isinstance(command, Capture):
            raise TransferError(command.request_id, "no such rows")
        return whole(self, command)

    whole = TransferExtension.execute
    monkeypatch.setattr(TransferExtension, "execute", execute)
    with Pair.open(qwen3.path, tp=(2, 1)) as pair:
        done = pair.prefill(make_request("r", qwen3.prompts[1]), capture=True)
        assert isinstance(done.error, TransferError)
        assert done.error.reason == "no such rows"
        pair.check_all_free()
        # One that was to go on here: it stops.
        events: Any = queue.SimpleQueue()
        request = make_request("s", qwen3.prompts[1], 900)
        pair.p.handover.submit(request, events.put, hand_over=False, capture=True)
        assert isinstance(pair.p.engine.collect(events).error, TransferError)
        pair.check_all_free()
        assert pair.p.engine.loops[0].times.num_steps < 900
        assert pair.prefill(make_request("r", qwen3.prompts[1])).error is None
        pair.p.handover.settle("r")
        pair.check_all_free()


# Waiting for blocks


def test_a_full_decode_pool_makes_requests_wait(qwen3: Model) -> None:
    """D holds one request of 324 tokens at a time; the others wait for it, or give up at their deadline."""
    with Pair.open(qwen3.path, changes=({"num_blocks": 100}, {"num_blocks": 24})) as pair:
        requests = [make_request(f"r{i}", qwen3.prompts[2], NUM_TOKENS) for i in range(3)]
        prefilled = [pair.prefill(r) for r in requests]
        long = make_request("long", qwen3.prompts[2], 40)
        first = pair.start_decode(long, pair.prefill(long))
        second = pair.start_decode(requests[0], prefilled[0])
        third = pair.start_decode(requests[1], prefilled[1])
        hasty = pair.start_decode(requests[2], prefilled[2], reserve_s=0.0)
        error = last_event(hasty, pair).error
        assert isinstance(error, DeadlineExceeded)
        assert "waiting for KV blocks" in str(error)
        assert last_event(first, pair).error is None
        for stream, done in ((second, prefilled[0]), (third, prefilled[1])):
            decoded = last_event(stream, pair)
            assert done.token_ids + decoded.token_ids == qwen3.expected[2]
            assert decoded.info["stage_ns"]["reserve"] > 0
        assert pair.d.engine.leader.scheduler.num_preemptions == 0
        pair.p.handover.settle("r2")
        pair.check_all_free()


@pytest.mark.parametrize("num_blocks", [22, 25, 28])
def test_handed_over_requests_that_are_preempted_recompute(qwen3: Model, num_blocks: int) -> None:
    order = [2, 1, 0, 1, 1]
    with Pair.open(qwen3.path, changes=({}, {"num_blocks": num_blocks, "max_batch_tokens": 64})) as pair:
        prompts = [qwen3.prompts[n] for n in order]
        assert pair.generate(prompts) == [qwen3.expected[n] for n in order]
        pair.check_all_free()


def test_a_newcomer_leaves_running_requests_a_block_to_go_on_with(qwen3: Model) -> None:
    """22 blocks: 19 hold the first request, which needs two more; the second one's three must wait."""
    with Pair.open(qwen3.path, changes=({}, {"num_blocks": 23})) as pair:
        requests = [make_request(name, qwen3.prompts[n], NUM_TOKENS) for name, n in (("a", 2), ("b", 1))]
        prefilled = [pair.prefill(r) for r in requests]
        first = pair.start_decode(requests[0], prefilled[0])
        first.get(timeout=60)
        second = pair.start_decode(requests[1], prefilled[1])
        assert prefilled[0].token_ids + last_event(first, pair).token_ids == qwen3.expected[2]
        assert prefilled[1].token_ids + last_event(second, pair).token_ids == qwen3.expected[1]
        assert pair.d.engine.leader.scheduler.num_preemptions == 0
        pair.check_all_free()


def test_a_newcomer_waits_behind_a_request_that_lacks_blocks(qwen3: Model) -> None:
    """The long one grows until the large one must go; then 18 blocks are free, but the large one is first."""
    with Pair.open(qwen3.path, changes=({}, {"num_blocks": 25})) as pair:
        scheduler = pair.d.engine.leader.scheduler
        newcomer = make_request("newcomer", qwen3.prompts[1], NUM_TOKENS)
        prefilled = pair.prefill(newcomer)
        long = pair.d.engine.submit(make_request("long", qwen3.prompts[1], 240))
        large = pair.d.engine.submit(make_request("large", qwen3.prompts[2], 70))
        wait_until(lambda: scheduler.num_preemptions == 1)
        came_back = pair.start_decode(newcomer, prefilled)
        large_events = []
        while not large_events or not large_events[-1].is_last:
            large_events.append(large.get(timeout=60))
        started = came_back.get(timeout=60)
        gap = max(b.time_ns - a.time_ns for a, b in itertools.pairwise(large_events))
        resumed = next(b for a, b in itertools.pairwise(large_events) if b.time_ns - a.time_ns == gap)
        assert started.time_ns > resumed.time_ns
        assert prefilled.token_ids + last_event(came_back, pair).token_ids == qwen3.expected[1]
        assert last_event(long, pair).error is None
        pair.check_all_free()


def test_a_request_that_arrives_is_decoded_at_once(qwen3: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only after an idle engine's next heartbeat, which here does not come in time."""
    with Pair.open(qwen3.path) as pair, monkeypatch.context() as patched:
        patched.setattr("rayk.engine.leader.HEARTBEAT_S", 1000.0)
        for i in range(8):
            request = make_request(f"r{i}", qwen3.prompts[0], 2)
            events = pair.start_decode(request, pair.prefill(request))
            assert not events.get(timeout=60).token_ids, "its KV has arrived"
            assert last_event(events, pair).error is None


# Aborts


def test_an_abort_while_reading_frees_blocks_only_afterwards(qwen3: Model) -> None:
    make_agent, agents = stubborn_agents()
    with Pair.open(qwen3.path, tp=(2, 2), make_agent=make_agent) as pair:
        request = make_request("r", qwen3.prompts[2])
        prefilled = pair.prefill(request)
        stream = pair.start_decode(request, prefilled)
        wait_until(lambda: pair.d.num_free_blocks < pair.d.num_blocks)
        pair.d.engine.leader.abort("r")
        assert last_event(stream, pair).finish_reason is FinishReason.ABORT
        refused = last_event(pair.start_decode(request, prefilled), pair)
        assert isinstance(refused.error, UserError), "the id is in use until the reads have ended"
        time.sleep(0.05)
        assert pair.d.num_blocks - pair.d.num_free_blocks == 19, "reads still write into these"
        for agent in agents:
            agent.go = True
        pair.check_all_free()
        assert pair.p.handover.num_expired_leases == 0


def test_a_deadline_while_reading_frees_blocks_only_after_draining(qwen3: Model) -> None:
    make_agent, agents = stubborn_agents()
    with Pair.open(qwen3.path, tp=(1, 2), make_agent=make_agent) as pair:
        request = make_request("r", qwen3.prompts[2])
        done = pair.decode(request, pair.prefill(request), transfer_s=0.05)
        assert isinstance(done.error, TransferError)
        assert "deadline" in done.error.reason
        assert done.token_ids == []
        time.sleep(0.05)
        assert pair.d.num_blocks - pair.d.num_free_blocks == 19, "reads still write into these"
        for agent in agents:
            agent.go = True
        pair.check_all_free()


@pytest.mark.parametrize("when", ["queued", "prefilling", "leased", "decoding"])
def test_aborts_at_every_other_time(qwen3: Model, when: str) -> None:
    with Pair.open(qwen3.path, changes=({"max_batch_tokens": 16}, {"num_blocks": 100})) as pair:
        request = make_request("r", qwen3.prompts[2], 1000)
        if when == "prefilling":
            stream = pair.start_prefill(request)
            pair.p.engine.leader.abort("r")
            assert pair.p.engine.collect(stream).finish_reason is FinishReason.ABORT
            pair.check_all_free()
            return
        prefilled = pair.prefill(request)
        if when == "leased":
            pair.p.engine.leader.abort("r")
        elif when == "queued":
            pair.d.run(lambda: pair.d.engine.leader.manager.extend("hog", 16 * 90))
            stream = pair.start_decode(request, prefilled)
            pair.d.engine.leader.abort("r")
            assert last_event(stream, pair).finish_reason is FinishReason.ABORT
            pair.d.run(lambda: pair.d.engine.leader.manager.free("hog"))
            pair.p.handover.settle("r")
        else:
            stream = pair.start_decode(request, prefilled)
            while not stream.get(timeout=60).token_ids:
                pass
            pair.d.engine.leader.abort("r")
            assert last_event(stream, pair).finish_reason is FinishReason.ABORT
        pair.check_all_free()


def test_a_request_that_ends_with_its_first_token_needs_no_ticket(qwen3: Model) -> None:
    with Pair.open(qwen3.path) as pair:
        done = pair.prefill(make_request("one", qwen3.prompts[0], 1))
        assert (done.token_ids, done.finish_reason) == (qwen3.expected[0][:1], FinishReason.LENGTH)
        assert done.payload is None
        stop = make_request("stop", qwen3.prompts[0], 9, stop_token_ids=(qwen3.expected[0][0],))
        assert pair.prefill(stop).finish_reason is FinishReason.STOP
        pair.check_all_free()
        # Nothing sticks to the id.
        stream = pair.p.engine.submit(make_request("one", qwen3.prompts[0], NUM_TOKENS))
        assert pair.p.engine.collect(stream).token_ids == qwen3.expected[0]


def test_the_prefill_pool_need_not_hold_the_output(qwen3: Model) -> None:
    with Pair.open(qwen3.path, changes=({"num_blocks": 20}, {"num_blocks": 100})) as pair:
        request = make_request("r", qwen3.prompts[2], 700)
        assert pair.prefill(request).error is None


def test_an_engine_that_dies_tells_every_hand_over(qwen3: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    make_agent, _ = stubborn_agents()
    with Pair.open(qwen3.path, make_agent=make_agent) as pair:
        request = make_request("r", qwen3.prompts[1])
        stream = pair.start_decode(request, pair.prefill(request))
        wait_until(lambda: pair.d.num_free_blocks < pair.d.num_blocks)
        pair.d.engine.leader.stop()
        assert last_event(stream, pair).error is not None


def test_rows_tell_what_both_sides_digests_took(qwen3: Model) -> None:
    with Pair.open(qwen3.path, tp=(2, 1)) as pair:
        request = make_request("r", qwen3.prompts[2], NUM_TOKENS)
        prefilled = pair.prefill(request)
        theirs = prefilled.payload.digest_ns  # type: ignore[union-attr]
        done = pair.decode(request, prefilled)
        own = {row.digest_ns - theirs[row.producer_rank] for row in done.info["transfers"]}
        assert len(theirs) == 2
        assert min(theirs) > 0
        assert len(own) == 1, "one consumer rank, one digest of all that came"
        assert 0 < own.pop() <= done.info["stage_ns"]["verify"]
        pair.check_all_free()


# Windows, unlike blocks, and the real transport


def test_only_the_windows_blocks_cross(mistral: Model) -> None:
    small = {"num_blocks": 8, "max_batch_tokens": 16}
    with Pair.open(mistral.path, tp=(1, 2), changes=({}, small)) as pair:
        request = make_request("r", mistral.prompts[2], NUM_TOKENS)
        prefilled = pair.prefill(request)
        # 300 tokens, window 50: rows 251 to 299, in blocks 15 to 18.
        assert pair.p.num_blocks - pair.p.num_free_blocks == 4
        done = pair.decode(request, prefilled)
        assert prefilled.token_ids + done.token_ids == mistral.expected[2]
        for row in done.info["transfers"]:
            assert row.bytes == 4 * 16 * 4 * 1 * 32 * 4, "blocks x tokens x layers x heads x (K, V) x float32"
        pair.check_all_free()


@pytest.mark.parametrize("sizes", [(8, 16), (32, 16), (16, 24)], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_unlike_block_sizes(qwen3: Model, mistral: Model, family: str, sizes: tuple[int, int]) -> None:
    model = qwen3 if family == "qwen3" else mistral
    sides = tuple({"block_size": s, "num_blocks": 1600 // s, "kernel_block_size": 8} for s in sizes)
    with Pair.open(model.path, tp=(2, 1), changes=sides) as pair:  # type: ignore[arg-type]
        assert pair.generate(model.prompts) == model.expected
        pair.check_all_free()


def test_delayed_reads_of_many_requests(qwen3: Model) -> None:
    """Reads that take many polls, of requests that come in while others decode."""
    with Pair.open(qwen3.path, tp=(2, 2), make_agent=local_agents(delay_polls=20), num_blocks=100) as pair:
        order = [n for n, _ in zip(itertools.cycle((2, 1, 0)), range(7), strict=False)]
        assert pair.generate([qwen3.prompts[n] for n in order]) == [qwen3.expected[n] for n in order]
        pair.check_all_free()


@nixl
@pytest.mark.parametrize("tp", [(1, 2), (2, 1)], ids=lambda t: f"{t[0]}to{t[1]}")
def test_over_nixl(qwen3: Model, tp: tuple[int, int]) -> None:
    from rayk.transfer.nixl_agent import NixlAgent

    with Pair.open(qwen3.path, tp=tp, layouts=("BHLNC", "LBNHC"), make_agent=NixlAgent) as pair:
        assert pair.generate(qwen3.prompts) == qwen3.expected
        pair.check_all_free()

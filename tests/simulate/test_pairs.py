"""Cells whose engines hand over, in virtual time: what a hand-over takes, what it moves, how it may fail."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from rayk.costs import CostBook
from rayk.costs.losses import StepLosses
from rayk.costs.table import HostTable, LinearCost
from rayk.explain.reads import explain_reads
from rayk.models.config import DecoderConfig
from rayk.models.engine_plan import plan_engine
from rayk.simulate import EngineDeath, SimOutcome, cell_arrivals, simulate_cell
from rayk.specs import Cell
from rayk.types.rows import TransferRow
from tests.markers import thorough
from tests.simulate.cells import (
    DIGEST,
    DISPATCH_NS,
    FENCE,
    HANDOVER_NS,
    MODEL,
    POST,
    STEP_NS,
    TOKEN_NS,
    VERIFY,
    WAIT,
    pair_book,
    pair_cell,
)
from tests.specs.models import decoder

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Layers, K and V, heads, elements of 4 bytes."""
WINDOWED = decoder((None, 12, 12))


def simulated(
    prompts: list[tuple[int, ...]],
    cell: Cell,
    book: CostBook | None = None,
    config: DecoderConfig = MODEL,
    *,
    due_ns: list[int] | None = None,
    **settings: Any,
) -> SimOutcome:
    """Simulate prompts that come at once, or when they are due."""
    arrivals = cell_arrivals(cell, prompts, due_ns=due_ns)
    return simulate_cell(cell, config, arrivals, book or pair_book(cell), **settings)


def adds_up(outcome: SimOutcome) -> None:
    """Stages of every request are all of its time, and readers release what they were lent."""
    assert all(engine.num_expired_leases == 0 for engine in outcome.engines.values())
    for row in outcome.requests:
        assert row.error is None
        assert sum(row.stage_ns.values()) == row.token_times_ns[-1] - row.arrival_ns


def of_pairs(rows: list[TransferRow]) -> dict[tuple[int, int, int], TransferRow]:
    found = {(row.producer_rank, row.consumer_rank, row.group): row for row in rows if row.bytes}
    assert len(found) == sum(1 for row in rows if row.bytes)
    return found


def test_a_hand_over_takes_what_its_parts_take() -> None:
    (row,) = (outcome := simulated([tuple(range(20))], pair_cell(sampling={"max_tokens": 3}))).requests
    (moved,) = outcome.transfers
    prefill, decode = STEP_NS + 20 * TOKEN_NS, STEP_NS + TOKEN_NS
    assert moved.bytes == 20 * TOKEN_BYTES
    post = round(POST.ns(moved.bytes, moved.num_descriptors_merged or 0))
    read = post + round(WAIT.ns(moved.bytes))
    assert row.stage_ns == {
        "queue": 0,
        "dispatch": DISPATCH_NS,
        "prefill_queue": 0,
        "prefill": prefill,
        "ticket": 0,  # commands are carried out at once
        "digest": DIGEST.ns(moved.bytes),
        "handover": HANDOVER_NS,
        "notice": 0,
        "reserve": 0,
        "read": read,
        "fence": FENCE.ns(),
        "verify": VERIFY.ns(moved.bytes),
        "decode_queue": 0,
        "decode": 2 * decode,
    }
    adds_up(outcome)
    assert (row.kv_path, row.prefill_engine, row.decode_engine) == ("remote", "prefill0", "decode0")
    assert row.exposed_ns == sum(row.stage_ns.values()) - DISPATCH_NS - prefill - 2 * decode
    assert (moved.post_ns, moved.transfer_ns) == (post, read)
    assert moved.digest_ns == DIGEST.ns(moved.bytes) + VERIFY.ns(moved.bytes)
    assert outcome.engines["decode0"].read_ns == read


def test_a_turn_for_a_command_comes_before_what_the_command_takes() -> None:
    book, each = pair_book(cell := pair_cell(sampling={"max_tokens": 3})), 40_000
    assert book.any_engine is not None
    commands = {**book.any_engine.commands, "each": LinearCost(fixed_ns=each)}
    slower = replace(book, any_engine=replace(book.any_engine, commands=commands))
    rows = [simulated([tuple(range(20))], cell, b).requests[0] for b in (book, slower)]
    more = {stage: ns - rows[0].stage_ns[stage] for stage, ns in rows[1].stage_ns.items()}
    assert {stage: ns for stage, ns in more.items() if ns} == {"ticket": each, "reserve": each}


def test_what_steps_lose_to_neighbours_is_not_booked_to_hand_overs() -> None:
    """A digest is slowed down while it lasts. It does not pay for the step before it."""
    cell = pair_cell(sampling={"max_tokens": 30})
    book = pair_book(cell)
    assert book.any_engine is not None
    losses = StepLosses(**dict.fromkeys(StepLosses.__slots__, 0.5))
    book = replace(book, any_engine=replace(book.any_engine, losses=losses), host=HostTable(num_cores=2))
    prompts, due_ns = [tuple(range(i, i + 40)) for i in range(12)], [3_000_000 * i for i in range(12)]
    outcome, alone = (simulated(prompts, cell, b, due_ns=due_ns) for b in (book, None))
    for row, moved in zip(outcome.requests, outcome.transfers, strict=True):
        assert row.stage_ns["digest"] <= 1.5 * DIGEST.ns(moved.bytes) + 1
    lasted = [sum(row.stage_ns["prefill"] for row in of.requests) for of in (outcome, alone)]
    assert lasted[0] > 1.2 * lasted[1], "it is steps that take longer"
    adds_up(outcome)


@pytest.mark.parametrize(
    ("config", "engines"),
    [
        (MODEL, {}),
        (MODEL, {"prefill": {"tp": 2}}),
        (MODEL, {"decode": {"tp": 2}}),
        (MODEL, {"prefill": {"tp": 4}, "decode": {"tp": 2, "block_size": 8}}),
        (MODEL, {"prefill": {"layout": "BHLNC"}, "decode": {"layout": "LBNHC"}}),
        (MODEL, {"prefill": {"tp": 4, "dcp": 2}, "decode": {"tp": 2}}),
        (WINDOWED, {"prefill": {"tp": 2}}),
        (WINDOWED, {"decode": {"layout": "LBNHC"}, "transfer": {"staging": "always"}}),
    ],
    ids=str,
)
def test_reads_are_those_of_the_planner(config: DecoderConfig, engines: dict[str, Any]) -> None:
    """A request alone lies in consecutive blocks, as `rayk explain` has it."""
    cell = pair_cell(config, sampling={"max_tokens": 2}, **engines)
    outcome = simulated([tuple(range(37))], cell, config=config)
    assert cell.decode is not None
    sides = plan_engine(cell.prefill, config), plan_engine(cell.decode, config)
    expected = [read for read in explain_reads(*sides, 37, cell.spec.transfer) if read.bytes]
    found = of_pairs(outcome.transfers)
    assert found.keys() == {(read.producer_rank, read.consumer_rank, read.group) for read in expected}
    for read in expected:
        row = found[read.producer_rank, read.consumer_rank, read.group]
        assert row.bytes == read.bytes
        assert row.staged == (read.way != "direct")
        assert row.direct_cost_us == pytest.approx(read.direct_us)
        if read.way == "direct":
            assert row.num_descriptors == read.num_descriptors
            assert row.num_descriptors_merged == read.num_descriptors_merged
    adds_up(outcome)


POLICIES = ("round_robin", "least_loaded", "prefix_aware", "session_affinity", "conditional")


@pytest.mark.parametrize("policy", POLICIES)
def test_several_engines_of_each_kind_share_the_requests(policy: str) -> None:
    draw = random.Random(4)
    prefixes = [tuple(range(n, n + 256)) for n in (10, 100, 200)]
    prompts = [draw.choice([(), *prefixes]) + tuple(draw.choices(range(3, 400), k=9)) for _ in range(30)]
    cell = pair_cell(
        prefill={"num_engines": 2},
        decode={"num_engines": 3},
        engine={"prefix_caching": True, "max_batch_tokens": 128, "max_seqs": 3, "num_blocks": 250},
        sampling={"max_tokens": 9},
        policy=policy,
        policy_settings={"local_prompt_tokens": 12} if policy == "conditional" else {},
        prompts={"random": {"count": 3, "input_tokens": 5}, "num_sessions": 5}
        if policy == "session_affinity"
        else {"random": {"count": 3, "input_tokens": 5}},
    )
    outcome = simulated(prompts, cell, due_ns=[4_000_000 * n for n in range(30)])
    adds_up(outcome)
    assert {row.decode_engine for row in outcome.requests} == {"decode0", "decode1", "decode2"}
    paths = {row.kv_path for row in outcome.requests}
    assert paths == ({"remote", "local"} if policy == "conditional" else {"remote"})
    handed = [row for row in outcome.requests if row.kv_path == "remote"]
    assert {row.prefill_engine for row in handed} == {"prefill0", "prefill1"}
    moved = defaultdict(int)
    for transfer in outcome.transfers:
        moved[transfer.request_id] += transfer.bytes + transfer.held_bytes
    num_blocks = {row.request_id: -(-row.num_prompt_tokens // 4) for row in handed}  # which are read whole
    assert moved == {name: 4 * num * TOKEN_BYTES for name, num in num_blocks.items()}
    assert sum(transfer.held_bytes for transfer in outcome.transfers) > 0, "decode engines have prefixes"
    assert sum(row.num_cached_tokens for row in outcome.requests) > 0, "and so have prefill engines"


def test_a_request_that_ends_with_its_first_token_is_handed_to_nobody() -> None:
    outcome = simulated([(1, 2, 3)], pair_cell(sampling={"max_tokens": 1}))
    (row,) = outcome.requests
    assert (row.finish_reason, row.kv_path, row.decode_engine) == ("length", "none", None)
    assert not outcome.transfers
    adds_up(outcome)


def device_cell(**changes: Any) -> Cell:
    return pair_cell(device="cuda", **{"sampling": {"max_tokens": 6}, **changes})


MOVES_NS = 20_000_000
SLOW = LinearCost(fixed_ns=1_000_000, byte_ns=MOVES_NS / (20 * TOKEN_BYTES))
"""Of a prompt of 20 tokens, whose read moves for MOVES_NS if it is alone."""
PROMPT = tuple(range(20))


def read_ns(outcome: SimOutcome) -> list[int]:
    return [row.stage_ns["read"] for row in outcome.requests]


def test_reads_of_devices_move_beside_steps_and_share_what_there_is() -> None:
    cell = device_cell(decode={"num_engines": 2}, prefill={"num_engines": 2})
    book = pair_book(cell, wait=SLOW)
    alone = simulated([PROMPT], cell, book)
    adds_up(alone)
    (one,) = read_ns(alone)
    assert 0 <= one - MOVES_NS - SLOW.fixed_ns - POST.ns(20 * TOKEN_BYTES, 1) < STEP_NS
    apart = simulated([PROMPT] * 2, cell, book)  # each between two engines of its own
    assert max(read_ns(apart)) < one + STEP_NS
    cell = device_cell(prefill={"num_engines": 2})
    together = simulated([PROMPT] * 2, cell, pair_book(cell, wait=SLOW))  # from two to one
    adds_up(together)
    assert min(read_ns(together)) > 1.7 * MOVES_NS
    assert max(read_ns(together)) < 2.2 * MOVES_NS + SLOW.fixed_ns
    assert together.engines["decode0"].read_ns < 1.2 * max(read_ns(together))


@pytest.mark.parametrize("policy", ["fail", "recompute", "migrate"])
def test_a_read_that_comes_too_late_fails(policy: str) -> None:
    """Its blocks stay taboo until nothing of it is under way; what arrived by then can be used."""
    cell = device_cell(
        prefill={"num_engines": 2}, deadlines={"transfer_s": 0.01, "request_s": 30}, failure_policy=policy
    )
    outcome = simulated([PROMPT], cell, pair_book(cell, wait=SLOW))
    (row,) = outcome.requests
    assert row.failure is not None
    assert "deadline passed while reading" in row.failure
    assert {transfer.verdict for transfer in outcome.transfers} == {"TRANSFER_ERROR"}
    if policy == "recompute":
        adds_up(outcome)
        assert (row.recovered_by, row.num_valid_tokens, row.num_attempts) == ("recompute", 20, 2)
        assert row.stage_ns["retry"] > 0
    else:
        assert row.error is not None
        assert row.num_attempts == (3 if policy == "migrate" else 1)
        assert row.output_token_ids, "the first token was there"


def test_nothing_arrives_of_a_read_whose_producer_dies() -> None:
    cell = device_cell(failure_policy="recompute")
    death = EngineDeath(at_s=0.01, engine="prefill0", returns=False)
    outcome = simulated([PROMPT], cell, pair_book(cell, wait=SLOW), deaths=[death])
    (row,) = outcome.requests
    adds_up(outcome)
    assert (row.failure or "").endswith("producer engine prefill0 is gone")
    assert (row.recovered_by, row.num_valid_tokens, row.num_recomputed_tokens) == ("recompute", 0, 20)
    assert row.token_times_ns[1] < MOVES_NS


@pytest.mark.parametrize("policy", ["fail", "recompute", "migrate"])
def test_blocks_that_are_handed_out_again_are_missed(policy: str) -> None:
    """A lease ends while its ticket travels, and another prompt takes the blocks."""
    cell = pair_cell(
        engine={"num_blocks": 9, "max_batch_tokens": 64},
        decode={"num_blocks": 200},
        sampling={"max_tokens": 4},
        transfer={"lease_s": 0.002},
        failure_policy=policy,
    )
    book = pair_book(cell, handover=5_000_000)
    outcome = simulated([PROMPT, tuple(range(100, 130))], cell, book, due_ns=[0, 3_900_000])
    first, second = outcome.requests
    assert first.failure is not None
    assert "was reused while being read" in first.failure or policy == "migrate"
    if policy == "fail":
        assert first.error is not None
    if policy == "recompute":
        assert (first.error, first.recovered_by, first.num_valid_tokens) == (None, "recompute", 0)
    assert second.num_prompt_tokens == 30


def test_a_lease_that_is_renewed_holds_while_its_ticket_waits_for_blocks() -> None:
    """The second request waits for the first one's blocks, longer than a lease lasts."""
    cell = pair_cell(
        decode={"num_blocks": 11},
        sampling={"max_tokens": 20},
        transfer={"lease_s": 0.003},
        failure_policy="fail",
    )
    due_ns = [0, 8_000_000]
    outcome = simulated([PROMPT, tuple(range(50, 70))], cell, due_ns=due_ns)
    adds_up(outcome)
    assert max(row.stage_ns["reserve"] for row in outcome.requests) > 3 * 3_000_000


def test_equal_seeds_give_equal_rows() -> None:
    cell = pair_cell(prefill={"num_engines": 2}, arrival={"rate": 300.0})
    prompts = [tuple(range(i, i + 9)) for i in range(12)]

    def rows(seed: int) -> SimOutcome:
        return simulated(prompts, cell, pair_book(cell, spread=0.5), noise=True, seed=seed)

    assert (rows(3).requests, rows(3).transfers) == (rows(3).requests, rows(3).transfers)
    assert rows(3).requests != rows(4).requests


@thorough
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("policy", ["fail", "recompute", "migrate"])
def test_nothing_is_left_whatever_happens(device: str, policy: str) -> None:
    """Blocks short, short leases, reads that fail, requests that time out; SimFleet.run looks at the end."""
    seen: set[str] = set()
    for seed in range(10):
        draw = random.Random(seed)
        config = draw.choice([MODEL, WINDOWED])
        cell = pair_cell(
            config,
            device=device,
            prefill={"num_engines": draw.choice([1, 2]), "tp": draw.choice([1, 2])},
            decode={"num_engines": draw.choice([1, 2]), "num_blocks": draw.choice([40, 60, 200])},
            engine={
                "num_blocks": draw.choice([40, 60, 200]),
                "prefix_caching": draw.random() < 0.5,
                "max_batch_tokens": draw.choice([8, 64]),
                "max_seqs": draw.choice([2, 4]),
            },
            sampling={"max_tokens": 16},
            transfer={"lease_s": draw.choice([None, 0.004, 0.5])},
            deadlines={"transfer_s": draw.choice([0.003, 1.0]), "request_s": draw.choice([0.04, 2.0])},
            failure_policy=policy,
        )
        prompts = [tuple(draw.choices(range(3, 9), k=draw.randrange(1, 40))) for _ in range(12)]
        due_ns = sorted(draw.randrange(30_000_000) for _ in prompts)
        book = pair_book(cell, wait=draw.choice([WAIT, SLOW]), spread=0.9, handover=draw.choice([1e5, 5e6]))
        outcome = simulated(prompts, cell, book, config, due_ns=due_ns, noise=True, seed=seed)
        assert len(outcome.requests) == 12
        for row in outcome.requests:
            assert row.finish_reason is not None
            seen.add("error" if row.error else row.kv_path)
            if row.error is None:
                assert sum(row.stage_ns.values()) == row.token_times_ns[-1] - row.arrival_ns
    assert seen >= {"error", "remote"}

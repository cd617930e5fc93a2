"""Requests whose transfer failed go on from what arrived and is proven; no token twice, none missing."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import RequestResult
from rayk.engine.leader import RequestEvent
from rayk.handover import receiving
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import KVMismatch, TransferError
from rayk.types.request import FinishReason, Request
from tests.handover.cases import NUM_TOKENS, Model, TamperingAgent, models_by_name, stubborn_agents
from tests.pd import Pair, make_request, wait_until


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Model]:
    return models_by_name(checkpoint, reference)


def start_decode(
    pair: Pair, request: Request, prefilled: RequestResult, transfer_s: float = 20.0
) -> queue.SimpleQueue[RequestEvent]:
    ticket = prefilled.payload
    assert isinstance(ticket, TransferTicket)
    events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
    pair.d.handover.submit_decode(
        request, ticket, tuple(prefilled.token_ids), transfer_s, events.put, recompute=True
    )
    return events


def tampering_agents() -> tuple[Callable[[str], LocalAgent], list[TamperingAgent]]:
    network, made = LocalNetwork(), []

    def make(name: str) -> LocalAgent:
        made.append(TamperingAgent(name, network))
        return made[-1]

    return make, made


def damage(pair: Pair, rank: int, layer: int, token: int, request_id: str) -> Callable[[], None]:
    """Change one byte of a token's first key in a rank of D, once all of its data is there."""

    def tamper() -> None:
        extension = pair.d.extensions[rank]
        view = next(v for v in extension.transfer._views if v.layer == layer)
        tables = pair.d.engine.leader.manager.block_tables(request_id)
        ids, rows, _ = view.places(tables[view.group.index], view.live_rows(token + 1).stop)
        view.fields[0].view[ids[-1], 0, rows[-1], 0] += 1

    return tamper


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=lambda t: f"{t[0]}to{t[1]}")
@pytest.mark.parametrize("token", [0, 100, 299])
def test_full_attention_keeps_what_stands_before_the_damage(
    models: Callable[[str], Model], tp: tuple[int, int], token: int
) -> None:
    model = models("qwen3")
    make_agent, agents = tampering_agents()
    with Pair.open(model.path, tp=tp, make_agent=make_agent) as pair:
        request = make_request("r", model.prompts[2], NUM_TOKENS)
        prefilled = pair.prefill(request)
        last = tp[1] - 1
        name = pair.d.extensions[last].transfer.description.agent_name
        agent = next(a for a in agents if a.name == name)
        agent.waits_for_all, agent.tamper = True, damage(pair, last, 1, token, "r")
        done = pair.d.engine.collect(start_decode(pair, request, prefilled))
        assert done.error is None
        assert prefilled.token_ids + done.token_ids == model.expected[2]
        rows = pair.d.extensions[0].transfer.description.rows_per_group
        assert done.info["num_valid_tokens"] == token // rows * rows
        assert done.info["num_recomputed_tokens"] == 300 - token // rows * rows
        assert isinstance(done.info["failure"], KVMismatch)
        pair.check_all_free()


@pytest.mark.parametrize(
    ("name", "layer", "token", "num_valid"),
    [
        # Layers with a window of 8 tokens beside full ones: no window but the last is here.
        ("gemma3", 0, 299, 0),
        # A damaged full layer alone: every prefix lacks its windows.
        ("gemma3", 3, 0, 0),
        # States stand for all tokens or for none.
        ("mamba2", 1, 299, 0),
        ("falcon_h1", 0, 100, 0),
    ],
)
def test_layers_that_keep_windows_or_states_begin_anew(
    models: Callable[[str], Model], name: str, layer: int, token: int, num_valid: int
) -> None:
    model = models(name)
    make_agent, agents = tampering_agents()
    with Pair.open(model.path, tp=(1, 1), make_agent=make_agent) as pair:
        request = make_request("r", model.prompts[2], NUM_TOKENS)
        prefilled = pair.prefill(request)
        agent = next(a for a in agents if a.name.startswith(pair.d.engine.name))
        agent.waits_for_all, agent.tamper = True, damage(pair, 0, layer, token, "r")
        done = pair.d.engine.collect(start_decode(pair, request, prefilled))
        assert prefilled.token_ids + done.token_ids == model.expected[2]
        assert done.info["num_valid_tokens"] == num_valid
        assert done.info["num_recomputed_tokens"] == 300 - num_valid
        pair.check_all_free()


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mamba2", "falcon_h1"])
def test_a_read_that_arrived_but_was_fenced_off_is_kept_whole(
    models: Callable[[str], Model], name: str
) -> None:
    """The generations say that blocks were reused, the digests that all bytes are those of the ticket."""
    model = models(name)
    make_agent, agents = tampering_agents()
    with Pair.open(model.path, make_agent=make_agent) as pair:
        request = make_request("r", model.prompts[2], NUM_TOKENS)
        prefilled = pair.prefill(request)

        def reuse() -> None:
            ticket = prefilled.payload
            assert isinstance(ticket, TransferTicket)
            blocks = [b for table in ticket.block_tables for b in table if b]
            pair.p.extensions[0].transfer.bump_generations(blocks)

        agent = next(a for a in agents if a.name.startswith(pair.d.engine.name))
        agent.tamper = reuse
        done = pair.d.engine.collect(start_decode(pair, request, prefilled))
        assert prefilled.token_ids + done.token_ids == model.expected[2]
        assert isinstance(done.info["failure"], TransferError)
        assert done.info["num_valid_tokens"] == 300
        assert done.info["num_recomputed_tokens"] == 0
        pair.check_all_free()


def test_reads_that_do_not_end_keep_their_blocks_and_the_request_goes_on(
    models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "DRAIN_S", 0.1)
    model = models("qwen3")
    make_agent, agents = stubborn_agents()
    with Pair.open(model.path, make_agent=make_agent) as pair:
        request = make_request("r", model.prompts[2], NUM_TOKENS)
        prefilled = pair.prefill(request)
        done = pair.d.engine.collect(start_decode(pair, request, prefilled, transfer_s=0.2))
        assert prefilled.token_ids + done.token_ids == model.expected[2]
        assert done.info["num_valid_tokens"] == 0
        (lease,) = pair.d.engine.leader.manager.leases
        assert lease.startswith(receiving.IN_FLIGHT)
        assert pair.d.num_blocks - pair.d.num_free_blocks == 19, "300 tokens stay with the reads"
        assert pair.d.engine.leader.manager.ledger.num_held == 19
        for agent in agents:
            agent.go = True
        pair.check_all_free()


@pytest.mark.parametrize("stage", ["reading", "draining", "running"])
def test_an_abort_at_any_stage_of_a_recovery_frees_both_sides(
    models: Callable[[str], Model], stage: str
) -> None:
    model = models("qwen3")
    make_agent, agents = stubborn_agents()
    with Pair.open(model.path, tp=(1, 2), make_agent=make_agent) as pair:
        request = make_request("r", model.prompts[2], 700)
        prefilled = pair.prefill(request)
        stream = start_decode(pair, request, prefilled, transfer_s=60.0 if stage == "reading" else 0.2)
        receive = pair.d.handover.receiving
        wait_until(lambda: bool(receive._reading))
        if stage == "draining":
            wait_until(lambda: bool(receive._draining))
        if stage == "running":
            for agent in agents:
                agent.go = True
            wait_until(lambda: pair.d.engine.leader.scheduler.num_running == 1)
        pair.d.engine.leader.abort("r")
        done = pair.d.engine.collect(stream)
        assert done.finish_reason == FinishReason.ABORT
        for agent in agents:
            agent.go = True
        pair.p.handover.settle("r")
        pair.check_all_free()
        for side in (pair.p, pair.d):
            assert side.engine.leader.manager.ledger.num_held == 0
            assert side.engine.leader.manager.ledger.num_leased >= 19

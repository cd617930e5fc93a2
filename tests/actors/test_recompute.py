"""Requests whose transfer failed go on from what of it arrived and is proven; no token twice, none missing."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import Completion
from rayk.engine.leader import RequestEvent
from rayk.transfer.ticket import TransferTicket
from rayk.types.errors import KVMismatch, TransferError
from rayk.types.request import Request
from tests.actors.cases import NUM_TOKENS, Model, TamperingAgent, stubborn_agents
from tests.pd import Pair, make_request, wait_until
from rayk.transfer.local_agent import LocalAgent, LocalNetwork


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in made:
            path = checkpoint(name)
            made[name] = Model(path, reference(path))
        return made[name]

    return model


def start_decode(
    pair: Pair, request: Request, prefilled: Completion, transfer_s: float = 20.0
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

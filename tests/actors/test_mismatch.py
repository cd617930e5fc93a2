"""Wrong bytes: nothing is decoded from them, they are named, and their blocks come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.handover import receiving as receiving_module
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.types.errors import KVMismatch
from rayk.types.request import FinishReason
from tests.handover.cases import Model, TamperingAgent, stubborn_agents
from tests.pd import Pair, Side, make_request, wait_until


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


def flip_bit(side: Side, table: Sequence[int], layer: int, head: int, token: int) -> bool:
    """Bit 30 of element 5 of V, through the bound view of each rank that holds the head; False if none."""
    rows = [
        v.view[table[token // 16], v.units.index(head), token % 16]
        for extension in side.extensions
        for view in extension._views
        for v in view.fields
        if view.layer == layer and v.name == "v" and head in v.units
    ]
    for row in rows:
        row[5:6].view(torch.int32).bitwise_xor_(1 << 30)
    return bool(rows)


BITS = pytest.mark.parametrize(
    ("tp", "layer", "head", "token", "layouts"),
    [
        ((1, 1), 0, 0, 0, ("auto", "auto")),
        ((1, 2), 3, 1, 36, ("LHBNC", "BLNHC")),
        ((4, 2), 2, 0, 17, ("BHLNC", "LBNHC")),
        ((2, 4), 1, 1, 32, ("BLHNC", "BHLNC")),
    ],
    ids=["1to1", "1to2", "4to2", "2to4"],
)


@BITS
def test_a_bit_flipped_in_transit_is_named(
    qwen3: Model, tp: tuple[int, int], layer: int, head: int, token: int, layouts: tuple[str, str]
) -> None:
    network, agents = LocalNetwork(), []

    def make_agent(name: str) -> LocalAgent:
        agents.append(TamperingAgent(name, network))
        return agents[-1]

    with Pair.open(qwen3.path, tp=tp, layouts=layouts, make_agent=make_agent) as pair:
        manager = pair.d.engine.leader.manager
        flipped = []
        for extension in pair.d.extensions:
            if head not in extension._views[0].fields[0].units:
                continue
            (agent,) = (a for a in agents if a.name == extension.transfer.description.agent_name)

            def tamper(mine: Any = extension) -> None:
                only = Side(pair.d.engine, pair.d.handover, only=[mine])
                flipped.append(flip_bit(only, manager.block_tables("r")[0], layer, head, token))

            agent.tamper = tamper
        request = make_request("r", qwen3.prompts[1])
        prefilled = pair.prefill(request)
        done = pair.decode(request, prefilled)
        assert all(flipped), "the bit was there to flip"
        assert isinstance(done.error, KVMismatch)
        assert done.token_ids == [], "nothing is decoded from wrong KV"
        where = (layer, 0, "v", head)
        assert (done.error.layer, done.error.group, done.error.field, done.error.head) == where
        assert pair.d.num_free_blocks < pair.d.num_blocks, "kept to be looked into"
        ticket: Any = prefilled.payload
        found = pair.diagnose("r", ticket)
        assert {(m.layer, m.group, m.field, m.head, m.token) for m in found} == {(*where, token)}
        assert len(found) == len(flipped)
        assert found[0].classification == f"one flipped bit in byte 23 of token {token}"
        assert found[0].num_bytes_mismatched == 1
        pair.d.handover.settle("r")
        pair.check_all_free()
        assert pair.p.handover.num_expired_leases == 0, "settling at D released the lease"
        # And the pair works on.
        assert pair.generate(qwen3.prompts[:2]) == qwen3.expected[:2]


@BITS
def test_a_bit_flipped_at_the_producer_after_its_digest_is_noticed(
    qwen3: Model, tp: tuple[int, int], layer: int, head: int, token: int, layouts: tuple[str, str]
) -> None:
    """Both sides then hold the same wrong byte: the digests name layer and head, nobody knows the token."""
    with Pair.open(qwen3.path, tp=tp, layouts=layouts) as pair:
        request = make_request("r", qwen3.prompts[1])
        prefilled = pair.prefill(request)
        ticket: Any = prefilled.payload
        assert flip_bit(pair.p, ticket.block_tables[0], layer, head, token)
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, KVMismatch)
        assert done.token_ids == []
        where = (layer, 0, "v", head)
        assert (done.error.layer, done.error.group, done.error.field, done.error.head) == where
        assert pair.diagnose("r", ticket) == []
        pair.d.handover.settle("r")
        pair.check_all_free()


def spoil(pair: Pair, ticket: Any) -> None:
    """Make every byte of the ticket's first block wrong at P."""
    for extension in pair.p.extensions:
        for view in extension._views:
            for field in view.fields:
                field.view[ticket.block_tables[0][0]] += 1


def test_a_mismatch_nobody_looks_into_is_let_go(qwen3: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving_module, "HOLD_S", 0.1)
    with Pair.open(qwen3.path, tp=(1, 2)) as pair:
        request = make_request("r", qwen3.prompts[1])
        prefilled = pair.prefill(request)
        ticket: Any = prefilled.payload
        spoil(pair, ticket)
        assert isinstance(pair.decode(request, prefilled).error, KVMismatch)
        pair.check_all_free()
        assert pair.p.handover.num_expired_leases == 0
        assert pair.diagnose("r", ticket) == [], "too late"
        assert pair.generate(qwen3.prompts[:1]) == qwen3.expected[:1], "and the engine lives"


def test_an_aborted_transfer_with_a_mismatch_keeps_nothing(qwen3: Model) -> None:
    make_agent, agents = stubborn_agents()
    with Pair.open(qwen3.path, make_agent=make_agent) as pair:
        request = make_request("r", qwen3.prompts[1])
        prefilled = pair.prefill(request)
        spoil(pair, prefilled.payload)
        stream = pair.start_decode(request, prefilled)
        wait_until(lambda: pair.d.num_free_blocks < pair.d.num_blocks)
        pair.d.engine.leader.abort("r")
        assert pair.d.engine.collect(stream).finish_reason is FinishReason.ABORT
        for agent in agents:
            agent.go = True
        pair.check_all_free()

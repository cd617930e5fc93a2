"""Requests are counted once each, wherever their ranks saw what: no rank alone knows how many there were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.transfer.local_agent import LocalNetwork
from rayk.types.errors import KVMismatch
from tests.handover.cases import NUM_TOKENS, Model, TamperingAgent
from tests.metrics.test_engine_metrics import flush, recorded
from tests.pd import Pair, make_request, wait_until

FAILED = "rayk_nixl_failed_requests_total"
EXPIRED = "rayk_nixl_expired_requests_total"


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Model:
    path = checkpoint("qwen3")
    return Model(path, reference(path))


def spoil(pair: Pair, rank: int, request_id: str) -> None:
    """Flip a bit of a request's first row of V at one rank."""
    block = pair.d.engine.leader.manager.block_tables(request_id)[0][0]
    field = next(v for v in pair.d.extensions[rank]._views[0].fields if v.name == "v")
    field.view[block, 0, 0][5:6].view(torch.int32).bitwise_xor_(1 << 30)


def test_errors_of_two_requests_at_two_ranks_are_two_requests(qwen3: Model) -> None:
    """At rank 0 of the first, at rank 1 of the second, at both of the third; the fourth is well."""
    recorders, make_meter = recorded()
    network, agents = LocalNetwork(), {}

    def make_agent(name: str) -> TamperingAgent:
        agents[name] = TamperingAgent(name, network)
        return agents[name]

    with Pair.open(qwen3.path, tp=(1, 2), make_agent=make_agent, make_meter=make_meter) as pair:
        for number, ranks in enumerate([(0,), (1,), (0, 1), ()]):
            request = make_request(f"r{number}", qwen3.prompts[1], NUM_TOKENS)
            for rank in ranks:
                name = pair.d.extensions[rank].transfer.description.agent_name
                agents[name].tamper = lambda rank=rank, number=number: spoil(pair, rank, f"r{number}")
            done = pair.decode(request, pair.prefill(request))
            assert isinstance(done.error, KVMismatch) == bool(ranks), done.error
            pair.d.handover.settle(f"r{number}")
        flush(pair)
    found = [recorders["d", rank] for rank in (0, 1)]
    assert [d.sum("rayk_kv_mismatches_total") for d in found] == [2, 2], "to see which rank it is"
    assert [d.sum(FAILED, reason="KV_MISMATCH") for d in found] == [3, 0], "rank 0 counts for both"
    assert [d.sum(FAILED) for d in found] == [3, 0]
    assert [d.sum("rayk_nixl_received_requests_total") for d in found] == [1, 0]


def test_a_lease_that_nobody_releases_is_one_request(qwen3: Model) -> None:
    recorders, make_meter = recorded()
    with Pair.open(qwen3.path, tp=(2, 1), lease_s=0.3, make_meter=make_meter) as pair:
        pair.prefill(make_request("r", qwen3.prompts[2], NUM_TOKENS))
        wait_until(lambda: pair.p.handover.num_expired_leases == 1)
        flush(pair)
    assert [recorders["p", rank].sum(EXPIRED) for rank in (0, 1)] == [1, 0]

"""A transport is a row of one table: engines, and connectors that pull or push, move bytes by its name."""

from __future__ import annotations

import time

import pytest
import torch

from rayk.conformance.engines import EnginePair
from rayk.kv.caches import allocate
from rayk.transfer import KVRequest, transports
from rayk.transfer.connectors import AgentConnector
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.push_connectors import AgentPushConnector
from rayk.transfer.transports import AgentSettings, Transport, make_agent
from rayk.types.errors import HandshakeMismatch
from tests.pd import HANG_S

FILLS = 17, 0
"""What the producer's buffer holds, and the consumer's."""


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> str:
    network = LocalNetwork()
    row = Transport(lambda name, _: LocalAgent(name, network, transport="loopback"), is_cross_process=False)
    monkeypatch.setitem(transports.TRANSPORTS, "loopback", row)
    return "loopback"


@pytest.mark.parametrize("base", [AgentConnector, AgentPushConnector])
def test_a_row_is_all_that_a_connector_needs(loopback, base):
    class Connector(base, transport=loopback):
        pass

    pair = EnginePair()
    ranks = [Connector(f"loopback-{side}") for side in (0, 1)]
    for side, rank in enumerate(ranks):
        rank.register(allocate(pair.geometry(side, 0), torch.device("cpu"), fill=FILLS[side]))
    blobs = [[rank.describe()] for rank in ranks]
    for rank in ranks:
        rank.connect(*blobs)
    here, there = (
        KVRequest(request_id="r", num_tokens=20, block_ids=(blocks,), deadline_s=HANG_S)
        for blocks in ((2, 5), (3, 1))
    )
    if base is AgentConnector:
        ranks[1].receive(there, [ranks[0].send(here)])
    else:
        ranks[0].send(here, [ranks[1].receive(there)])
    reported = []
    while len(reported) < 2:
        reported += [finished for rank in ranks for finished in rank.poll()]
        time.sleep(0)
    assert all(finished.ok for finished in reported), reported
    assert not Connector.is_cross_process
    for rank in ranks:
        rank.close()


def test_engines_that_deal_tokens_unlike_those_met_before_are_refused(loopback):
    """Their peers count on digests by the classes of tokens that they were told."""

    class Connector(AgentConnector, transport=loopback):
        pass

    def engine(name, **sizes):
        pair = EnginePair(num_kv_heads=1, **{key: (n, n) for key, n in sizes.items()})
        ranks = [Connector(f"{name}-{rank}") for rank in range(pair.shape(0).num_ranks)]
        for number, rank in enumerate(ranks):
            rank.register(allocate(pair.geometry(0, number), torch.device("cpu"), fill=0))
        return ranks, [rank.describe() for rank in ranks]

    (producer,), told = engine("p")
    engines = [engine(name, tp=dcp, dcp=dcp) for name, dcp in (("a", 2), ("b", 2), ("c", 4), ("d", 1))]
    for _, blobs in engines[:2]:
        producer.connect(told, blobs)
    for _, blobs in engines[2:]:
        with pytest.raises(HandshakeMismatch, match="token_classes of engines met before: producer .*Stripe"):
            producer.connect(told, blobs)
    for rank in (producer, *(rank for ranks, _ in engines for rank in ranks)):
        rank.close()


def test_what_engines_use_is_in_the_table(monkeypatch, loopback):
    assert transports.ENGINES_USE in transports.TRANSPORTS
    assert make_agent("a", AgentSettings(), loopback).transport == "loopback"

"""What transfers cost, measured when engines are wired up: over agents of known costs, on their clock."""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from rayk.transfer import measuring
from rayk.transfer.agent import DescriptorList, Handle, Transfer, TransferState
from rayk.transfer.costs import CostTable, TransferCosts, transfer_costs
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.measuring import LIMIT_NS, START_BYTES, STEP_NS, fit_costs
from rayk.transfer.push_link import make_consumer_link
from rayk.transfer.pusher import Pusher
from rayk.transfer.rank import TransferRank
from rayk.transfer.staging import StagingSettings
from tests.transfer import cluster
from tests.transfer.cluster import Pair, Shape, make_engine

DEVICE = TransferCosts(
    request_ns=15_000,
    descriptor_ns=5_300,
    index_ns=7,
    byte_ns=0.0008,
    prepare_ns=90_000,
    copy_run_ns=0.5,
    copy_byte_ns=0.001,
)
"""Descriptors are dear, bytes cost next to nothing."""
NETWORK = replace(DEVICE, descriptor_ns=20, byte_ns=2.0, copy_byte_ns=3.0)
"""The other way round."""
SHAPE = Shape(layouts=("BLNHC", "BHLNC"), head_sizes=(64, 64), block_sizes=(16, 16), num_blocks=(200, 50))
"""Of 9 MiB at the producer; a run per token and head, or all of a block at once."""
LOCAL = ("local", "cpu", "cpu")


class Clock:
    """Nanoseconds, which pass where somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> Any:
        return self.now


@dataclass(eq=False)
class CostlyAgent(LocalAgent):
    """It takes its clock as long as the model says."""

    clock: Clock = field(default_factory=Clock)
    costs: TransferCosts = DEVICE
    poll_ns: float = 0.0
    """What one poll takes."""
    num_fast_reads: int = 1 << 30
    """The reads after these are never over."""

    def prepare(
        self, peer: str, local: DescriptorList, remote: DescriptorList, remote_device: str = "cpu"
    ) -> Handle:
        self.clock.now += self.costs.prepare_ns
        return super().prepare(peer, local, remote, remote_device)

    def read(self, handle: Handle, local_indices: np.ndarray, remote_indices: np.ndarray) -> Transfer:
        lists = self._handles[handle].local
        is_next = (np.diff(local_indices) == 1) & (np.diff(remote_indices) == 1)
        num_joined = int(is_next.sum()) if lists.lengths[0] == lists.strides[0] else 0
        count, length = len(local_indices), int(lists.lengths[0])
        self.clock.now += self.costs.move_ns(count, count - num_joined, count * length)
        transfer = super().read(handle, local_indices, remote_indices)
        self.num_fast_reads -= 1
        if self.num_fast_reads < 0:
            self._in_flight[transfer].polls_left = 1 << 30
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        self.clock.now += self.poll_ns
        return super().poll(transfer)


@dataclass(eq=False)
class Measured:
    """Two engines, on a clock of their own."""

    pair: Pair
    clock: Clock
    table: CostTable

    @property
    def rank(self) -> TransferRank:
        return self.pair.consumer.ranks[0]

    @property
    def agent(self) -> CostlyAgent:
        (agent,) = self.pair.consumer.agents
        assert isinstance(agent, CostlyAgent)
        return agent

    def wire(self) -> int:
        """Until it is wired; how often it was asked."""
        return next(n for n in itertools.count(1) if self.rank.wire("p", 1000.0))


def make(
    monkeypatch: pytest.MonkeyPatch,
    costs: TransferCosts,
    shape: Shape = SHAPE,
    *,
    staging: StagingSettings | None = None,
    **of_agent: Any,
) -> Measured:
    clock, network, table = Clock(), LocalNetwork(), CostTable(measures_everywhere=True)
    copy = measuring.copy_runs

    def timed_copy(source, destination, runs, here, there) -> None:
        copy(source, destination, runs, here, there)
        num_runs, num_bytes = len(here) * runs.num_runs, len(here) * int(runs.host[2].sum())
        clock.now += costs.repack_ns(num_runs, num_bytes, 0)

    monkeypatch.setattr(measuring, "copy_runs", timed_copy)
    monkeypatch.setattr(cluster, "TransferRank", functools.partial(TransferRank, clock=clock, costs=table))

    def make_agent(name: str) -> CostlyAgent:
        return CostlyAgent(name, network, clock=clock, costs=costs, **of_agent)

    pair = Pair(*(make_engine(shape, side, make_agent, staging=staging) for side in (0, 1)))
    pair.connect()
    return Measured(pair, clock, table)


@pytest.mark.parametrize("costs", [DEVICE, NETWORK])
def test_what_an_agent_costs_is_found_while_it_is_wired(
    monkeypatch: pytest.MonkeyPatch, costs: TransferCosts
) -> None:
    measured = make(monkeypatch, costs)
    measured.wire()
    assert measured.table.told(*LOCAL) == "measured"
    assert asdict(measured.table.of(*LOCAL)) == pytest.approx(asdict(costs), rel=1e-3)
    began = measured.clock.now
    assert measured.wire() == 1
    assert measured.clock.now - began < 1e6, "it is measured once"


@pytest.mark.parametrize(("costs", "is_staged"), [(DEVICE, True), (NETWORK, False)])
def test_reads_go_the_way_that_was_measured_to_be_cheaper(
    monkeypatch: pytest.MonkeyPatch, costs: TransferCosts, is_staged: bool
) -> None:
    measured = make(monkeypatch, costs)
    measured.wire()
    values = SHAPE.values(40)
    outcomes, tables = measured.pair.transfer(values)
    assert outcomes[0].error is None
    measured.pair.consumer.check(values, tables)
    (row,) = outcomes[0].rows
    assert (row.staged, row.costs) == (is_staged, "measured")


def test_layers_per_write_follow_what_is_measured_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pusher measures on its thread, when it is connected; its first pushes go by what the code says."""
    shape = replace(SHAPE, num_layers=16, layouts=("LBHNC", "LBHNC"), num_blocks=(50, 50))
    measured = make(monkeypatch, NETWORK, shape)
    engines = measured.pair.producer.descriptions, measured.pair.consumer.descriptions
    agent = CostlyAgent("pusher", measured.agent.network, clock=measured.clock, costs=DEVICE)
    link = make_consumer_link(agent, engines[0][0], *engines, push_layers=None, costs=measured.table)
    guessed = [link.layers_per_write(1 << n) for n in range(10, 24)]
    caches = measured.pair.producer.caches[0]
    pusher = Pusher(
        agent, caches.buffer, engines[0][0], costs=measured.table, clock=measured.clock, has_thread=False
    )
    pusher.connect(*engines)
    for _ in range(1000):
        pusher.turn()
    assert measured.table.told(*LOCAL) == "measured"
    assert measured.table.of(*LOCAL).descriptor_ns == pytest.approx(DEVICE.descriptor_ns, rel=1e-3)
    assert guessed != [link.layers_per_write(1 << n) for n in range(10, 24)]
    assert len(agent._regions) == 1, "what was measured with is given back"


def test_a_peer_with_too_little_memory_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPE, num_blocks=(40, 50))
    measured = make(monkeypatch, DEVICE, shape)
    measured.wire()
    size = measured.pair.producer.caches[0].geometry.pages_bytes
    assert size < START_BYTES
    outcomes, _ = measured.pair.transfer(shape.values(30))
    assert [r.costs for r in outcomes[0].rows] == [f"as coded: p has only {size} bytes to read"]
    assert measured.table.of(*LOCAL) == transfer_costs("local", "cpu")


def test_nobody_waits_long_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = make(monkeypatch, DEVICE, delay_polls=7, poll_ns=STEP_NS / 2)
    steps: list[float] = []
    is_wired = False
    while not is_wired:
        began = measured.clock.now
        is_wired = measured.rank.wire("p", 1000.0)
        steps.append(measured.clock.now - began)
    assert max(steps) < 3 * STEP_NS
    assert len(steps) > 20


def test_a_read_that_never_ends_is_told_of_and_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = make(monkeypatch, DEVICE, poll_ns=1e6)
    measured.agent.num_fast_reads = 5
    num_regions = len(measured.agent._regions)
    began = measured.clock.now
    measured.wire()
    assert LIMIT_NS < measured.clock.now - began < 1.2 * LIMIT_NS
    assert measured.table.told(*LOCAL) == "as coded: a read took over 5 s"
    monkeypatch.setattr(measured.agent, "release", lambda transfer: False)
    assert len(measured.agent._regions) == num_regions


def test_memory_is_given_back_when_nothing_comes_there_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the engine goes while it is measured, and comes back."""
    measured = make(monkeypatch, DEVICE, poll_ns=1e6)
    agent, num_regions = measured.agent, len(measured.agent._regions)
    agent.num_fast_reads = 5
    for _ in range(3):
        assert not measured.rank.wire("p", 1000.0)
    assert len(agent._regions) == num_regions + 1
    with monkeypatch.context() as stuck:
        stuck.setattr(agent, "release", lambda transfer: False)
        measured.rank.disconnect("p")
        measured.pair.poll()
        assert len(agent._regions) == num_regions + 1, "bytes may still come"
    measured.pair.poll()
    assert len(agent._regions) == num_regions
    assert not agent._in_flight
    agent.num_fast_reads = 1 << 30
    measured.pair.connect()
    measured.wire()
    assert measured.table.told(*LOCAL) == "measured"


def test_kernels_may_be_compiled_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = make(monkeypatch, DEVICE)
    copy, calls = measuring.copy_runs, itertools.count()

    def compiled_first(*arguments: Any) -> None:
        measured.clock.now += 0 if next(calls) else 2 * LIMIT_NS
        copy(*arguments)

    monkeypatch.setattr(measuring, "copy_runs", compiled_first)
    measured.wire()
    assert measured.table.told(*LOCAL) == "measured"


def test_a_rank_that_never_stages_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = make(monkeypatch, DEVICE, staging=StagingSettings("never"))
    measured.wire()
    assert measured.table.told(*LOCAL) == "as coded"


def test_a_table_keeps_rows_by_kinds_of_devices() -> None:
    table = CostTable()
    assert not table.wants("nixl/UCX", "cpu", "cpu")
    assert table.wants("nixl/UCX", "cuda:1", "cuda:0")
    table.put("nixl/UCX", "cuda:1", "cuda:0", NETWORK)
    assert not table.wants("nixl/UCX", "cuda:3", "cuda:2")
    assert table.of("nixl/UCX", "cuda:3", "cuda:2") == NETWORK
    assert table.wants("nixl/UCX", "cuda:0", "cpu"), "the host's memory is another matter"
    assert table.of("nixl/UCX", "cuda:0", "cpu") == transfer_costs("nixl/UCX", "cuda")
    table.put("nixl/UCX", "cuda:0", "cpu", "its reads took over 5 s")
    assert not table.wants("nixl/UCX", "cuda:0", "cpu"), "it was tried"
    assert table.told("nixl/UCX", "cuda:0", "cpu") == "as coded: its reads took over 5 s"


def test_bytes_that_cost_nothing_measurable_leave_gaps_finite() -> None:
    moves, copies = measuring.START_MOVES, measuring.START_COPIES
    free = replace(DEVICE, byte_ns=0.0)
    times = [free.move_ns(m.count, m.num_merged, m.count * m.length) for m in moves]
    copied = [free.repack_ns(c.runs * c.blocks, c.runs * c.blocks * c.length) for c in copies]
    found = fit_costs(moves, np.array(times), copies, np.array(copied))
    assert 0 < found.gap_bytes < 1 << 30


@pytest.mark.nixl
def test_nixl_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayk.transfer.nixl_agent import NixlAgent

    table = CostTable(measures_everywhere=True)
    monkeypatch.setattr(cluster, "TransferRank", functools.partial(TransferRank, costs=table))
    pair = Pair(*(make_engine(SHAPE, side, lambda name: NixlAgent(f"measured.{name}")) for side in (0, 1)))
    pair.connect()
    before = pair.producer.caches[0].buffer.clone()
    while not pair.consumer.ranks[0].wire("p", 60.0):
        pair.poll()
    found = table.of("nixl/UCX", "cpu", "cpu")
    assert table.told("nixl/UCX", "cpu", "cpu") == "measured", table.told("nixl/UCX", "cpu", "cpu")
    assert found != transfer_costs("nixl/UCX", "cpu")
    assert found.byte_ns > 0
    assert found.gap_bytes >= 0
    assert torch.equal(pair.producer.caches[0].buffer, before)
    for rank in (*pair.consumer.ranks, *pair.producer.ranks):
        rank.close()

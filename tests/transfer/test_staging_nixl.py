"""Staged reads over NIXL: between agents of one process, between processes, and from hosts that are lost."""

from __future__ import annotations

import itertools

import pytest
import torch

from rayk.kv.layout import LAYOUTS
from rayk.transfer.nixl_agent import NixlAgent
from rayk.transfer.staging import StagingSettings
from rayk.types.errors import TransferError
from tests.markers import slow, thorough
from tests.transfer.cluster import Pair, Shape, make_engine
from tests.transfer.far_peer import connect, two_hosts, two_processes, why_not
from tests.transfer.test_netns import again_if_too_late

pytestmark = pytest.mark.nixl

NAMES = itertools.count()
PAIRS = [pair for pair in itertools.product(LAYOUTS, repeat=2) if pair[0] != pair[1]]
TPS = [(1, 1), (1, 2), (2, 1), (4, 2), (3, 2)]


@pytest.mark.parametrize("layouts", PAIRS[::5], ids="-".join)
def test_all_modes_bring_the_same_bytes(layouts):
    tp = TPS[PAIRS.index(layouts) // 5 % len(TPS)]
    shape = Shape(tp=tp, units=4, query_heads=24, layouts=layouts, head_sizes=(6, 5), block_sizes=(6, 4))
    pages = {}
    for mode in ("never", "always", "auto"):
        name = f"staging{next(NAMES)}."
        sides = [
            make_engine(shape, side, lambda n, run=name: NixlAgent(run + n), staging=StagingSettings(mode))
            for side in (0, 1)
        ]
        pair = Pair(*sides)
        try:
            pair.connect()
            values = shape.values(33)
            outcomes, tables = pair.transfer(values)
            assert [o.error for o in outcomes.values()] == [None] * tp[1]
            pair.consumer.check_all(values, tables)
            assert pair.released() == [["lease-r"]] * tp[0]
            rows = [row for o in outcomes.values() for row in o.rows]
            assert mode == "auto" or {row.staged for row in rows} == {mode == "always"}
            caches = pair.consumer.caches
            pages[mode] = [c.buffer[: c.geometry.pages_bytes].clone() for c in caches]
        finally:
            for rank in (*pair.consumer.ranks, *pair.producer.ranks):
                rank.close()
    for mode in ("always", "auto"):
        assert all(torch.equal(a, b) for a, b in zip(pages["never"], pages[mode], strict=True))


@thorough
@pytest.mark.parametrize("num_bytes", [1 << 14, pytest.param(1 << 22, marks=slow)])
def test_every_kind_of_cache_is_staged_between_processes(num_bytes):
    """In one go, and in chunks with too little room for a state."""
    shape = Shape(
        family="everything",
        tp=(3, 1),
        layouts=("BLNHC", "LBHNC"),
        block_sizes=(4, 6),
        state_block_sizes=(64, 16),
        num_blocks=(60, 70),
    )
    with two_processes(shape, StagingSettings("always", num_bytes)) as (producer, consumer):
        connect(producer, consumer)
        _, outcome = consumer("read", producer("ticket", 300, "r"))
        assert outcome.error is None
        assert all(row.staged and row.repack_ns > 0 for row in outcome.rows)
        assert {row.group for row in outcome.rows} == set(range(7))
        assert producer("released") == [["lease-r"]] * 3
        assert consumer("staging_in_use") == [(0, 0)]


@thorough
@again_if_too_late
def test_a_producer_killed_in_the_middle_leaves_the_staging_buffer_free():
    if why_not() is not None:
        pytest.skip(str(why_not()))
    with two_hosts(staging=StagingSettings("always", 4 << 20)) as (producer, consumer):
        connect(producer, consumer)
        _, outcome = consumer("read", producer("ticket", 300, "small"))
        assert outcome.error is None
        assert {row.staged for row in outcome.rows} == {True}
        ticket = producer("ticket", 30_000, "large")
        _, outcome = consumer("read_until_some_landed", ticket, producer("pid"), 100.0)
        assert isinstance(outcome.error, TransferError)
        assert "failed" in outcome.error.reason
        assert not outcome.is_draining
        assert consumer("staging_in_use") == [(0, 0)]

"""What passes between engines comes out of a run's tables as it was planted in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rayk.costs import CostBook, EngineCosts
from rayk.costs.table import read_name
from rayk.planner.between import fit_gaps, fit_reads, hand_over_costs
from rayk.types.config import EngineConfig

DIGEST_NS, VERIFY_NS = (50_000.0, 0.25), (20_000.0, 0.5)  # once, and per byte
FENCE_NS = 45_000.0
POST = (8_000.0, 1_500.0, 0.01)  # once, per descriptor, per byte
WAIT = (30_000.0, 0.0, 0.2)


def pair_cell(tp: tuple[int, int] = (2, 1), num: int = 120) -> Any:
    """Requests of three lengths, each handed over by two ranks to one; times vary by a tenth."""
    rng = np.random.default_rng(2)
    prefill, decode = (EngineConfig(model="m", tp=n, layout="BHLNC") for n in tp)
    requests: list[dict[str, Any]] = []
    transfers: list[dict[str, Any]] = []
    for index in range(num):
        size = (4096, 65536, 2**20)[index % 3]
        name = {"repeat": 0, "request_id": f"r{index}"}
        verified, digested = 2 * size, size
        requests.append(
            name
            | {
                "num_attempts": 1,
                "due_ms": 100.0 * index,
                "e2e_ms": 50.0,
                "stage_dispatch_ns": 700_000 * rng.uniform(0.9, 1.1),
                "stage_handover_ns": 400_000 * rng.uniform(0.9, 1.1),
                "stage_digest_ns": DIGEST_NS[0] + DIGEST_NS[1] * digested,
                "stage_fence_ns": FENCE_NS,
                "stage_verify_ns": VERIFY_NS[0] + VERIFY_NS[1] * verified,
            }
        )
        posts = [
            (POST[0] + POST[1] * (size // 4096 + rank) + POST[2] * size) * rng.uniform(0.95, 1.05)
            for rank in range(2)
        ]
        wait = (WAIT[0] + WAIT[2] * 2 * size) * rng.uniform(0.95, 1.05)
        for rank in range(2):
            descriptors = size // 4096 + rank
            transfers.append(
                name
                | {
                    "purpose": "handover",
                    "mode": "pull",
                    "verdict": "OK",
                    "retries": 0,
                    "producer_rank": rank,
                    "consumer_rank": 0,
                    "bytes": size,
                    "num_descriptors": 9 * descriptors,
                    "num_descriptors_merged": descriptors,
                    "held_bytes": 0,
                    "post_ms": posts[rank] / 1e6,
                    "begin_ms": sum(posts[:rank]) / 1e6,
                    "end_ms": (sum(posts) + wait) / 1e6,
                }
            )
    cell = SimpleNamespace(prefill=prefill, decode=decode)
    return SimpleNamespace(cell=cell, requests=requests, transfers=transfers)


def test_reads_are_fitted_by_descriptors_and_bytes() -> None:
    """A rank posts two rows, and waits for both together."""
    cell = pair_cell()
    (name,) = (reads := fit_reads([cell]).reads)
    assert name == read_name(cell.cell.prefill, cell.cell.decode) == "nixl cpu 2:1 BHLNC:BHLNC"
    for size, descriptors in ((4096, 1), (65536, 16), (2**20, 257)):
        post = POST[0] + POST[1] * descriptors + POST[2] * size
        assert reads[name].post.ns(size, descriptors) == pytest.approx(post, rel=0.03)
        wait = WAIT[0] + WAIT[2] * 2 * size
        assert reads[name].wait.ns(2 * size, 2 * descriptors) == pytest.approx(wait, rel=0.03)


def test_a_read_that_waited_for_a_core_does_not_count() -> None:
    cell = pair_cell(num=30)
    for row in cell.transfers[:5]:
        row |= {"post_ms": row["post_ms"] + 20, "end_ms": row["end_ms"] + 20}
    (found,) = fit_reads([cell]).reads.values()
    assert found.post.ns(4096, 1) == pytest.approx(POST[0] + POST[1] + POST[2] * 4096, rel=0.05)


def test_failed_and_pushed_transfers_are_not_fitted() -> None:
    cell = pair_cell()
    for row in cell.transfers:
        row |= {"verdict": "KV_MISMATCH"} if row["consumer_rank"] else {"mode": "push"}
    assert not fit_reads([cell]).reads


def test_digests_cost_the_rank_that_has_most() -> None:
    """A producer rank has half of what the one consumer rank has."""
    found = hand_over_costs([pair_cell()])
    for size in (4096, 2**20):
        assert found["fence"].ns(2 * size) == pytest.approx(FENCE_NS, rel=1e-3)
        assert found["MakeTicket"].ns(size) == pytest.approx(DIGEST_NS[0] + DIGEST_NS[1] * size, rel=1e-3)
        assert found["verify"].ns(2 * size) == pytest.approx(VERIFY_NS[0] + VERIFY_NS[1] * 2 * size, rel=1e-3)


def test_gaps_of_requests_that_stream_alone_have_no_slope() -> None:
    gaps = fit_gaps([pair_cell()], num_cores=2)
    assert gaps.dispatch.stream_ns == 0
    assert gaps.dispatch.ns() == pytest.approx(700_000, rel=0.03)
    assert gaps.handover.ns(0.9) == pytest.approx(400_000 * 1.08, rel=0.02)
    assert gaps.release.ns() == 0


def test_what_is_fitted_survives_the_disk(tmp_path) -> None:
    cell = pair_cell()
    book = CostBook(transfers=fit_reads([cell]), gaps=fit_gaps([cell], num_cores=2))
    costs = EngineCosts.flat(5.0, commands=hand_over_costs([cell]))
    book = CostBook(engines={costs.key: costs}, transfers=book.transfers, gaps=book.gaps)
    book.save(tmp_path)
    again = CostBook.load(tmp_path)
    assert (again.engines, again.transfers, again.gaps) == (book.engines, book.transfers, book.gaps)


def test_a_bursts_requests_do_not_stretch_the_gaps_of_others() -> None:
    """In a burst each waits for those before it. Gaps of requests that come one by one tell how long a way
    is, if there are enough of them."""
    cell = pair_cell()
    waits = [
        row
        | {"due_ms": 0.0, "repeat": 1 + index // 10, "stage_dispatch_ns": 700_000.0 + 900_000 * (index % 10)}
        for index, row in enumerate(cell.requests)
    ]
    burst = SimpleNamespace(cell=cell.cell, requests=waits, transfers=[])
    gap = fit_gaps([cell, burst], num_cores=2).dispatch
    assert gap.ns() == pytest.approx(700_000, rel=0.05)
    assert gap.stream_ns == 0
    few = SimpleNamespace(cell=cell.cell, requests=cell.requests[:8], transfers=[])
    assert fit_gaps([few, burst], num_cores=2).dispatch.stream_ns > 500_000, (
        "of nothing else is anything known"
    )


def test_streams_that_take_a_core_add_more_than_others() -> None:
    """Requests come together by up to nine, 20 ms apart; those before them stream yet."""
    cell = pair_cell()
    planted, rows = (400_000.0, 50_000.0, 3_000_000.0), []
    for index, row in enumerate(cell.requests):
        streams = index % 9
        ns = planted[0] + planted[1] * streams + planted[2] * min(streams, 2)
        due_ms = 10_000.0 * (index // 9) + 20.0 * streams
        rows.append(row | {"due_ms": due_ms, "e2e_ms": 500.0, "stage_handover_ns": ns})
    busy = SimpleNamespace(cell=cell.cell, requests=rows, transfers=[])
    gap = fit_gaps([busy], num_cores=2).handover
    assert (gap.ns(), gap.stream_ns, gap.core_ns) == pytest.approx(planted, rel=1e-3)
    many = fit_gaps([busy], num_cores=64).handover
    assert many.ns(num_streams=8, num_cores=64) == pytest.approx(gap.ns(num_streams=8, num_cores=2), rel=0.2)

"""What cells.parquet says of a host tier: sums over engines, tiers, repeats; every fallback in words."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.experiments.offloaded import offloaded
from rayk.offload.costs import CostModel
from rayk.reports.columns import OFFLOADED, cell_record
from rayk.types.offload import ENDED
from rayk.types.rows import TransferRow
from tests.reports.synthetic import cell_row

COSTS = {"out_gb_per_s": 1.0, "in_gb_per_s": 2.0, "out_latency_ns": 2e6, "in_latency_ns": 1e6}


def engine(**told: Any) -> dict[str, Any]:
    return {"why_off": "", "costs": COSTS, **told}


def tier(**told: Any) -> dict[str, Any]:
    return {"num_blocks": 8, "num_cached_blocks": 3, **told}


def test_a_cell_without_a_tier_says_nothing_of_one() -> None:
    assert offloaded([CellOutcome()]) == {}
    record = cell_record(cell_row(1, 1, ("BHLNC", "BHLNC")), [], [])
    assert {record[name] for name in OFFLOADED} == {None}


def test_counters_are_those_of_the_cell_over_all_engines_and_repeats() -> None:
    outcomes = [
        CellOutcome(
            offload={
                "prefill0": engine(stored_bytes=10, loaded_bytes=3, swaps_declined=1),
                "decode0": engine(swapped_out_bytes=7, costs={**COSTS, "out_gb_per_s": 0.01}),
            },
            # The tier served another cell before.
            tiers_before={"t": tier(hits=5, misses=1, disk={"state": "on", "num_pages": 1, "pages_read": 2})},
            tiers={"t": tier(hits=7, misses=4, disk={"state": "on", "num_pages": 4, "pages_read": 6})},
        ),
        CellOutcome(
            offload={"prefill0": engine(stored_bytes=100)},
            tiers_before={"t": tier(hits=7, misses=4, disk={"state": "on", "num_pages": 4, "pages_read": 6})},
            tiers={"t": tier(hits=8, misses=4, disk={"state": "on", "num_pages": 5, "pages_read": 6})},
        ),
    ]
    found = offloaded(outcomes)
    assert (found["host_stored_bytes"], found["host_loaded_bytes"], found["swapped_out_bytes"]) == (110, 3, 7)
    assert (found["num_swaps_declined"], found["swapped_in_bytes"]) == (1, 0)
    assert (found["host_tier.hits"], found["host_tier.misses"], found["host_tier.num_blocks"]) == (3, 3, 8)
    assert (found["disk_tier.num_pages"], found["disk_tier.num_read"], found["disk_tier.num_bad"]) == (
        5,
        4,
        0,
    )
    # The median of three engines: 2 ms, and 2^20 bytes at 1 and at 2 GB/s.
    assert found["offload_out_1mib_ms"] == pytest.approx(2 + 1.048576)
    assert found["offload_in_1mib_ms"] == pytest.approx(1 + 0.524288)
    assert "offload_compute_512_ms" not in found, "nothing is known of it"
    assert "offload_note" not in found
    assert set(found) <= set(OFFLOADED)


def test_what_is_believed_is_what_the_cost_model_would_weigh() -> None:
    model = CostModel()
    for tokens in (64, 128, 256, 512):
        model.observe_prefill(tokens, 3e6 + 2e4 * tokens)
        model.observe_out(tokens << 12, 1e6 + (tokens << 12) / 0.5)
    found = offloaded([CellOutcome(offload={"prefill0": engine(costs=model.describe())})])
    recompute_ns, choice = model.recompute_ns(512), model.swap(1 << 20, 0, 512)
    assert recompute_ns is not None
    assert found["offload_compute_512_ms"] == pytest.approx(recompute_ns / 1e6)
    assert found["offload_out_1mib_ms"] == pytest.approx(choice.move_ns / 1e6)


@pytest.mark.parametrize(
    ("outcome", "note"),
    [
        ({"tier_losses": ["it was killed"]}, "the host tier was lost: it was killed"),
        (
            {"offload": {"prefill0": engine(why_off="no room"), "decode0": engine(why_off=ENDED)}},
            "prefill0 had no host tier: no room",
        ),
        ({"offload": {"prefill0": engine(loads_failed=2)}}, "2 loads failed and were computed"),
        (
            {"offload": {"prefill0": engine(loads_held_back=3)}},
            "3 prompts were not looked up, after failures in a row",
        ),
        (
            {"offload": {"prefill0": engine(stores_too_large=2), "decode0": engine(stores_too_large=2)}},
            "4 stores did not fit into outboxes (offload.outbox_mib)",
        ),
        (
            {"offload": {"prefill0": engine(handovers_too_large=2), "prefill1": engine()}},
            "2 hand-overs were read past outboxes, which cannot hold them (offload.outbox_mib)",
        ),
        (
            {
                "offload": {
                    "prefill0": engine(stores_failed=2),
                    "decode0": engine(stores_failed=1, last_store_failure="no memory"),
                }
            },
            "3 stores failed (such as: no memory)",
        ),
        (
            {"tiers": {"t": tier(disk={"state": "off: no room", "num_pages": 0})}},
            "the disk tier was off: no room",
        ),
        (
            {"tiers": {"t": tier(disk={"state": "on", "num_pages": 0, "bad_digest": 2, "bad_short": 1})}},
            "pages on disk were not served, but computed: 2 digest, 1 short",
        ),
    ],
)
def test_every_fallback_is_told(outcome: dict[str, Any], note: str) -> None:
    assert offloaded([CellOutcome(**outcome), CellOutcome()])["offload_note"] == note


def test_what_the_tier_moves_is_no_hand_over() -> None:
    fields: dict[str, Any] = {"cell_id": "c", "repeat": 0, "request_id": "r", "producer_rank": 0}
    fields |= {"consumer_rank": 0, "group": 0, "num_descriptors": 3}
    rows = [
        TransferRow(**fields, bytes=size, transfer_ns=size, purpose=purpose)
        for size, purpose in ((2_000, "handover"), (70_000, "load"), (900_000, "swap"))
    ]
    record = cell_record(cell_row(1, 1, ("BHLNC", "BHLNC")), [], rows)
    assert (record["transfer_bytes"], record["num_descriptors"]) == (2_000, 3)
    assert record["transfer_gb_per_s"] == pytest.approx(1.0)

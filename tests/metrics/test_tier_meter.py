"""What is told of host tiers: an engine's counters, and what a tier says of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rayk.handover.transfer_metrics import FAILURES, PAGES, TIER_NAME, report_offload, report_tier
from rayk.kv.specs import page_bytes
from rayk.metrics import LABEL_VALUES, Meter
from rayk.offload.disk import status_without
from tests.conftest import CheckpointFactory
from tests.metrics.recording import Recorder
from tests.offload.node import Node, NodeEngine
from tests.pd import make_request

PROMPT = list(range(5, 5 + 80))
RANK = {"model": "m", "engine": "e", "role": "prefill", "rank": "0"}


def told(report: Callable[[Meter], None], **known: str) -> Recorder:
    recorder = Recorder(**known)
    meter = Meter(recorder)
    report(meter)
    meter.flush()
    return recorder


def of_engine(engine: NodeEngine) -> Recorder:
    return told(lambda meter: report_offload(meter, engine.offloading), **RANK)


def test_an_engine_and_its_tier_tell_what_moved(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    with Node.open(checkpoint("qwen3"), [{}, {"tp": 2}], disk_folder=str(tmp_path)) as node:
        for engine in node.engines:
            engine.complete([make_request("r", PROMPT, 4)])
            node.settle()
        first, second = map(of_engine, node.engines)
        groups = node.engines[0].engine.leader.manager.groups
        tokens = len(PROMPT) // 16 * 16  # of whole blocks, of which the last token is computed
        block = sum(page_bytes(g.spec) * len(g.layers) for g in groups)
        assert first.sum("rayk_offload_stored_bytes_total") == tokens // 16 * block
        assert first.sum("rayk_offload_loads_total") == 0
        assert second.sum("rayk_offload_loads_total") == second.sum("rayk_offload_lookups_total") == 1
        assert second.sum("rayk_offload_loaded_tokens_total") == tokens - 16
        assert {engine.gauge("rayk_offload_tier_up") for engine in (first, second)} == {1.0}
        status = node.status()
        tier = told(lambda meter: report_tier(meter, status), model="m", engine=TIER_NAME)
        assert tier.sum("rayk_offload_tier_hits_total") == tier.sum("rayk_offload_tier_misses_total") == 1
        assert tier.gauge("rayk_offload_tier_blocks", state="cached") == tokens // 16
        assert sum(tier.gauges["rayk_offload_tier_blocks"].values()) == status["num_blocks"]
        assert tier.sum("rayk_offload_disk_pages_total", outcome="written") == tokens // 16
        assert tier.gauge("rayk_offload_disk_bytes") >= tokens // 16 * block
        assert tier.gauge("rayk_offload_disk_up") == 1
        engine = node.engines[0]
        engine.run(lambda: engine.offloading.lost("it was killed"))
        lost = of_engine(engine)
    assert lost.gauge("rayk_offload_tier_up") == 0
    assert lost.sum("rayk_offload_tier_losses_total") == 1


def test_damaged_pages_count_whatever_is_wrong_with_them() -> None:
    disk = {
        "state": "on",
        "num_bytes": 7,
        **dict.fromkeys(PAGES.values(), 0),
        "bad_digest": 2,
        "bad_missing": 3,
    }
    status = {"num_blocks": 5, "num_used_blocks": 1, "num_cached_blocks": 2, "disk": disk}
    found = told(lambda meter: report_tier(meter, status), model="m", engine=TIER_NAME)
    assert found.sum("rayk_offload_disk_pages_total", outcome="bad") == 5
    assert found.sum("rayk_offload_disk_pages_total") == 5
    assert found.gauge("rayk_offload_tier_blocks", state="free") == 2


def test_a_disk_that_is_off_or_was_never_there_shows() -> None:
    """A server says nothing else of it, but in the tier's log."""
    never = status_without("Read-only file system")
    later = {**never, "state": "off: No space left on device", "num_bytes": 4096, "pages_written": 1}
    for disk, written in ((never, 0), (later, 1)):
        status = {"num_blocks": 5, "num_used_blocks": 0, "num_cached_blocks": 0, "disk": disk}
        found = told(lambda meter, status=status: report_tier(meter, status), model="m", engine=TIER_NAME)
        assert found.gauge("rayk_offload_disk_up") == 0
        assert found.sum("rayk_offload_disk_pages_total", outcome="written") == written


def test_every_value_of_a_label_is_counted_somewhere() -> None:
    assert set(FAILURES) == LABEL_VALUES["move"]
    assert {*PAGES, "bad"} == LABEL_VALUES["outcome"]

"""The proving connector under vLLM's own classes, in a process of vLLM's environment, without an engine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rayk.vllm.arguments import ALONE, ON_CPUS
from tests.house import ROOT
from tests.markers import needs_vllm
from tests.pd import HANG_S
from tests.vllm.run_engine import RESULT

pytestmark = needs_vllm

METHODS = """
bind_connector_metadata bind_gpu_block_pool bind_kv_cache_manager build_connector_meta
build_connector_worker_meta build_kv_connector_stats build_prom_metrics clear_connector_metadata
finish_forward get_block_ids_with_load_errors get_external_cache_hit_sources get_finished
get_finished_count get_handshake_metadata get_kv_connector_kv_cache_events get_kv_connector_stats
get_loaded_kv_cache_group_ids get_mem_pool_context get_num_new_matched_tokens
get_required_kvcache_layout get_transfer_results handle_preemptions has_connector_metadata
has_pending_block_frees has_pending_push_work on_new_request register_finished_partial_tail
register_kv_caches request_finished requires_kv_delivery requires_piecewise_for_cudagraph reset_cache
reset_capture_state role save_kv_layer set_host_xfer_buffer_ops set_xfer_handshake_metadata
set_xfer_handshake_metadata_pp_aware shutdown start_load_kv supports_divergent_local_hybrid_hits
take_events update_connector_output update_state_after_alloc wait_for_layer_load wait_for_save
"""
"""What vLLM 0.32.0 asks of a connector. What is new is delegated; somebody should look at what it is for."""

PLANTED = {
    "heads_shifted": ("k", "head 0 holds head 1 of the producer"),
    "kv_swapped": ("k", "K and V swapped"),
    "last_block_dropped": ("k", "block 4 of the sequence missing"),
    "stale_block_ids": ("k", "blocks 0 to 4 of the sequence missing"),
    "state_columns_shifted": ("conv_x", "channels shifted: channel c holds channel c-1"),
}


@pytest.fixture(scope="module")
def driven(vllm_python: Path) -> dict[str, Any]:
    """What `drive_connector` prints."""
    done = subprocess.run(
        [vllm_python, "-m", "tests.vllm.drive_connector", *PLANTED],
        cwd=ROOT,
        env={**os.environ, **ALONE, **ON_CPUS, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(RESULT))
    found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    return found


def test_whatever_vllm_asks_of_a_connector_reaches_the_inner_one(driven: dict[str, Any]) -> None:
    assert driven["methods"] == METHODS.split()
    assert driven["not_ours"] == []
    assert driven["inner_extra"] == {"lease": 600}, "our keys are ours"
    assert driven["shut_down"] == 1


def test_another_version_of_vllm_is_told_once(driven: dict[str, Any]) -> None:
    assert driven["versions"] == ["KV proof: this is vLLM 0.99.0, rayk is tested with 0.32.0"]


def test_threads_of_the_proof_do_not_share_the_core_that_nixl_reserves(driven: dict[str, Any]) -> None:
    before, *ours, now = driven["num_cores"]
    assert now == 1, "the inner connector has pinned the worker"
    assert ours == [before]


def test_caches_registered_anew_leave_no_server_of_the_old_ones(driven: dict[str, Any]) -> None:
    assert (driven["left_running"], driven["num_serving"]) == ([], 1)


def test_what_vllm_asks_the_class_is_as_the_inner_class_says(driven: dict[str, Any]) -> None:
    assert driven["names"] == list(driven["hma"])
    assert all(inner == ours for inner, ours in driven["hma"].values())
    assert not all(inner for inner, _ in driven["hma"].values())
    assert (driven["layout"], driven["piecewise"]) == ("LBHNC", True)


def test_what_would_not_be_as_with_the_inner_name_is_refused(driven: dict[str, Any]) -> None:
    assert 'write "kv_connector": "NixlConnector"' in driven["conv_layout"]
    assert 'write "kv_connector": "MultiConnector"' in driven["conv_layout_of_child"]
    assert 'write "kv_connector": "ProvingConnectorWithoutHMA"' in driven["no_hma"]
    assert driven["hidden_hma"].endswith('write "kv_connector": "ProvingConnector"')
    assert '"inner": "NixlConnector"' in driven["no_inner"]


def test_a_right_request_is_equal_and_told_to_prometheus(driven: dict[str, Any]) -> None:
    assert driven["right"] == {"status": "equal", "failed": [], "mismatch": None}
    metrics = dict(line.rsplit(" ", 1) for line in driven["metrics"])
    proofs = 'vllm:kv_proof_requests_total{engine="0",status="%s"}'
    found = [metrics[proofs % status] for status in ("equal", "mismatch", "unverified")]
    assert found == ["1.0", "0.0", "0.0"]
    for name in ("digest", "fetch"):
        assert metrics[f'vllm:kv_proof_{name}_seconds_count{{engine="0"}}'] == "1.0"
    assert float(metrics['vllm:moved_total{engine="0"}']) > 0, "the inner connector's own"
    assert not any("first_mismatch" in name for name in metrics)


def test_the_child_of_a_multi_connector_that_loads_a_request_is_known(driven: dict[str, Any]) -> None:
    moving = ["MovingConnector", ["p2p"]]
    assert driven["loaders"] == [["OffloadingConnector", ["host"]], moving, moving]


def test_what_vllm_says_of_a_source_decides_whether_a_difference_is_a_mismatch(
    driven: dict[str, Any],
) -> None:
    stores = ("ExampleConnector", "MultiConnector", "OffloadingConnector")
    known = dict.fromkeys(("NixlConnector", "NixlPushConnector"), "p2p")
    assert driven["sources"] == {**known, **dict.fromkeys(stores, "external_unspecified")}
    assert (driven["stored"], driven["stored_by_p"]) == ("unverified", "mismatch")


def test_planted_bugs_are_named_and_their_requests_fail(driven: dict[str, Any]) -> None:
    for planted, (field, classification) in PLANTED.items():
        found = driven[planted]
        assert (found["status"], found["failed"]) == ("mismatch", [f"d-{planted}"])
        assert found["mismatch"]["field"] == field
        assert found["mismatch"]["classification"].startswith(classification)
    first = [line for line in driven["metrics_wrong"] if "first_mismatch" in line]
    assert len(first) == 1
    assert 'classification="channels shifted: channel c holds channel c-1"' in first[0]
    assert first[0].endswith(" 2.0")

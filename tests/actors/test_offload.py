"""Engines that share a host tier under Ray: what one cell stored, the next ones load, whatever their kind."""

from __future__ import annotations

import pytest

from rayk import Experiment, load
from rayk.reports.stages import limit_rows
from tests.markers import nixl, ray, slow, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(240), thorough]
LENGTHS = [40, 170, 300]
WHOLE = [32, 160, 288]
"""Tokens of their prompts that a tier of 16 in a block has, the last token aside."""
ROW_BYTES = 4 * 2 * 2 * 16 * 4
"""Of a token: 4 layers, K and V of 2 heads of 16 elements."""


@pytest.fixture(scope="module")
def run(ray_address, checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("offload") / "run"
    Experiment(
        {
            "name": "offload",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"random": {"count": 3, "input_tokens": LENGTHS, "seed": 0}},
            "sampling": {"max_tokens": 8, "ignore_eos": True},
            "engine": {"max_batch_tokens": 128},
            "offload": {"host_gib": 0.05, "keep": "run", "load": "always"},
            "matrix": [
                {"mode": "aggregated", "prefill.tp": 2, "prefill.layout": "LBNHC"},
                {"mode": "aggregated", "prefill.layout": "BLHNC", "prefill.block_size": 32},
                {"transfer.path": "host", "prefill.block_size": 32, "decode.tp": 1},
            ],
            "checks": ["tokens", "kv_bytes"],
        }
    ).run(out, address=ray_address)
    return load(out)


def test_every_cell_passes_and_gives_every_block_back(run):
    """A tier whose blocks do not add up is an error of its cell."""
    assert run.cells["verdict"].tolist() == ["PASS"] * 3, run.cells["reason"].tolist()
    assert run.cells["num_blocks_held"].tolist() == [0] * 3
    assert (run.cells["num_blocks_leased"] == run.cells["num_blocks_freed"]).all()
    assert run.requests["offload_failure"].isna().all()


def test_what_two_ranks_stored_is_loaded_by_one_of_another_layout_and_block_size(run):
    found = run.requests.pivot_table(index="cell_id", columns="prompt_index", values="num_host_tokens")
    assert found.loc[run.cells["cell_id"]].to_numpy().tolist() == [[0, 0, 0], WHOLE, WHOLE]
    stored = run.cells["host_stored_bytes"].tolist()
    # All rows that were computed but for the last token's, in whole blocks; later cells' were there.
    assert stored[0] >= sum(WHOLE) * ROW_BYTES
    assert stored[1] < stored[0] // 4
    loads = run.transfers[run.transfers["purpose"] == "load"]
    assert loads.groupby("cell_id")["bytes"].sum().tolist() == [sum(WHOLE) * ROW_BYTES] * 2
    assert run.cells["num_kv_bytes_checked"].tolist()[1] == sum(WHOLE) * ROW_BYTES


def test_what_is_handed_over_through_the_tier_comes_from_there(run):
    """Runs of the tier's pages, 16 tokens each: the prefill engine's have 32."""
    handed = run.transfers[run.transfers["purpose"] == "handover"]
    assert handed["cell_id"].unique().tolist() == [run.cells["cell_id"][2]]
    assert sorted(handed["num_descriptors"]) == [-(-n // 16) for n in LENGTHS]
    assert run.requests["kv_path"].tolist() == ["local"] * 6 + ["remote"] * 3
    # The way in is told beside it, as a stage of its own.
    relayed = run.transfers[run.transfers["purpose"] == "relay"]
    assert relayed["cell_id"].unique().tolist() == [run.cells["cell_id"][2]]
    assert relayed["bytes"].sum() == run.cells["host_relayed_bytes"][2]
    # The tier had row groups of the longest.
    assert relayed["held_bytes"].sum() == 256 * ROW_BYTES
    assert relayed["bytes"].sum() == sum(-(-n // 16) for n in LENGTHS) * 16 * ROW_BYTES - 256 * ROW_BYTES
    assert run.cells["host_relayed_bytes"].tolist()[:2] == [0, 0]
    assert (run.requests["stage_relay_ns"].notna() == (run.requests["kv_path"] == "remote")).all()
    assert (relayed["begin_ms"] < handed["begin_ms"].min()).any()
    for request, rows in relayed.groupby("request_id"):
        assert rows["end_ms"].max() <= handed.loc[handed["request_id"] == request, "begin_ms"].min()
    [cell_limits] = [row for row in limit_rows(run) if row["cell_id"] == run.cells["cell_id"][2]]
    assert cell_limits["host tier"] > 0
    # Each prompt was looked up by the prefill engine, and lent to the decode engine.
    assert run.cells["host_tier.hits"].tolist() == [0, 3, 6]


@slow
def test_cells_of_unlike_dtypes_share_a_folder_and_no_page(ray_address, checkpoint, tmp_path):
    """Quantised, their pages look alike. A kind's tier ends before another's begins: the third cell finds on
    disk what the first one stored."""
    folder = tmp_path / "kv"
    Experiment(
        {
            "name": "kinds",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"random": {"count": 3, "input_tokens": LENGTHS, "seed": 0}},
            "sampling": {"max_tokens": 8, "ignore_eos": True},
            "kv_dtype": "fp8_e4m3",
            "offload": {"host_gib": 0.05, "disk_folder": str(folder), "keep": "run", "load": "always"},
            "mode": "aggregated",
            "matrix": [
                {"dtype": "float32"},
                {"dtype": "bfloat16"},
                {"dtype": "float32", "prefill.tp": 2, "prefill.layout": "LBNHC", "prefill.block_size": 32},
            ],
            "checks": ["kv_bytes"],
        }
    ).run(tmp_path / "run", address=ray_address)
    run = load(tmp_path / "run")
    assert run.cells["verdict"].tolist() == ["PASS"] * 3, run.cells["reason"].tolist()
    for column in ("num_host_tokens", "num_disk_tokens"):
        found = run.requests.pivot_table(index="cell_id", columns="prompt_index", values=column)
        assert found.loc[run.cells["cell_id"]].to_numpy().tolist() == [[0, 0, 0], [0, 0, 0], WHOLE]
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 2

"""What `rayk explain --engine vllm` counts, against counts by hand and vLLM's own functions."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.explain.vllm import _sources, explain_vllm, text_lines
from rayk.types.config import TESTED_VLLM
from tests.conftest import CheckpointFactory
from tests.markers import needs_vllm

LAYERS, HEADS, HEAD_SIZE = 4, 2, 16
"""Of the tiny qwen3."""


def settings(**sides: Any) -> dict[str, Any]:
    return {"engine": {"kind": "vllm"}, **sides}


@pytest.mark.parametrize(
    ("prefill", "decode", "pairs", "size"),
    [
        ({}, {}, [(0, 0)], 128),
        ({}, {"tp": 2}, [(0, 0), (0, 1)], 128),
        ({"tp": 2}, {}, [(0, 0), (1, 0)], 128),
        # The last block of 64 is all that is read of the decode side's third block.
        ({"block_size": 64}, {"block_size": 128}, [(0, 0)], 64),
        ({"tp": 2, "block_size": 32}, {"tp": 2, "block_size": 32}, [(0, 0), (1, 1)], 32),
    ],
)
def test_descriptors_by_hand(
    prefill: dict[str, int],
    decode: dict[str, int],
    pairs: list[tuple[int, int]],
    size: int,
    checkpoint: CheckpointFactory,
) -> None:
    found = explain_vllm(str(checkpoint("qwen3")), settings(prefill=prefill, decode=decode), num_tokens=300)
    assert found.supported, found.reason
    num_blocks = -(-300 // size)
    assert [(r.producer_rank, r.consumer_rank) for r in found.reads] == pairs
    assert {r.num_descriptors for r in found.reads} == {LAYERS * num_blocks}
    assert found.bytes == LAYERS * num_blocks * size * HEADS * 2 * HEAD_SIZE * 4
    assert found.rayk_bytes is not None
    assert found.rayk_bytes <= found.bytes


def test_windows_are_clipped(checkpoint: CheckpointFactory) -> None:
    found = explain_vllm(
        str(checkpoint("mistral")), settings(prefill={"block_size": 32}, decode={"block_size": 32})
    )
    assert found.num_tokens == 1024
    assert found.num_descriptors == LAYERS * (-(-50 // 32) + 1)  # as blocks_per_sw counts them


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        (
            {"prefill": {"tp": 3}},
            "prefill: vLLM 0.32.0: Total number of attention heads (8) must be divisible",
        ),
        ({"decode": {"layout": "NHD"}}, "VLLM_KV_CACHE_LAYOUT=LBNHC does not satisfy every supported set"),
        ({"prefill": {"block_size": 16}}, "No common block size for 16"),
        (
            {"prefill": {"block_size": 128}, "decode": {"block_size": 64}},
            "Local block size 64 is not divisible by remote block size 128",
        ),
        ({"decode": {"kind": "rayk"}}, "rayk and vLLM have no common handshake"),
    ],
)
def test_refusals_are_vllms_own(sides: dict[str, Any], words: str, checkpoint: CheckpointFactory) -> None:
    found = explain_vllm(str(checkpoint("qwen3")), settings(**sides))
    assert not found.supported
    assert words in found.reason


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("falcon_h1", {}, "models with states"),
        ("qwen3", {"transfer": {"mode": "push"}}, "NixlConnector pulls"),
        ("qwen3", {"engine": {"kind": "vllm", "connector": "ExampleConnector"}}, "NixlConnector pulls"),
    ],
)
def test_a_pair_that_vllm_runs_is_supported_though_it_is_not_counted(
    family: str, changes: dict[str, Any], words: str, checkpoint: CheckpointFactory
) -> None:
    found = explain_vllm(str(checkpoint(family)), settings(**changes))
    assert (found.supported, found.reason, found.reads, found.rayk_bytes) == (True, "", (), None)
    assert words in found.not_counted
    (line,) = text_lines(found)
    assert f"not counted: {found.not_counted}" in line


def test_the_command(checkpoint: CheckpointFactory) -> None:
    model = str(checkpoint("qwen3"))
    shown = CliRunner().invoke(app, ["explain", "--model", model, "--engine", "vllm", "--decode-tp", "2"])
    assert shown.exit_code == 0, shown.output
    assert f"as NixlConnector of vLLM {TESTED_VLLM} posts them" in " ".join(shown.output.split())
    assert "rayk: " in shown.output
    told = CliRunner().invoke(app, ["explain", "--model", model, "--engine", "vllm", "--format", "json"])
    assert json.loads(told.output)["supported"] is True
    refused = CliRunner().invoke(app, ["explain", "--model", model, "--prefill-kind", "vllm"])
    assert refused.exit_code == 1
    hybrid = ["explain", "--model", str(checkpoint("falcon_h1")), "--engine", "vllm", "--decode-tp", "2"]
    shown = CliRunner().invoke(app, hybrid)
    assert (shown.exit_code, "not counted" in shown.output) == (0, True)
    assert "no common handshake" in refused.output
    assert (
        CliRunner().invoke(app, ["explain", "--model", model, "--engine", "vllm", "--byte", "0"]).exit_code
        == 2
    )


MAPPING = """
import json
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec
found = []
for heads in (1, 2, 4, 8):
    for p in (1, 2, 4, 8):
        for d in (1, 2, 4, 8):
            for rank in range(d):
                topo = SimpleNamespace(tp_rank=rank, tp_size=d, total_num_kv_heads=heads, is_mla=False,
                                       dcp_consumer_count=lambda *a: 1)
                plan = compute_tp_mapping(topo, p, (FullAttentionSpec,))
                found.append([rank, p, d, heads, list(plan.source_ranks_per_group[0])])
print(json.dumps(found))
"""


@needs_vllm
def test_the_ranks_that_are_read_are_vllms(vllm_python: Path) -> None:
    told = subprocess.run(
        [vllm_python, "-c", MAPPING], capture_output=True, text=True, check=True, timeout=280
    )
    for rank, prefill_tp, decode_tp, heads, sources in json.loads(told.stdout.splitlines()[-1]):
        assert _sources(rank, prefill_tp, decode_tp, heads) == sources

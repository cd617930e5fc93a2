"""jobs/benchmarks/real_model.py: what it says of quality and of cells, on a tiny model and made-up rows."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.specs import load_spec
from tests.conftest import ROOT, CheckpointFactory
from tests.markers import thorough

CELL = {
    "cell_id": "p1-d3",
    "prefill.tp": 1.0,
    "decode.tp": 3.0,
    "prefill.effective_layout": "BHLNC",
    "decode.effective_layout": "LBNHC",
    "dtype": "float32",
    "kv_dtype": "auto",
    "kv_scales": "tensor",
    "transfer.mode": "pull",
    "transfer.path": "direct",
    "verdict": "PASS",
    "reason": "",
    "num_cached_tokens": 0,
    "num_host_tokens": 0,
    "num_token_mismatches": 0.0,
    "first_divergence": None,
    "max_logprob_error": 2e-5,
    "max_prompt_logprob_error": math.nan,
    "logprob_bound": 2e-3,
    "prompt_logprob_bound": math.nan,
    "num_kv_bytes_checked": 3_000_000,
    "num_kv_bytes_mismatched": 0,
    "transfer_bytes": 2_500_000.0,
    "wall_s": 1.25,
}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    return importlib.import_module("jobs.benchmarks.real_model")


def test_divergence_by_hand(job: Any) -> None:
    """Of two tokens: one whose distributions are equal, and (1/2, 1/2) beside (1/4, 3/4)."""
    right = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    found = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log() + 3.0  # logits may be shifted
    quality = job.compare([right], [found], [[0, 1, 1]])
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert quality.num_tokens == 2
    assert quality.mean_kl == pytest.approx(kl / 2, rel=1e-6)
    assert quality.max_kl == pytest.approx(kl, rel=1e-6)
    assert quality.share_same_best == 0.5
    assert quality.perplexity == pytest.approx(math.sqrt(1 / (0.5 * 0.75)), rel=1e-6)


@thorough
def test_an_engine_is_compared_at_every_token_of_every_text(job: Any, checkpoint: CheckpointFactory) -> None:
    """Over several steps of the engine; coarser KV is farther off."""
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(4, 500, (n,), generator=draw).tolist() for n in (37, 600)]
    kept = [job.FORMATS[0], job.FORMATS[2], job.FORMATS[4]]
    exact, fp8, nvfp4 = (q for _, q in job.measure_quality(checkpoint("qwen3"), texts, kept))
    assert exact.num_tokens == 36 + 599
    assert exact.max_kl < 1e-6
    assert exact.mean_kl < fp8.mean_kl < nvfp4.mean_kl


def test_a_row_says_what_the_cell_found(job: Any) -> None:
    requests = [{"num_prompt_tokens": 1200}, {"num_prompt_tokens": 51}]
    row = dict(zip(job.CELL_TITLES, job.cell_cells(CELL, requests), strict=True))
    assert row == {
        "cell": "(1, 3)",
        "dtype": "float32",
        "KV": "as it",
        "layouts": "BHLNC to LBNHC",
        "transfer": "pull",
        "prompt tokens": "1,251",
        "cached": "0",
        "verdict": "PASS",
        "tokens equal": "all of 2",
        "largest logprob gap": "2e-05",
        "bound": "0.002",
        "digests": "0 wrong in 3.0 MB",
        "MB moved": "2.5",
        "s": "1.2",
    }
    near = CELL | {"first_divergence": {"request": 1, "token_index": 3}, "num_token_mismatches": 1.0}
    assert "1 of 2, or nearly a tie" in job.cell_cells(near, requests)
    assert "" in job.cell_cells(CELL | {"num_token_mismatches": math.nan}, requests)
    # A run's table lacks the settings that none of its cells changes.
    plain = {key: value for key, value in CELL.items() if key not in ("kv_scales", "transfer.path")}
    assert job.cell_cells(plain, requests) == job.cell_cells(CELL, requests)
    assert job.cell_cells(plain | {"kv_dtype": "fp8_e4m3"}, requests)[2] == "fp8_e4m3, scales by tensor"
    assert list(job.wrong_cells([plain])) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"verdict": "NEAR_TIE", "reason": "token 3"}, ["p1-d3: NEAR_TIE: token 3"]),
        ({"engine.prefix_caching": True}, ["p1-d3: nothing was found in the prefix cache"]),
        ({"engine.prefix_caching": True, "num_cached_tokens": 16}, []),
        ({"transfer.path": "host"}, ["p1-d3: nothing was loaded from the host tier"]),
    ],
    ids=["right", "near", "no hit", "a hit", "no load"],
)
def test_cells_that_prove_nothing_are_named(job: Any, changed: dict[str, Any], said: list[str]) -> None:
    assert list(job.wrong_cells([CELL | changed])) == said


def test_the_experiments_have_every_pair_format_and_way() -> None:
    """And the prompts are of many scripts, long, and two begin alike."""
    spec = load_spec(ROOT / "jobs" / "real.yaml").spec

    def values(key: str, default: Any) -> set[Any]:
        return {value for point in spec.matrix for value in point.get(key, [default])}

    points = [(p.get("prefill.tp", [1])[0], p.get("decode.tp", [1])[0]) for p in spec.matrix]
    assert set(points) == {(1, 1), (1, 3), (3, 1)}
    assert all(p["prefill.layout"] != p["decode.layout"] for p in spec.matrix)
    assert values("dtype", "float32") == {"float32", "bfloat16"}
    assert values("kv_dtype", "auto") == {"auto", "fp8_e4m3"}
    assert values("transfer.mode", "pull") == {"pull", "push"}
    assert values("transfer.path", "direct") == {"direct", "host"}
    assert values("engine.prefix_caching", False) == {True, False}
    files = [Path(ROOT, name) for name in spec.prompt_files()]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert max(map(len, prompts)) > 9000
    assert any(set("Ελ Дб 中 お 한녕 صب בט हि ไท 🎉") <= set(p) for p in prompts)
    assert any(a != b and a[:1000] == b[:1000] for a in prompts for b in prompts)

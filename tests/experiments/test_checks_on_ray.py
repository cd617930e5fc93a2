"""Checks outside float32, and faults that only `kv_values` sees, through real workers and transfers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rayk import Experiment, load
from rayk.reports import exit_code
from tests.markers import nixl, ray, slow

pytestmark = [ray, nixl, pytest.mark.timeout(240), slow]

ALL = ["logprobs", "kv_bytes", "kv_values"]


def wrong_kv(point: str, rank: int) -> list[dict[str, Any]]:
    return [{"kind": "wrong_kv", "point": point, "layer": 1, "role": "prefill", "rank": rank}]


@pytest.fixture(scope="module")
def cells(
    ray_address: str, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, pd.Series]:
    """What each cell ended in, by a name of our own."""
    faults = [wrong_kv("rope", 0), wrong_kv("store_kv", 1)]
    half = {"dtype": "bfloat16", "prefill.tp": 2}
    matrix = [
        {**half, "checks": [ALL]},
        {**half, "mode": "aggregated", "sampling.temperature": 1.0, "sampling.logprobs": 2},
        {**half, "checks": [["tokens"]]},
        {"dtype": "float16", "decode.tp": 2, "prefill.layout": "BHLNC"},
        {"prefill.tp": 2, "faults": faults, "checks": [["kv_bytes", "kv_values"]]},
    ]
    out: Path = tmp_path_factory.mktemp("checks") / "run"
    experiment = Experiment(
        {
            "name": "checks",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"random": {"count": 3, "input_tokens": [5, 37, 300], "seed": 0}},
            "sampling": {"max_tokens": 12, "ignore_eos": True},
            "matrix": matrix,
        }
    )
    result = experiment.run(out, address=ray_address)
    assert exit_code(result.cells) == 0, result.cells[["verdict", "reason"]].to_string()
    names = ["all", "sampled", "tokens", "float16", "rope", "store_kv"]
    rows = [row for _, row in load(out).cells.iterrows()]
    return dict(zip(names, rows, strict=True))


def test_every_check_passes_in_bfloat16(cells: dict[str, pd.Series]) -> None:
    row = cells["all"]
    assert row["verdict"] == "PASS", row["reason"]
    assert set(row["checks_done"]) == set(ALL)
    assert row["num_logprobs_checked"] == 3 * 12
    assert row["num_prompt_logprobs_checked"] == 4 + 36 + 299
    for kind in ("", "prompt_"):
        assert 0 < row[f"max_{kind}logprob_error"] <= row[f"{kind}logprob_bound"]
        assert 0 < row[f"typical_{kind}logprob_error"] <= row[f"typical_{kind}logprob_bound"]
    assert 0 < row["max_kv_value_error_of_bound"] < 1
    assert row["max_kv_value_error"] > 0.01, "bfloat16 rounds"


def test_outside_float32_logprobs_are_the_default_and_take_sampled_tokens(
    cells: dict[str, pd.Series],
) -> None:
    for name, checks in (("sampled", {"logprobs"}), ("float16", {"logprobs", "kv_bytes"})):
        assert cells[name]["verdict"] == "PASS", cells[name]["reason"]
        assert set(cells[name]["checks_done"]) == checks
        assert cells[name]["num_logprobs_checked"] == 3 * 12
    assert cells["float16"]["logprob_bound"] < cells["all"]["logprob_bound"] / 3, "three bits more"


def test_tokens_outside_float32_may_part_where_rounding_decides(cells: dict[str, pd.Series]) -> None:
    row = cells["tokens"]
    assert row["verdict"] in ("PASS", "NEAR_TIE")
    assert row["num_token_mismatches"] == 0
    assert 0.02 < row["near_tie_tolerance"] < 5


@pytest.mark.parametrize(
    ("point", "head", "why"),
    [
        ("rope", 0, "rope: positions are off by +1"),
        ("store_kv", 1, "store_kv: token t holds token t-1"),
    ],
)
def test_wrong_kv_passes_kv_bytes_and_is_named_by_kv_values(
    cells: dict[str, pd.Series], point: str, head: int, why: str
) -> None:
    row = cells[point]
    assert row["verdict"] == row["expected_verdict"] == "KV_MISMATCH"
    assert {"kv_bytes", "kv_values"} <= set(row["checks_done"])
    assert row["num_kv_bytes_mismatched"] == 0, "both sides hold the same wrong bytes"
    assert row["num_kv_bytes_checked"] > 0
    assert f"layer 1, group 0, k, head {head}, token 0" in row["reason"]
    assert why in row["reason"]

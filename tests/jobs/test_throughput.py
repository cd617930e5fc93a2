"""jobs/benchmarks/throughput.py: rates are what they say, and every contestant does the same work."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "jobs" / "benchmarks"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture(scope="module")
def job() -> Iterator[Any]:
    path, threads = list(sys.path), os.environ.get("OMP_NUM_THREADS")
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("throughput")
    sys.path[:] = path
    sys.modules.pop("throughput", None)
    if threads is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = threads


def test_rates(job: Any) -> None:
    """Two requests: the second has its first token at 3 s, when the first has two of its four."""
    run = job.Run([[1, 2, 3, 4], [5, 6]], [[2.0, 3.0, 4.0, 5.0], [3.0, 7.0]], started_s=1.0, ended_s=9.0)
    assert run.rates(20) == {"prefill": 20 / 2, "decode": 3 / 4, "end to end": 6 / 8}


def test_prompts_are_stretches_of_a_text_where_there_is_one(job: Any) -> None:
    text = tuple(range(100, 200))
    prompts = job.Case("float32", 3, 10, 4, text).prompts()
    assert prompts == [list(range(100 + at, 110 + at)) for at in (0, 30, 60)]
    assert job.Case("float32", 1, 10, 4, text).prompts() == [list(range(100, 110))]
    assert [len(p) for p in job.Case("float32", 2, 10, 4).prompts()] == [10, 10]


def test_ratios_are_taken_round_by_round(job: Any) -> None:
    """A slow round of everybody changes no ratio."""
    ours = [dict.fromkeys(job.METRICS, rate) for rate in (30.0, 3.0, 30.0)]
    theirs = [dict.fromkeys(job.METRICS, rate) for rate in (20.0, 2.0, 60.0)]
    result = job.Result({"rayk": ours, "generate": theirs}, {"rayk": 1.0, "generate": 1.0})
    case = job.Case("float32", 1, 4, 4)
    assert result.ratio("generate", "decode") == 1.5
    assert result.rate("generate", "decode") == 20.0
    assert job.behind({case: result}) == []
    slower = job.Result({"rayk": theirs, "generate": ours}, result.share_equal)
    assert len(job.behind({case: slower})) == len(job.METRICS)
    row = dict(zip(job.TITLES[2:7], job.cells(case, result, "generate")[2:7], strict=True))
    assert row == {"contestant": "generate"} | dict.fromkeys(job.METRICS, "20") | {
        "rayk by it: prefill": "1.50"
    }


def test_contestants_generate_the_same_tokens(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "MODEL", job.MODEL | SMALL)
    job.write_model(tmp_path)
    case = job.Case("float32", 2, 5, 6)
    result = job.run_case(tmp_path, case, num_rounds=1, only=["rayk", "generate"])
    assert result.share_equal == {"rayk": 1.0, "generate": 1.0}
    assert all(rate > 0 for rounds in result.rates.values() for found in rounds for rate in found.values())
    assert len(case.prompts()) == 2
    assert all(len(p) == 5 and max(p) < SMALL["vocab_size"] for p in case.prompts())

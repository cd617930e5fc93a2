"""Due times and prompts: what was asked for, and the same again with the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rayk.bench.load import Load, check_load
from rayk.bench.prompts import plan_requests
from rayk.bench.run import with_own_seed
from rayk.sched.arrivals import due_times
from rayk.traces.drawn import Lengths, parse_lengths
from rayk.types.errors import UserError
from rayk.types.slo import parse_slo

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("process", "burstiness", "deviation"),
    [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5), ("constant", 1.0, 0.0)],
)
def test_gaps_have_the_mean_and_deviation_of_their_process(
    process: str, burstiness: float, deviation: float
) -> None:
    due = due_times(process, rate=50.0, num_requests=20_000, burstiness=burstiness, seed=3)
    gaps = np.diff([0, *due]) / 1e9
    assert gaps.min() >= 0
    # Five standard errors.
    assert abs(gaps.mean() - 0.02) <= 5 * 0.02 * deviation / np.sqrt(20_000) + 1e-9
    assert abs(gaps.std() / 0.02 - deviation) <= 0.1 * deviation + 1e-6


def test_a_seed_draws_the_same_times_at_any_rate() -> None:
    def drawn(rate: float, seed: int) -> np.ndarray:
        return np.array(due_times("poisson", rate=rate, num_requests=50, burstiness=1, seed=seed))

    assert (drawn(5, 0) == drawn(5, 0)).all()
    assert not (drawn(5, 0) == drawn(5, 1)).all()
    assert np.abs(drawn(5, 0) - 2 * drawn(10, 0)).max() <= 1
    gamma = due_times("gamma", rate=5, num_requests=50, burstiness=1.0, seed=0)
    assert np.std(np.diff(gamma)) > 0


def test_a_load_draws_the_same_whatever_loads_are_beside_it() -> None:
    def prompts(**options: float) -> list[list[int]]:
        load = with_own_seed(Load(url=URL, num_requests=5, **options))
        return [list(planned.prompt) for planned in plan_requests(load, (4, 900))]

    assert prompts(rate=4.0) == prompts(rate=4.0) != prompts(rate=2.0)
    assert prompts(concurrency=4) not in (prompts(rate=4.0), prompts(concurrency=8))


def test_random_prompts_have_their_lengths_their_ids_and_shared_prefixes() -> None:
    load = Load(
        url=URL,
        rate=2.0,
        num_requests=40,
        input_tokens=Lengths(values=(5, 37, 300)),
        output_tokens=Lengths(uniform=(3, 9)),
        prefix_tokens=20,
        num_prefixes=2,
        seed=1,
    )
    planned = plan_requests(load, (10, 99))
    assert [len(p.prompt) for p in planned] == [(5, 37, 300)[i % 3] for i in range(40)]
    assert all(10 <= token <= 99 for p in planned for token in p.prompt)
    assert {token for p in planned for token in p.prompt} == set(range(10, 100))
    assert {p.max_tokens for p in planned} == set(range(3, 10))
    for p in planned:
        sharing = planned[p.index % 2 + 2 * 2]  # of 37 or 300 tokens
        shared = min(20, len(p.prompt), len(sharing.prompt))
        assert p.prompt[:shared] == sharing.prompt[:shared]
    assert planned[1].prompt[:20] != planned[2].prompt[:20]
    assert planned == plan_requests(load, (10, 99))
    assert [p.due_ns for p in planned] == sorted(p.due_ns or 0 for p in planned)


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


ROWS = [
    {"timestamp": 3000, "input_length": 1300, "output_length": 100, "hash_ids": [0, 7, 9]},
    {"timestamp": 0, "input_length": 1100, "output_length": 512, "hash_ids": [0, 7, 8]},
    {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [3, 4]},
    {"timestamp": 4000.5, "input_length": 700, "output_length": 20, "hash_ids": [0]},
]


def common(a: list[int], b: list[int]) -> int:
    """Length of the common start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_trace_is_sent_as_it_was_recorded(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", ROWS)
    planned = plan_requests(Load(url=URL, trace=path, trace_speed=2.0), (0, 999))
    assert [p.due_ns for p in planned] == [0, 0, 1_500_000_000, 2_000_250_000]
    assert [len(p.prompt) for p in planned] == [1100, 600, 1300, 700]
    assert [p.max_tokens for p in planned] == [512, 1, 100, 20]
    first, other, second, last = (list(p.prompt) for p in planned)
    assert common(first, second) == 1024, "two blocks are the same, the third is not"
    assert common(first, last) == 512
    assert common(first, other) <= 3
    assert len(plan_requests(Load(url=URL, trace=path, num_requests=2), (0, 999))) == 2


def test_a_shrunken_trace_shares_what_the_whole_one_shares(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", ROWS)
    planned = plan_requests(Load(url=URL, trace=path, trace_block_tokens=8), (0, 999))
    assert [len(p.prompt) for p in planned] == [18, 10, 21, 11]  # n * 8 / 512, rounded up
    assert [p.max_tokens for p in planned] == [8, 1, 2, 1]
    first, _, second, last = (list(p.prompt) for p in planned)
    assert common(first, second) == 16
    assert common(first, last) == 8


def test_prompts_are_read_as_experiments_read_them(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "one"}, {"prompt_token_ids": [4, 5]}])
    load = Load(url=URL, concurrency=2, prompts=path, num_requests=3)
    assert [p.prompt for p in plan_requests(load, (0, 0))] == ["one", [4, 5], "one"]
    bad = write_lines(tmp_path / "bad.jsonl", [{"prompt": "one"}, {"text": "two"}])
    with pytest.raises(UserError, match="not a prompt") as raised:
        plan_requests(Load(url=URL, concurrency=1, prompts=bad), (0, 0))
    assert raised.value.where == f"{bad}:2"
    with pytest.raises(UserError, match="cannot read"):
        plan_requests(Load(url=URL, concurrency=1, prompts=tmp_path / "none"), (0, 0))


def test_objectives_and_lengths_are_read() -> None:
    assert parse_slo("ttft=200ms, tpot=0.5s,e2e=10us").limits_ms == {
        "ttft": 200.0,
        "tpot": 500.0,
        "e2e": 0.01,
    }
    assert parse_slo("").limits_ms == {}
    for text in ("ttft", "ttft=5", "ttft=5ms,ttft=6ms", "speed=5ms", "ttft=-5ms"):
        with pytest.raises(UserError, match="not an objective"):
            parse_slo(text)
    assert parse_lengths("5, 37", where="") == Lengths(values=(5, 37))
    assert parse_lengths("64-256", where="") == Lengths(uniform=(64, 256))
    for text in ("", "0", "9-3", "0-3", "a", "3,,4"):
        with pytest.raises(UserError, match="not a number of tokens"):
            parse_lengths(text, where="--input-tokens")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0.0},
        {"rate": 1.0, "concurrency": 1},
        {"concurrency": 0},
        {},
        {"rate": 1.0, "burstiness": 0.0},
        {"rate": 1.0, "process": "weekly"},
        {"rate": 1.0, "num_requests": 0},
        {"rate": 1.0, "timeout_s": 0.0},
        {"rate": 1.0, "use_chat": True},
        {"rate": 1.0, "url": "localhost:8000"},
        {"rate": float("nan")},
        {"rate": float("inf")},
    ],
)
def test_a_load_that_cannot_be_sent_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        check_load(Load(**({"url": URL} | wrong)))  # type: ignore[arg-type]

"""Data sets and levels of load by the names that vLLM's benchmark has for them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rayk import load
from rayk.cli.bench import _levels
from tests.bench.fake_server import Script
from tests.bench.test_bench_command import run_on
from tests.markers import thorough


def row(*texts: object) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": text} for text in texts]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    odd = [row(), row("a question"), row("a question", 3), {"conversations": "?"}, None, row("?", "!" * 99)]
    long = [row("x" * 5000, "an answer, all of it"), row("a long question", "y" * 9000)]
    good = [row(f"question number {i}?", "z" * (40 + 4 * i), "more") for i in range(3)]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*odd, *long, *good]), encoding="utf-8")
    return path


def test_conversations_are_prompts_and_lengths(path: Path, tmp_path: Path) -> None:
    options = [
        "--dataset-name",
        "sharegpt",
        "--dataset-path",
        str(path),
        "--num-requests",
        "6",
        "--seed",
        "1",
    ]
    _, bodies = run_on(Script(), tmp_path / "a", *options, "--max-concurrency", "1", "--request-rate", "inf")
    asked = [(body["prompt"], body["max_tokens"]) for body in bodies]
    assert sorted(set(asked)) == [(f"question number {i}?", 10 + i) for i in range(3)]
    assert asked[:3] == asked[3:]
    _, bodies = run_on(Script(), tmp_path / "b", *options, "--chat", "--output-tokens", "5")
    assert {body["messages"][0]["content"] for body in bodies} == {prompt for prompt, _ in asked}
    assert {body["max_tokens"] for body in bodies} == {5}


@thorough
def test_levels_by_any_name(tmp_path: Path) -> None:
    few = ("--num-requests", "2", "--output-tokens", "2", "--dataset-name", "random")
    run_on(Script(), tmp_path / "a", *few, "--concurrency", "1,2", "--rate", "300")
    names = ["poisson rate=300", "closed concurrency=1", "closed concurrency=2"]
    assert list(load(tmp_path / "a").cells["cell_id"]) == names
    run_on(Script(), tmp_path / "b", *few, "--request-rate", "300")
    run_on(Script(), tmp_path / "c", *few, "--max-concurrency", "2")
    cells = [load(tmp_path / name).cells["cell_id"][0] for name in "bc"]
    assert cells == ["poisson rate=300", "closed concurrency=2"]


def test_at_once_is_so_many_in_flight_by_either_name() -> None:
    assert _levels([], ["8"], "inf", None) == _levels([], [], "inf", "8") == ([], [8])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--concurrency", "1,x"], "--concurrency 1,x: not a number"),
        (["--concurrency", "1,0"], "--concurrency 0"),
        (["--rate", ""], "not a number"),
        (["--request-rate", "inf"], "--max-concurrency N"),
        (["--request-rate", "2", "--max-concurrency", "2"], "one of them"),
        (["--dataset-name", "sharegpt"], "--dataset-path FILE"),
        (["--dataset-path", "x.json"], "--dataset-name sharegpt"),
        (["--dataset-name", "sharegpt", "--dataset-path", "none.json"], "cannot read the data set"),
        (["--dataset-name", "sharegpt", "--dataset-path", "/dev/zero"], "not a plain file"),
        (["--dataset-name", "sharegpt", "--dataset-path", os.devnull], "not a plain file"),
        (["--dataset-name", "sharegpt", "--dataset-path", __file__], "cannot read the data set"),
        (["--dataset-name", "sharegpt", "--dataset-path", "PATH", "--prompts", "x"], "several files"),
    ],
)
def test_what_cannot_be_sent_is_refused(path: Path, tmp_path: Path, options: list[str], says: str) -> None:
    named = [str(path) if word == "PATH" else word for word in options]
    result, bodies = run_on(Script(), tmp_path / "out", *named)
    assert (result.exit_code, bodies) == (2, [])
    assert says in result.stderr


def test_a_file_without_conversations_is_refused(path: Path, tmp_path: Path) -> None:
    path.write_text('{"rows": []}', encoding="utf-8")
    options = ("--dataset-name", "sharegpt", "--dataset-path", str(path))
    result, _ = run_on(Script(), tmp_path / "out", *options)
    assert result.exit_code == 2
    assert "no conversations of ShareGPT" in result.stderr

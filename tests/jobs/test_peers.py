"""jobs/benchmarks/peers.py: engines in processes of their own take turns; who lacks is told."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import pytest

from jobs.benchmarks.harness import Page
from jobs.benchmarks.peer_workers.contract import Job
from jobs.benchmarks.peer_workers.memory import weight_bytes
from tests.jobs.test_throughput import SMALL
from tests.markers import thorough


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which it sets for good when it is imported
    module = importlib.import_module("jobs.benchmarks.peers")
    monkeypatch.setattr(module.throughput, "MODEL", module.throughput.MODEL | SMALL)
    return module


@thorough
def test_engines_take_turns_and_a_missing_one_is_a_row(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = job.Peer("ctranslate2", "with_ctranslate2", ".venv-of-nobody")
    there = [peer for peer in job.PEERS if peer.name in job.ALWAYS]
    monkeypatch.setattr(job, "PEERS", (*there, absent))
    monkeypatch.setattr(job, "TARGETS", (("float32", 2, "ctranslate2", 1.0), ("float32", 2, job.RIGHT, 0.0)))
    page = Page({})
    options = argparse.Namespace(
        only=None, prompt=5, tokens=6, rounds=2, batches=[1, 2], dtypes=["float32"], model=None
    )
    assert job.fill(options, page) == []
    assert page.wrong == []
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.text.splitlines()]
    of = {tuple(row[:3]): row for row in rows if len(row) == len(job.TITLES)}
    why = "skipped: no .venv-of-nobody (make bench-peers installs it)"
    for batch in "12":
        assert of["float32", batch, "ctranslate2"][3] == why
        assert float(of["float32", batch, job.RIGHT][6]) > 0
        assert float(of["float32", batch, job.LIMIT][4]) > 0
    assert of["float32", "2", job.RAYK][-1] == "100%"
    assert ["float32", "2", "ctranslate2", "1.00", why, "", ""] in rows


def test_a_worker_that_cannot_or_dies_says_why(job: Any, tmp_path: Path) -> None:
    memory = job.Peer("one", "memory")
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(job.PeerFailed, match="one: KeyError: 'intermediate_size'"):
        job.Worker(memory, Job(str(tmp_path), "float32", 1, 2, 3), tmp_path / "log")
    job.throughput.write_model(tmp_path)
    worker = job.Worker(memory, Job(str(tmp_path), "float32", 1, 2, 3), tmp_path / "log")
    try:
        assert worker.run([[1]], 3).tokens == [[0, 0, 0]]
        with pytest.raises(job.PeerFailed, match="one: its process ended: TypeError: .*NoneType"):
            worker.run([[1]], None)
    finally:
        worker.close()
    skipped: dict[str, str] = {}
    job.skip(job.PeerFailed("one", "gone"), skipped)
    assert skipped == {"one": "gone"}
    with pytest.raises(job.PeerFailed, match="rayk: gone"):
        job.skip(job.PeerFailed("rayk", "gone"), skipped)


def test_a_step_reads_all_weights_but_the_embedding(job: Any, tmp_path: Path) -> None:
    job.throughput.write_model(tmp_path)
    model = importlib.import_module("transformers").LlamaForCausalLM.from_pretrained(tmp_path)
    read = sum(p.numel() for p in model.parameters() if p.dim() > 1) - model.model.embed_tokens.weight.numel()
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        assert weight_bytes(Job(str(tmp_path), dtype, 1, 2, 3)) == size * read


def test_targets_are_held_to_ratios_of_decode(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rayk decodes at 30, 3 and 30 beside 20, 2 and 60: a slow round of everybody changes no ratio."""

    def rounds(*decode: float) -> list[dict[str, float]]:
        return [{"prefill": 10.0, "decode": rate, "end to end": 1.0} for rate in decode]

    names = (job.RAYK, "llama.cpp", job.LIMIT)
    rates = dict(zip(names, (rounds(30, 3, 30), rounds(20, 2, 60), rounds(40, 4, 40)), strict=True))
    case = job.Case("bfloat16", 1, 4, 4)
    result = job.Result(rates, dict.fromkeys(names, 0.5))
    row = dict(enumerate(job.cells(case, result, "llama.cpp")))
    assert list(row.values()) == [
        *("bfloat16", "1", "llama.cpp", "10", "20", "50%", "1.50", "0.50 to 1.50"),
        *("1.00", "1.00 to 1.00", "50%"),
    ]
    for least, is_missed in ((1.5, False), (1.6, True)):
        monkeypatch.setattr(job, "TARGETS", (("bfloat16", 1, "llama.cpp", least),))
        found = ["bfloat16", "1", "llama.cpp", f"{least:.2f}", "1.50", "75%", "50%"]
        assert job.targets({case: result}, {case: {}}) == [(found, is_missed)]

"""What a worker of vLLM answers the driver."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from rayk.vllm import extension
from rayk.vllm.extension import WorkerExtension


def worker(device: str) -> WorkerExtension:
    made = WorkerExtension()
    made.model_runner = SimpleNamespace(device=SimpleNamespace(type=device))
    return made


def test_the_thread_that_computes_may_run_wherever_its_parent_may(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: asked.append((pid, cores)))
    worker("cuda").rayk_unpin()
    assert asked == []
    worker("cpu").rayk_unpin()
    assert asked == [(0, os.sched_getaffinity(os.getppid()))]


def test_rows_are_told_with_their_shapes_and_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {(0, "k", 1): np.arange(6, dtype=np.uint8).reshape(2, 3), (1, "v", 0): np.ones((1, 2), np.uint8)}
    connector = SimpleNamespace(kept_rows={"r": kept}.get)
    monkeypatch.setattr(extension, "_connector", lambda: connector)
    shapes, content = worker("cpu").rayk_rows("r")
    assert shapes == [[0, "k", 1, 2, 3], [1, "v", 0, 1, 2]]
    assert content == bytes(range(6)) + bytes([1, 1])

"""Requests of one cell run at once: a worker streams each of them while it streams the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rayk import Experiment
from tests.markers import nixl, ray, slow

pytestmark = [ray, nixl, pytest.mark.timeout(240), slow]

NUM_PROMPTS = 4
MAX_TOKENS = 160
"""So many that the last request begins to decode long before the first one ends."""


def most_at_once(requests: pd.DataFrame) -> int:
    """How many of them decode at one time, by the stamps that their engines put on tokens."""
    ends = (requests["due_ms"] + requests["e2e_ms"]).to_numpy()
    starts = ends - requests["stage_decode_ns"].to_numpy(dtype=float) / 1e6
    assert (starts < ends).all()
    return int(max(np.sum((starts <= at) & (at < ends)) for at in starts))


def test_intervals_are_counted() -> None:
    def table(*intervals: tuple[float, float]) -> pd.DataFrame:
        rows = [
            {"due_ms": 1.0, "e2e_ms": end - 1, "stage_decode_ns": (end - a) * 1e6} for a, end in intervals
        ]
        return pd.DataFrame(rows)

    assert most_at_once(table((5, 9), (9, 12), (12, 20))) == 1
    assert most_at_once(table((5, 9), (8, 12), (12, 20))) == 2
    assert most_at_once(table((5, 30), (8, 12), (11, 20))) == 3


def test_requests_of_a_cell_decode_at_the_same_time(
    ray_address: str, spec: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    matrix = [{"prefill.tp": 1, "decode.tp": 2}, {"mode": "aggregated"}]
    asked = spec(
        matrix,
        prompts={"random": {"count": NUM_PROMPTS, "input_tokens": [5, 37], "seed": 0}},
        sampling={"max_tokens": MAX_TOKENS, "ignore_eos": True},
        checks=["kv_bytes"],
    )
    result = Experiment(asked).run(tmp_path / "run", address=ray_address)
    assert set(result.cells["verdict"]) == {"PASS"}, result.cells["reason"].tolist()
    found = {cell: most_at_once(rows) for cell, rows in result.requests.groupby("cell_id")}
    # One after the other they would never be more than one; a slow machine may let the first one end early.
    assert len(found) == 2
    assert min(found.values()) > NUM_PROMPTS / 2, found

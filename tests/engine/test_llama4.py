"""llama4 in an engine: where layers share, too, queries that skipped layers grow with their own positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import ThreadEngine
from rayk.models.families import load_config
from rayk.oracle.checkpoint import read_marker
from rayk.types.config import EngineConfig
from tests.oracle.test_llama4 import SHARED
from tests.pd import NAN_POISON, make_request

NUM_TOKENS = 24


CELLS = [
    pytest.param(tp, hybrid_kv, fast, chunk, marks=() if quick else pytest.mark.slow)
    for turn, (tp, hybrid_kv) in enumerate([(1, True), (2, False), (4, True)])
    for fast in (False, True)
    for chunk in (7, 512)
    for quick in [fast and (chunk == 7) == (turn != 1)]
]


@pytest.mark.parametrize(("tp", "hybrid_kv", "fast", "chunk"), CELLS)
def test_tokens_equal_those_of_transformers(
    checkpoint: Callable[..., Path], tp: int, hybrid_kv: bool, fast: bool, chunk: int
) -> None:
    """Those its checkpoint promises; the longest prompt is longer than three chunks."""
    path = checkpoint("llama4", overrides=SHARED)
    config = load_config(path)
    assert [config.layers[i].temperature is not None for i in config.fast_prefill_layers] == [
        True,
        False,
        True,
    ]
    probes: list[dict[str, Any]] = read_marker(path)["probes"]
    assert max(len(probe["prompt"]) for probe in probes) > 3 * max(
        layer.chunk or 0 for layer in config.layers
    )
    settings = EngineConfig(
        model=str(path), tp=tp, hybrid_kv=hybrid_kv, fast_prefill=fast, max_batch_tokens=chunk, num_blocks=96
    )
    with ThreadEngine(settings, poison=NAN_POISON) as engine:
        done = engine.generate(
            [make_request(str(i), probe["prompt"], NUM_TOKENS) for i, probe in enumerate(probes)]
        )
        engine.leader.check_integrity()
    assert [d.error for d in done] == [None] * len(probes)
    assert [list(d.token_ids) for d in done] == [probe["output"] for probe in probes]

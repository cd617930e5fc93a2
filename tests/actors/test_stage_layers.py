"""What a cell tells of an engine whose layers are in stages. No Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayk.actors.forming import told_by_stages
from rayk.models.families import load_config
from rayk.specs import expand, load_spec
from tests.actors import in_threads
from tests.conftest import CheckpointFactory

PROMPT = [5, 9, 11, 200, 3, 77]
NUM_TOKENS = 3


@pytest.mark.parametrize("engine", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "pp_layers": [1, 3]}], ids=str)
def test_token_layers_are_those_of_all_stages(
    checkpoint: CheckpointFactory, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any]
) -> None:
    pool, path = in_threads.make_pool(monkeypatch), checkpoint("llama")
    config = load_config(path)
    spec = {
        "name": "stages",
        "model": str(path),
        "mode": "aggregated",
        "prefill": engine,
        "prompts": {"random": {}},
        "sampling": {"max_tokens": NUM_TOKENS, "ignore_eos": True},
    }
    (cell,) = expand(load_spec(spec).spec, config, device="cpu")

    async def run() -> Any:
        return await in_threads.coordinator_of(pool).run_cell(cell, [PROMPT], 0, capture=False)

    try:
        outcome = asyncio.run(run())
    finally:
        pool.free_all()
    assert outcome.errors == []
    (told,) = [facts["num_token_layers"] for facts in outcome.facts.values()]
    assert told == (len(PROMPT) + NUM_TOKENS - 1) * config.num_layers


def test_stages_are_told_apart_where_they_differ() -> None:
    """The last one comes first among ranks."""
    assert told_by_stages(["float32", "float32"]) == "float32"
    two, three = "fp8: 2 matrices kept in fp8", "fp8: 3 matrices kept in fp8"
    assert told_by_stages([three, two]) == f"stage 0: {two}; stage 1: {three}"

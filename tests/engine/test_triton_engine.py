"""The Triton kernels inside engines: prefill at TP 2, transfer, decode at TP 1, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import ThreadEngine
from rayk.types.config import EngineConfig
from tests.markers import interpreted, thorough
from tests.pd import HANG_S, NAN_POISON, Pair, make_request

pytestmark = interpreted

PROMPTS = [[17, 250, 3, 99, 42, 7, 181, 64], [5, 5, 200, 31, 77, 12, 140, 2]]
NUM_TOKENS = 3
ONE_HEAD = {"num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("family", "layouts"),
    [("qwen3", ("LBHNC", "LBNHC")), ("gpt_oss", ("BLHNC", "BHLNC")), ("gemma2", ("BLNHC", "LBHNC"))],
    ids=["plain", "sinks and windows", "soft cap"],
)
def test_tokens_are_the_references(
    family: str, layouts: tuple[str, str], checkpoint: Callable[..., Path], reference: Callable[..., Any]
) -> None:
    path = checkpoint(family, overrides={"num_hidden_layers": 2})
    expected = reference(path).generate(PROMPTS, NUM_TOKENS, ignore_eos=True)
    with Pair.open(path, tp=(2, 1), layouts=layouts, attention_backend="triton") as pair:
        for side in (pair.p, pair.d):
            assert {rank.backends.implementation for rank in side.engine.ranks} == {"triton (interpreter)"}
        assert pair.generate(PROMPTS, NUM_TOKENS) == [list(e.token_ids) for e in expected]
        pair.check_all_free()


@thorough
@pytest.mark.parametrize(
    ("family", "overrides", "interleave"),
    [("llama", ONE_HEAD, 1), ("deepseek_v3", {}, 2), ("gpt_oss", ONE_HEAD, 4)],
    ids=["one head", "latents", "sinks and windows"],
)
def test_tokens_of_ranks_that_deal_theirs(
    family: str,
    overrides: dict[str, Any],
    interleave: int,
    checkpoint: Callable[..., Path],
    reference: Callable[..., Any],
) -> None:
    """A prompt in chunks beside decodes, so that requests have one token and several."""
    path = checkpoint(family, overrides={"num_hidden_layers": 2, **overrides})
    expected = reference(path).generate(PROMPTS, NUM_TOKENS, ignore_eos=True)
    config = EngineConfig(
        model=str(path),
        num_blocks=32,
        block_size=4,
        max_batch_tokens=10,
        tp=2,
        dcp=2,
        dcp_interleave=interleave,
        attention_backend="triton",
    )
    with ThreadEngine(config, poison=NAN_POISON, timeout_s=HANG_S) as engine:
        assert engine.ranks[0].backends.implementation == "triton (token shards)"
        assert "dcp 2" in engine.ranks[0].graphs_note
        done = engine.generate([make_request(f"r{i}", p, NUM_TOKENS) for i, p in enumerate(PROMPTS)])
    assert [c.token_ids for c in done] == [list(e.token_ids) for e in expected]

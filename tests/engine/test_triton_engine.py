"""The Triton kernels inside engines: prefill at TP 2, transfer, decode at TP 1, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.markers import interpreted
from tests.pd import Pair

pytestmark = interpreted

PROMPTS = [[17, 250, 3, 99, 42, 7, 181, 64], [5, 5, 200, 31, 77, 12, 140, 2]]
NUM_TOKENS = 3


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

"""Hand-overs between engines that deal tokens unlike: digests are equal, tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.markers import one_per
from tests.pd import Pair

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gemma3n": ("gemma3n", {}),
    "falcon_h1": ("falcon_h1", {}),
}
Shape = tuple[int, int, int]
"""TP, DCP, interleave."""


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


@one_per()
@pytest.mark.parametrize(
    ("model", "p", "d"),
    [
        ("llama", (4, 2, 1), (2, 1, 1)),
        ("llama", (1, 1, 1), (4, 2, 16)),
        ("deepseek_v3", (2, 2, 1), (4, 4, 2)),
        ("gpt_oss", (4, 2, 4), (1, 1, 1)),
        ("gemma3n", (1, 1, 1), (4, 2, 1)),
        ("falcon_h1", (4, 2, 1), (2, 1, 1)),
    ],
)
def test_tokens_are_transformers(answers: Callable[[str], Answers], model: str, p: Shape, d: Shape) -> None:
    found = answers(model)
    shapes = tuple({"dcp": dcp, "dcp_interleave": interleave} for _, dcp, interleave in (p, d))
    with Pair.open(found.path, tp=(p[0], d[0]), changes=shapes, max_batch_tokens=70) as pair:  # type: ignore[arg-type]
        assert pair.generate(found.prompts, NUM_TOKENS) == found.expected

"""`rayk explain` of engines of which some have a drafter: its groups, their bytes, and what stays."""

from __future__ import annotations

import pytest

from rayk.explain.drawing import svg_drawing
from rayk.explain.explanation import explain_pair
from rayk.explain.text import remarks, side_lines
from rayk.kv.riders import Riders
from rayk.kv.specs import FullAttentionSpec
from tests.conftest import CheckpointFactory

RIDERS = Riders({(100, "attention"): FullAttentionSpec(16, 2, 8, 8, "float32", 4)}, drafter="d")
TOKENS = 64
ROW_BYTES = 2 * (8 + 8) * 4


@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True)], ids=str)
def test_drafts_are_told_of_and_what_is_left_out(
    checkpoint: CheckpointFactory, has: tuple[bool, bool]
) -> None:
    model, sides = str(checkpoint("qwen3")), ("prefill", "decode")
    settings = {"prefill": {"tp": 2}, "decode": {"tp": 1}}
    riders = {side: RIDERS for side, h in zip(sides, has, strict=True) if h}
    plain = explain_pair(model, settings, num_tokens=TOKENS)
    found = explain_pair(model, settings, num_tokens=TOKENS, riders=riders)
    assert found.bytes - plain.bytes == (TOKENS * ROW_BYTES if all(has) else 0)
    for side in riders:
        *own, rider = found.sides[side].groups
        assert tuple(own) == plain.sides[side].groups
        assert (rider.rides, rider.draft_layers) == (0, (0,))
        assert found.sides[side].block_bytes - plain.sides[side].block_bytes == 16 * ROW_BYTES
    lines = [line for _, group_lines in side_lines(found) for line in group_lines]
    told = [line for line in lines if "full, draft layer 0 on the blocks of KV group 0, " in line]
    assert len(told) == len(riders)
    lacks = {(True, False): "consumer", (False, True): "producer"}.get(has)
    texts = [text for text in remarks(found) if text.startswith("left out")]
    assert texts == ([f"left out: draft layer 0: the {lacks} has none"] if lacks else [])
    assert svg_drawing(found)

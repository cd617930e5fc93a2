"""`rayk explain` of engines of which some have a drafter: its groups, their bytes, and what stays."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayk.explain.drawing import svg_drawing
from rayk.explain.explanation import explain_pair
from rayk.explain.text import remarks, side_lines
from rayk.kv.riders import Riders
from rayk.kv.specs import FullAttentionSpec
from rayk.oracle.eagle3 import write_eagle3
from tests.conftest import CheckpointFactory
from tests.models.tiny import write_checkpoint

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


def test_rows_that_do_not_come_are_told_with_their_costs(checkpoint: CheckpointFactory) -> None:
    """The model drafts for itself: its rows cost what its prefill did."""
    model = str(checkpoint("qwen3"))
    drafts = {"method": "draft", "model": model}

    def told(**settings: object) -> list[str]:
        found = explain_pair(model, settings, num_tokens=TOKENS)
        return [note for note in found.notes if "do not come over" in note]

    (note,) = told(decode={"speculative": drafts})
    assert note.startswith(
        f"decode: the drafter's rows of {TOKENS} tokens do not come over: it computes them from the tokens"
    )
    needed, took = re.findall(r"[\d.]+(?= GFLOP|; to have)", note)
    assert needed == took
    assert "no hidden states, of which a smaller model takes none" in note
    (note,) = told(decode={"speculative": drafts | {"draft_kv": "none"}})
    assert "requests that were handed over are not drafted for (draft_kv: none)" in note
    assert told(speculative=drafts) == []
    assert told(prefill={"speculative": drafts}) == []


def test_hidden_states_of_a_head_are_told_in_bytes(tmp_path: Path) -> None:
    saved = write_checkpoint(tmp_path / "model", "llama", num_hidden_layers=6)
    head = write_eagle3(tmp_path / "head", saved.path, seed=3)
    settings = {"decode": {"speculative": {"method": "eagle3", "model": str(head)}}}
    found = explain_pair(str(saved.path), settings, num_tokens=TOKENS)
    (note,) = (note for note in found.notes if "do not come over" in note)
    assert f"{TOKENS * 3 * saved.config.hidden_size * 4:,} bytes of hidden states" in note
    assert "are not drafted for (draft_kv: none)" in note
    settings["decode"]["speculative"]["draft_kv"] = "hidden"
    refused = explain_pair(str(saved.path), settings, num_tokens=TOKENS)
    assert not refused.supported
    assert "hidden states do not travel yet" in refused.reason

"""What drafters proposed in two runs is compared where both went on from the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayk.experiments.drafted import (
    DraftReferences,
    Parting,
    compare_proposals,
    is_near_tie,
    own_layers,
)
from rayk.kv.groups import group_layers
from rayk.kv.riders import add_riders
from rayk.oracle.cache import AnswerStore
from rayk.types.config import EngineConfig
from rayk.types.rows import RequestRow
from rayk.types.speculative import SpeculativeConfig
from tests.kv.brute import full, keyed
from tests.models.tiny import write_checkpoint

OUTPUT = [5, 6, 7, 8, 9]


def row(proposals: list[tuple[int, list[int]]], output: list[int] = OUTPUT, **changes: Any) -> RequestRow:
    fields = {"cell_id": "c", "repeat": 0, "request_id": "c/0", "prompt_index": 0, "prompt_token_ids": [1]}
    return RequestRow(**(fields | changes), output_token_ids=output, proposals=proposals)


@pytest.mark.parametrize(
    ("found", "expected", "from_tokens", "of_heads"),
    [
        ([(1, [6, 7]), (3, [8, 9])], [(1, [6, 7]), (3, [8, 9])], (4, []), (4, [])),
        ([(1, [6, 7])], [(1, [6, 7, 8])], (2, []), (2, [])),
        ([(1, [6, 7, 8])], [(2, [7, 8, 9])], (2, []), (0, [])),
        ([(1, [6, 3, 4])], [(1, [6, 7, 1])], (2, [Parting(2, 3, 7)]), (2, [Parting(2, 3, 7)])),
        (
            [(1, [6, 3]), (3, [1])],
            [(1, [6, 7, 2])],
            (3, [Parting(2, 3, 7), Parting(3, 1, 2)]),
            (2, [Parting(2, 3, 7)]),
        ),
        (
            [(2, [3]), (4, [1])],
            [(1, [2]), (3, [8]), (4, [2])],
            (1, [Parting(4, 1, 2)]),
            (1, [Parting(4, 1, 2)]),
        ),
        ([(1, [])], [(1, [6])], (0, []), (0, [])),
        ([(5, [1, 2])], [(5, [1, 3])], (1, []), (1, [])),
    ],
    ids=[
        "alike",
        "shorter",
        "begun elsewhere",
        "another token",
        "two places",
        "what follows a wrong one",
        "nothing",
        "behind the end",
    ],
)
def test_proposals_are_compared_where_the_tokens_before_are_the_same(
    found: Any, expected: Any, from_tokens: Any, of_heads: Any
) -> None:
    for wanted, is_from_tokens in ((from_tokens, True), (of_heads, False)):
        compared = compare_proposals(row(found), row(expected), from_tokens=is_from_tokens)
        assert (compared.num_compared, list(compared.partings)) == wanted


def test_proposals_behind_unlike_tokens_are_not_compared() -> None:
    other = row([(2, [1]), (3, [2]), (4, [3])], [5, 6, 1, 8, 9])
    compared = compare_proposals(row([(2, [1]), (3, [4]), (4, [5])]), other, from_tokens=True)
    assert (compared.num_compared, compared.partings) == (1, ())


def test_two_tokens_that_are_as_good_are_no_mismatch(tmp_path: Path) -> None:
    """By the drafter's own logits; of nobody else's drafter these are known."""
    saved = write_checkpoint(tmp_path / "model", "llama")
    drafts = SpeculativeConfig(method="draft", model=str(saved.path))
    known = DraftReferences(AnswerStore(None)).of(
        EngineConfig(model=str(saved.path), speculative=drafts), saved.config
    )
    assert known is not None
    references = known[1]
    asked = row([], prompt_token_ids=[3, 4, 5])
    text = [3, 4, 5, *OUTPUT[:2]]
    gaps = [references.forced(text, [token])[0].gap for token in range(saved.config.vocab_size)]
    best, second = sorted(range(len(gaps)), key=gaps.__getitem__)[:2]
    assert gaps[second] > 1e-3
    assert not is_near_tie(asked, Parting(2, second, best), references)
    assert is_near_tie(asked, Parting(2, best, best), references)
    assert not is_near_tie(asked, Parting(2, best, best), None)


def test_a_drafters_layers_are_numbered_as_in_its_own_checkpoint() -> None:
    groups = add_riders(group_layers(keyed({0: full(), 1: full()})), keyed({2: full(), 3: full()}))
    captured: Any = [{layer: {("k", 0): np.full((2, 4), layer, np.uint8)} for layer in range(4)}]
    rows, own = own_layers(captured, groups)
    assert [sorted(per) for per in rows] == [[0, 1]]
    assert rows[0][1]["k", 0][0, 0] == 3
    assert [(g.layers, g.draft_number(1)) for g in own] == [((0, 1), 1)]

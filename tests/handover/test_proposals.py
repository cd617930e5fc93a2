"""D's drafter goes on from what P's computed as if there had been no hand-over: it proposes what an oracle
does that reads the whole text, and all say what the model says without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drafters import APPLIES, make_drafted, noted
from tests.markers import one_per, sweep
from tests.models.test_decoder import prompts
from tests.pd import Pair, make_request

NUM_TOKENS = 12


@sweep(10)
@one_per("method", "push")
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(
    ("tp", "own_tp"),
    [((1, 1), (None, None)), ((2, 1), (2, None)), ((1, 2), (None, None)), ((1, 2), (None, 2))],
)
@pytest.mark.parametrize(("method", "family"), APPLIES)
def test_d_proposes_as_if_there_had_been_no_hand_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    family: str,
    tp: tuple[int, int],
    own_tp: tuple[int | None, int | None],
    push: bool,
) -> None:
    """Also from the row of the prompt's last token, which takes a token that P sampled beside a hidden state
    that D never had."""
    made, texts = make_drafted(tmp_path, method, family), prompts()[:2]
    changes = tuple({"speculative": made.of_tp(own)} for own in own_tp)
    settings = {"block_size": 8, "max_batch_tokens": 20, "num_blocks": 100, "changes": changes}
    with noted(monkeypatch) as found, Pair.open(made.saved.path, tp=tp, push=push, **settings) as pair:  # type: ignore[arg-type]
        done = pair.complete([make_request(f"r{i}", text, NUM_TOKENS) for i, text in enumerate(texts)])
        pair.check_all_free()
    assert [one.token_ids for one in done] == [made.says(text, NUM_TOKENS) for text in texts]
    assert len(found) >= NUM_TOKENS
    assert min(len(tokens) for tokens, _ in found) == min(map(len, texts)) + 2, "D's first step comes before"
    made.check(found)

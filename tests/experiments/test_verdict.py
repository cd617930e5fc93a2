"""Verdicts: precedence, what each error stands for, ties, and where values differ. No Ray."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from rayk.experiments.compare import NEAR_TIE_LOGITS, compare_tokens, compare_values
from rayk.experiments.verdict import Findings
from rayk.kv.groups import group_layers
from rayk.kv.specs import FullAttentionSpec, SlidingWindowSpec
from rayk.types.errors import (
    CommError,
    DeadlineExceeded,
    EngineDied,
    HandshakeMismatch,
    KVMismatch,
    LayoutVetoed,
    NotFiniteError,
    TransferError,
    Unsupported,
    UserError,
)
from rayk.types.request import SamplingParams
from rayk.types.rows import RequestRow
from rayk.types.verdicts import VERDICTS, verdict_of

MISMATCH = KVMismatch("r", 1, 0, "k", 0, 3, "one flipped bit")


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (MISMATCH, "KV_MISMATCH"),
        (NotFiniteError("r", "KV is"), "NOT_FINITE"),
        (TransferError("r", "lost"), "TRANSFER_ERROR"),
        (HandshakeMismatch((("rope", "a", "b"),)), "TRANSFER_ERROR"),
        (EngineDied("p0", "killed"), "ENGINE_ERROR"),
        (CommError("all_reduce", "gone"), "ENGINE_ERROR"),
        (UserError("too long"), "ENGINE_ERROR"),
        (DeadlineExceeded("a request", 1.0), "TIMEOUT"),
        (Unsupported("TP 3"), "UNSUPPORTED"),
        (LayoutVetoed(()), "UNSUPPORTED"),
    ],
)
def test_what_an_error_stands_for(error, verdict):
    assert verdict_of(error) == verdict


def test_the_gravest_finding_is_the_verdict():
    assert Findings().judge() == ("PASS", "")
    findings = Findings()
    for verdict in reversed(VERDICTS):
        findings.add(verdict, f"because of {verdict}")
        assert findings.judge() == (verdict, f"because of {verdict}")
    assert VERDICTS[:3] == ("KV_MISMATCH", "NOT_FINITE", "TRANSFER_ERROR")
    assert VERDICTS.index("TIMEOUT") < VERDICTS.index("TOKEN_MISMATCH") < VERDICTS.index("NEAR_TIE")


def test_equal_reasons_are_counted_once():
    findings = Findings()
    findings.add_errors([MISMATCH, MISMATCH, TransferError("r", "lost")])
    assert findings.judge() == ("KV_MISMATCH", str(MISMATCH))
    findings.add_errors([KVMismatch("s", 1, 0, "k", 0, 3, "rows shifted")])
    assert findings.judge()[1].endswith("(and 1 more)")


DEATH = EngineDied("prefill0", "gone", rank=0)
REFUSED = HandshakeMismatch((("engine", "prefill0 epoch 0", "prefill0 epoch 1"),))


@pytest.mark.parametrize(
    ("errors", "survived", "verdict"),
    [
        ([TransferError("r", "link down", "prefill0", "decode0/r1"), DEATH], [], "ENGINE_ERROR"),
        # Its requests may all have met the broken link before anybody knew of the death.
        ([TransferError("r", "link down", "prefill0", "decode0/r1")], [DEATH], "ENGINE_ERROR"),
        ([TransferError("r", "link down", "prefill1", "decode0/r1")], [DEATH], "TRANSFER_ERROR"),
        # It was formed again before the request's ticket was read.
        ([REFUSED], [DEATH], "ENGINE_ERROR"),
        ([], [DEATH], "PASS"),
    ],
    ids=["both", "survivors", "another-engine", "next-life", "nothing-was-lost"],
)
def test_a_transfer_that_fails_with_its_engine_is_the_engines_death(errors, survived, verdict):
    findings = Findings()
    findings.add_errors(errors, survived)
    assert findings.judge() == (verdict, str(DEATH) if verdict == "ENGINE_ERROR" else findings.judge()[1])


@dataclass
class _Step:
    gap: float


class _Forced:
    """Stands for the reference's opinion of each token: how far below its best it is."""

    def __init__(self, gaps: list[float]) -> None:
        self.gaps = gaps

    def forced(self, prompt, output_ids):
        assert len(output_ids) == len(self.gaps)
        return [_Step(g) for g in self.gaps]


def _row(output: list[int]) -> RequestRow:
    return RequestRow(
        cell_id="c", repeat=0, request_id="r", prompt_index=4, prompt_token_ids=[1], output_token_ids=output
    )


TIE = NEAR_TIE_LOGITS / 2


@pytest.mark.parametrize(
    ("output", "gaps", "first", "near"),
    [
        ([7, 8, 9], [0, 0, 0], None, False),
        ([7, 5, 6], [0, TIE, 0], 1, True),
        ([7, 5, 6], [0, 2 * NEAR_TIE_LOGITS, 0], 1, False),
        # A tie first, then a token the reference would never choose: not a tie.
        ([7, 5, 6], [0, TIE, 3.0], 1, False),
        ([7, 8], [0, 0], 2, False),
        ([7, 8, 9, 9], [0, 0, 0, 0], 3, False),
    ],
    ids=["equal", "tie", "beyond-a-tie", "tie-then-wrong", "too-few", "too-many"],
)
def test_tokens_against_the_reference(output, gaps, first, near):
    compared = compare_tokens(_row(output), (7, 8, 9), _Forced(gaps), SamplingParams(max_tokens=3))
    assert compared.first_divergence == first
    assert compared.near_tie is near
    assert bool(compared.reason) == (first is not None)


LAYERS, HEADS, TOKENS, SIZE, WINDOW = 3, 2, 12, 4, 5


@pytest.fixture
def cache():
    """(captured by rank, reference, groups): layer 1 slides; two ranks hold one head each."""
    torch.manual_seed(0)
    full = FullAttentionSpec(4, HEADS, SIZE, SIZE, "float32", HEADS)
    sliding = SlidingWindowSpec(4, HEADS, SIZE, SIZE, "float32", HEADS, WINDOW)
    specs = enumerate((full, sliding, full))
    groups = group_layers({(layer, "attention"): spec for layer, spec in specs})
    reference = [{name: torch.randn(HEADS, TOKENS, SIZE) for name in "kv"} for _ in range(LAYERS)]
    captured = []
    for head in range(HEADS):
        rank = {}
        for layer in range(LAYERS):
            first = TOKENS + 1 - WINDOW if layer == 1 else 0
            rank[layer] = {
                (name, head): tensor[head, first:].clone().view(torch.uint8).numpy()
                for name, tensor in reference[layer].items()
            }
        captured.append(rank)
    return captured, reference, groups


def test_equal_caches_have_no_difference(cache):
    captured, reference, groups = cache
    compared = compare_values("r", captured, reference, groups, TOKENS)
    assert compared.mismatch is None
    assert compared.max_error == 0
    assert compared.num_values == 2 * HEADS * SIZE * (2 * TOKENS + WINDOW - 1)


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (lambda rows, ref: ref[2]["k"][0, 3], "K holds|head 1 holds head 0"),
        (lambda rows, ref: ref[2]["v"][1, 3], "K holds V of head 1"),
        (lambda rows, ref: ref[2]["k"][1, 2], "token t holds token t-1"),
        (lambda rows, ref: torch.zeros(SIZE), "never written"),
        (lambda rows, ref: torch.arange(SIZE) * 9.0, "other values"),
    ],
    ids=["head", "field", "token", "zeros", "junk"],
)
def test_a_wrong_row_is_named(cache, plant, what):
    captured, reference, groups = cache
    rows = captured[1][2]["k", 1]
    rows[3] = plant(rows, reference).clone().view(torch.uint8).numpy()
    mismatch = compare_values("r", captured, reference, groups, TOKENS).mismatch
    assert mismatch is not None
    assert (mismatch.layer, mismatch.field, mismatch.head, mismatch.token) == (2, "k", 1, 3)
    assert any(text in mismatch.classification for text in what.split("|")), mismatch.classification


def test_a_head_that_no_rank_shows_is_not_passed_over(cache):
    captured, reference, groups = cache
    del captured[1][2]["v", 1]
    with pytest.raises(AssertionError, match="no rank shows"):
        compare_values("r", captured, reference, groups, TOKENS)


def test_sliding_rows_are_named_by_their_position(cache):
    captured, reference, groups = cache
    captured[0][1]["v", 0][2] = 0
    mismatch = compare_values("r", captured, reference, groups, TOKENS).mismatch
    assert mismatch is not None
    assert mismatch.layer == 1
    assert mismatch.group == next(g.index for g in groups if 1 in g.layers)
    assert mismatch.token == TOKENS + 1 - WINDOW + 2

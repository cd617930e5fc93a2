"""No check passes over NaN or infinity, on either side, and none says of them what they are not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayk.experiments.compare import compare_tokens, compare_values
from rayk.experiments.logprobs import compare_logprobs
from rayk.experiments.noise import measure
from rayk.kv.groups import group_layers
from rayk.kv.specs import FullAttentionSpec
from rayk.oracle.reference import ForcedStep, TextScores
from rayk.types.request import SamplingParams
from rayk.types.rows import RequestRow

TOKENS, SIZE = 6, 4
SPEC = FullAttentionSpec(4, 2, SIZE, SIZE, "float32", 2)
GROUPS = group_layers({(layer, "attention"): SPEC for layer in range(3)})
ROW = RequestRow(
    cell_id="c",
    repeat=0,
    request_id="c/0",
    prompt_index=0,
    prompt_token_ids=[1, 2],
    output_token_ids=[7, 8],
    output_logprobs=[-1.0, -1.0],
)


def caches(scale: float = 1.0) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
    """(captured by rank, reference), equal."""
    torch.manual_seed(0)
    reference = [{name: scale * torch.randn(2, TOKENS, SIZE) for name in "kv"} for _ in range(3)]
    captured = {
        layer: {
            (name, head): rows[name][head].clone().view(torch.uint8).numpy()
            for name in "kv"
            for head in range(2)
        }
        for layer, rows in enumerate(reference)
    }
    return [captured], reference


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "sides", [("the prefill engine's",), ("the reference's",), ("the prefill engine's", "both")]
)
def test_a_cache_that_is_not_finite_is_no_cache_that_was_never_written(
    bad: float, sides: tuple[str, ...]
) -> None:
    captured, reference = caches()
    for token in (3, 4):
        if "the prefill engine's" in sides:
            captured[0][1]["v", 1][token] = np.full(SIZE, bad, dtype=np.float32).view(np.uint8)
        if sides != ("the prefill engine's",):
            reference[1]["v"][1, token] = bad
    found = compare_values("r", captured, reference, GROUPS, TOKENS)
    assert found.mismatch is None
    assert found.not_finite == (
        f"{sides[0]} cache is not finite (NaN or infinite), first at layer 1, v, head 1, token 3"
    )
    assert found.max_error == 0


def test_a_reference_of_zeros_divides_nothing() -> None:
    captured, reference = caches(0.0)
    assert compare_values("r", captured, reference, GROUPS, TOKENS).max_error_of_bound == 0
    captured[0][0]["k", 0][2] = np.full(SIZE, 1e-9, dtype=np.float32).view(np.uint8)
    found = compare_values("r", captured, reference, GROUPS, TOKENS)
    assert found.max_error_of_bound == math.inf
    assert found.mismatch is not None


def test_what_overflows_in_eager_code_bounds_nothing() -> None:
    errors = torch.tensor([0.5, 0.25, 0.125, 0.25])
    spoiled = torch.cat([errors, torch.tensor([math.inf, math.nan])])
    assert measure(spoiled, floor=0.01, further=spoiled) == measure(errors, floor=0.01, further=errors)


class Fake:
    """References whose logits of the output's second token are not finite."""

    is_exact, routed, eager_dtype = True, False, "float32"

    def forced(self, prompt: Any, output: Any) -> list[ForcedStep]:
        del prompt, output
        step = ForcedStep(
            chosen_id=7, argmax_id=9, gap=0.0, margin=1.0, chosen_logprob=-1.0, top_ids=(), top_logits=()
        )
        return [step, replace(step, gap=math.nan)]

    def scores(self, prompt: Any, output: Any) -> tuple[TextScores, TextScores]:
        del prompt, output
        scores = TextScores(
            prompt_logprobs=(-1.0,),
            output_logprobs=(-1.0, math.nan),
            output_gaps=(0.0, math.nan),
            further_logprobs=((), (), ()),
        )
        return scores, scores


def test_tokens_are_no_near_tie_where_the_reference_has_no_logits() -> None:
    found = compare_tokens(ROW, [9, 9], Fake(), SamplingParams(max_tokens=2))  # type: ignore[arg-type]
    assert (found.verdict, found.near_tie) == ("NOT_FINITE", False)


def test_log_probabilities_are_not_judged_by_a_reference_that_has_none() -> None:
    found = compare_logprobs([ROW], Fake(), SamplingParams(max_tokens=2))  # type: ignore[arg-type]
    assert found.reasons == ()
    assert found.not_finite == ("logprobs: request 0: the reference's own are NaN or infinite",)

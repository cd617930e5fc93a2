"""Penalties and filters against transformers' LogitsProcessors, row by row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rayk.engine import sampling as sampling_module
from rayk.engine.filters import NEVER, DrawNumbers, Row, candidates, penalise, scaled
from rayk.engine.sampling import sample, score_tokens
from rayk.types.request import SamplingParams
from tests.helpers import assert_matches
from tests.markers import gpu

V = 60


def row(output: Sequence[int] = (), prompt: Sequence[int] = (), **params: Any) -> Row:
    return Row(SamplingParams(**({"seed": 0} | params)), tuple(prompt), tuple(output))


def transformers_scores(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """[V] of one row, in the order of transformers' generate."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(float(p.temperature))])
    if p.top_k is not None:
        chain.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        chain.append(TopPLogitsWarper(p.top_p))
    if p.min_p > 0:
        chain.append(MinPLogitsWarper(p.min_p))
    scores: torch.Tensor = chain(torch.zeros(1, 1, dtype=torch.long), logits[None])[0]
    return scores


def filtered(logits: torch.Tensor, params: Sequence[SamplingParams], *, narrow: bool) -> torch.Tensor:
    """Scaled scores of candidates put back into their places of the vocabulary: float64 [R, V]."""
    numbers = DrawNumbers.sent(params, [0] * len(params), logits.shape[1], logits.device)
    left, ids = candidates(logits, params, numbers, narrow=narrow)
    scores = scaled(left, numbers).double()
    return torch.full_like(logits, NEVER, dtype=torch.float64).scatter_(1, ids.expand_as(scores), scores)


def some_logits(kind: str, num_rows: int) -> torch.Tensor:
    """float32 [R, V]: smooth ones, ones full of ties, and ones a temperature of 2^n divides exactly."""
    draw = torch.Generator().manual_seed(5)
    logits = torch.randn(num_rows, V, generator=draw) * 3
    if kind == "ties":
        return (logits / 2).round() * 2
    return (logits * 8).round() / 8 if kind == "exact" else logits


GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product(
        (0.25, 1.0, 2.0), (None, 1, 2, 7, V, 10 * V), (1.0, 0.93, 0.31, 1e-9), (0.0, 0.07, 0.6, 1.0)
    )
]


@pytest.mark.parametrize("kind", ["smooth", "ties", "exact"])
@pytest.mark.parametrize("narrow", [False, True])
def test_filters_leave_what_transformers_leave(kind: str, narrow: bool) -> None:
    """Every combination, all in one batch: each row has its own parameters."""
    params = [p for p in GRID if not narrow or p.top_k is not None]
    random.Random(3).shuffle(params)
    logits = some_logits(kind, len(params))
    found = filtered(logits, params, narrow=narrow)
    num_left = set()
    for i, p in enumerate(params):
        expected = transformers_scores(logits[i].double(), p)
        num_left.add(int((expected > NEVER).sum()))
        if kind == "smooth":
            assert torch.equal(found[i] > NEVER, expected > NEVER), p
            continue
        # Nothing is rounded: the scores are equal, but for a constant. Which of equal ones top-p leaves is
        # open in transformers (its sort is not stable): here the lowest ids.
        expected = expected - expected.max()
        assert torch.equal(found[i].sort().values, expected.sort().values), p
        if p.top_p == 1:
            assert torch.equal(found[i], expected), p
    assert {1, 2, V} <= num_left if not narrow else {1, 2} <= num_left


def test_a_row_does_not_depend_on_its_batch() -> None:
    params = [p for p in GRID if p.top_k is not None][::7]
    logits = some_logits("ties", len(params))
    together = filtered(logits, params, narrow=True)
    for i, p in enumerate(params):
        assert torch.equal(filtered(logits[i : i + 1], [p], narrow=True)[0], together[i]), p


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e300])
def test_extreme_temperatures_leave_numbers(temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, top_k=3, top_p=0.9)]
    logits = some_logits("smooth", 1)
    found = filtered(logits, params, narrow=True)[0]
    assert not bool(found.isnan().any())
    assert found[logits.argmax()] == 0


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.1}])
def test_a_row_of_nan_gets_some_token_and_spoils_no_other(params: dict[str, Any]) -> None:
    """An engine that computes NaN is for the checks to see; its other requests go on."""
    rows = [row(temperature=1.0, **params)] * 2
    logits = some_logits("smooth", 2).float()
    (alone,) = sample(rows[1:], logits[1:])
    logits[0] = float("nan")
    lost, found = sample(rows, logits)
    assert 0 <= lost < V
    assert found == alone
    assert 0 <= sample(rows[:1], logits[:1])[0] < V


def test_equal_logits_share_the_probability() -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.5), SamplingParams(temperature=1.0, min_p=1.0)]
    found = filtered(torch.zeros(2, 4), params, narrow=False)
    assert [row.nonzero()[:, 0].tolist() for row in found > NEVER] == [[0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_is_penalised_as_transformers_does(penalty: float) -> None:
    logits = some_logits("smooth", 3).double()
    prompts, outputs = ([5, 5, 9], [1], [0, V - 1]), ([7, 5], [], [3, 3, 3])
    rows = [row(o, p, repetition_penalty=penalty) for o, p in zip(outputs, prompts, strict=True)]
    found = logits.clone()
    penalise(found, rows)
    for i in range(3):
        history = torch.tensor([[*prompts[i], *outputs[i]]])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits[i : i + 1].clone())[0]
        assert torch.equal(found[i], expected)


def test_presence_and_frequency_follow_openais_formula() -> None:
    """logit[t] -= count[t] * frequency + (count[t] > 0) * presence, over the output alone."""
    logits = some_logits("exact", 4)
    outputs: list[list[int]] = [[4, 4, 9, 4], [0], [], [V - 1] * 7]
    penalties = [(0.5, 0.25), (-2.0, 0.0), (1.0, 1.0), (0.0, -1.5)]
    rows = [
        row(o, [4, 8], presence_penalty=p, frequency_penalty=f)
        for o, (p, f) in zip(outputs, penalties, strict=True)
    ]
    found = logits.clone()
    penalise(found, rows)
    for i, (presence, frequency) in enumerate(penalties):
        for token in range(V):
            count = outputs[i].count(token)
            expected = logits[i, token].item() - count * frequency - (presence if count else 0)
            assert found[i, token].item() == expected


def test_a_batch_mixes_greedy_and_drawn_rows_of_every_kind() -> None:
    """And gives each the token that it gets alone, in whatever pieces the rows are worked on."""
    rows = [row()]
    rows += [Row(replace(p, seed=i), (1,), (i % V,) * 3) for i, p in enumerate(GRID[::3])]
    rows += [row([3], repetition_penalty=9.0), row(temperature=1.0, seed=-5, presence_penalty=2.0)]
    rows += [row([8], temperature=0.7, seed=2, top_k=4, frequency_penalty=1.0)]
    logits = some_logits("smooth", len(rows)).float()
    together = sample(rows, logits)
    alone = [sample([r], logits[i : i + 1])[0] for i, r in enumerate(rows)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())
    for limit in (V, 3 * V):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling_module, "MAX_ELEMENTS", limit)
            assert sample(rows, logits) == together
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_module, "NARROW_TOP_K", 0)
        assert sample(rows, logits) == together, "looking at the whole vocabulary changes nothing"


@gpu
def test_a_gpu_draws_the_same_tokens() -> None:
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.5}
    rows = [Row(replace(p, seed=i, **penalties), (1,), (i % V,) * 3) for i, p in enumerate(GRID)]
    for kind in ("smooth", "ties"):
        logits = some_logits(kind, len(rows)).float()
        assert sample(rows, logits.cuda()) == sample(rows, logits)


def test_the_lowest_id_wins_a_greedy_tie_also_after_penalties() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0]] * 2)
    assert sample([row(), row([1], repetition_penalty=2.0)], logits) == [1, 2]


def test_log_probabilities_ranks_and_best_tokens() -> None:
    logits = some_logits("ties", 4).float()
    tokens = [int(logits[0].argmax()), int(logits[1].argmin()), 7, 8]
    scored = score_tokens(logits, tokens, [3, 0, V + 5, 1])
    for i, (token, found) in enumerate(zip(tokens, scored, strict=True)):
        assert found.token_id == token
        assert found.rank == 1 + sum(v > logits[i, token] for v in logits[i])
        ids = [t for t, _ in found.top]
        assert logits[i, ids].equal(logits[i].sort(descending=True).values[: len(ids)])
        assert list(found.top) == sorted(found.top, key=lambda t: (-t[1], t[0])), (
            "of equal ones the lowest id"
        )
        told = torch.tensor([found.logprob, *(v for _, v in found.top)])
        exact, eager = (
            logits[i].to(d).log_softmax(-1)[[token, *ids]] for d in (torch.float64, torch.float32)
        )
        assert_matches(told, exact, eager)
    assert [len(s.top) for s in scored] == [3, 0, V, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_module, "MAX_ELEMENTS", 2 * V)
        assert score_tokens(logits, tokens, [3, 0, V + 5, 1]) == scored, "also in pieces"
    assert scored[0].rank == 1

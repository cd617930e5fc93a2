"""Draws that proposed tokens may decide have exactly the model's distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayk.engine.filters import Row
from rayk.engine.noise import draw_key, gumbel
from rayk.engine.rejecting import BEYOND, KEEPS
from rayk.engine.sampling import draw, sample
from rayk.types.request import SamplingParams
from tests.engine.statistics import P_VALUE, chi_square_p
from tests.engine.test_sampling import transformers_scores
from tests.markers import sweep

NUM_DRAWS = 20_000
VOCAB = 40
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "hot top-p": {"temperature": 1.6, "top_p": 0.9},
    "top-k": {"temperature": 0.8, "top_k": 12},
    "min-p": {"temperature": 1.3, "min_p": 0.05},
}


def logits_of(seed: int, scale: float = 1.5) -> torch.Tensor:
    """Float32 [V], no two alike."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def rows_of(
    kind: dict[str, Any], drafts: list[int], draft_logits: torch.Tensor | None, index: int = 3
) -> list[Row]:
    return [
        Row(SamplingParams(seed=seed, **kind), [1], [2] * index, draft, draft_logits)
        for seed, draft in enumerate(drafts)
    ]


def expected(logits: torch.Tensor, kind: dict[str, Any]) -> torch.Tensor:
    """The distribution by transformers' processors, float64 [V]."""
    return transformers_scores(logits.double(), SamplingParams(**kind)).softmax(-1)


def counts_of(tokens: list[int]) -> torch.Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=VOCAB)


@sweep(3)
@pytest.mark.parametrize("rank", [0, 3, 20, VOCAB - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sure_drafter_changes_no_distribution(kind: str, rank: int) -> None:
    """Whether it proposes the best token, a rare one, or one that the filters leave out."""
    logits, sampling = logits_of(1), KINDS[kind]
    draft = int(logits.argsort(descending=True)[rank])
    found = sample(rows_of(sampling, [draft] * NUM_DRAWS, None), logits.repeat(NUM_DRAWS, 1))
    wanted = expected(logits, sampling)
    counts = counts_of(found)
    assert chi_square_p(counts, wanted) > P_VALUE
    assert not counts[wanted == 0].any(), "what the filters leave out is never drawn"
    assert abs(counts[draft] / NUM_DRAWS - wanted[draft]) < 0.015, "it is kept as often as it is drawn"


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_draws_changes_no_distribution_either(kind: str) -> None:
    """And its draws are kept as often as the overlap of both distributions allows."""
    logits, draft_logits, sampling = logits_of(2), logits_of(2) + logits_of(3, 0.7), KINDS[kind]
    q = draft_logits.double().softmax(-1)
    drafts = q.multinomial(NUM_DRAWS, replacement=True, generator=torch.Generator().manual_seed(4)).tolist()
    found = sample(rows_of(sampling, drafts, draft_logits), logits.repeat(NUM_DRAWS, 1))
    wanted = expected(logits, sampling)
    assert chi_square_p(counts_of(found), wanted) > P_VALUE
    kept = sum(a == b for a, b in zip(found, drafts, strict=True)) / NUM_DRAWS
    overlap = float(torch.minimum(wanted, q).sum())
    assert abs(kept - overlap) < 4 * (0.25 / NUM_DRAWS) ** 0.5


def test_a_bias_of_one_draw_in_twenty_is_seen() -> None:
    logits, sampling = logits_of(1), KINDS["plain"]
    wanted, draft = expected(logits, sampling), int(logits.argsort(descending=True)[3])
    found = sample(rows_of(sampling, [draft] * NUM_DRAWS, None), logits.repeat(NUM_DRAWS, 1))
    biased = [draft if i % 20 == 0 else token for i, token in enumerate(found)]
    assert chi_square_p(counts_of(biased), wanted) < P_VALUE


def test_a_drafter_that_knows_the_model_is_always_believed() -> None:
    logits = logits_of(5)
    drafts = torch.randint(0, VOCAB, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = rows_of({"temperature": 1.0}, drafts, logits)
    assert sample(rows, logits.repeat(1000, 1)) == drafts


def test_rows_without_a_draft_are_drawn_as_ever() -> None:
    logits, params = logits_of(6), [SamplingParams(temperature=1.0, seed=s) for s in range(50)]
    plain = [Row(p, [1], [2] * 3) for p in params]
    mixed = [Row(p, [1], [2] * 3, 7 if i % 2 else None) for i, p in enumerate(params)]
    scores = logits.repeat(50, 1)
    assert sample(mixed, scores)[::2] == sample(plain, scores)[::2]


def test_streams_of_one_token_are_apart() -> None:
    """What keeps a draft tells nothing of what takes its place, nor of the draw without drafts."""
    ids = torch.arange(1)
    keys = [[draw_key(s, 3, *stream) for s in range(4000)] for stream in ((), (KEEPS,), (BEYOND,))]
    noise = torch.stack([gumbel(torch.tensor(k), ids)[:, 0] for k in keys])
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.06


def test_it_depends_on_seed_and_place_alone() -> None:
    logits, sampling = logits_of(7), {"temperature": 1.0}
    rows = rows_of(sampling, [5] * 200, None)
    together = draw(rows, logits.repeat(200, 1), narrow=False).tolist()
    alone = [draw([row], logits[None].clone(), narrow=False).item() for row in rows]
    assert together == alone
    elsewhere = draw(
        rows_of(sampling, [5] * 200, None, index=4), logits.repeat(200, 1), narrow=False
    ).tolist()
    assert elsewhere != together

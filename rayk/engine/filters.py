"""Filter logits before a token is drawn: penalties, temperature, top-k, top-p, min-p.

In the order and with the definitions of transformers' LogitsProcessors (presence and frequency: of OpenAI's
API), over a batch whose rows have parameters of their own. Filters work on candidates: scores [R, C] with
their token ids, [C] for the whole vocabulary in order or [R, C], ascending; -inf means filtered out.
R rows, V vocabulary, C candidates of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayk.types.request import SamplingParams

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Row:
    params: SamplingParams  # with a seed where tokens are drawn
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]


def penalise(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    """Apply the rows' penalties to `scores` [R, V], in place."""
    for i, row in enumerate(rows):
        p = row.params
        if p.repetition_penalty != 1:
            _repetition(scores[i], {*row.prompt_token_ids, *row.output_token_ids}, p.repetition_penalty)
        if (p.presence_penalty or p.frequency_penalty) and row.output_token_ids:
            counts = Counter(row.output_token_ids)
            ids = torch.tensor(list(counts), device=scores.device)
            times = torch.tensor(list(counts.values()), dtype=scores.dtype, device=scores.device)
            scores[i, ids] -= p.presence_penalty + p.frequency_penalty * times


def _repetition(scores: torch.Tensor, token_ids: set[int], penalty: float) -> None:
    ids = torch.tensor(sorted(token_ids), device=scores.device)
    found = scores[ids]
    scores[ids] = torch.where(found < 0, found * penalty, found / penalty)


def candidates(
    scores: torch.Tensor, params: Sequence[SamplingParams], *, narrow: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [R, C] and token ids of what the filters of each row leave, given float64 logits [R, V].

    narrow: every row has a top_k, and only the best of each row are kept (C is about the largest top_k);
    else C = V. Either way the same tokens are left, at least one per row.
    """
    scores = (scores - scores.amax(-1, keepdim=True)) / _column(scores, [p.temperature for p in params])
    ids = torch.arange(scores.shape[1], device=scores.device)
    with_k = [i for i, p in enumerate(params) if p.top_k is not None]
    if with_k:
        kept = _keep_top_k(scores[with_k], [params[i].top_k or 0 for i in with_k])
        scores[with_k] = kept
    if narrow:
        assert len(with_k) == len(params), "narrow rows have a top_k"
        # Of a row of NaN nothing is above NEVER: it keeps one, as it does where C = V.
        num_left = max(1, int((scores > NEVER).sum(-1).max()))
        ids = scores.topk(num_left).indices.sort(-1).values
        scores = scores.gather(1, ids)
    for limited, keep in (
        ([i for i, p in enumerate(params) if p.top_p < 1], _keep_top_p),
        ([i for i, p in enumerate(params) if p.min_p > 0], _keep_min_p),
    ):
        if limited:
            scores[limited] = keep(scores[limited], [params[i] for i in limited])
    return scores, ids


def _column(scores: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=scores.dtype, device=scores.device)[:, None]


def _keep_top_k(scores: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """Keep the k best of each row, and what ties with the last of them."""
    counts = [min(k, scores.shape[1]) for k in top_k]
    best = scores.topk(max(counts)).values
    last = best.gather(1, torch.tensor(counts, device=scores.device)[:, None] - 1)
    return scores.masked_fill(scores < last, NEVER)


def _keep_top_p(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Keep the fewest best whose probabilities reach top_p; of equal ones, lower ids first."""
    # Stable, so that ties end alike on every device. Summed from the worst, as transformers does.
    ordered, order = (part.flip(-1) for part in scores.sort(dim=-1, descending=True, stable=True))
    cumulative = ordered.softmax(-1).cumsum(-1)
    removed = cumulative <= 1 - _column(scores, [p.top_p for p in params])
    removed[:, -1] = False
    return scores.masked_fill(torch.empty_like(removed).scatter_(1, order, removed), NEVER)


def _keep_min_p(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Keep those at least min_p times as likely as the best."""
    probabilities = scores.softmax(-1)
    least = probabilities.amax(-1, keepdim=True) * _column(scores, [p.min_p for p in params])
    return scores.masked_fill(probabilities < least, NEVER)

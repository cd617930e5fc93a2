"""Filter logits before a token is drawn: structured outputs, penalties, temperature, top-k, top-p, min-p.

In the order and with the definitions of transformers' LogitsProcessors (presence and frequency: of OpenAI's
API), over a batch whose rows have parameters of their own. Filters work on candidates: scores [R, C] with
their token ids, [C] for the whole vocabulary in order or [R, C], ascending; -inf means filtered out.
Nothing is sorted: top-p finds the worst score that it keeps by its bits, from sums of integer masses, which
do not depend on the order of the terms. R rows, V vocabulary, C candidates of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rayk.kernels.uploads import sent, uploaded
from rayk.types.request import SamplingParams

NEVER = float("-inf")
TEMPERATURES = (1e-30, 1e30)
"""Temperatures beyond these act like these: their quotients would leave the range of float32."""
_UNIT_MASS = 2.0**42
"""Mass of the best token, as an integer; those of 2^20 tokens still fit into int64."""
_DIGITS = ((21, 11), (10, 11), (0, 10))
"""(position, number) of the bits of a score's rank that each pass of top-p looks at."""


@dataclass(frozen=True, slots=True)
class Row:
    params: SamplingParams  # with a seed where tokens are drawn
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    drafted: int | None = None  # the proposed token, where it is verified by rejection
    # what the drafter drew it from, float32 logits [V]; None: it was sure of it
    draft_logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DrawNumbers:
    """What R rows that are drawn ask for, on their device: [R, 1] each."""

    temperatures: torch.Tensor  # float64
    divisors: torch.Tensor  # float64, temperatures whose quotients stay in the range of float32
    removable: torch.Tensor  # float64, the share of the weights that top-p may leave out
    min_p: torch.Tensor  # float64
    top_k: torch.Tensor  # int64, V where all are kept
    keys: torch.Tensor  # int64, see engine.noise.draw_key

    @classmethod
    def sent(
        cls, params: Sequence[SamplingParams], keys: Sequence[int], num_tokens: int, device: torch.device
    ) -> DrawNumbers:
        """Bring them there by one copy, which nobody waits for; `num_tokens` is V."""
        low, high = TEMPERATURES
        shares = [(p.temperature, min(max(p.temperature, low), high), 1 - p.top_p, p.min_p) for p in params]
        counts = [(min(p.top_k or num_tokens, num_tokens), key) for p, key in zip(params, keys, strict=True)]
        here = torch.cat(
            [torch.tensor(shares, dtype=torch.float64).view(torch.int64), torch.tensor(counts)], 1
        )
        columns = sent(here.t().contiguous(), device).unsqueeze(-1).unbind()
        temperatures, divisors, removable, min_p = (column.view(torch.float64) for column in columns[:4])
        return cls(temperatures, divisors, removable, min_p, *columns[4:])


def forbid(logits: torch.Tensor, rows: Sequence[int], masks: Sequence[np.ndarray]) -> None:
    """Put -inf into float32 `logits` [R, V], in place, for tokens that the masks of these rows lack: int32
    [ceil(V / 32)], bit t % 32 of word t // 32 for token t. It does not wait for the device."""
    device, num_tokens = logits.device, logits.shape[1]
    octets = sent(torch.from_numpy(np.stack(masks).view(np.uint8)), device)
    places = uploaded(rows, torch.int64, device)
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    is_forbidden = ((octets.unsqueeze(-1) & bits) == 0).flatten(1).narrow(1, 0, num_tokens)
    with torch.inference_mode():  # in which the model computed them
        logits.index_copy_(0, places, logits.index_select(0, places).masked_fill_(is_forbidden, NEVER))


def penalise(scores: torch.Tensor, rows: Sequence[Row]) -> None:
    """Apply the rows' penalties to `scores` [R, V], in place; each penalised score is rounded once."""
    for i, row in enumerate(rows):
        p = row.params
        if p.repetition_penalty != 1:
            _repetition(
                scores.select(0, i), {*row.prompt_token_ids, *row.output_token_ids}, p.repetition_penalty
            )
        if (p.presence_penalty or p.frequency_penalty) and row.output_token_ids:
            counts = Counter(row.output_token_ids)
            ids = uploaded(list(counts), torch.int64, scores.device)
            times = uploaded(list(counts.values()), torch.float64, scores.device)
            penalties = p.presence_penalty + p.frequency_penalty * times
            own = scores.select(0, i)
            own.index_copy_(0, ids, (own.index_select(0, ids) - penalties).to(own.dtype))


def _repetition(scores: torch.Tensor, token_ids: set[int], penalty: float) -> None:
    ids = uploaded(sorted(token_ids), torch.int64, scores.device)
    found = scores.index_select(0, ids).double()
    penalised = torch.where(found < 0, found * penalty, found / penalty)
    scores.index_copy_(0, ids, penalised.to(scores.dtype))


def candidates(
    scores: torch.Tensor, params: Sequence[SamplingParams], numbers: DrawNumbers, *, narrow: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [R, C] and token ids of what the filters of each row leave, given float32 logits [R, V].

    narrow: every row has a top_k, and only the best of each row are kept (C is about the largest top_k),
    which waits for the device; else C = V. Either way the same tokens are left, at least one per row.
    """
    ids = torch.arange(scores.shape[1], device=scores.device)
    counts = [min(p.top_k or scores.shape[1], scores.shape[1]) for p in params]
    if min(counts) < scores.shape[1]:
        scores = _keep_top_k(scores, counts, numbers.top_k)
    if narrow:
        # Of a row of NaN nothing is above NEVER: it keeps one, as it does where C = V.
        num_left = max(1, int((scores > NEVER).sum(-1).max()))
        ids = scores.topk(num_left).indices.sort(-1).values
        scores = scores.gather(1, ids)
    if all(p.top_p == 1 and p.min_p == 0 for p in params):
        return scores, ids
    weights = scaled(scores, numbers).exp_()
    if any(p.top_p < 1 for p in params):
        scores = _keep_top_p(scores, weights, numbers.removable)
    if any(p.min_p > 0 for p in params):
        scores = scores.masked_fill(weights < numbers.min_p.to(scores.dtype), NEVER)
    return scores, ids


def scaled(scores: torch.Tensor, numbers: DrawNumbers) -> torch.Tensor:
    """Divide the distances of scores [R, C] to the best of their row by the row's temperature."""
    return (scores - scores.amax(-1, keepdim=True)).div_(numbers.divisors.to(scores.dtype))


def _keep_top_k(scores: torch.Tensor, counts: Sequence[int], top_k: torch.Tensor) -> torch.Tensor:
    """Keep the best `counts` of each row, and what ties with the last of them."""
    num_all = scores.shape[1]
    best = scores.topk(max(count for count in counts if count < num_all)).values
    last = best.gather(1, top_k.clamp(max=best.shape[1]) - 1)
    return scores.masked_fill((scores < last) & (top_k < num_all), NEVER)


def _keep_top_p(scores: torch.Tensor, weights: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Keep the fewest best whose share of the weights is all but `shares`; of equal ones, lower ids first."""
    ranks = _ranks(scores)
    masses = weights.mul(_UNIT_MASS).long()
    total = masses.sum(-1, keepdim=True)
    # Summed from the worst, as transformers does; the best always stays.
    removable = torch.minimum((total * shares).long(), total - 1)
    is_here = torch.ones_like(scores, dtype=torch.bool)
    worst = torch.zeros_like(total)
    for position, num_bits in _DIGITS:
        digits = (ranks >> position) & ((1 << num_bits) - 1)
        sums = torch.zeros(len(scores), 1 << num_bits, dtype=torch.int64, device=scores.device)
        below = sums.scatter_add_(1, digits, masses * is_here).cumsum(-1)
        # The digit at which the sum passes what may go. There is one, but in rows of NaN.
        digit = (below <= removable).sum(-1, keepdim=True).clamp(max=(1 << num_bits) - 1)
        removable -= (below - sums).gather(1, digit)
        is_here &= digits == digit
        worst |= digit << position
    each = (masses * is_here).amax(-1, keepdim=True).clamp(min=1)
    num_equal = is_here.sum(-1, keepdim=True) - removable // each
    removed = (ranks < worst) | (is_here & (is_here.cumsum(-1, dtype=torch.int32) > num_equal))
    return scores.masked_fill(removed & (shares > 0), NEVER)


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """Order float32 as int64 in [0, 2^32)."""
    # Adding zero turns -0 into 0, which it equals.
    bits = (scores + 0.0).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long().add_(1 << 31)

"""Verify proposed tokens by rejection: what comes out has exactly the model's distribution.

A token x that the drafter drew with probability q(x) is kept with probability min(1, p(x) / q(x)), p being
what the model's filters and temperature leave; else a token is drawn from what p has beyond q. A drafter
that is sure has q(x) = 1. Sources: Leviathan, Kalman, Matias, "Fast inference from transformers via
speculative decoding" (ICML 2023); Chen et al., "Accelerating large language model decoding with speculative
sampling" (2023).

The numbers that decide are functions of (seed, index of the output token), of streams of their own beside the
one that tokens are drawn from without drafts: see noise. So equal seeds give equal tokens where equal drafts
come to equal places; with other drafts, or none, tokens of the same distribution. R rows, V vocabulary, C
candidates of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayk.engine.filters import DrawNumbers, Row
from rayk.engine.noise import draw_key, gumbel, uniform
from rayk.kernels.uploads import uploaded

NO_DRAFT = -1
KEEPS, BEYOND, PROPOSES = 1, 2, 3
"""Streams of numbers: which tokens are kept, what is drawn in their place, and what a drafter draws."""


def verify(
    rows: Sequence[Row], left: torch.Tensor, ids: torch.Tensor, numbers: DrawNumbers, drawn: torch.Tensor
) -> torch.Tensor:
    """Choose int64 [R]: `drawn` in rows without a draft. `left` [R, C] and `ids` are what the filters leave,
    see filters.candidates."""
    device = left.device
    drafts = [NO_DRAFT if row.drafted is None else row.drafted for row in rows]
    drafted = uploaded(drafts, torch.int64, device).unsqueeze(1)
    ids = ids.expand_as(left)
    p = ((left.double() - left.amax(-1, keepdim=True)) / numbers.temperatures).softmax(-1)
    q = _draft_probabilities(rows, ids, drafted)
    is_draft = ids == drafted
    p_of, q_of = (p * is_draft).sum(-1), (q * is_draft).sum(-1)
    beyond = (p - q).clamp(min=0)
    # Of rounding alone there is nothing beyond: then p is q, and the draft is kept.
    keeps = (_uniform(rows, KEEPS, device) * q_of < p_of) | (beyond.amax(-1) == 0)
    noise = gumbel(uploaded(_keys(rows, BEYOND), torch.int64, device), ids)
    others = ids.gather(1, (beyond.log() + noise).argmax(-1, keepdim=True))
    verified = torch.where(keeps.unsqueeze(1), drafted, others).squeeze(1)
    return torch.where(drafted.squeeze(1) == NO_DRAFT, drawn, verified)


def _draft_probabilities(rows: Sequence[Row], ids: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Compute what the drafter drew from, float64 [R, C], as far as it is among the candidates."""
    q = (ids == drafted).double()
    for i, row in enumerate(rows):
        if row.draft_logits is not None:
            q[i] = row.draft_logits.double().softmax(-1)[ids[i]]
    return q


def _uniform(rows: Sequence[Row], stream: int, device: torch.device) -> torch.Tensor:
    keys = uploaded(_keys(rows, stream), torch.int64, device)
    return uniform(keys, torch.zeros(1, dtype=torch.int64, device=device)).squeeze(1)


def _keys(rows: Sequence[Row], stream: int) -> list[int]:
    seeds = [row.params.seed for row in rows]
    assert None not in seeds, "the leader gives every drawn request a seed"
    return [
        draw_key(seed or 0, len(row.output_token_ids), stream) for seed, row in zip(seeds, rows, strict=True)
    ]

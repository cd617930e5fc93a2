"""Differences between what a cell produced and what the reference says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rayk.actors.commands import CapturedRows
from rayk.experiments.references import References
from rayk.kv.caches import TORCH_DTYPES
from rayk.kv.groups import KVCacheGroup
from rayk.types.errors import KVMismatch
from rayk.types.request import SamplingParams
from rayk.types.rows import RequestRow

NEAR_TIE_LOGITS = 1e-3
"""float32: two tokens whose reference logits are this close may swap."""
KV_VALUES_RELATIVE = 2e-3
"""float32: largest difference of a key or value, in units of its layer's RMS."""


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """One request's tokens against the reference's."""

    first_divergence: int | None
    """Index of the first token that differs; None when all are equal."""
    near_tie: bool = False
    """Whether it was a tie by the reference's own logits, and all later tokens are the reference's choice."""
    reason: str = ""


def compare_tokens(
    row: RequestRow, expected: Sequence[int], references: References, sampling: SamplingParams
) -> TokenComparison:
    """Compare a finished request with the reference's greedy tokens.

    After a first difference the histories differ, so the rest is judged teacher-forced: at every step the
    chosen token must be within NEAR_TIE_LOGITS of the reference's best.
    """
    found = row.output_token_ids
    if found == list(expected):
        return TokenComparison(None)
    pairs = zip(found, expected, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    if first >= min(len(found), len(expected)):
        what = f"{len(found)} tokens, the reference has {len(expected)}"
        return TokenComparison(first, reason=f"request {row.prompt_index}: {what}")
    forced = references.forced(row.prompt_token_ids, found)
    worst = max(range(first, len(found)), key=lambda i: forced[i].gap)
    near = forced[worst].gap <= NEAR_TIE_LOGITS and len(found) <= sampling.max_tokens
    what = (
        f"request {row.prompt_index}, token {first}: {found[first]} instead of {expected[first]}, "
        f"{forced[first].gap:.3g} logits below the reference's best"
    )
    return TokenComparison(first, near, what)


@dataclass(frozen=True, slots=True)
class ValueComparison:
    """A prefill engine's cache against the reference's, for one request."""

    num_values: int
    max_error: float
    """Largest absolute difference."""
    mismatch: KVMismatch | None


def compare_values(
    request_id: str,
    captured: Sequence[CapturedRows],
    reference: Sequence[tuple[torch.Tensor, torch.Tensor]],
    groups: Sequence[KVCacheGroup],
    num_tokens: int,
) -> ValueComparison:
    """Compare every rank's live rows with the reference's keys and values, layer by layer.

    `captured` by rank. The first difference in the order (layer, field, head, token) is named.
    """
    num_values, max_error = 0, 0.0
    mismatch: KVMismatch | None = None
    for layer, group in sorted((layer, g) for g in groups for layer in g.layers):
        live = group.spec.live_rows(num_tokens)
        truth = {
            name: tensor[:, live.start : live.stop].double()
            for name, tensor in zip(("k", "v"), reference[layer], strict=True)
        }
        for rank in captured:
            for (name, head), rows in sorted(rank[layer].items()):
                found = _values(rows, group.spec.dtype)
                error = (found - truth[name][head]).abs()
                error = torch.where(error.isnan(), torch.inf, error)
                num_values += found.numel()
                max_error = max(max_error, float(error.max())) if error.numel() else max_error
                limit = KV_VALUES_RELATIVE * float(truth[name].square().mean().sqrt())
                wrong = (error > limit).any(dim=1)
                if mismatch is None and bool(wrong.any()):
                    first = int(wrong.nonzero()[0])
                    what = _explain(found, truth, name, head, wrong, limit)
                    mismatch = KVMismatch(
                        request_id,
                        layer,
                        group.index,
                        name,
                        head,
                        live.start + first,
                        f"the prefill engine's cache differs from the reference's by up to "
                        f"{float(error.max()):.3g}: {what}",
                    )
    return ValueComparison(num_values, max_error, mismatch)


def _values(rows: np.ndarray, dtype: str) -> torch.Tensor:
    """uint8 [T, bytes] -> float64 [T, D]."""
    return torch.from_numpy(np.array(rows)).view(TORCH_DTYPES[dtype]).double()


def _explain(
    found: torch.Tensor,
    truth: dict[str, torch.Tensor],
    name: str,
    head: int,
    wrong: torch.Tensor,
    limit: float,
) -> str:
    """What the wrong rows hold instead, if that is anywhere in the reference's layer."""
    rows = wrong.nonzero()[:, 0]
    for other_name, tensor in truth.items():
        for other in range(tensor.shape[0]):
            same = tensor.shape[2] == found.shape[1] and (other_name, other) != (name, head)
            if same and bool(((found[rows] - tensor[other, rows]).abs() <= limit).all()):
                if other_name != name:
                    return f"{name.upper()} holds {other_name.upper()} of head {other}"
                return f"head {head} holds head {other}"
    for shift in (-1, 1):
        inside = (rows + shift >= 0) & (rows + shift < found.shape[0])
        source = rows[inside] + shift
        if len(source) and bool(((found[rows[inside]] - truth[name][head, source]).abs() <= limit).all()):
            return f"token t holds token t{shift:+d}"
    held = found[rows].flatten()
    if bool(held.isnan().all() or (held == held[0]).all()):
        return f"{len(rows)} tokens were never written"
    return f"{len(rows)} tokens hold other values"

"""A scheduled batch as one int32 array: what rank 0 broadcasts each step.

Layout: [step, num_requests, num_groups], then per request
[row, num_computed_tokens, num_tokens, num_logits, start and stop of prompt_logits],
per group [start, num_ids, num_filled, ids...], token ids.
Request ids stay on rank 0: peers know rows only.

What a drafter does after a step goes as int64: per request [num_kept, next_token, num_proposed, bits of the
temperature, seed, output_index, num_groups], per group [start, num_ids, ids...].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rayk.types.batch import ScheduledBatch, ScheduledRequest
from rayk.types.drafting import DraftPlan, DraftShare


def encode_batch(batch: ScheduledBatch) -> bytes:
    """Pack a batch; `decode_batch` is the inverse but for request ids."""
    num_groups = len(batch.requests[0].new_block_ids) if batch.requests else 0
    words = [batch.step, len(batch.requests), num_groups]
    for r in batch.requests:
        words += (r.row, r.num_computed_tokens, len(r.token_ids), r.num_logits, *r.prompt_logits)
        filled = r.num_filled_blocks or (0,) * num_groups
        for (start, ids), num_filled in zip(r.new_block_ids, filled, strict=True):
            words += (start, len(ids), num_filled, *ids)
        words += r.token_ids
    return np.array(words, dtype=np.int32).tobytes()


def decode_batch(payload: bytes) -> ScheduledBatch:
    """Unpack what `encode_batch` made; request ids become "row<N>"."""
    words: list[int] = np.frombuffer(payload, dtype=np.int32).tolist()
    step, num_requests, num_groups = words[:3]
    at = 3
    requests = []
    for _ in range(num_requests):
        row, num_computed, num_tokens, num_logits, start, stop = words[at : at + 6]
        prompt_logits = (start, stop)
        at += 6
        updates, filled = [], []
        for _ in range(num_groups):
            start, count, num_filled = words[at : at + 3]
            updates.append((start, tuple(words[at + 3 : at + 3 + count])))
            filled.append(num_filled)
            at += 3 + count
        token_ids = tuple(words[at : at + num_tokens])
        at += num_tokens
        requests.append(
            ScheduledRequest(
                request_id=f"row{row}",
                row=row,
                num_computed_tokens=num_computed,
                token_ids=token_ids,
                new_block_ids=tuple(updates),
                num_filled_blocks=tuple(filled) if any(filled) else (),
                needs_logits=num_logits > 0,
                prompt_logits=prompt_logits,
                num_drafts=max(0, num_logits - 1),
            )
        )
    assert at == len(words), "header has trailing words"
    return ScheduledBatch(step=step, requests=tuple(requests))


def encode_plan(plan: DraftPlan) -> bytes:
    """Pack a plan; `decode_plan` is the inverse."""
    words: list[int] = []
    for share in plan:
        bits = int(np.float64(share.temperature).view(np.int64))
        words += (share.num_kept, share.next_token, share.num_proposed, bits, share.seed, share.output_index)
        words += (share.first_row, len(share.token_ids), *share.token_ids, len(share.new_block_ids))
        for start, ids in share.new_block_ids:
            words += (start, len(ids), *ids)
    return np.array(words, dtype=np.int64).tobytes()


def decode_plan(payload: bytes) -> DraftPlan:
    """Unpack what `encode_plan` made."""
    return tuple(_shares(np.frombuffer(payload, dtype=np.int64).tolist()))


def _shares(words: Sequence[int]) -> Iterator[DraftShare]:
    at = 0
    while at < len(words):
        num_kept, next_token, num_proposed, bits, seed, index, first_row, num_tokens = words[at : at + 8]
        at += 8 + num_tokens
        token_ids, num_groups = tuple(words[at - num_tokens : at]), words[at]
        at += 1
        updates: list[tuple[int, tuple[int, ...]]] = []
        for _ in range(num_groups):
            start, count = words[at : at + 2]
            updates.append((start, tuple(words[at + 2 : at + 2 + count])))
            at += 2 + count
        temperature = float(np.int64(bits).view(np.float64))
        drawing = temperature, seed, index
        yield DraftShare(num_kept, next_token, num_proposed, tuple(updates), *drawing, first_row, token_ids)

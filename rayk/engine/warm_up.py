"""Every form of a step, run before an engine serves: no deadline then runs while kernels compile.

A kernel is compiled when it is first launched, for 1 to 20 seconds, and again for arguments of another form.
What changes from step to step is no part of the form (`do_not_specialize`), but tiles are, which some kernels
choose by the number of tokens. So prefills of all powers of two meet them all, with a decode step of one long
request, whose keys are split, and one of many short ones; and where drafts are proposed the same two with
as many drafts as there may be.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from rayk.kv.groups import KVCacheGroup
from rayk.kv.riders import tabled
from rayk.parallel.comm import Comm, patient
from rayk.types.batch import ScheduledBatch, ScheduledRequest

WARM_UP_S = 600.0
"""How much longer the start of an engine on a GPU may take for it."""
_BLOCK = 1
"""All requests share it: what they write means nothing."""


def warm_up_batches(
    groups: Sequence[KVCacheGroup],
    *,
    max_seqs: int,
    max_batch_tokens: int,
    max_positions: int,
    max_drafts: int = 0,
) -> Iterator[tuple[str, ScheduledBatch]]:
    """Yield (what it is, the step)."""
    tokens, longest = min(max_batch_tokens, max_positions), max_positions - 1
    later = min(1, longest)
    if tokens > 2 and max_seqs > 1:
        both = [(0, tokens - 1), (later, 1)]
        yield f"prefill of {tokens - 1} tokens beside a decode", _batch(groups, both)
    else:
        yield f"prefill of {tokens} tokens", _batch(groups, [(0, tokens)])
    for power in range((tokens - 1).bit_length() - 1, 0, -1):
        yield f"prefill of {1 << power} tokens", _batch(groups, [(0, 1 << power)])
    yield f"decode after {longest} tokens", _batch(groups, [(longest, 1)])
    rows = min(max_seqs, max_batch_tokens)
    yield f"decode of {rows} requests", _batch(groups, [(later, 1)] * rows)
    drafts = min(max_drafts, tokens - 1)
    if drafts > 0:
        start = max(0, longest - drafts)
        yield f"{drafts} drafts after {start} tokens", _batch(groups, [(start, 1 + drafts)], drafts)
        rows = min(max_seqs, max_batch_tokens // (1 + drafts))
        start = min(later, start)
        yield f"{drafts} drafts of {rows} requests", _batch(groups, [(start, 1 + drafts)] * rows, drafts)


def _batch(
    groups: Sequence[KVCacheGroup], step: Sequence[tuple[int, int]], num_drafts: int = 0
) -> ScheduledBatch:
    """Make a step of requests that have (computed tokens, tokens to compute, so many of them drafts)."""
    requests = tuple(
        ScheduledRequest(
            request_id=f"warm-up {row}",
            row=row,
            num_computed_tokens=computed,
            token_ids=(0,) * tokens,
            new_block_ids=tuple(
                (0, (_BLOCK,) * -(-(computed + tokens) // group.spec.block_size)) for group in tabled(groups)
            ),
            needs_logits=True,
            num_drafts=num_drafts,
        )
        for row, (computed, tokens) in enumerate(step)
    )
    return ScheduledBatch(step=0, requests=requests)


def run_warm_up(steps: Iterable[tuple[str, Callable[[], object]]], comm: Comm) -> None:
    """Run the steps, of (what it is, what runs it), and tell of each on stderr; at the end how many kernels
    came of it. Peers are waited for as long as a start may take: their compilers may be slower."""
    from rayk.kernels.compilations import compilations  # here: CPU ranks do without Triton

    name = f"rank {comm.rank} of {comm.size}"
    began = time.monotonic()
    with compilations() as names, patient(comm, WARM_UP_S):
        for text, step in steps:
            took_s = time.monotonic() - began
            _tell(f"{name}: compiling kernels, {text} ({len(names)} so far, {took_s:.0f} s)")
            step()
    _tell(f"{name}: {len(names)} kernels ready in {time.monotonic() - began:.1f} s")


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()

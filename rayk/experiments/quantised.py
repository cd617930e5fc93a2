"""Judge cells whose KV is quantised.

Greedy tokens are compared with those of one rayk engine that does all by itself, with the same KV format and
the prefill engine's TP: a run of its own on the same cluster, kept. Where they differ (another decode TP adds
up in another order, and a last bit flips a quantisation step), and where there is no such engine because the
two sides keep unlike formats, every token must be nearly as good as the reference's best, teacher-forced.

The reference is transformers with a cache that rounds as the formats do: right engines agree with it to 1e-5
where no step flips. Of prompts whose rows were captured (kv_values) and engines in float32 it takes the steps
that the engine took (`follow`, oracle.following): then each stored row must be a rounding of what belongs
there, and a log probability that no other step could change keeps float32's own bound. Elsewhere,
how far off a token may be is measured (see `noise`) by the same reference with values that are a little off
before they are rounded (References), which flips some steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rayk.experiments.references import References
from rayk.kv.groups import KVCacheGroup
from rayk.specs import Cell
from rayk.types.rows import RequestRow

if TYPE_CHECKING:  # torch is imported when there is something to judge
    from rayk.experiments.compare import TokenComparison
    from rayk.experiments.logprobs import Followed
    from rayk.handover.commands import CapturedRows
    from rayk.oracle.quantised import KVRounding


def rounding_of(cell: Cell) -> KVRounding | None:
    """Say what a quantised cell's caches do to values, one after the other where they are converted; None if
    nothing."""
    if not cell.is_quantised:
        return None
    from rayk.oracle.quantised import KVRounding

    kept = [KVRounding(engine.kv_dtype, engine.kv_scales) for engine in cell.engines]
    return replace(kept[0], then=kept[1]) if cell.is_converted else kept[0]


def compare_forced(
    row: RequestRow, expected: Sequence[int] | None, references: References, tolerance: float
) -> TokenComparison:
    """Compare a finished request's tokens with an aggregated engine's. If `expected` is None the reference
    must find each within `tolerance` logits of its best."""
    from rayk.experiments.compare import TokenComparison, gap_in_words

    if expected is not None and row.output_token_ids == list(expected):
        return TokenComparison(None)
    found = row.output_token_ids
    forced = references.forced(row.prompt_token_ids, found)
    worst = max(range(len(found)), key=lambda i: (math.isnan(forced[i].gap), forced[i].gap))
    near, is_finite = forced[worst].gap <= tolerance, not math.isnan(forced[worst].gap)
    off = f"at most {gap_in_words(forced[worst].gap)} (bound {tolerance:.3g})"
    if expected is None:
        what = f"request {row.prompt_index}, token {worst}: {found[worst]}, teacher-forced {off}"
        return TokenComparison(None if near else worst, False, what, is_finite)
    pairs = zip(found, expected, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    if len(found) != len(expected) and first >= min(len(found), len(expected)):
        what = f"{len(found)} tokens, the aggregated engine has {len(expected)}"
        return TokenComparison(first, False, f"request {row.prompt_index}: {what}")
    what = (
        f"request {row.prompt_index}, token {first}: {found[first]}, the aggregated engine's is "
        f"{expected[first]}; teacher-forced {off}"
    )
    return TokenComparison(first, near, what, is_finite)


def follow(
    row: RequestRow,
    captured: Sequence[CapturedRows] | None,
    references: References,
    groups: Sequence[KVCacheGroup],
) -> tuple[Followed | None, str]:
    """Ask the reference about a request given the prompt's keys and values that the prefill engine stored;
    and find which of them are wrong. None where no rows were brought here, or not those that the tokens were
    computed from."""
    from rayk.experiments.dequantised import dequantised, stored_kv
    from rayk.experiments.logprobs import Followed

    computed_again = row.num_attempts > 1 or row.recovered_by is not None or row.num_recomputed_tokens
    if captured is None or not references.can_follow or computed_again:
        return None, ""
    rows, plain = dequantised(captured, groups, references.kv_scales)
    prompt, output = row.prompt_token_ids, row.output_token_ids
    scores, following = references.follow(prompt, output, stored_kv(rows, plain, len(prompt)))
    first = following.first_unsettled
    refused = min(following.refused, default=None)
    what = ""
    if refused is not None:
        what = (
            f"layer {refused.layer}, {refused.side} of head {refused.head}, token {refused.token}: no "
            f"rounding of what the layers below make of the stored values ({len(following.refused)} rows)"
        )
    return Followed(scores, len(prompt) + len(output) if first is None else first), what

"""When a request's KV came, of all ranks of a decode engine together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayk.transfer.consumer import TransferOutcome

STAGES = ("read", "fence", "verify")
"""Stages of one rank, in order."""


def to_one_clock(outcomes: Sequence[TransferOutcome], started_ns: int, now_ns: int) -> list[int]:
    """When each rank's transfer began, of those where one did. Times of ranks on other hosts, whose clocks
    are others, are put on rank 0's: all ranks begin in the same turn, so they are taken to begin with it at
    `started_ns`. Shifts the outcomes' rows likewise."""
    begins = []
    for outcome in outcomes:
        if outcome.began_ns is None:
            continue
        is_ours = started_ns <= outcome.began_ns <= now_ns
        shift_ns = 0 if is_ours else started_ns - outcome.began_ns
        for row in outcome.rows:
            row.shift(shift_ns)
        begins.append(outcome.began_ns + shift_ns)
    return begins


def arrival_stages(
    outcomes: Sequence[TransferOutcome], taken_ns: int, started_ns: int, now_ns: int
) -> dict[str, int]:
    """Stage -> ns, end to end from `taken_ns` on: `reserve` until the first rank began, each of STAGES
    until the last rank had ended it. One that no rank ended is absent. Call it once: see `to_one_clock`."""
    begins = to_one_clock(outcomes, started_ns, now_ns)
    began = [o for o in outcomes if o.began_ns is not None]
    ends = {"reserve": min(begins, default=started_ns)}
    for begin_ns, outcome in zip(begins, began, strict=True):
        at_ns = begin_ns
        for stage, length_ns in outcome.stage_ns.items():
            at_ns += length_ns
            ends[stage] = max(ends.get(stage, at_ns), at_ns)
    found, last_ns = {}, taken_ns
    for stage in ("reserve", *STAGES):
        if stage in ends:
            end_ns = max(last_ns, ends[stage])
            found[stage], last_ns = end_ns - last_ns, end_ns
    return found

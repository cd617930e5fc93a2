"""How much of a request a consumer may keep when its transfer failed: a prefix whose KV is proven. Pure.

Digests prove rows one by one, whatever went wrong with the rest. A prefix of n tokens can be gone on from
when every row that is live at n, in every layer and on every rank, is among those proven: all n of full
attention, the last window, the rows of the last chunk, and of a recurrent layer the state after exactly n
tokens. Prefixes do not nest: a longer one may be valid where a shorter one is not (its state is not here).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rayk.kv.groups import KVCacheGroup


@dataclass(frozen=True, slots=True)
class LayerProof:
    """Rows of one of a layer's caches that one rank has proven. Picklable: it travels to the leader."""

    group: int
    layer: int
    rows: tuple[range, ...]
    """Token positions, ascending, apart. Of a recurrent layer position p stands for the state after the token
    at p."""


def proven_rows(live: range, rows_per_group: int, wrong_groups: Iterable[int]) -> tuple[range, ...]:
    """`live` without the digest groups that differ: group g covers positions g * rows_per_group and on."""
    proven: list[range] = []
    start = live.start
    for group in sorted(set(wrong_groups)):
        stop = min(group * rows_per_group, live.stop)
        if start < stop:
            proven.append(range(start, stop))
        start = max(start, (group + 1) * rows_per_group)
    if start < live.stop:
        proven.append(range(start, live.stop))
    return tuple(proven)


def longest_valid_prefix(
    groups: Sequence[KVCacheGroup], proofs: Sequence[Sequence[LayerProof]], num_tokens: int
) -> int:
    """Return the largest n <= num_tokens such that all rows live at n are proven on every rank; 0 at worst.

    `groups`: the consumer's. `proofs`: of every rank. A rank proves rows as far as they are its own, and
    speaks of the layers that it keeps; a cache that nobody speaks of is not proven."""
    caches = [(group, layer) for group in groups for layer in group.layers]
    by_rank = [{(p.group, p.layer): p.rows for p in rank} for rank in proofs]
    spoken = set().union(*by_rank)
    if not all((group.index, layer) in spoken for group, layer in caches) or not all(by_rank):
        return 0
    # Layers of a group mostly stand alike: each way of standing is looked at once.
    wanted = dict.fromkeys(
        (group.seen_by(layer), rank[group.index, layer])
        for rank in by_rank
        for group, layer in caches
        if (group.index, layer) in rank
    )
    n = num_tokens
    while n > 0:
        missing = [_last_missing(seen.live_rows(n), rows) for seen, rows in wanted]
        found = [position for position in missing if position is not None]
        if not found:
            return n
        # Live rows begin no earlier when there are more tokens: the row is live at every length from here
        # down to it, unless a length ends before it.
        n = min(found)
    return 0


def _last_missing(live: range, proven: Sequence[range]) -> int | None:
    """Return the last live position outside the proven ones; None where there is none."""
    stop = live.stop
    for rows in reversed(proven):
        if rows.start >= stop:
            continue
        if rows.stop < stop:
            break
        stop = rows.start
    return stop - 1 if stop > live.start else None

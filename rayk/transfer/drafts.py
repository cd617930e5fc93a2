"""Which draft layers move between two engines, and why the others stay. Pure; free of torch.

An engine may have a drafter that the other lacks, or another one. A drafter is one model: its layers move all
together, where both sides keep the same ones of the same drafter, or none of them does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rayk.kv.geometry import RankGeometry
from rayk.kv.groups import CacheKey, KVCacheGroup
from rayk.transfer.meaning import can_convert, differences, kept_as, meaning


def left_out(producer: RankGeometry, consumer: RankGeometry) -> dict[CacheKey, str]:
    """Return the caches of draft layers that do not move, in words; empty: all that there are move."""
    ours, theirs = _drafts(producer), _drafts(consumer)
    if not ours and not theirs:
        return {}
    keys = sorted({*ours, *theirs})
    why = {key: _why_not(key[0], ours.get(key), theirs.get(key)) for key in keys}
    found = {key: text for key, text in why.items() if text}
    if not found:
        return {}
    first = next(iter(found.values())).partition(":")[0]
    return {key: text or f"{ours[key].name_of(key[0])}: it goes with {first}" for key, text in why.items()}


def _drafts(side: RankGeometry) -> Mapping[CacheKey, KVCacheGroup]:
    return {key: g.group for g in side.groups if g.group.rides is not None for key in g.group.keys}


def _why_not(layer: int, ours: KVCacheGroup | None, theirs: KVCacheGroup | None) -> str:
    """Say why a draft layer does not move; empty where it does."""
    if ours is None or theirs is None:
        there, lacks = (theirs, "producer") if ours is None else (ours, "consumer")
        assert there is not None
        return f"{there.name_of(layer)}: the {lacks} has none"
    for name, here, there_ in _unlike(layer, ours, theirs):
        return f"{ours.name_of(layer)}: {name} is {here} at the producer, {there_} at the consumer"
    return ""


def _unlike(layer: int, ours: KVCacheGroup, theirs: KVCacheGroup) -> Iterator[tuple[str, str, str]]:
    sides = ({"its name": g.name_of(layer), "its drafter": g.drafter} for g in (ours, theirs))
    yield from differences(*sides)
    yield from differences(meaning(ours.seen_by(layer)), meaning(theirs.seen_by(layer)))
    if not can_convert(ours.spec, theirs.spec):
        yield from differences(kept_as(ours.spec), kept_as(theirs.spec))

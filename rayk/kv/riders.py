"""Groups that ride: layers of a drafter, which share the block table and block ids of a group of the model.

A block id of the carrying group stands for its block and, beside it, for a page of each rider in memory of
its own. Whoever allocates blocks knows nothing of riders, and the model's own groups, block sizes and
canonical pages are what they are without a drafter: an engine with one and an engine without agree on them.
Riders come last of an engine's groups, so that these keep their numbers too. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rayk.kv.groups import CacheKey, KVCacheGroup
from rayk.kv.specs import KVCacheSpec, with_block_size
from rayk.types.errors import Unsupported

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Riders:
    """What the layers of a drafter keep."""

    specs: Mapping[CacheKey, KVCacheSpec]
    """Layers are numbered from the model's number of layers on; the lowest is draft layer 0. Block sizes do
    not count: blocks are those of the group on which they ride."""
    seen: Mapping[CacheKey, KVCacheSpec] | None = None
    """The spec of the rows that each layer can see, where `specs` keep more (windows)."""
    drafter: str = ""
    """Names the drafter's weights and settings: rows of two drafters do not mean the same."""
    looks_ahead: bool = False
    """A row depends on the token after its own, too."""


def add_riders(
    groups: Sequence[KVCacheGroup], riders: Riders | Mapping[CacheKey, KVCacheSpec]
) -> tuple[KVCacheGroup, ...]:
    """Return a model's groups and behind them those of a drafter's caches, one for each kind of spec. Raises
    Unsupported where the model has no group that keeps every token, or a drafter's layer keeps something
    else than every token."""
    if not isinstance(riders, Riders):
        riders = Riders(riders)
    specs = riders.specs
    if not specs:
        return tuple(groups)
    carrier = carrier_of(groups)
    first = min(layer for layer, _ in specs)
    assert first > max(layer for g in groups for layer in g.layers), "a draft layer has a number of its own"
    kinds: dict[KVCacheSpec, list[CacheKey]] = {}
    for key in sorted(specs):
        spec = specs[key]
        if not _keeps_all(spec):
            raise Unsupported(
                f"draft layer {key[0] - first} keeps a {spec.kind} cache, and drafts share the block table "
                "of a group that keeps every token (mend: a drafter of full attention, or "
                "speculative.method ngram)"
            )
        kinds.setdefault(with_block_size(spec, carrier.spec.block_size), []).append(key)
    found = list(groups)
    for spec, keys in kinds.items():
        layers = tuple(layer for layer, _ in keys)
        own = tuple(with_block_size((riders.seen or specs)[key], spec.block_size) for key in keys)
        found.append(
            KVCacheGroup(
                len(found),
                spec,
                layers,
                len(layers),
                seen=() if set(own) == {spec} else own,
                rides=carrier.index,
                first_draft=first,
                drafter=riders.drafter,
            )
        )
    return tuple(found)


def carrier_of(groups: Sequence[KVCacheGroup]) -> KVCacheGroup:
    """Return the group on which a drafter's layers ride: the first that keeps every token. Raises Unsupported
    where there is none."""
    for g in groups:
        if g.rides is None and _keeps_all(g.spec):
            return g
    kinds = ", ".join(dict.fromkeys(g.spec.kind for g in groups))
    raise Unsupported(
        f"a drafter keeps something of every token, and no layer of the model does (it has {kinds}) "
        "(mend: hybrid_kv: false where the model has windows, or speculative.method ngram)"
    )


def tabled(groups: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Return the groups that have block tables, each told what rides on it."""
    carried = {g.rides: g.spec for g in groups if g.rides is not None}
    return tuple(replace(g, carries=carried.get(g.index)) for g in groups if g.rides is None)


def of_groups(groups: Sequence[KVCacheGroup], tables: Sequence[T]) -> tuple[T, ...]:
    """Return what belongs to each group of `tables`, which has something for each that has a block table: a
    rider has what the group has on which it rides."""
    return tuple(tables[g.index if g.rides is None else g.rides] for g in groups)


def _keeps_all(spec: KVCacheSpec) -> bool:
    return spec.has_token_rows and not spec.live_step

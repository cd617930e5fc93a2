"""The wire cache: where rows arrive that the consumer keeps in another format than the producer.

Pages as the producer's specs lay them out, on the consumer's shard, with block ids of their own. A request
holds blocks here from its first read until its rows were converted (or nobody looks into them any more).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from rayk.kv.block_pool import NULL_BLOCK, BlockPool
from rayk.kv.caches import TORCH_DTYPES, CacheView, CanonicalKVCaches, FieldView, allocate
from rayk.kv.geometry import RankGeometry
from rayk.kv.groups import KVCacheGroup
from rayk.kv.riders import of_groups
from rayk.kv.specs import num_kept_blocks
from rayk.transfer.agent import TransferAgent
from rayk.transfer.handshake import CacheDescription, engine_scales
from rayk.transfer.layer_view import make_layer_view
from rayk.transfer.verify import CanonicalViews, sorted_views
from rayk.transfer.wire_geometry import needs_conversion, num_wire_blocks, wire_geometry


@dataclass(eq=False)
class WireCache:
    """One consumer rank's, for one producer engine: it goes with its last block when that is gone. Made by
    `wire_cache_for`."""

    agent: TransferAgent
    """The agent with which it is registered."""
    caches: CanonicalKVCaches
    description: CacheDescription
    """This rank, with the wire cache in place of its own."""
    consumers: tuple[RankGeometry, ...]
    """Every consumer rank's wire cache: what the producer is read into."""
    views: CanonicalViews
    """Views in canonical order."""
    _pool: BlockPool = field(init=False)
    _is_retired: bool = False
    """Nothing new arrives."""
    _is_registered: bool = True

    def __post_init__(self) -> None:
        self._pool = BlockPool(self.caches.geometry.num_blocks)

    def num_needed(self, num_tokens: int) -> int:
        """Count the blocks of a request."""
        return sum(num_kept_blocks(g.spec, num_tokens) for g in self._groups)

    def refusal(self, num_tokens: int) -> str | None:
        """Say why a request can never be converted, if so."""
        needed, there = self.num_needed(num_tokens), self._pool.num_blocks - 1
        if needed <= there:
            return None
        return f"{num_tokens} tokens arrive in {needed} blocks, the wire cache has {there}"

    def take(self, num_tokens: int) -> list[list[int]] | None:
        """Take block tables per group, nulls where nothing is live; None where there is no room now."""
        if self.num_needed(num_tokens) > self._pool.num_free_blocks:
            return None
        tables = []
        for g in self._groups:
            first = g.spec.live_rows(num_tokens).start // g.spec.block_size
            blocks = self._pool.allocate(num_kept_blocks(g.spec, num_tokens))
            tables.append([NULL_BLOCK] * first + blocks)
        return list(of_groups([g.group for g in self.caches.geometry.groups], tables))

    def give_back(self, tables: Sequence[Sequence[int]]) -> None:
        """Nothing arrives in these blocks any more, and nobody reads them."""
        for _, table in zip(self._groups, tables, strict=False):
            self._pool.free([b for b in table if b != NULL_BLOCK])
        self._settle()

    def retire(self) -> None:
        """Nothing arrives any more but in blocks that are held. Once is enough."""
        self._is_retired = True
        self._settle()

    def _settle(self) -> None:
        is_empty = self._pool.num_free_blocks == self._pool.num_blocks - 1
        if self._is_retired and self._is_registered and is_empty:
            self._is_registered = False  # another one may come to lie at its address
            self.agent.deregister(self.description.base_address)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free_blocks

    @property
    def _groups(self) -> list[KVCacheGroup]:
        """Those that have block tables, which come first."""
        return [g.group for g in self.caches.geometry.groups if g.group.rides is None]


def wire_cache_for(
    agent: TransferAgent,
    producers: Sequence[CacheDescription],
    consumers: Sequence[CacheDescription],
    me: CacheDescription,
    own: CanonicalViews,
    device: torch.device,
) -> WireCache | None:
    """Return what this rank needs to read from an engine; None where both keep the same formats. `own`: views
    of the rank's own cache, whose units the wire cache's must be."""
    producer = producers[0]
    if not needs_conversion(producer.geometry, me.geometry):
        return None
    # Ranks of unlike stages may afford unlike numbers: all have the least.
    num_blocks = min(num_wire_blocks(producer.geometry, c.geometry) for c in consumers)
    geometries = tuple(wire_geometry(producer.geometry, c.geometry, num_blocks) for c in consumers)
    caches = allocate(geometries[me.geometry.rank], device, fill=None)
    address = agent.register(caches.buffer)
    # What the agent said of itself before does not cover the buffer: whoever pushes into it must know.
    description = replace(
        me,
        geometry=caches.geometry,
        base_address=address,
        agent_metadata=agent.metadata(),
        kv_scales=engine_scales(producers),
    )
    return WireCache(agent, caches, description, geometries, views_like(own, caches))


def views_like(own: CanonicalViews, caches: CanonicalKVCaches) -> CanonicalViews:
    """Return views of caches in another format, with the units and tokens of a rank's own."""
    mine = {(v.layer, v.group.spec.part): v for v in own}
    groups = [g.group for g in caches.geometry.groups]
    views = []
    for group in groups:
        for layer, part in (key for key in group.keys if key in mine):
            like = mine[layer, part]
            units = {f.name: f.units for f in like.fields}
            fields = field_views(group, caches.view(layer, part), units)
            views.append(make_layer_view(layer, group, fields, like.tokens))
    return sorted_views(views, groups, own.classes)


def field_views(
    group: KVCacheGroup, view: CacheView, units: Mapping[str, tuple[int, ...]]
) -> list[FieldView]:
    """Return the fields of one bound cache, with the units of the rank's own; scales have those of what they
    scale."""
    bundles = dict(view) if isinstance(view, Mapping) else None
    ends: dict[str, int] = {}
    found = []
    for f in group.spec.fields():
        bundle = bundles[f.bundle] if bundles is not None else view
        assert isinstance(bundle, torch.Tensor)
        start = ends.get(f.bundle, 0)
        ends[f.bundle] = start + f.row_bytes
        content = bundle.view(torch.uint8)[..., start : start + f.row_bytes]
        scaled = f.name.removesuffix("_scale")
        found.append(FieldView(f.name, content.view(TORCH_DTYPES[f.dtype]), units[scaled]))
    return found

"""Ranks of an engine without a model: their memory, and what reads and writes it over an agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayk.kv.caches import CanonicalKVCaches, FieldView, allocate
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import KVCacheGroup
from rayk.kv.layout import get_layout
from rayk.parallel.shard import EngineShape
from rayk.transfer.agent import TransferAgent
from rayk.transfer.handshake import describe_cache
from rayk.transfer.layer_view import make_layer_view
from rayk.transfer.rank import TransferRank
from rayk.transfer.token_classes import ONE_CLASS, TokenClasses
from rayk.transfer.wire import field_views


def make_rank(
    groups: Sequence[KVCacheGroup],
    layout: str,
    agent: TransferAgent,
    *,
    shape: EngineShape,
    rank: int,
    num_blocks: int,
    engine: str,
    epoch: int = 0,
    fill: int = 0,
    token_classes: TokenClasses = ONE_CLASS,
    **more: Any,
) -> tuple[CanonicalKVCaches, TransferRank]:
    """One rank's memory in the host, every byte `fill`, and what moves it; `more` is for TransferRank.
    `token_classes`: of both sides' shapes."""
    geometry = plan_rank(groups, get_layout(layout), shape=shape, rank=rank, num_blocks=num_blocks)
    caches = allocate(geometry, torch.device("cpu"), fill=fill)
    tokens = geometry.share.tokens
    views = [
        make_layer_view(layer, g, bound_fields(caches, g, layer), tokens)
        for g in groups
        for layer in g.layers
    ]
    description = describe_cache(
        agent, caches, engine=engine, epoch=epoch, fingerprint={}, token_classes=token_classes
    )
    return caches, TransferRank(agent, caches, views, description, **more)


def bound_fields(caches: CanonicalKVCaches, group: KVCacheGroup, layer: int) -> list[FieldView]:
    """The fields of a layer's bound cache, with the units that its weights would be cut for."""
    tp = caches.geometry.tp_size, caches.geometry.tp_rank
    units = {f.name: f.shard(*tp) for f in group.spec.fields()}
    views = field_views(group, caches.view(layer, group.spec.part), units)
    assert all(len(v.units) == v.view.shape[1] for v in views)
    return views

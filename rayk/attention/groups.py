"""Which layers share attention metadata. One KV group may hold several attention groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from rayk.attention.backend import AttentionBackend, PagedAttentionMetadata
from rayk.attention.metadata import CommonAttentionMetadata, TokenShardMetadata
from rayk.attention.transforms import chunked_local, fast_prefill, sliding_window, token_shard_view
from rayk.kv.specs import KVCacheSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionView:
    """How layers see a step of their KV group. Groups with equal views share transformed metadata."""

    kv_group: int
    window: int | None = None
    """It may differ from the spec's: a windowed layer may keep all tokens in a full-attention group."""
    chunk: int | None = None
    fast_prefill: bool = False
    """Compute only the tokens whose logits are wanted."""


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """The properties that decide a layer's attention group."""

    layer: int
    backend: AttentionBackend
    spec: KVCacheSpec
    num_query_heads: int
    view: AttentionView


@dataclass(frozen=True, kw_only=True)
class AttentionGroup:
    """Layers of one KV group with the same backend, spec, query heads and view."""

    backend: AttentionBackend
    spec: KVCacheSpec
    num_query_heads: int
    view: AttentionView
    layers: tuple[int, ...]


def make_attention_groups(layers: Iterable[AttentionLayer]) -> tuple[AttentionGroup, ...]:
    """Gather distinct layers, in their order, into groups ordered by their first layers."""
    members: dict[tuple[object, ...], list[AttentionLayer]] = {}
    seen: set[int] = set()
    for item in layers:
        assert item.layer not in seen, f"layer {item.layer} is in two attention groups"
        seen.add(item.layer)
        key = (id(item.backend), item.spec, item.num_query_heads, item.view)
        members.setdefault(key, []).append(item)
    return tuple(
        AttentionGroup(
            backend=first.backend,
            spec=first.spec,
            num_query_heads=first.num_query_heads,
            view=first.view,
            layers=tuple(item.layer for item in (first, *rest)),
        )
        for first, *rest in members.values()
    )


class AttentionGroups:
    """An engine's attention groups: initialised once, built every step."""

    def __init__(self) -> None:
        self._groups: tuple[AttentionGroup, ...] | None = None
        self.views: tuple[AttentionView, ...] = ()
        """The distinct views, in the order of their first groups."""
        self._sees_all = True

    @property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """They are ordered by their first layers; a model without attention has none."""
        return self._groups or ()

    def initialise(self, layers: Iterable[AttentionLayer]) -> None:
        """Form the groups; may be called only once."""
        assert self._groups is None, "attention groups are already initialised"
        self._groups = make_attention_groups(layers)
        self.views = tuple(dict.fromkeys(group.view for group in self._groups))
        self._sees_all = all(view.window is None and view.chunk is None for view in self.views)

    def see(
        self, commons: Mapping[int, CommonAttentionMetadata], wanted: np.ndarray | None = None
    ) -> dict[AttentionView, CommonAttentionMetadata]:
        """Return the step by view, from the common metadata of each KV group with attention layers. Views
        that compute nothing are left out, and equal results are the same object.

        `wanted`: ascending packed tokens [M] whose logits are wanted; None: all tokens are computed
        everywhere.
        """
        if wanted is None and self._sees_all:
            return {view: commons[view.kv_group] for view in self.views}
        step = _StepTransforms(wanted)
        seen = {view: step.see(commons[view.kv_group], view) for view in self.views}
        return {view: common for view, common in seen.items() if common is not None}

    def build(
        self, seen: Mapping[AttentionView, CommonAttentionMetadata]
    ) -> dict[int, PagedAttentionMetadata]:
        """Build metadata by layer, for layers whose view is present. Groups with the same backend,
        transformed metadata, window and chunk share one build."""
        assert self._groups is not None, "attention groups are not initialised"
        shared: dict[tuple[object, ...], PagedAttentionMetadata] = {}
        built: dict[int, PagedAttentionMetadata] = {}
        for group in self._groups:
            common = seen.get(group.view)
            if common is None:
                continue
            local = group.view.window, group.view.chunk
            key = group.backend, common, *local
            if key not in shared:
                shared[key] = group.backend.build(common, *local)
            built |= dict.fromkeys(group.layers, shared[key])
        return built


class _StepTransforms:
    """The transforms of one step, each computed once per input."""

    def __init__(self, wanted: np.ndarray | None) -> None:
        self._sharded = cache(partial(token_shard_view, wanted=None))
        self._sharded_wanted = cache(partial(token_shard_view, wanted=wanted))
        self._reduced = None if wanted is None else cache(partial(fast_prefill, wanted=wanted))
        self._chunked = cache(chunked_local)
        self._windowed = cache(sliding_window)

    def see(self, common: CommonAttentionMetadata, view: AttentionView) -> CommonAttentionMetadata | None:
        """Return the step as the view's layers see it; None if they compute nothing."""
        if isinstance(common, TokenShardMetadata):
            sharded = self._sharded_wanted if view.fast_prefill else self._sharded
            return sharded(common, view.window, view.chunk)
        seen: CommonAttentionMetadata | None = common
        if view.fast_prefill and self._reduced is not None:
            seen = self._reduced(common)
        if seen is not None and view.chunk is not None:
            seen = self._chunked(seen, view.chunk)
        if seen is not None and view.window is not None:
            seen = self._windowed(seen, view.window)
        return seen

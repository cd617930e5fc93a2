"""Which layers share attention metadata. One KV group may hold several attention groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayk.attention.backend import AttentionBackend, PagedAttentionMetadata
from rayk.attention.metadata import CommonAttentionMetadata
from rayk.kv.specs import KVCacheSpec


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """What decides a layer's attention group."""

    layer: int
    kv_group: int
    backend: AttentionBackend
    spec: KVCacheSpec
    num_query_heads: int
    window: int | None
    """Not always the spec's: a windowed layer may keep all its tokens in a full-attention group."""
    fast_prefill: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionGroup:
    """Layers of one KV group with the same backend, spec, query heads, window and eligibility."""

    kv_group: int
    backend: AttentionBackend
    spec: KVCacheSpec
    num_query_heads: int
    window: int | None
    fast_prefill: bool
    layers: tuple[int, ...]

    def build(self, common: CommonAttentionMetadata) -> PagedAttentionMetadata:
        """This step's metadata for every layer of the group."""
        return self.backend.build(common, self.window)


def make_attention_groups(layers: Iterable[AttentionLayer]) -> tuple[AttentionGroup, ...]:
    """Gather layers, in their order, into groups; a group stands where its first layer does.

    A layer given twice is a programmer's error.
    """
    members: dict[tuple[object, ...], list[AttentionLayer]] = {}
    seen: set[int] = set()
    for item in layers:
        assert item.layer not in seen, f"layer {item.layer} is in two attention groups"
        seen.add(item.layer)
        key = (
            item.kv_group,
            id(item.backend),
            item.spec,
            item.num_query_heads,
            item.window,
            item.fast_prefill,
        )
        members.setdefault(key, []).append(item)
    return tuple(
        AttentionGroup(
            kv_group=first.kv_group,
            backend=first.backend,
            spec=first.spec,
            num_query_heads=first.num_query_heads,
            window=first.window,
            fast_prefill=first.fast_prefill,
            layers=tuple(item.layer for item in (first, *rest)),
        )
        for first, *rest in members.values()
    )


class AttentionGroups:
    """An engine's attention groups: initialised once, built every step."""

    def __init__(self) -> None:
        self._groups: tuple[AttentionGroup, ...] | None = None

    @property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """All groups, in layer order of their first layers. None in a model without attention."""
        return self._groups or ()

    def initialise(self, layers: Iterable[AttentionLayer]) -> None:
        """Form the groups. Doing it twice would leave layers with another group's metadata: an error."""
        assert self._groups is None, "attention groups are already initialised"
        self._groups = make_attention_groups(layers)

    def build(
        self, commons: Sequence[CommonAttentionMetadata] | Mapping[int, CommonAttentionMetadata]
    ) -> dict[int, PagedAttentionMetadata]:
        """Metadata by layer, from the common metadata of each KV group that has attention layers."""
        assert self._groups is not None, "attention groups are not initialised"
        built: dict[int, PagedAttentionMetadata] = {}
        for group in self._groups:
            metadata = group.build(commons[group.kv_group])
            built |= dict.fromkeys(group.layers, metadata)
        return built

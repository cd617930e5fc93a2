"""The protocol of attention backends, and the constants of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from rayk.attention.metadata import CommonAttentionMetadata
from rayk.kernels.paged_attention import HeadGroups, head_groups
from rayk.kernels.quantise import QuantisedKV
from rayk.kv.specs import KVCacheSpec


@dataclass(frozen=True)
class AttentionParams:
    """Constants of one attention layer, filled when it is built."""

    scale: float
    """Factor on q . k before the softmax."""
    window: int | None
    """Keys a token sees, itself included; None: all before it."""
    kv_index: torch.Tensor
    """[Q] int64, on the layer's device: local KV head slot of each local query head."""
    head_size_k: int
    head_size_v: int
    sinks: torch.Tensor | None = None
    """[Q] float32, on the layer's device: a learned logit per local query head that only adds to the
    softmax's denominator, unscaled and uncapped."""
    soft_cap: float | None = None
    """Scores become cap * tanh(scale * q . k / cap), before the mask."""
    chunk: int | None = None
    """Chunked local attention: positions per chunk, beyond which no token sees."""

    @cached_property
    def groups(self) -> HeadGroups:
        """Query heads by KV head."""
        return head_groups(self.kv_index)


@dataclass(frozen=True)
class MlaParams:
    """Constants of one latent-attention layer (MLA), filled when it is built."""

    scale: float
    """Factor on q . row before the softmax."""
    latent_size: int
    """R, elements of a cached row's latent: the value, and the first part of the key."""
    rope_size: int
    """Dr, elements of the rotated key, its other part."""


@dataclass(frozen=True)
class PagedAttentionMetadata:
    """The metadata of one attention group's layers for a step."""

    common: CommonAttentionMetadata
    """The step as the group sees it: transformed (see transforms)."""
    window: int | None
    chunk: int | None = None


class AttentionBackend(Protocol):
    """Stores new keys and values and attends. Usable by several threads at once."""

    @property
    def name(self) -> str:
        """Its name as `attention_backend` in a spec."""
        ...

    @property
    def implementation(self) -> str:
        """What actually runs, for the results, e.g. `cpu-native`; a fallback says why."""
        ...

    @property
    def graph_safe(self) -> bool:
        """Whether a CUDA graph may capture `forward`: it never waits for the device, and its launches depend
        only on shapes and on the metadata's host-side maxima."""
        ...

    def veto(self, layout_name: str, spec: KVCacheSpec) -> str | None:
        """Say why this backend cannot serve layers of `spec` in this KV-cache layout, or None."""
        ...

    def build(
        self, common: CommonAttentionMetadata, window: int | None, chunk: int | None = None
    ) -> PagedAttentionMetadata:
        """Build metadata for the layers of one attention group, once per group and step. `common` is already
        transformed for the window or the chunk."""
        ...

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        kv_cache: torch.Tensor | QuantisedKV,
        metadata: PagedAttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store k [T, H, Dk] and v [T, H, Dv], then attend q [T, Q, Dk]. Returns [T, Q, Dv]. If k and v are
        None, nothing is stored and another layer's keys and values are attended to."""
        ...

    def forward_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        cache: torch.Tensor | QuantisedKV,
        metadata: PagedAttentionMetadata,
        params: MlaParams,
    ) -> torch.Tensor:
        """Store latent [T, R] and rope [T, Dr] in cache [B, N, R + Dr] (a quantised cache has a single head),
        then attend q [T, Q, R + Dr]. Returns [T, Q, R]: each query head's weighted latents."""
        ...

"""What a way of computing attention must offer, and what one layer tells it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from rayk.attention.metadata import CommonAttentionMetadata
from rayk.kernels.paged_attention import HeadGroups, head_groups

if TYPE_CHECKING:
    import torch

    from rayk.kernels.quantise import QuantisedKV
    from rayk.kv.specs import KVCacheSpec


@dataclass(frozen=True)
class AttentionParams:
    """Constants of one attention layer. Filled by the layer when it is built."""

    scale: float
    """Factor on q . k before the softmax."""
    window: int | None
    """Keys a token sees, itself included; None = all before it."""
    kv_index: torch.Tensor
    """[Q] int64, on the layer's device: local KV head slot of each local query head."""
    head_size_k: int
    head_size_v: int
    sinks: torch.Tensor | None = None
    """[Q] float32, on the layer's device: a learned logit per local query head that joins the softmax's
    denominator only, unscaled and not capped."""
    soft_cap: float | None = None
    """Scores become cap * tanh(scale * q . k / cap), before the mask; None = as they are."""
    chunk: int | None = None
    """Positions of a chunk, beyond which no token sees (chunked local attention); None = no chunks."""

    @cached_property
    def groups(self) -> HeadGroups:
        """Query heads by KV head, worked out on first use."""
        return head_groups(self.kv_index)


@dataclass(frozen=True)
class MlaParams:
    """Constants of one latent-attention layer (MLA). Filled by the layer when it is built."""

    scale: float
    """Factor on q . row before the softmax."""
    latent_size: int
    """R, elements of a cached row that are its latent: the value, and the first part of the key."""
    rope_size: int
    """Dr, those of the rotated key, its other part."""


@dataclass(frozen=True)
class PagedAttentionMetadata:
    """What `build` makes of the common metadata for the layers of one attention group."""

    common: CommonAttentionMetadata
    """As the group sees the step: transformed (see transforms)."""
    window: int | None
    chunk: int | None = None


class AttentionBackend(Protocol):
    """Stores new keys and values and attends. Usable by several threads at once."""

    @property
    def name(self) -> str:
        """What `attention_backend` in a spec calls it."""
        ...

    @property
    def implementation(self) -> str:
        """What runs in fact, for the results, e.g. `cpu-native`; a second choice says why."""
        ...

    @property
    def graph_safe(self) -> bool:
        """Whether `forward` may be captured in a CUDA graph: it never waits for the device, and what it
        launches depends on shapes and on the metadata's host-side maxima only."""
        ...

    def veto(self, layout_name: str, spec: KVCacheSpec) -> str | None:
        """Why this backend cannot serve layers of `spec` in this KV-cache layout, or None."""
        ...

    def build(
        self, common: CommonAttentionMetadata, window: int | None, chunk: int | None = None
    ) -> PagedAttentionMetadata:
        """Metadata for the layers of one attention group; once per group and step. `common`: transformed for
        the window or the chunk."""
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
        """Store k [T, H, Dk] and v [T, H, Dv], then attend q [T, Q, Dk]. Returns [T, Q, Dv].

        k and v are None together: the keys and values of another layer are attended to, and nothing stored.
        """
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
        """Store latent [T, R] and rope [T, Dr] in cache [B, N, R + Dr], then attend q [T, Q, R + Dr]. A
        quantised cache is one of a single head, of latents and rotated keys.

        Returns [T, Q, R]: each query head's weighted latents.
        """
        ...

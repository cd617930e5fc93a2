"""Attention of ranks that deal the tokens of each sequence: every rank attends to its own, with the query
heads of all, and the parts are merged.

T tokens of the step, Q query heads of a rank, N ranks.
"""

from __future__ import annotations

import torch

from rayk.attention.backend import AttentionParams, MlaParams, PagedAttentionMetadata
from rayk.attention.backends.paged import PagedBackend
from rayk.attention.metadata import CommonAttentionMetadata, TokenShardMetadata
from rayk.kernels.paged_attention import HeadGroups, head_groups
from rayk.kernels.paged_attention.merge import merge_partials
from rayk.kernels.paged_attention.partial import Partial
from rayk.kernels.quantise import QuantisedKV
from rayk.kv.specs import KVCacheSpec
from rayk.parallel.comm import Comm


class TokenShardBackend:
    """Implements AttentionBackend over another one, for the ranks of `dcp`, which hold the same KV heads."""

    graph_safe = False

    def __init__(self, inner: PagedBackend, dcp: Comm) -> None:
        self.name = inner.name
        self.implementation = f"{inner.partial_impl} (token shards)"
        self._inner = inner
        self._dcp = dcp
        self._gathered: dict[int, tuple[torch.Tensor, HeadGroups]] = {}

    def veto(self, layout_name: str, spec: KVCacheSpec) -> str | None:
        return self._inner.veto(layout_name, spec)

    def build(
        self, common: CommonAttentionMetadata, window: int | None, chunk: int | None = None
    ) -> PagedAttentionMetadata:
        return self._inner.build(common, window, chunk)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        kv_cache: torch.Tensor | QuantisedKV,
        metadata: PagedAttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """A collective. Sinks are each rank's own heads', and counted once, when its parts are merged."""
        common = _sharded(metadata)
        if k is not None:
            assert v is not None
            self._inner.store(k, v, kv_cache, common)
        partial = self._inner.partial(
            self._all_heads(q), kv_cache, common, params, *self._kv_index_of_all(params)
        )
        return self._merge(partial, q, params.sinks)

    def forward_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        cache: torch.Tensor | QuantisedKV,
        metadata: PagedAttentionMetadata,
        params: MlaParams,
    ) -> torch.Tensor:
        """A collective."""
        common = _sharded(metadata)
        self._inner.store_latent(latent, rope, cache, common)
        return self._merge(self._inner.partial_latent(self._all_heads(q), cache, common, params), q, None)

    def _all_heads(self, q: torch.Tensor) -> torch.Tensor:
        """[T, Q, D] -> [T, N * Q, D]: the query heads of all ranks, in rank order."""
        return torch.cat(self._dcp.all_gather(q.contiguous()), 1)

    def _kv_index_of_all(self, params: AttentionParams) -> tuple[torch.Tensor, HeadGroups]:
        """Return the KV head slot of each gathered query head. A collective in a layer's first step."""
        if id(params) not in self._gathered:
            kv_index = torch.cat(self._dcp.all_gather(params.kv_index))
            self._gathered[id(params)] = kv_index, head_groups(kv_index)
        return self._gathered[id(params)]

    def _merge(self, partial: Partial, q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """Merge all ranks' parts of this rank's own heads: [T, Q, Dv] in q's dtype."""
        out, lse = partial
        num_heads = q.shape[1]
        own = slice(self._dcp.rank * num_heads, (self._dcp.rank + 1) * num_heads)
        # One collective for both.
        parts = self._dcp.all_gather(torch.cat([out, lse.unsqueeze(-1)], -1))
        outs = [part[:, own, :-1] for part in parts]
        return merge_partials(outs, [part[:, own, -1] for part in parts], sinks).to(q.dtype)


def _sharded(metadata: PagedAttentionMetadata) -> TokenShardMetadata:
    assert isinstance(metadata.common, TokenShardMetadata), "the step is not one of a token shard"
    return metadata.common

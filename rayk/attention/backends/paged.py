"""Backends over the paged kernels, differing only in which implementation of each kernel they name."""

from __future__ import annotations

import torch

from rayk.attention.backend import AttentionParams, MlaParams, PagedAttentionMetadata
from rayk.attention.backends import first_chunk
from rayk.attention.metadata import CommonAttentionMetadata, TokenShardMetadata
from rayk.kernels.mla_attention import mla_attention
from rayk.kernels.mla_attention.partial import mla_attention_partial
from rayk.kernels.paged_attention import HeadGroups, Workspace, paged_attention
from rayk.kernels.paged_attention.partial import Partial, paged_attention_partial
from rayk.kernels.quantise import QuantisedKV
from rayk.kernels.store_kv import store_kv
from rayk.kv.formats import FORMATS, LATENT_SIDES
from rayk.kv.specs import KVCacheSpec

MAX_HEAD_SIZE = {"native": 1024, "triton": 256}
"""Implementation -> largest key or value it supports, if limited."""

MAX_LATENT_SIZES = {"triton": (512, 64)}
"""Implementation -> widest latent and rotated key it supports, if limited."""


class PagedBackend:
    """Stores with one kernel implementation and attends with another."""

    def __init__(self, name: str, implementation: str, *, store: str | None, attend: str) -> None:
        """`store` None: native where values are copied, reference where they are converted."""
        self.name = name
        self.implementation = implementation
        self._store = store
        self._attend = attend
        self._attend_latent = "torch" if attend == "native" else attend
        self.graph_safe = attend in ("triton", "native")
        self._workspace = Workspace()

    def veto(self, layout_name: str, spec: KVCacheSpec) -> str | None:
        """Accept any layout of pages K | V, or latent | rotated key, in supported dtypes and sizes."""
        rows = {field.name: field.row_bytes for field in spec.fields()}
        names = tuple(name for name in rows if not name.endswith("_scale"))
        if names not in (("k", "v"), LATENT_SIDES):
            return f"pages hold {names}, not keys and values"
        if spec.dtype not in FORMATS:
            return f"KV dtype {spec.dtype} is not one of {', '.join(FORMATS)}"
        sizes = tuple(FORMATS[spec.dtype].elements(rows[name]) for name in names)
        if names == LATENT_SIDES:
            most = MAX_LATENT_SIZES.get(self._attend_latent, sizes)
            if sizes[0] > most[0] or sizes[1] > most[1]:
                return f"latents of {sizes} elements are larger than the {most} of {self.implementation}"
            return None
        limit = MAX_HEAD_SIZE.get(self._attend)
        if limit is not None and max(sizes) > limit:
            return f"heads of {max(sizes)} elements are larger than the {limit} of {self.implementation}"
        return None

    def build(
        self, common: CommonAttentionMetadata, window: int | None, chunk: int | None = None
    ) -> PagedAttentionMetadata:
        """The kernels use the common metadata unchanged."""
        return PagedAttentionMetadata(common, window, chunk)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        kv_cache: torch.Tensor | QuantisedKV,
        metadata: PagedAttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        local = params.window, params.chunk
        assert local == (metadata.window, metadata.chunk), (
            "the layer is in another attention group's metadata"
        )
        common = metadata.common
        assert len(q) == common.num_tokens, (len(q), common.num_tokens)
        if k is not None:
            assert v is not None
            self.store(k, v, kv_cache, common)
            is_stored_as_given = (
                not isinstance(kv_cache, QuantisedKV) and k.dtype == kv_cache.dtype == q.dtype
            )
            if is_stored_as_given and first_chunk.is_faster(q, metadata, params):
                return first_chunk.attend(q, k, v, metadata, params)
        return paged_attention(
            q,
            kv_cache,
            common.block_table,
            common.query_start_loc,
            common.seq_lens,
            params.kv_index,
            scale=params.scale,
            window=params.window,
            head_size_k=params.head_size_k,
            impl=self._attend,
            groups=params.groups,
            sinks=params.sinks,
            soft_cap=params.soft_cap,
            workspace=self._workspace,
        )

    def forward_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        rope: torch.Tensor,
        cache: torch.Tensor | QuantisedKV,
        metadata: PagedAttentionMetadata,
        params: MlaParams,
    ) -> torch.Tensor:
        assert metadata.window is None, "latent attention has no window"
        common = metadata.common
        self.store_latent(latent, rope, cache, common)
        return mla_attention(
            q,
            cache,
            common.block_table,
            common.query_start_loc,
            common.seq_lens,
            scale=params.scale,
            latent_size=params.latent_size,
            impl=self._attend_latent,
            workspace=self._workspace,
        )

    def store(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor | QuantisedKV,
        common: CommonAttentionMetadata,
    ) -> None:
        """Store k [T, H, Dk] and v [T, H, Dv]."""
        store_kv(k, v, kv_cache, common.slot_mapping, impl=self._store)

    def store_latent(
        self,
        latent: torch.Tensor,
        rope: torch.Tensor,
        cache: torch.Tensor | QuantisedKV,
        common: CommonAttentionMetadata,
    ) -> None:
        """Store latent [T, R] and rope [T, Dr] like the key and the value of a single head."""
        pages = cache if isinstance(cache, QuantisedKV) else cache.unsqueeze(1)
        self.store(latent.unsqueeze(1), rope.unsqueeze(1), pages, common)

    @property
    def partial_impl(self) -> str:
        """What computes attention to some of the keys."""
        return "torch" if self._attend == "native" else self._attend

    def partial(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor | QuantisedKV,
        common: TokenShardMetadata,
        params: AttentionParams,
        kv_index: torch.Tensor,
        groups: HeadGroups,
    ) -> Partial:
        """Attend q to the rank's keys; `kv_index`, `groups`: of q's heads, which may be several ranks'."""
        return paged_attention_partial(
            q,
            kv_cache,
            common.block_table,
            common.key_rows,
            common.key_starts,
            common.key_ends,
            kv_index,
            scale=params.scale,
            head_size_k=params.head_size_k,
            soft_cap=params.soft_cap,
            query_start_loc=_several_each(common),
            impl=self.partial_impl,
            groups=groups,
            workspace=self._workspace,
        )

    def partial_latent(
        self,
        q: torch.Tensor,
        cache: torch.Tensor | QuantisedKV,
        common: TokenShardMetadata,
        params: MlaParams,
    ) -> Partial:
        """Attend q to the rank's rows."""
        return mla_attention_partial(
            q,
            cache,
            common.block_table,
            common.key_rows,
            common.key_starts,
            common.key_ends,
            scale=params.scale,
            latent_size=params.latent_size,
            query_start_loc=_several_each(common),
            impl=self.partial_impl,
            workspace=self._workspace,
        )


def _several_each(common: CommonAttentionMetadata) -> torch.Tensor | None:
    """Where requests' tokens start, None if each has one at most: kernels then take tokens one by one."""
    return common.query_start_loc if common.max_query_len > 1 else None

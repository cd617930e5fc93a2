"""Backends over the paged kernels: they differ only in which implementation of each kernel they name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayk.attention.backend import AttentionParams, PagedAttentionMetadata
from rayk.kernels.paged_attention import Workspace, paged_attention
from rayk.kernels.store_kv import store_kv
from rayk.kv.fields import ITEMSIZE

if TYPE_CHECKING:
    import torch

    from rayk.attention.metadata import CommonAttentionMetadata
    from rayk.kv.specs import KVCacheSpec

DTYPES = ("float32", "bfloat16", "float16")
"""Cache dtypes that every implementation reads and writes."""

MAX_HEAD_SIZE = {"native": 1024, "triton": 256}
"""Implementation -> the largest key or value it has room for, where there is a limit."""


class PagedBackend:
    """Stores with one kernel implementation and attends with another."""

    def __init__(self, name: str, implementation: str, *, store: str, attend: str) -> None:
        self.name = name
        self.implementation = implementation
        self._store = store
        self._attend = attend
        self.graph_safe = attend == "triton"
        self._workspace = Workspace()

    def veto(self, layout_name: str, spec: KVCacheSpec) -> str | None:
        """Layouts are read by their strides; pages must be K | V of a dtype and size the kernels know."""
        names = tuple(field.name for field in spec.fields())
        if names != ("k", "v"):
            return f"pages hold {names}, not keys and values"
        if spec.dtype not in DTYPES:
            return f"KV dtype {spec.dtype} is not one of {', '.join(DTYPES)}"
        limit = MAX_HEAD_SIZE.get(self._attend)
        size = max(field.row_bytes // ITEMSIZE[spec.dtype] for field in spec.fields())
        if limit is not None and size > limit:
            return f"heads of {size} elements are larger than the {limit} of {self.implementation}"
        return None

    def build(self, common: CommonAttentionMetadata, window: int | None) -> PagedAttentionMetadata:
        """The kernels take the common metadata as it is."""
        return PagedAttentionMetadata(common, window)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: PagedAttentionMetadata,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store k [T, H, Dk] and v [T, H, Dv], then attend q [T, Q, Dk]. Returns [T, Q, Dv]."""
        assert params.window == metadata.window, "the layer is in another attention group's metadata"
        common = metadata.common
        store_kv(k, v, kv_cache, common.slot_mapping, impl=self._store)
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

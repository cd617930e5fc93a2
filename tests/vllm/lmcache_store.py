"""LMCache's connector as a store, for whoever has `lmcache` beside vLLM. It has no kernels for CPUs: what
copies between vLLM's cache and LMCache's memory is stood in for; keys, look-ups and memory are LMCache's own.
It keeps one engine per process, so each check takes one of its own (`--only`)."""

from __future__ import annotations

import os
from typing import Any

import torch

from rayk.vllm.stores import BLOCK_TOKENS, ConnectorStore

os.environ |= {
    "LMCACHE_CHUNK_SIZE": str(BLOCK_TOKENS),
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.05",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "LMCACHE_TRACK_USAGE": "false",
}


def make_copier(*_: Any, **__: Any) -> Any:
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

    class Copier(GPUConnectorInterface):  # type: ignore[misc]
        load_stream = store_stream = None

        def from_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
            cache, blocks, rows = _place(start, end, given)
            found = cache[blocks, 0, rows].contiguous().view(torch.uint8).reshape(-1)
            memory_obj.tensor.reshape(-1).view(torch.uint8)[:] = found

        def to_gpu(self, memory_obj: Any, start: int, end: int, **given: Any) -> None:
            cache, blocks, rows = _place(start, end, given)
            found = memory_obj.tensor.reshape(-1).view(torch.uint8).view(cache.dtype)
            cache[blocks, 0, rows] = found.reshape(len(blocks), -1)

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **given: Any) -> None:
            for place in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(*place, **given)

        def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **given: Any) -> None:
            for place in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(*place, **given)

        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size([2, 1, num_tokens, 32])

    return Copier()


def _place(start: int, end: int, given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """vLLM's cache, and the blocks and rows of tokens there."""
    (cache,), slots = given["kvcaches"], given["slot_mapping"][start:end]
    return cache, slots // cache.shape[2], slots % cache.shape[2]


class LMCache(ConnectorStore):
    """LMCacheConnectorV1 of the package lmcache, with memory of the host."""

    connector = "LMCacheConnectorV1Dynamic"
    module_path = "lmcache.integration.vllm.lmcache_connector_v1"

    def make(self, role: str, revision: str) -> Any:
        import lmcache.v1.gpu_connector

        lmcache.v1.gpu_connector.CreateGPUConnector = make_copier
        return super().make(role, revision)

"""Paged attention in C++ (native.cpp): one call per layer for the whole batch, no gather."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from rayk.kernels.native import load_native
from rayk.kernels.paged_attention.heads import HeadGroups

_KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = (
    (_POINTER, _LONG, _LONG)  # q
    + (_POINTER, _INT, _LONG, _LONG, _LONG)  # kv
    + (_POINTER, _LONG, _LONG)  # out
    + (_POINTER, _LONG, _POINTER, _POINTER, _INT)  # block table, query starts, lengths, R
    + (_POINTER, _POINTER, _INT, _INT)  # head groups
    + (_INT, _INT, _INT, _INT, _FLOAT, _INT, _POINTER, _FLOAT, _INT)
)
_FAILURES = {
    1: "a block table entry that is read is out of range",
    2: "the head size of the keys is too large",
}


@functools.cache
def _load() -> tuple[Callable[..., int] | None, str]:
    loaded = load_native(Path(__file__).with_name("native.cpp"))
    if loaded.library is None:
        return None, loaded.reason
    function = loaded.library.rayk_paged_attention
    function.argtypes = _ARGUMENTS
    function.restype = _INT
    call: Callable[..., int] = function
    return call, ""


def why_no_native() -> str | None:
    """Why this machine cannot run the C++ kernel, or None when it can. Builds it on first use."""
    function, reason = _load()
    return reason if function is None else None


def paged_attention_native(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    groups: HeadGroups,
    scale: float,
    window: int | None,
    head_size_k: int,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Arguments and result as `paged_attention`; computes in float32 on torch's number of threads."""
    function, reason = _load()
    assert function is not None, reason
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    assert kv_cache.dtype in _KV_TYPES, f"no native kernel for a {kv_cache.dtype} cache"
    assert block_table.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32
    assert query_start_loc.is_contiguous()
    assert seq_lens.is_contiguous()
    q32 = q.float()
    assert q32.stride(-1) == block_table.stride(-1) == kv_cache.stride(-1) == 1
    assert q.shape[-1] == head_size_k
    num_blocks, _, num_slots, content = kv_cache.shape
    out = torch.empty(q.shape[0], q.shape[1], content - head_size_k, dtype=torch.float32)
    status = function(
        q32.data_ptr(),
        q32.stride(0),
        q32.stride(1),
        kv_cache.data_ptr(),
        _KV_TYPES[kv_cache.dtype],
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        block_table.data_ptr(),
        block_table.stride(0),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        len(seq_lens),
        groups.kv_heads_tensor.data_ptr(),
        groups.query_heads_tensor.data_ptr(),
        len(groups.kv_heads),
        groups.group_size,
        num_blocks,
        num_slots,
        head_size_k,
        content - head_size_k,
        scale,
        window or 0,
        None if sinks is None else sinks.data_ptr(),
        soft_cap or 0.0,
        torch.get_num_threads(),
    )
    assert status == 0, _FAILURES[status]
    return out.to(q.dtype)

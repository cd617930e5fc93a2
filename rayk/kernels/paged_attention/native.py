"""Paged attention in C++ (native.cpp): one call per layer for the whole batch, no gather."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from rayk.kernels.native import NativeKernels
from rayk.kernels.paged_attention.heads import HeadGroups
from rayk.kernels.quantise import QuantisedKV, head_size_v

_Q_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float
_ARGUMENTS = (
    (_POINTER, _INT, _LONG, _LONG)  # q
    + (_POINTER, _INT, _LONG, _LONG, _LONG)  # kv
    + (_POINTER, _LONG, _LONG)  # out
    + (_POINTER, _LONG, _POINTER, _POINTER, _INT)  # block table, query starts, lengths, R
    + (_POINTER, _POINTER, _INT, _INT)  # head groups
    + (_INT, _INT, _INT, _INT, _FLOAT, _INT, _POINTER, _FLOAT, _POINTER, _INT)
)
_QUANTISED = 3
_SCALES = {"tensor": 1, "token_head": 2, "block": 3}
_FAILURES = {
    1: "a block table entry that is read is out of range",
    2: "the head size of the keys is too large",
}


class _Coding(ctypes.Structure):
    """native.cpp's struct Coding."""

    _fields_ = (
        ("values", _POINTER),
        *((name, _LONG) for name in ("stride_b", "stride_h", "stride_n", "k_scales", "v_scales")),
        ("scales", _INT),
        ("k_scale", _FLOAT),
        ("v_scale", _FLOAT),
    )


_KERNELS = NativeKernels(Path(__file__).with_name("native.cpp"), {"rayk_paged_attention": _ARGUMENTS}, _INT)
why_no_native = _KERNELS.why_not
"""Why this machine cannot run the C++ kernel, or None when it can. Builds it on first use."""


def paged_attention_native(
    q: torch.Tensor,
    kv_cache: torch.Tensor | QuantisedKV,
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
    """Compute in float32 on torch's number of threads; q and the result are float32 or bfloat16."""
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    assert block_table.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32
    assert query_start_loc.is_contiguous()
    assert seq_lens.is_contiguous()
    q_in = q if q.dtype in _Q_TYPES else q.float()
    coding = None
    if isinstance(kv_cache, QuantisedKV):
        coding, keys, kv_type = _coding(kv_cache), kv_cache.raw(kv_cache.k)[0], _QUANTISED
    else:
        assert kv_cache.dtype in _KV_TYPES, f"no native kernel for a {kv_cache.dtype} cache"
        keys, kv_type = kv_cache, _KV_TYPES[kv_cache.dtype]
    assert q_in.stride(-1) == block_table.stride(-1) == keys.stride(-1) == 1
    assert q.shape[-1] == head_size_k
    size_v = head_size_v(kv_cache, head_size_k)
    out = torch.empty(q.shape[0], q.shape[1], size_v, dtype=q_in.dtype)
    status = _KERNELS.library.rayk_paged_attention(
        q_in.data_ptr(),
        _Q_TYPES[q_in.dtype],
        q_in.stride(0),
        q_in.stride(1),
        keys.data_ptr(),
        kv_type,
        *keys.stride()[:3],
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
        keys.shape[0],
        keys.shape[2],
        head_size_k,
        size_v,
        scale,
        window or 0,
        None if sinks is None else sinks.data_ptr(),
        soft_cap or 0.0,
        None if coding is None else ctypes.addressof(coding),
        torch.get_num_threads(),
    )
    assert status == 0, _FAILURES[status]
    return out.to(q.dtype)


def _coding(cache: QuantisedKV) -> _Coding:
    """Strides are in bytes; scales are given by their distance from the data."""
    offsets = []
    for side in (cache.k, cache.v):
        data, scales = cache.raw(side)
        if scales is None:
            offsets.append(0)
            continue
        strides = tuple(s * scales.element_size() for s in scales.stride()[:3])
        assert strides == data.stride()[:3], "scales lie with their data"
        offsets.append(scales.data_ptr() - data.data_ptr())
    values = cache.raw(cache.v)[0]
    assert values.stride(-1) == 1, "the content axis must be dense"
    return _Coding(
        values.data_ptr(),
        *values.stride()[:3],
        *offsets,
        _SCALES[cache.kv_format.scales],
        cache.k_scale,
        cache.v_scale,
    )

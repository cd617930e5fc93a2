"""Run by vLLM's interpreter: the learned map of the CPU backend against what its kernel writes.

Prints a line of JSON for each case: whether random keys and values, read through the map, are those stored.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from rayk.vllm.store_map import learn_block_map, store_of

HEAD_SIZES = (32, 64, 80, 128)
BLOCK_SIZES = (16, 32, 128)
HEADS = 3
NUM_BLOCKS = 8


def cpu_layer(dtype: torch.dtype, block_size: int, head_size: int, kv_dtype: str) -> Any:
    """A layer with what the store of vLLM's CPU backend reads of it."""
    from vllm.v1.attention.backends import cpu_attn

    class Impl:
        attn_type, kv_cache_dtype = "decoder", kv_dtype
        do_kv_cache_update = cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update

    isa = cpu_attn._get_attn_isa(dtype, block_size, head_size, kv_dtype)
    scales = {"_k_scale_float": 1.0, "_v_scale_float": 1.0}
    backend = cpu_attn.CPUAttentionBackend
    return SimpleNamespace(impl=Impl(), attn_backend=backend, isa=isa, **scales)


def check(dtype: torch.dtype, head_size: int, block_size: int, kv_dtype: str = "auto") -> dict[str, Any]:
    """Store a request's random keys and values into blocks out of order, and read them back by the map."""
    layer = cpu_layer(dtype, block_size, head_size, kv_dtype)
    stored_dtype = torch.uint8 if kv_dtype == "fp8" else dtype
    cache = torch.zeros(NUM_BLOCKS, HEADS, block_size, 2 * head_size, dtype=stored_dtype)
    block_map = learn_block_map(store_of(layer), cache, HEADS, (head_size, head_size), dtype)
    num_tokens, ids = 3 * block_size - 5, torch.tensor([5, 2, 7])
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, num_tokens, HEADS, head_size, generator=generator).to(dtype)
    positions = torch.arange(num_tokens)
    slots = ids[positions // block_size] * block_size + positions % block_size
    if kv_dtype == "fp8":  # values that it holds exactly: kernels need not round as torch does
        keys, values = (side.to(torch.float8_e4m3fn).to(dtype) for side in (keys, values))
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
    blocks = cache[ids].flatten(1)
    found = (
        _values(field.read(blocks)).transpose(1, 2).reshape(-1, HEADS, head_size)[:num_tokens].to(dtype)
        for field in (block_map.keys, block_map.values)
    )
    return {
        "dtype": str(dtype),
        "head_size": head_size,
        "block_size": block_size,
        "kv_dtype": kv_dtype,
        "isa": layer.isa,
        "right": [torch.equal(stored, read) for stored, read in zip((keys, values), found, strict=True)],
        "untouched": not bool(cache[[0, 1, 3, 4, 6]].any()),
        "keys": str(block_map.keys),
    }


def cut_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Values as fp8_e4m3 has them where bits that find no room are cut: so vLLM 0.32.0's kernel has them on
    CPUs (csrc/cpu/cpu_attn_fp8.hpp, float_to_fp8e4m3_scalar). PyTorch and CUDA round to the nearest."""
    bits = (values.float().clamp(-448, 448) * 2.0**-120).view(torch.int32)  # the exponent has fp8's bias
    return ((bits >> 24) & 0x80 | (bits >> 20) & 0x7F).to(torch.uint8).view(torch.float8_e4m3fn)


def check_rounding(dtype: torch.dtype) -> dict[str, Any]:
    """Store random numbers in fp8, and tell whether the kernel cut each of them."""
    block_size, size = 64, 32
    layer = cpu_layer(dtype, block_size, size, "fp8")
    cache = torch.zeros(2, HEADS, block_size, 2 * size, dtype=torch.uint8)
    found = learn_block_map(store_of(layer), cache, HEADS, (size, size), dtype)
    keys, values = 4 * torch.randn(2, block_size, HEADS, size, generator=torch.Generator().manual_seed(0))
    layer.impl.do_kv_cache_update(layer, keys.to(dtype), values.to(dtype), cache, torch.arange(block_size))
    blocks = cache[:1].flatten(1)
    stored = [m.read(blocks).reshape(HEADS, block_size, size) for m in (found.keys, found.values)]
    sides = [side.to(dtype).float().transpose(0, 1) for side in (keys, values)]
    return {
        "dtype": str(dtype),
        "cut": [torch.equal(_values(s), cut_to_e4m3(v).float()) for s, v in zip(stored, sides, strict=True)],
        "nearest": [
            torch.equal(_values(s), v.to(torch.float8_e4m3fn).float())
            for s, v in zip(stored, sides, strict=True)
        ],
    }


def _values(stored: torch.Tensor) -> torch.Tensor:
    """As numbers: the kernel stores -0 as 0 in fp8."""
    return stored.view(torch.float8_e4m3fn).float() if stored.dtype == torch.uint8 else stored


if __name__ == "__main__":
    for dtype in (torch.float32, torch.bfloat16):
        for head_size in HEAD_SIZES:
            for block_size in BLOCK_SIZES:
                print(json.dumps(check(dtype, head_size, block_size)))
    if torch.cpu._is_avx512_supported():  # else vLLM refuses it
        print(json.dumps(check(torch.bfloat16, 64, 32, "fp8")))
        print(json.dumps(check_rounding(torch.float32)))
        print(json.dumps(check_rounding(torch.bfloat16)))

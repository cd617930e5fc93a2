"""Who computes attention: rayk's kernels, torch's, and what else is installed. Each makes a call to time."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import bias
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from gpu_attention.problem import Problem
from rayk.kernels.paged_attention import head_groups, paged_attention

NOT_INSTALLED = "not installed"


class Cannot(Exception):
    """Why a path does not compute a shape."""


Call = Callable[[], Tensor]


def rayk_paged(problem: Problem) -> Call:
    """The dispatcher's choice: Triton on a GPU (a decode split as it sees fit), torch on a CPU."""
    groups = head_groups(problem.kv_index)
    return lambda: paged_attention(
        problem.q,
        problem.cache,
        problem.block_table,
        problem.query_start_loc,
        problem.seq_lens,
        problem.kv_index,
        scale=problem.scale,
        window=problem.shape.window,
        head_size_k=problem.shape.head_size,
        groups=groups,
        sinks=problem.sinks,
        soft_cap=problem.shape.soft_cap,
    )


def rayk_not_split(problem: Problem) -> Call:
    """Decode with one program per sequence and KV head."""
    if not problem.shape.is_decode:
        raise Cannot("only a decode step is split")
    if not problem.on_cuda:
        raise Cannot("needs CUDA")
    from rayk.kernels.paged_attention.launch import paged_attention_triton

    groups = head_groups(problem.kv_index)
    return lambda: paged_attention_triton(
        problem.q,
        problem.cache,
        problem.block_table,
        problem.query_start_loc,
        problem.seq_lens,
        groups=groups,
        scale=problem.scale,
        window=problem.shape.window,
        head_size_k=problem.shape.head_size,
        sinks=problem.sinks,
        soft_cap=problem.shape.soft_cap,
        num_splits=1,
    )


def torch_sdpa(problem: Problem) -> Call:
    """Dense [R, H, L, D] keys and values; requests of unlike lengths in one call each."""
    shape = problem.shape
    if shape.has_sinks or shape.soft_cap is not None:
        raise Cannot("SDPA has no sinks" if shape.has_sinks else "SDPA has no soft cap")
    if shape.window is not None:
        raise Cannot("SDPA has no window")
    parts = []
    for r, q in enumerate(problem.q.split(problem.query_lens)):
        keys, values = problem.keys[r], problem.values[r]
        parts.append(tuple(x.transpose(0, 1).unsqueeze(0) for x in (q, keys, values)))
    if shape.is_uniform:
        parts = [tuple(torch.cat(same).contiguous() for same in zip(*parts, strict=True))]

    def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        num_queries, total = q.shape[2], keys.shape[2]
        # A bias says how queries and keys are aligned without being a matrix: the fast kernels take it.
        mask = None if num_queries == 1 else bias.causal_lower_right(num_queries, total)
        out = scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=problem.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    return lambda: torch.cat([attend(*part) for part in parts])


def torch_flex(problem: Problem) -> Call:
    """Dense keys and values, compiled on a GPU; a sink from the logarithm of the denominator."""
    shape = problem.shape
    if not shape.is_uniform:
        raise Cannot("requests of unlike lengths")
    (num_queries, total), device = shape.requests[0], str(problem.q.device)
    queries = problem.q.split(problem.query_lens)
    q, keys, values = (
        torch.stack(list(same)).transpose(1, 2).contiguous()
        for same in (queries, problem.keys, problem.values)
    )
    reach, cap, sinks = shape.window or sys.maxsize, shape.soft_cap, problem.sinks

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        position = i + (total - num_queries)
        return (j <= position) & (j > position - reach) if shape.window else j <= position

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    mask = create_block_mask(sees, None, None, num_queries, total, device=device)
    torch.compiler.reset()  # Dynamo stops compiling a function that has met eight shapes
    attend = torch.compile(flex_attention, dynamic=False) if problem.on_cuda else flex_attention
    options: dict[str, Any] = {"score_mod": None if cap is None else capped, "block_mask": mask}
    options |= {"scale": problem.scale, "enable_gqa": True}

    def call() -> Tensor:
        if sinks is None:
            return attend(q, keys, values, **options).transpose(1, 2).flatten(0, 1)
        out, aux = attend(q, keys, values, return_aux=AuxRequest(lse=True), **options)
        out = out * torch.sigmoid(aux.lse - sinks.view(1, -1, 1)).unsqueeze(-1).to(out.dtype)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def vllm_unified(problem: Problem) -> Call:
    """vLLM's Triton kernel on rayk's own cache, with the split of its backend (128 programs, 16 segments)."""
    names = ("vllm.v1.attention.ops", "vllm.attention.ops")
    unified = _imported([f"{name}.triton_unified_attention" for name in names], "unified_attention")
    if not problem.on_cuda:
        raise Cannot("needs CUDA")
    shape, size = problem.shape, problem.shape.head_size
    out = torch.empty_like(problem.q)
    window = (-1, -1) if shape.window is None else (shape.window - 1, 0)
    arguments: dict[str, Any] = {
        "q": problem.q,
        "k": problem.cache[..., :size].transpose(1, 2),
        "v": problem.cache[..., size:].transpose(1, 2),
        "out": out,
        "cu_seqlens_q": problem.query_start_loc,
        "max_seqlen_q": max(problem.query_lens),
        "seqused_k": problem.seq_lens,
        "max_seqlen_k": max(problem.totals),
        "softmax_scale": problem.scale,
        "causal": True,
        "window_size": window,
        "block_table": problem.block_table,
        "softcap": shape.soft_cap or 0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        "sinks": problem.sinks,
    }
    most, segments = max(1, 128 // shape.num_kv_heads), 16
    partial = (most, shape.num_query_heads, segments)
    padded = 1 << (size - 1).bit_length()
    split = {
        "seq_threshold_3D": most,
        "num_par_softmax_segments": segments,
        "softmax_segm_output": torch.empty(*partial, padded, device=problem.q.device),
        "softmax_segm_max": torch.empty(partial, device=problem.q.device),
        "softmax_segm_expsum": torch.empty(partial, device=problem.q.device),
    }
    # Older versions keep the memory of the split themselves.
    known = inspect.signature(unified).parameters
    arguments |= {name: value for name, value in split.items() if name in known}

    def call() -> Tensor:
        unified(**arguments)
        return out

    return call


def flashinfer_paged(problem: Problem) -> Call:
    """FlashInfer's batch wrappers on a copy of the cache in their own layout. Planning is not timed."""
    decode = _imported(["flashinfer"], "BatchDecodeWithPagedKVCacheWrapper")
    prefill = _imported(["flashinfer"], "BatchPrefillWithPagedKVCacheWrapper")
    shape, size, device = problem.shape, problem.shape.head_size, problem.q.device
    if not problem.on_cuda:
        raise Cannot("needs CUDA")
    if shape.has_sinks:
        raise Cannot("these wrappers have no sinks")
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    starts = torch.tensor([0, *problem.num_pages]).cumsum(0).to(device, torch.int32)
    last = (problem.seq_lens - 1) % shape.block_size + 1
    pages = (starts, torch.cat(problem.pages), last)
    heads = (shape.num_query_heads, shape.num_kv_heads, size, shape.block_size)
    options = {
        "window_left": -1 if shape.window is None else shape.window - 1,
        "logits_soft_cap": shape.soft_cap,
        "sm_scale": problem.scale,
        "q_data_type": problem.q.dtype,
        "kv_data_type": problem.q.dtype,
    }
    if shape.is_decode:
        wrapper = decode(workspace, "NHD", use_tensor_cores=shape.group >= 4)
        wrapper.plan(*pages, *heads, **options)
    else:
        wrapper = prefill(workspace, "NHD")
        wrapper.plan(problem.query_start_loc, *pages, *heads, causal=True, **options)
    by_token = problem.cache.transpose(1, 2)
    cache = torch.stack([by_token[..., :size], by_token[..., size:]], 1)  # [B, 2, N, H, D]
    return lambda: wrapper.run(problem.q, cache)


def _imported(modules: Sequence[str], name: str) -> Any:
    """The attribute of the first of these modules that is there."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise Cannot(NOT_INSTALLED)


PATHS: dict[str, Callable[[Problem], Call]] = {
    "rayk": rayk_paged,
    "rayk, not split": rayk_not_split,
    "torch SDPA (dense)": torch_sdpa,
    "flex_attention (dense)": torch_flex,
    "vLLM unified": vllm_unified,
    "FlashInfer": flashinfer_paged,
}

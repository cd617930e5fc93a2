"""Paged attention on a GPU: one program per (tile of query rows, KV head), online softmax over key tiles.

The rows of a tile are (token, query head of the group), token-major, so that query heads which share a KV
head read its keys once. A request's tiles are found without the host knowing its length: request r owns
the programs from query_start_loc[r] // TILE_Q + r on, which is always enough of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from rayk.kernels.interpreter import INTERPRETED, launching

if TYPE_CHECKING:
    from rayk.kernels.paged_attention.heads import HeadGroups


@triton.jit
def _request_of(query_start_loc, i_tile, num_requests, TILE_Q: tl.constexpr):
    """The last request whose tiles start at or before i_tile."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // TILE_Q + middle <= i_tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def paged_attention_kernel(
    q,
    kv_cache,
    out,
    block_table,
    query_start_loc,
    seq_lens,
    group_kv_heads,
    group_query_heads,
    scale,
    window,
    num_requests,
    q_stride_t,
    q_stride_h,
    stride_b,
    stride_h,
    stride_n,
    out_stride_t,
    out_stride_h,
    table_stride,
    NUM_SLOTS: tl.constexpr,
    HEAD_K: tl.constexpr,
    HEAD_V: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_V: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    TILE_Q: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
):
    i_tile = tl.program_id(0)
    i_g = tl.program_id(1)
    i_r = _request_of(query_start_loc, i_tile, num_requests, TILE_Q)
    first_token = tl.load(query_start_loc + i_r)
    num_queries = tl.load(query_start_loc + i_r + 1) - first_token
    first_query = (i_tile - first_token // TILE_Q - i_r) * TILE_Q
    if first_query >= num_queries:
        return
    seq_len = tl.load(seq_lens + i_r)
    kv_head = tl.load(group_kv_heads + i_g).to(tl.int64)

    o_m = tl.arange(0, TILE_Q * PADDED_GROUP)
    o_query = first_query + o_m // PADDED_GROUP
    o_member = o_m % PADDED_GROUP
    b_head = tl.load(group_query_heads + i_g * GROUP + o_member, mask=o_member < GROUP, other=-1).to(tl.int64)
    m_row = (o_query < num_queries) & (b_head >= 0)
    b_position = seq_len - num_queries + o_query
    b_token = (first_token + o_query).to(tl.int64)

    o_k = tl.arange(0, PADDED_K)
    o_v = tl.arange(0, PADDED_V)
    p_q = q + b_token * q_stride_t + b_head * q_stride_h
    b_q = tl.load(p_q[:, None] + o_k[None, :], mask=m_row[:, None] & (o_k < HEAD_K)[None, :], other=0.0)
    if WIDEN:
        b_q = b_q.to(tl.float32)

    # Keys that some row of the tile sees.
    last_query = tl.minimum(first_query + TILE_Q, num_queries) - 1
    end_key = seq_len - num_queries + last_query + 1
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(seq_len - num_queries + first_query - window + 1, 0)

    b_max = tl.full([TILE_Q * PADDED_GROUP], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE_Q * PADDED_GROUP], tl.float32)
    b_acc = tl.zeros([TILE_Q * PADDED_GROUP, PADDED_V], tl.float32)
    for start in range(first_key, end_key, TILE_KEYS):
        o_key = start + tl.arange(0, TILE_KEYS)
        m_key = o_key < end_key
        b_block = tl.load(
            block_table + i_r.to(tl.int64) * table_stride + o_key // NUM_SLOTS, mask=m_key, other=0
        ).to(tl.int64)
        p_row = kv_cache + b_block * stride_b + kv_head * stride_h + (o_key % NUM_SLOTS) * stride_n
        b_k = tl.load(p_row[None, :] + o_k[:, None], mask=m_key[None, :] & (o_k < HEAD_K)[:, None], other=0.0)
        b_v = tl.load(
            p_row[:, None] + HEAD_K + o_v[None, :],
            mask=m_key[:, None] & (o_v < HEAD_V)[None, :],
            other=0.0,
        )
        if WIDEN:
            b_k = b_k.to(tl.float32)
            b_v = b_v.to(tl.float32)
        b_scores = tl.dot(b_q, b_k.to(b_q.dtype), input_precision="ieee") * scale
        m_seen = m_key[None, :] & (o_key[None, :] <= b_position[:, None])
        if HAS_WINDOW:
            m_seen = m_seen & (o_key[None, :] > b_position[:, None] - window)
        b_scores = tl.where(m_seen, b_scores, float("-inf"))

        b_new_max = tl.maximum(b_max, tl.max(b_scores, 1))
        # The maximum goes before the change of base, so that large scores lose nothing to it.
        # A row may see nothing of this tile: keep -inf - -inf out of the exponent.
        b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2((b_scores - b_base[:, None]) * 1.4426950408889634)
        b_shrink = tl.exp2((b_max - b_base) * 1.4426950408889634)
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_acc = b_acc * b_shrink[:, None]
        b_acc += tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee")
        b_max = b_new_max

    b_out = b_acc / tl.where(m_row, b_sum, 1.0)[:, None]
    p_out = out + b_token * out_stride_t + b_head * out_stride_h
    tl.store(
        p_out[:, None] + o_v[None, :],
        b_out.to(out.dtype.element_ty),
        mask=m_row[:, None] & (o_v < HEAD_V)[None, :],
    )


class Tiles(NamedTuple):
    """Compile-time shape of a launch."""

    tile_q: int
    """Tokens in a tile of query rows."""
    tile_keys: int
    padded_group: int
    num_warps: int
    num_stages: int


def choose_tiles(*, decode_only: bool, group_size: int, row_elements: int, itemsize: int) -> Tiles:
    """Tile sizes that fit shared memory (232,448 bytes on sm_90) and do not spill, for rows to 256 elements.

    row_elements: padded elements of the wider of a key and a value. itemsize: of the dtype multiplied in.
    """
    padded_group = triton.next_power_of_2(group_size)
    if itemsize == 4:
        # Exact float32 products do not use tensor cores: larger tiles, or fewer warps, spill registers.
        rows, tile_keys, num_warps = 16, 32, 8
    else:
        rows = 16 if decode_only else 64
        tile_keys, num_warps = (64 if row_elements <= 128 else 32), 4
    return Tiles(max(1, rows // padded_group), tile_keys, padded_group, num_warps, 2)


def paged_attention_triton(
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
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Arguments and result as `paged_attention`. `tiles` is for tests."""
    num_tokens, num_query_heads, _ = q.shape
    num_requests = len(seq_lens)
    head_size_v = kv_cache.shape[-1] - head_size_k
    assert q.shape[-1] == head_size_k
    assert sinks is None, "the Triton kernel has no attention sinks"
    assert soft_cap is None, "the Triton kernel has no soft cap"
    assert q.stride(-1) == kv_cache.stride(-1) == block_table.stride(-1) == 1
    padded_k = max(16, triton.next_power_of_2(head_size_k))
    padded_v = max(16, triton.next_power_of_2(head_size_v))
    tiles = tiles or choose_tiles(
        decode_only=num_tokens == num_requests,
        group_size=groups.group_size,
        row_elements=max(padded_k, padded_v),
        itemsize=max(q.element_size(), kv_cache.element_size()),
    )
    out_dtype = torch.float32 if INTERPRETED else q.dtype
    out = torch.empty(num_tokens, num_query_heads, head_size_v, dtype=out_dtype, device=q.device)
    if num_tokens == 0:
        return out.to(q.dtype)
    grid = (num_tokens // tiles.tile_q + num_requests, len(groups.kv_heads))
    with launching():
        paged_attention_kernel[grid](
            q,
            kv_cache,
            out,
            block_table,
            query_start_loc,
            seq_lens,
            groups.kv_heads_tensor,
            groups.query_heads_tensor,
            scale,
            0 if window is None else window,
            num_requests,
            q.stride(0),
            q.stride(1),
            *kv_cache.stride()[:3],
            out.stride(0),
            out.stride(1),
            block_table.stride(0),
            NUM_SLOTS=kv_cache.shape[2],
            HEAD_K=head_size_k,
            HEAD_V=head_size_v,
            PADDED_K=padded_k,
            PADDED_V=padded_v,
            GROUP=groups.group_size,
            PADDED_GROUP=tiles.padded_group,
            TILE_Q=tiles.tile_q,
            TILE_KEYS=tiles.tile_keys,
            HAS_WINDOW=window is not None,
            WIDEN=INTERPRETED,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    return out.to(q.dtype)

"""What the chunked scans share on a GPU: how a program finds its tokens (see segments)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_tokens(bounds, i_c, CHUNK: tl.constexpr):
    """Packed indices [CHUNK] of a chunk's tokens, and which of them it has."""
    o_t = (tl.load(bounds + 2 * i_c) + tl.arange(0, CHUNK)).to(tl.int64)
    return o_t, o_t < tl.load(bounds + 2 * i_c + 1)


@triton.jit
def segments_of(query_start_loc, segment_start_loc, i_r, TAKES: tl.constexpr):
    """First segment of a request and end of its segments; it has none here unless it goes as TAKES says: in
    `steps` token by token, in `runs`, or `any` way."""
    first = tl.load(segment_start_loc + i_r)
    last = tl.load(segment_start_loc + i_r + 1)
    num_tokens = tl.load(query_start_loc + i_r + 1) - tl.load(query_start_loc + i_r)
    if TAKES == "steps":
        last = tl.where(num_tokens == last - first, last, first)
    if TAKES == "runs":
        last = tl.where(num_tokens == last - first, first, last)
    return first, last


@triton.jit
def segment_tokens(p_request, p_end, is_later):
    """First token and end of a segment, loaded from query_start_loc (p_request) or, if the request has an
    earlier segment (is_later), from segment_ends (p_end).

    Both are loaded: Triton drops a value that a loop carries only for the bounds of an inner one.
    """
    return tl.load(tl.where(is_later, p_end - 1, p_request)), tl.load(p_end)

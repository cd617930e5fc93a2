"""First chunks, which have no cached context, by torch's scaled_dot_product_attention where that is faster.

The environment variable RAYK_FIRST_CHUNKS names a table of measurements, which `jobs/benchmarks/
attention_gpu.py --first-chunks` writes: a JSON list of {device, head_size, group, tokens, ratio}, the paged
kernel's time over torch's. Without it, no chunk goes this way.
"""

from __future__ import annotations

import functools
import json
import os
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from rayk.attention.backend import AttentionParams, PagedAttentionMetadata
from rayk.types.errors import UserError

TABLE = "RAYK_FIRST_CHUNKS"

Ratios = dict[tuple[str, int, int], dict[int, float]]
"""(device, head size, query heads of a KV head) -> tokens of a chunk -> ratio."""


@functools.cache
def read_ratios(path: str) -> Ratios:
    """Read a table; an empty path is an empty table."""
    ratios: Ratios = {}
    try:
        for row in json.loads(Path(path).read_text()) if path else []:
            key = row["device"], row["head_size"], row["group"]
            ratios.setdefault(key, {})[row["tokens"]] = row["ratio"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{TABLE}={path} is no table of first chunks: {error!r}", mend="unset it") from error
    return ratios


def is_faster(q: torch.Tensor, metadata: PagedAttentionMetadata, params: AttentionParams) -> bool:
    """Say whether torch attends this batch, and was measured to be faster at its shortest chunk or below."""
    ratios = read_ratios(os.environ.get(TABLE, ""))
    if not ratios or not _can_attend(metadata, params):
        return False
    device = torch.cuda.get_device_name(q.device) if q.is_cuda else "cpu"
    measured = ratios.get((device, params.head_size_k, params.groups.group_size), {})
    below = [tokens for tokens in measured if tokens <= min(metadata.common.seq_lens_cpu)]
    return bool(below) and measured[max(below)] > 1


def _can_attend(metadata: PagedAttentionMetadata, params: AttentionParams) -> bool:
    common, groups = metadata.common, params.groups
    if (metadata.window, metadata.chunk, params.sinks, params.soft_cap) != (None,) * 4:
        return False
    if params.head_size_k != params.head_size_v or not groups.uniform:
        return False
    in_order = [head for heads in groups.query_heads for head in heads]
    if in_order != sorted(in_order) or groups.kv_heads != tuple(range(len(groups.kv_heads))):
        return False
    return tuple(b - a for a, b in pairwise(common.query_start_loc_cpu)) == common.seq_lens_cpu


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: PagedAttentionMetadata,
    params: AttentionParams,
) -> torch.Tensor:
    """Attend the tokens of each request to one another. Returns [T, Q, Dv]."""
    out = torch.empty_like(q)
    for first, end in pairwise(metadata.common.query_start_loc_cpu):
        own_q, own_k, own_v = (x[first:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        found = scaled_dot_product_attention(
            own_q, own_k, own_v, is_causal=True, scale=params.scale, enable_gqa=True
        )
        out[first:end] = found.squeeze(0).transpose(0, 1)
    return out

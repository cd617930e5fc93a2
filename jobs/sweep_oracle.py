"""What lies at every coordinate of a KV cache in jobs/transfer_sweep.py: f(layer, field, unit, token, byte).

No map or plan of rayk's is asked where anything lies: pages are filled and checked through the bound views
that kernels would use, by block, slot and head, from the field's own coordinates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from jobs.ranks import bound_fields
from rayk.kv.caches import CanonicalKVCaches, FieldView
from rayk.kv.fields import FIELD_IDS, PageField
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    GatedDeltaNetSpec,
    KVCacheSpec,
    Mamba2Spec,
    MlaSpec,
    SlidingWindowSpec,
)

POISON = 0x5A
"""What pages hold where nobody wrote."""
QUERY_HEADS = 12
STATE_TOKENS = 512
"""Tokens per block of a state."""
_GOLDEN, _MUL = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)

Specs = dict[tuple[int, str], KVCacheSpec]


def make_specs(shape: str, block_size: int) -> Specs:
    """What each layer of a shape keeps. KeyError for an unknown one."""
    full = FullAttentionSpec(block_size, 4, 16, 16, "bfloat16", QUERY_HEADS)
    uneven = FullAttentionSpec(block_size, 2, 16, 16, "bfloat16", 6)
    sliding = SlidingWindowSpec(block_size, 4, 16, 16, "bfloat16", QUERY_HEADS, 40)
    chunked = ChunkedLocalSpec(block_size, 4, 16, 16, "bfloat16", QUERY_HEADS, 64)
    latent = MlaSpec(block_size, 32, 8, "bfloat16", QUERY_HEADS)
    mamba = Mamba2Spec(STATE_TOKENS, "bfloat16", 4, QUERY_HEADS, 8, 2, 16)
    delta = GatedDeltaNetSpec(STATE_TOKENS, "bfloat16", 4, 4, 8, QUERY_HEADS, 8)
    large = FullAttentionSpec(block_size, 8, 128, 128, "bfloat16", 32)
    layers: dict[str, tuple[KVCacheSpec, ...]] = {
        "attention": (full,) * 4,
        "uneven": (uneven,) * 3,
        "windows": (full, sliding, chunked, full),
        "latent": (latent,) * 3,
        "mamba": (mamba, full, mamba),
        "delta": (delta, delta, full),
        "large": (large,) * 32,
    }
    return {(index, spec.part): spec for index, spec in enumerate(layers[shape])}


SHAPES = ("attention", "uneven", "windows", "latent", "mamba", "delta", "large")


def content(
    layer: int, field: PageField, units: Sequence[int], tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """uint8 [tokens, units, row_bytes]: every byte follows from its coordinate (splitmix64's mixing)."""
    key = np.uint64(layer * 1009 + FIELD_IDS[field.name] * 31)
    of_token = _mix(_mix(key) + tokens.astype(np.uint64))
    rows = _mix(of_token[:, None] ^ np.asarray(units, dtype=np.uint64)[None, :])
    words = np.arange(-(-field.row_bytes // 8), dtype=np.uint64) * _GOLDEN
    mixed = _mix(rows[:, :, None] + words)
    return mixed.view(np.uint8)[:, :, : field.row_bytes]


def _mix(x: npt.NDArray[np.uint64] | np.uint64) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):  # modulo 2^64
        x = (np.asarray(x) + _GOLDEN) * _MUL
        return x ^ (x >> np.uint64(29))


@dataclass(frozen=True, eq=False)
class Place:
    """Where one field of one layer lies on one rank, and what it should hold."""

    group: KVCacheGroup
    layer: int
    view: FieldView
    blocks: torch.Tensor
    rows: torch.Tensor
    tokens: npt.NDArray[np.int64]
    right: torch.Tensor
    """uint8 [tokens, units, row_bytes]."""


def places(caches: CanonicalKVCaches, tables: Sequence[Sequence[int]], num_tokens: int) -> Iterator[Place]:
    """Every live row of every field of a request. `tables` by group; blocks are kernel blocks here."""
    for group in (g.group for g in caches.geometry.groups):
        spec = group.spec
        live = spec.live_rows(num_tokens)
        tokens = np.arange(live.start, live.stop, dtype=np.int64)
        table = np.asarray(tables[group.index], dtype=np.int64)
        rows = tokens % spec.block_size if spec.has_token_rows else np.zeros_like(tokens)
        blocks = torch.from_numpy(table[tokens // spec.block_size])
        for layer in group.layers:
            for view, f in zip(bound_fields(caches, group, layer), spec.fields(), strict=True):
                right = torch.from_numpy(content(layer, f, view.units, tokens).copy())
                yield Place(group, layer, view, blocks, torch.from_numpy(rows), tokens, right)


def fill(caches: CanonicalKVCaches, tables: Sequence[Sequence[int]], num_tokens: int) -> None:
    for place in places(caches, tables, num_tokens):
        view = place.view.view
        view[place.blocks, :, place.rows] = place.right.view(view.dtype)


def wrong_bytes(
    caches: CanonicalKVCaches, tables: Sequence[Sequence[int]], num_tokens: int
) -> tuple[int, str]:
    """(wrong bytes of a rank's pages, the first of them in words): live rows must hold what f says, all else
    poison. Rows around the live ones may have moved with them: the peer's poison is the same."""
    pages = caches.buffer[: caches.geometry.pages_bytes]
    found = pages.clone()
    first = ""
    for place in places(caches, tables, num_tokens):
        seen = place.view.view[place.blocks, :, place.rows].contiguous().view(torch.uint8)
        if not first and not torch.equal(seen, place.right):
            token, unit, byte = (int(i) for i in torch.nonzero(seen != place.right)[0])
            first = (
                f"layer {place.layer}, {place.view.name}, unit {place.view.units[unit]}, "
                f"token {place.tokens[token]}, byte {byte}"
            )
    pages.fill_(POISON)
    fill(caches, tables, num_tokens)
    wrong = int((pages != found).sum())
    pages.copy_(found)
    return wrong, first or ("a byte that nobody should have written" if wrong else "")

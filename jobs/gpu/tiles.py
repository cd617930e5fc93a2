"""Tiles and splits of the paged attention kernels, swept: what the engine's choice leaves on the table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import attention_gpu
import torch
from gpu_attention.problem import Problem, Shape

from jobs.gpu.rows import Row
from jobs.gpu.stages import Bench, Stage, failed
from rayk.kernels.paged_attention import head_groups

SHAPES = (
    Shape("decode 1 x 8192", ((1, 8192),), group=4),
    Shape("decode 64 x 8192, GQA 8:1", ((1, 8192),) * 64, group=8),
    Shape("decode 64 x 8192, 1 KV head", ((1, 8192),) * 64, num_kv_heads=1, group=8),
    Shape("prefill 1 x 8192", ((8192, 8192),)),
)
CHOSEN = "as chosen"
DECODE = [f"16 {k} {w} {s}" for k, w, s in product((32, 64, 128), (4, 8), (2, 3, 4, 5))]
"""Rows, keys, warps and stages of a tile."""
PREFILL = [f"{r} {k} {w} {s}" for r, k, w, s in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))]
SPLITS = (1, 2, 4, 8)
MAX_REGISTERS = 255


def _items(device: str) -> Sequence[str]:
    if device == "cpu":
        return (f"decode {CHOSEN}", "decode 16 32 4 5")
    named = {"decode": DECODE, "prefill": PREFILL}
    return [f"{kind} {tile}" for kind, tiles in named.items() for tile in (CHOSEN, *tiles)]


def _measure(item: str, bench: Bench) -> Iterator[Row]:
    kind, _, tile = item.partition(" ")
    for shape in SHAPES[:1] if bench.is_small else SHAPES:
        if shape.name.startswith(kind):
            yield from _sweep(shape.small() if bench.is_small else shape, tile, bench)


def _sweep(shape: Shape, tile: str, bench: Bench) -> Iterator[Row]:
    from rayk.kernels.paged_attention.launch import paged_attention_triton
    from rayk.kernels.paged_attention.tiles import Tiles

    problem = Problem(shape, bench.device, bench.dtype)
    groups = head_groups(problem.kv_index)
    tiles = None if tile == CHOSEN else Tiles(*map(int, tile.split()), MAX_REGISTERS)

    def attend(num_splits: int | None, own: Tiles | None = tiles) -> torch.Tensor:
        return paged_attention_triton(
            problem.q,
            problem.cache,
            problem.block_table,
            problem.query_start_loc,
            problem.seq_lens,
            groups=groups,
            scale=problem.scale,
            window=None,
            head_size_k=shape.head_size,
            tiles=own,
            num_splits=num_splits,
        )

    expected = attend(None, None).float()
    work = {"num_bytes": shape.num_bytes(bench.dtype.itemsize), "flop": shape.flop}
    splits_swept = SPLITS[1:2] if bench.is_small else SPLITS
    for num_splits in (None, *splits_swept) if shape.is_decode else (None,):
        splits = CHOSEN if num_splits is None else f"{num_splits} splits"
        about = {"kernel": "paged attention", "shape": shape.name, "variant": f"{tile}; {splits}"}
        try:
            error = attention_gpu.relative_error(attend(num_splits), expected)
            assert error < torch.finfo(bench.dtype).eps, f"relative error {error:.1e}"
            ms = bench.milliseconds(lambda n=num_splits: attend(n))  # type: ignore[misc]
        except Exception as refused:
            if "OutOfResources" not in type(refused).__name__:
                raise
            yield failed(**about, error=refused)
            return
        yield Row(**about, **bench.rates(ms, **work))


STAGE = Stage(name="tiles", about="tiles and splits of attention", items=_items, measure=_measure)

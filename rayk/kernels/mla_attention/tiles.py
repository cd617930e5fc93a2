"""Tile sizes of the latent-attention kernel, from facts that the host knows."""

from __future__ import annotations

from rayk.kernels.paged_attention.tiles import Tiles
from rayk.kernels.target import Target


def choose_tiles(target: Target, *, num_rows: int, itemsize: int, quantised: bool = False) -> Tiles:
    """Choose tiles that fit the target's shared memory and registers at a latent of 512 elements and a key of
    64.

    num_rows: (token, query head) pairs that share keys: those of one request in a decode step, else those of
    the batch. itemsize: bytes of an element when multiplied. quantised: rows are decoded first. The weighted
    latents, rows x 512 float32, fill the registers. `make kernels` shows the registers of each choice, and
    fails if one spills.
    """
    if quantised and itemsize != 4:
        if target.is_amd:
            return Tiles(16, 16, 8, 1)
        # Few keys: their codes and decoded elements are in registers together.
        return Tiles(16 if num_rows <= 16 else 32, 16, 8, 3, 255)
    if itemsize == 4:
        # Exact float32 products do not use tensor cores on NVIDIA.
        return Tiles(16, 16, 4, 1) if target.is_amd else Tiles(16, 16, 8, 1, 255)
    if target.is_amd:
        return Tiles(16 if num_rows <= 16 else 32, 16, 8, 1)
    # Three stages: one tile is multiplied while the next is copied.
    if num_rows <= 16:
        return Tiles(16, 64 if target.has_warp_group_mma else 32, 8, 3, 255)
    # 64 rows, what a warp group multiplies at once: a few registers short on sm_100.
    if target.name == "sm_90":
        return Tiles(64, 16, 8, 3, 255)
    return Tiles(32, 32, 8, 3 if target.has_room else 2, 255)

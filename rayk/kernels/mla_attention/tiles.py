"""Tile sizes of the latent-attention kernel, from facts that the host knows."""

from __future__ import annotations

from rayk.kernels.paged_attention.tiles import Tiles
from rayk.kernels.target import Target


def choose_tiles(
    target: Target, *, decode_only: bool, num_rows: int, itemsize: int, scales: str = "none"
) -> Tiles:
    """Choose tiles that fit the target's shared memory and registers at a latent of 512 elements and a key of
    64.

    num_rows: (token, query head) pairs that share keys: those of one request in a decode step, else those of
    the batch. itemsize: bytes of an element when multiplied. scales: KVFormat.scales of the cached rows. The
    weighted latents, rows x 512 float32, fill the registers. `make kernels` shows the registers of each
    choice, and fails if one spills.
    """
    if scales != "none" and itemsize != 4:
        # Codes and decoded elements are in registers together, and scales of tokens beside them.
        if target.is_amd:
            return Tiles(16, 16, 8, 1)
        few = num_rows <= 16 or scales == "token_head" or not decode_only
        few |= scales == "block" and target.name in ("sm_100", "sm_103")
        rows = 16 if few else 32
        return Tiles(rows, 16, 8, _quantised_stages(target, rows, scales, decode_only=decode_only), 255)
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


def _quantised_stages(target: Target, rows: int, scales: str, *, decode_only: bool) -> int:
    """Choose how many tiles are in flight: fewer where that would spill a few registers."""
    if target.name in ("sm_100", "sm_103") and scales == "token_head" and not decode_only:
        return 2
    return 1 if rows == 32 and scales == "tensor" and not target.has_warp_group_mma else 3

"""A 64-bit checksum of cached values by canonical coordinate, read through the bound view."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rayk.kernels.digest.native import digest_rows_native, native_digest
from rayk.kernels.digest.reference import digest_rows_reference

__all__ = ["digest_rows", "native_digest"]


def digest_rows(
    kv_cache: torch.Tensor,
    block_ids: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    layer: int,
    units: Sequence[int],
    fields: Sequence[tuple[int, int, int]],
    rows_per_group: int,
    first_group: int,
    num_groups: int,
    are_places_checked: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Digest of the given rows of one layer: int64 [num_fields, H, num_groups]. `reference.py` defines it.

    kv_cache [B, H, N, C]. Row i (block_ids[i], slots[i]) holds absolute token position rows[i]; all three
    are [n_rows] int64. units[h] is the global id of local head h. A field is (field_id, start_elem,
    num_elems) of the content axis. Row group g, counted from `first_group`, holds the positions
    (first_group + g) * rows_per_group and on; sums of positions nobody gave are 0.

    `are_places_checked`: the caller knows that ids, slots and positions are in range; to look at them here
    waits for the device.

    `impl`: reference, native or triton; None takes triton for CUDA tensors, and native for those of the CPU
    where it can be built. All give the same integers.
    """
    num_blocks, num_heads, num_slots, content = kv_cache.shape
    assert kv_cache.stride(-1) == 1, "the content axis must be dense"
    assert len(units) == num_heads, "one global unit id per local head"
    assert len(block_ids) == len(slots) == len(rows)
    assert block_ids.dtype == slots.dtype == rows.dtype == torch.int64
    assert all(0 <= start <= start + num_elems <= content for _, start, num_elems in fields)
    if len(rows) > 0 and not are_places_checked:
        _check_range(block_ids, num_blocks, "block id")
        _check_range(slots, num_slots, "slot")
        _check_range(rows // rows_per_group - first_group, num_groups, "row group")
    return _implementation(impl or _default(kv_cache.device))(
        kv_cache,
        block_ids,
        slots,
        rows,
        layer=layer,
        units=units,
        fields=fields,
        rows_per_group=rows_per_group,
        first_group=first_group,
        num_groups=num_groups,
    )


def _default(device: torch.device) -> str:
    if device.type == "cuda":
        return "triton"
    return "native" if device.type == "cpu" and native_digest() is not None else "reference"


def _implementation(name: str) -> Callable[..., torch.Tensor]:
    if name == "triton":
        # Here: importing Triton takes a second, which CPU ranks would wait for.
        from rayk.kernels.digest.triton import digest_rows_triton

        return digest_rows_triton
    assert name in ("native", "reference"), f"unknown digest implementation {name!r}"
    return digest_rows_native if name == "native" else digest_rows_reference


def _check_range(indices: torch.Tensor, size: int, what: str) -> None:
    low, high = indices.aminmax()
    assert 0 <= int(low) <= int(high) < size, f"{what} {int(low)} .. {int(high)} outside 0 .. {size - 1}"

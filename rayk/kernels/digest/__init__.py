"""A 64-bit checksum of cached values by canonical coordinate, read through the bound view."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayk.kernels.digest.native import digest_views_native, native_digest
from rayk.kernels.digest.reference import digest_rows_reference
from rayk.kernels.digest.views import DigestedView, DigestedViews, Ints, RowPlaces
from rayk.kernels.dispatch import default_impl

__all__ = [
    "DigestedView",
    "DigestedViews",
    "RowPlaces",
    "digest_rows",
    "digest_views",
    "host_digests",
    "native_digest",
]


def digest_views(
    digested: DigestedViews, places: Sequence[RowPlaces], *, rows_per_group: int, impl: str | None = None
) -> torch.Tensor:
    """Compute digests of a request's rows in all views of a rank: int64 [words + 1], view by view [F, H,
    num_groups]; the last word is 1 if any value of these rows is NaN or infinite, else 0.

    View i holds the rows at `places[digested.place_of[i]]`. The caller guarantees that they are in range:
    checking here would wait for the device. `impl` is as in `digest_rows`.
    """
    if not digested.views:
        return torch.zeros(1, dtype=torch.int64)
    device = digested.views[0].kv_cache.device
    name = impl or _default(device)
    if name == "native":
        return torch.from_numpy(digest_views_native(digested, places, rows_per_group))
    if name == "triton":
        # Here: importing Triton takes a second, which CPU ranks would wait for.
        from rayk.kernels.digest.triton import digest_views_triton

        return digest_views_triton(digested, places, rows_per_group)
    assert name == "reference", f"unknown digest implementation {name!r}"
    words = []
    not_finite = torch.zeros(1, dtype=torch.int64, device=device)
    there = [tuple(torch.from_numpy(a).to(device) for a in (p.block_ids, p.slots, p.rows)) for p in places]
    for view, index in zip(digested.views, digested.place_of, strict=True):
        at = places[index]
        word = digest_rows_reference(
            view.kv_cache,
            *there[index],
            layer=view.layer,
            units=view.units,
            fields=view.fields,
            rows_per_group=rows_per_group,
            first_group=at.first_group,
            num_groups=at.num_groups,
            not_finite=not_finite,
        )
        words.append(word.reshape(-1))
    return torch.cat([*words, not_finite])


def host_digests(digested: DigestedViews, places: Sequence[RowPlaces], *, rows_per_group: int) -> Ints:
    """Compute what `digest_views` does into the host's memory: the only wait for the device."""
    if digested.views and _default(digested.views[0].kv_cache.device) == "native":
        return digest_views_native(digested, places, rows_per_group)
    return digest_views(digested, places, rows_per_group=rows_per_group).cpu().numpy()


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
    impl: str | None = None,
) -> torch.Tensor:
    """Compute the digest of the given rows of one layer: int64 [num_fields, H, num_groups], as `reference.py`
    defines it.

    kv_cache [B, H, N, C]. Row i, at (block_ids[i], slots[i]), is absolute token position rows[i]; all three
    are [n_rows] int64. units[h] is the global id of local head h. A field is (field_id, start_elem,
    num_elems) of the content axis. Row group g, counted from `first_group`, covers the positions from
    (first_group + g) * rows_per_group on; groups without rows sum to 0.

    `impl`: reference, native or triton; None takes triton on CUDA, and native on a CPU where it can be built.
    All give the same integers.
    """
    block_ids, slots, rows = (t.cpu() for t in (block_ids, slots, rows))
    found = [t.contiguous().numpy() for t in (block_ids, slots, rows)]
    at = RowPlaces(found[0], found[1], found[2], first_group, num_groups)
    view = DigestedView(kv_cache, layer, tuple(units), tuple(fields))
    if len(rows) > 0:
        _check_range(block_ids, kv_cache.shape[0], "block id")
        _check_range(slots, kv_cache.shape[2], "slot")
        _check_range(rows // rows_per_group - first_group, num_groups, "row group")
    words = digest_views(DigestedViews((view,), (0,)), [at], rows_per_group=rows_per_group, impl=impl)
    return words[:-1].view(len(fields), len(units), num_groups)


def _default(device: torch.device) -> str:
    if default_impl(device.type == "cuda") == "triton":
        return "triton"
    return "native" if device.type == "cpu" and native_digest() is not None else "reference"


def _check_range(indices: torch.Tensor, size: int, what: str) -> None:
    low, high = indices.aminmax()
    assert 0 <= int(low) <= int(high) < size, f"{what} {int(low)} .. {int(high)} outside 0 .. {size - 1}"

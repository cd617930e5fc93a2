"""What transfers launch on a GPU, launched once before an engine serves, so that none of it is compiled while
a transfer's deadline runs: digests of the rank's caches, copies out of the staging buffer for every alignment
and length of runs, and conversions from every format that a producer may keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from rayk.kernels.copy_runs import RunTable, copy_runs, every_form
from rayk.kernels.copy_runs.table import MAX_WORD_BYTES
from rayk.kv.block_pool import NULL_BLOCK
from rayk.kv.caches import CanonicalKVCaches, allocate
from rayk.kv.formats import FORMATS
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import with_dtype
from rayk.transfer.convert import Conversion
from rayk.transfer.meaning import can_convert
from rayk.transfer.verify import CanonicalViews, compute_digests
from rayk.transfer.wire import views_like
from rayk.transfer.wire_geometry import wire_geometry
from rayk.types.errors import Unsupported

Launches = Iterator[tuple[str, Callable[[], object]]]
_TOKENS = 2
"""One would not do: an axis of one has no stride, and its digest may be of another form."""


def transfer_launches(views: CanonicalViews, caches: CanonicalKVCaches, rows_per_group: int) -> Launches:
    """Yield (what it is, what launches it). They read and write the null block alone, which is nobody's."""
    device = caches.buffer.device
    tables = [[NULL_BLOCK] * _TOKENS for _ in caches.geometry.groups]
    yield "digests", partial(compute_digests, views, tables, _TOKENS, rows_per_group)
    for table in every_form(device):
        what = f"copies of {table.max_length} bytes, aligned to {table.alignment}"
        yield what, partial(_copy, table, device)
    for name in FORMATS:
        wire = _wire_views(views, caches, name)
        if wire is not None:
            yield f"conversion from {name}", partial(_convert, wire, views, tables, rows_per_group)


def _copy(table: RunTable, device: torch.device) -> None:
    num_bytes = table.max_length + MAX_WORD_BYTES
    source, target = (torch.zeros(num_bytes, dtype=torch.int8, device=device) for _ in range(2))
    block = np.zeros(1, dtype=np.int64)
    copy_runs(source, target, table, block, block)


def _convert(wire: CanonicalViews, own: CanonicalViews, tables: list[list[int]], rows_per_group: int) -> None:
    compute_digests(wire, tables, _TOKENS, rows_per_group)
    conversion = Conversion(wire, own, {}, {})
    conversion.run(tables, tables, _TOKENS)
    conversion.check("", tables, tables, _TOKENS, rows_per_group)


def _wire_views(own: CanonicalViews, caches: CanonicalKVCaches, name: str) -> CanonicalViews | None:
    """Return a wire cache of two blocks of a producer that keeps this format; None where nobody can."""
    geometry = caches.geometry
    try:
        groups = [_in_format(g.group, name) for g in geometry.groups]
        if not any(
            theirs.spec != g.group.spec and can_convert(g.group.spec, theirs.spec)
            for g, theirs in zip(geometry.groups, groups, strict=True)
        ):
            return None
        there = [replace(g, group=group) for g, group in zip(geometry.groups, groups, strict=True)]
        of_wire = wire_geometry(replace(geometry, groups=tuple(there)), geometry, 2)
    except Unsupported:  # heads that the format cannot hold
        return None
    return views_like(own, allocate(of_wire, caches.buffer.device, fill=0))


def _in_format(group: KVCacheGroup, name: str) -> KVCacheGroup:
    if not group.spec.has_token_rows:
        return group
    return replace(group, spec=with_dtype(group.spec, name))

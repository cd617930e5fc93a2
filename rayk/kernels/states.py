"""Reads and writes states by slot.

A state view is [B, ...] with any stride in B: states are gathered from it and scattered into it in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rayk.kernels.segments import NO_SLOT, Segments


def read_states(state: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return copies of state[slots] ([R] int64) in the view's dtype: [R, ...]. NO_SLOT gives zeros,
    unread."""
    is_kept = slots != NO_SLOT
    if bool(is_kept.all()):
        # Some times faster than indexing, which goes element by element.
        return state.index_select(0, slots)
    found = state.new_zeros(len(slots), *state.shape[1:])
    found[is_kept] = state.index_select(0, slots[is_kept])
    return found


def write_states(state: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """state[slots] = values [R, ...], converted to the view's dtype. NO_SLOT is skipped."""
    is_kept = slots != NO_SLOT
    if not bool(is_kept.all()):
        slots, values = slots[is_kept], values[is_kept]
    state.index_copy_(0, slots, values.to(state.dtype))


def is_dense_inside(state: torch.Tensor) -> bool:
    """Tell whether the last two axes of [B, U, D, N] are one run; strides of axes of length 1 do not
    matter."""
    rows, columns = state.shape[2:]
    return (columns == 1 or state.stride(3) == 1) and (rows == 1 or state.stride(2) == columns)


@dataclass(frozen=True)
class Walk:
    """One request of a step, in packed token indices."""

    start: int
    stop: int
    read_slot: int
    segments: tuple[tuple[int, int], ...]
    """(end, write slot) of each, ascending; the last end is `stop`."""

    def chunks(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, write slot) of runs of up to `size` tokens that cross no segment end; the slot
        is NO_SLOT unless a segment ends there."""
        start = self.start
        for end, slot in self.segments:
            while start < end:
                stop = min(start + size, end)
                yield start, stop, slot if stop == end else NO_SLOT
                start = stop


def walks(segments: Segments) -> Iterator[Walk]:
    """Yield one Walk per request of a step."""
    ends, slots = segments.segment_ends_cpu, segments.write_slots.tolist()
    reads = segments.read_slots.tolist()
    for r in range(segments.num_requests):
        first, last = segments.segment_start_loc_cpu[r : r + 2]
        start, stop = segments.query_start_loc_cpu[r : r + 2]
        pairs = tuple(zip(ends[first:last], slots[first:last], strict=True))
        yield Walk(start, stop, reads[r], pairs)


@dataclass(frozen=True)
class Singles:
    """The S requests of a step that have one token."""

    tokens: torch.Tensor | slice
    """Packed indices of the tokens: [S] int64, or a slice if they are the whole step."""
    read_slots: torch.Tensor
    """[S] int64"""
    write_slots: torch.Tensor
    """[S] int64"""


def split_singles(segments: Segments) -> tuple[Singles | None, list[Walk]]:
    """Split off the requests with one token, which can run together."""
    if segments.is_single_step:
        return Singles(slice(None), segments.read_slots, segments.write_slots), []
    single, longer = [], []
    for r, walk in enumerate(walks(segments)):
        if walk.stop - walk.start > 1:
            longer.append(walk)
        else:
            single.append((walk.start, r, segments.segment_start_loc_cpu[r]))
    if not single:
        return None, longer
    tokens, requests, firsts = torch.tensor(single, device=segments.read_slots.device).T
    return Singles(tokens, segments.read_slots[requests], segments.write_slots[firsts]), longer

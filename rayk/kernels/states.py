"""Reads and writes states by slot.

A state view is [B, ...] with any stride in B: states are gathered from it and scattered into it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    assert segments.query_start_loc_cpu, "the host does not know how long this step's requests are"
    ends, slots = segments.segment_ends_cpu, segments.write_slots.tolist()
    reads = segments.read_slots.tolist()
    for r in range(segments.num_requests):
        first, last = segments.segment_start_loc_cpu[r : r + 2]
        start, stop = segments.query_start_loc_cpu[r : r + 2]
        pairs = tuple(zip(ends[first:last], slots[first:last], strict=True))
        yield Walk(start, stop, reads[r], pairs)


Tokens = torch.Tensor | slice
"""Packed indices of tokens: [S] int64, or a slice if they are the whole step."""


@dataclass(frozen=True)
class Stepwise:
    """The S requests of a step that go token by token, those with most tokens first."""

    read_slots: torch.Tensor
    """[S] int64"""
    turns: tuple[tuple[Tokens, torch.Tensor], ...]
    """The next token of each request that has one left, which are the first ones, and their write slots."""

    def run(self, state: torch.Tensor, step: Callable[[Tokens, torch.Tensor], torch.Tensor]) -> None:
        """Take the states through all tokens, one token of every request at once. `step` takes tokens and
        the states before them, [n, ...] in the view's dtype, which it may change, and returns those after
        them."""
        states = read_states(state, self.read_slots)
        for tokens, write_slots in self.turns:
            states = step(tokens, states[: len(write_slots)])
            write_states(state, write_slots, states)


def split_stepwise(segments: Segments) -> tuple[Stepwise | None, list[Walk]]:
    """Split off the requests that go token by token, which can run together."""
    if segments.is_single_step:
        return Stepwise(segments.read_slots, ((slice(None), segments.write_slots),)), []
    if "stepwise" not in segments.derived:
        segments.derived["stepwise"] = _split(segments)
    found: tuple[Stepwise | None, list[Walk]] = segments.derived["stepwise"]
    return found


def _split(segments: Segments) -> tuple[Stepwise | None, list[Walk]]:
    stepwise, longer = [], []
    for r, walk in enumerate(walks(segments)):
        num_tokens = walk.stop - walk.start
        if len(walk.segments) < num_tokens:
            longer.append(walk)
        else:
            stepwise.append((num_tokens, walk.start, r, segments.segment_start_loc_cpu[r]))
    if not stepwise:
        return None, longer
    stepwise.sort(key=lambda request: -request[0])
    counts, starts, requests, firsts = torch.tensor(stepwise, device=segments.read_slots.device).T
    turns = []
    for n in range(stepwise[0][0]):
        left = int((counts > n).sum())
        turns.append((starts[:left] + n, segments.write_slots[firsts[:left] + n]))
    return Stepwise(segments.read_slots[requests], tuple(turns)), longer

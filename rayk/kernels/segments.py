"""How a step's batch is described to kernels that carry a state from token to token.

Each request's packed tokens are cut into segments, at whose ends the state is written to a slot: the last
segment ends with the request's last token, others where a block of the state cache ends. Slots index the
first axis of the state views. A request reads its state from one slot and writes it to another (the same one
if nobody else reads it), so that a shared state never changes.

A request whose every token ends a segment goes token by token: in decode steps, and where the state after
each token is kept because the tokens are drafts. Others go by runs, a chunk of tokens at once.

The host has copies of a batch's shape but not of the slots: a recorded decode step replays the same shape
with new slots. Where the shape is new, too, the host has no copies, and every request goes token by token.

R requests, S segments, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from rayk.kernels.uploads import sent

NO_SLOT = -1
"""A read slot of -1 starts from zero; a write slot of -1 keeps no state."""


@dataclass(frozen=True)
class Chunks:
    """A step's M runs of tokens that programs take at once; they cross no segment end."""

    bounds: torch.Tensor
    """[M, 2] int32: packed indices of each chunk's first token and of the one past its last."""
    first: torch.Tensor
    """[S] int32: the first chunk of each segment."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """One step's batch. Filled by the engine; never changed."""

    query_start_loc: torch.Tensor
    """[R + 1] int32: where each request's tokens start among the T packed ones; the last is T."""
    read_slots: torch.Tensor
    """[R] int64: where each request's state before this step is, or NO_SLOT."""
    segment_start_loc: torch.Tensor
    """[R + 1] int32: the first segment of each request, which has at least one; the last is S."""
    segment_ends: torch.Tensor
    """[S] int32: packed index one past each segment's last token, ascending."""
    write_slots: torch.Tensor
    """[S] int64: where the state after each segment goes, or NO_SLOT."""
    query_start_loc_cpu: tuple[int, ...]
    segment_start_loc_cpu: tuple[int, ...]
    segment_ends_cpu: tuple[int, ...]
    max_query_len: int
    """Most tokens of one request in this step."""
    longest_run: int
    """Most tokens of a request that goes by runs; 0: every request goes token by token."""
    derived: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What kernels make of the host's numbers, once for all layers of the step."""

    @property
    def num_requests(self) -> int:
        return len(self.query_start_loc_cpu) - 1

    @property
    def num_tokens(self) -> int:
        return self.query_start_loc_cpu[-1]

    @property
    def kernel_arguments(self) -> dict[str, Any]:
        """The tensors, by their names as arguments of Triton kernels."""
        names = ("query_start_loc", "read_slots", "segment_start_loc", "segment_ends", "write_slots")
        return {name: getattr(self, name) for name in names}

    @property
    def is_single_step(self) -> bool:
        """Whether every request has one token."""
        return self.max_query_len == 1

    @property
    def has_stepwise(self) -> bool:
        """Whether some request goes token by token."""
        return any(map(int.__eq__, *self._counts()))

    def _counts(self) -> tuple[list[int], list[int]]:
        """Count each request's tokens, and its segments."""
        tokens, segments = (
            [stop - start for start, stop in pairwise(starts)]
            for starts in (self.query_start_loc_cpu, self.segment_start_loc_cpu)
        )
        return tokens, segments

    def chunks(self, size: int) -> Chunks:
        """Cut the segments of all requests that go by runs into chunks of up to `size` tokens. All layers of
        a step share them."""
        if size not in self.derived:
            bounds: list[tuple[int, int]] = []
            first: list[int] = []
            ends = iter(self.segment_ends_cpu)
            start = 0
            for num_tokens, num_segments in zip(*self._counts(), strict=True):
                for _, end in zip(range(num_segments), ends, strict=False):
                    first.append(len(bounds))
                    if num_segments < num_tokens:
                        bounds += [(at, min(at + size, end)) for at in range(start, end, size)]
                    start = end
            device = self.segment_ends.device
            both = (sent(torch.tensor(rows, dtype=torch.int32), device) for rows in (bounds, first))
            self.derived[size] = Chunks(*both)
        chunks: Chunks = self.derived[size]
        return chunks

    @classmethod
    def from_host(
        cls,
        *,
        query_lens: Sequence[int],
        read_slots: Sequence[int],
        ends: Sequence[Sequence[int]],
        write_slots: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> Segments:
        """Build from plain numbers, one entry per request: its tokens, its read slot, the tokens after which
        segments end (counted within the request, the last being `query_lens`), and their write slots."""
        starts, segment_starts = [0], [0]
        flat_ends: list[int] = []
        flat_slots: list[int] = []
        for n, cuts, slots in zip(query_lens, ends, write_slots, strict=True):
            assert len(cuts) == len(slots) > 0, "a slot per segment"
            assert list(cuts) == sorted(set(cuts)), cuts
            assert cuts[0] > 0, cuts
            assert cuts[-1] == n, (cuts, n)
            flat_ends += [starts[-1] + cut for cut in cuts]
            flat_slots += slots
            starts.append(starts[-1] + n)
            segment_starts.append(len(flat_ends))

        def tensor(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        return cls(
            query_start_loc=tensor(starts, torch.int32),
            read_slots=tensor(read_slots, torch.int64),
            segment_start_loc=tensor(segment_starts, torch.int32),
            segment_ends=tensor(flat_ends, torch.int32),
            write_slots=tensor(flat_slots, torch.int64),
            query_start_loc_cpu=tuple(starts),
            segment_start_loc_cpu=tuple(segment_starts),
            segment_ends_cpu=tuple(flat_ends),
            max_query_len=max(query_lens),
            longest_run=max(
                (n for n, cuts in zip(query_lens, ends, strict=True) if len(cuts) < n), default=0
            ),
        )

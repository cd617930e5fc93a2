"""Decode steps replayed from CUDA graphs: one launch instead of hundreds.

A graph is captured per batch size (1, 2, 4, ... max_seqs) over buffers that never move. A step copies its
inputs into them, pads the batch to the next captured size and replays. Padding rows compute one token that
sees only slot 0 of the null block and store nothing (slot -1); their states begin at zero and are not kept.
So no request can tell that they are there.

Only a step where every request computes one token and wants its logits fits a graph; others run eagerly.

Legend: R requests of a step, S rows of a graph (S >= R), G KV groups, W width of a block table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from rayk.attention.metadata import CommonAttentionMetadata
from rayk.kernels.segments import NO_SLOT, Segments

if TYPE_CHECKING:
    from rayk.engine.inputs import GroupMetadata, ModelInputs

Forward = Callable[[torch.Tensor, torch.Tensor, "Sequence[GroupMetadata]"], torch.Tensor]
"""(token_ids [S], positions [S], metadata per KV group) -> logits [S, vocab]."""
Replay = Callable[[], torch.Tensor]
"""Runs what was recorded on what the buffers hold now; the result stays valid until the next replay."""


class Recorder(Protocol):
    """Turns work on fixed buffers into something that can be repeated."""

    def record(self, work: Callable[[], torch.Tensor]) -> Replay:
        """`work` reads and writes the same memory every time and never waits for the device."""
        ...


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool. All ranks of an engine must record alike."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], torch.Tensor]) -> Replay:
        """See Recorder."""
        # Compilation, workspaces and NCCL's set-up must not happen inside a capture.
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of this process may go on using CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def graph_sizes(max_seqs: int) -> tuple[int, ...]:
    """Batch sizes to record: powers of two, and the largest batch."""
    sizes = [1]
    while sizes[-1] * 2 < max_seqs:
        sizes.append(sizes[-1] * 2)
    return tuple(sorted({*sizes, max_seqs}))


class _Rows:
    """What all groups' buffers share: S rows of one token each."""

    def __init__(self, max_seqs: int, max_positions: int, device: torch.device) -> None:
        self.seq_lens = torch.ones(max_seqs, dtype=torch.int32, device=device)
        self.starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)
        self.max_positions = max_positions


class _AttentionBuffers:
    """One KV group's block table and slots."""

    def __init__(self, rows: _Rows, width: int, block_size: int) -> None:
        max_seqs, device = len(rows.seq_lens), rows.seq_lens.device
        self._block_size = block_size
        self._rows = rows
        self._table = torch.zeros(max_seqs, width, dtype=torch.int32, device=device)
        self._slots = torch.full((max_seqs,), -1, dtype=torch.int64, device=device)

    def fill(self, metadata: GroupMetadata, num_requests: int, size: int) -> None:
        """Copy a step in; rows from `num_requests` to `size` become padding."""
        assert isinstance(metadata, CommonAttentionMetadata)
        width = metadata.block_table.shape[1]
        # Columns beyond a row's sequence keep older ids: nothing reads them.
        self._table[:num_requests, :width] = metadata.block_table
        self._table[num_requests:size, :1] = 0
        self._slots[:num_requests] = metadata.slot_mapping
        self._slots[num_requests:size] = -1

    def metadata(self, size: int) -> CommonAttentionMetadata:
        """Of the first `size` rows. Host-side numbers hold for every step: lengths are the longest."""
        longest = self._rows.max_positions
        return CommonAttentionMetadata(
            query_start_loc=self._rows.starts[: size + 1],
            seq_lens=self._rows.seq_lens[:size],
            block_table=self._table[:size],
            slot_mapping=self._slots[:size],
            block_size=self._block_size,
            query_start_loc_cpu=tuple(range(size + 1)),
            seq_lens_cpu=(longest,) * size,
            num_tokens=size,
            max_query_len=1,
            max_seq_len=longest,
        )


class _StateBuffers:
    """One KV group's slots of states; every row is one segment."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows
        self._reads, self._writes = (torch.full_like(rows.seq_lens, NO_SLOT, dtype=torch.int64) for _ in "rw")

    def fill(self, metadata: GroupMetadata, num_requests: int, size: int) -> None:
        """Copy a step in; rows from `num_requests` to `size` become padding."""
        assert isinstance(metadata, Segments)
        self._reads[:num_requests] = metadata.read_slots
        self._writes[:num_requests] = metadata.write_slots
        self._reads[num_requests:size] = NO_SLOT
        self._writes[num_requests:size] = NO_SLOT

    def metadata(self, size: int) -> Segments:
        """Of the first `size` rows."""
        starts = self._rows.starts
        return Segments(
            query_start_loc=starts[: size + 1],
            read_slots=self._reads[:size],
            segment_start_loc=starts[: size + 1],
            segment_ends=starts[1 : size + 1],
            write_slots=self._writes[:size],
            query_start_loc_cpu=tuple(range(size + 1)),
            segment_start_loc_cpu=tuple(range(size + 1)),
            segment_ends_cpu=tuple(range(1, size + 1)),
            max_query_len=1,
        )


class DecodeGraphs:
    """The recorded decode steps of one rank."""

    def __init__(
        self,
        forward: Forward,
        recorder: Recorder,
        *,
        table_shapes: Sequence[tuple[int, int] | None],
        max_seqs: int,
        max_positions: int,
        device: torch.device,
    ) -> None:
        """Record every size. `table_shapes`: W of each KV group's block table, in kernel blocks, and the
        tokens of a kernel block; None for groups of states."""
        self.sizes = graph_sizes(max_seqs)
        self._token_ids = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_seqs, dtype=torch.int64, device=device)
        self._rows = _Rows(max_seqs, max_positions, device)
        self._groups = [
            _StateBuffers(self._rows) if shape is None else _AttentionBuffers(self._rows, *shape)
            for shape in table_shapes
        ]
        # Largest first: later captures then find room in the pool that the first one took.
        self._replays = {
            size: self._record(forward, recorder, size) for size in sorted(self.sizes, reverse=True)
        }

    def fits(self, inputs: ModelInputs) -> bool:
        """Whether a recorded step computes just this."""
        num_requests = inputs.metadata[0].num_requests
        decodes = len(inputs.token_ids) == num_requests == len(inputs.logits_index)
        return decodes and inputs.prompt_index is None and num_requests <= self.sizes[-1]

    def replay(self, inputs: ModelInputs) -> torch.Tensor:
        """Logits [R, vocab] of a step that fits; valid until the next replay."""
        num_requests = len(inputs.token_ids)
        size = next(s for s in self.sizes if s >= num_requests)
        self._fill(inputs, num_requests, size)
        return self._replays[size]()[:num_requests]

    def _fill(self, inputs: ModelInputs, num_requests: int, size: int) -> None:
        """Copy a step in, and make the rows up to `size` padding."""
        padding = slice(num_requests, size)
        self._token_ids[:num_requests] = inputs.token_ids
        self._positions[:num_requests] = inputs.positions
        self._rows.seq_lens[:num_requests] = inputs.positions + 1
        self._token_ids[padding] = 0
        self._positions[padding] = 0
        self._rows.seq_lens[padding] = 1
        for metadata, group in zip(inputs.metadata, self._groups, strict=True):
            group.fill(metadata, num_requests, size)

    def _record(self, forward: Forward, recorder: Recorder, size: int) -> Replay:
        groups = [group.metadata(size) for group in self._groups]
        return recorder.record(lambda: forward(self._token_ids[:size], self._positions[:size], groups))

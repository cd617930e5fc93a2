"""Decode steps replayed from CUDA graphs: one launch instead of hundreds.

A graph is captured per batch size (1, 2, 4, ... max_seqs) over buffers that never move. A step copies its
inputs into them, pads the batch to the next captured size and replays. Padding rows compute one token that
sees only slot 0 of the null block and store nothing (slot -1); their states begin at zero and are not kept.
So no request can tell that they are there.

Each way of seeing a KV group (AttentionView) has block tables and lengths of its own, as wide as its window
or chunk needs them: the step is seen before it is copied in, on the host, and what is recorded sees no more
of it. Only a step where every request computes one token and wants its logits fits a graph; others run
eagerly. So every view has a row per request, and fast prefill leaves nothing out.

Legend: R requests of a step, S rows of a graph (S >= R), W width of a block table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from rayk.attention.groups import AttentionView
from rayk.attention.metadata import CommonAttentionMetadata
from rayk.kernels.segments import NO_SLOT, Segments

if TYPE_CHECKING:
    from rayk.engine.inputs import ModelInputs


@dataclass(frozen=True, kw_only=True, slots=True)
class StepViews:
    """A step as layers see it. Filled by the rank, once a step."""

    attention: Mapping[AttentionView, CommonAttentionMetadata]  # views that compute nothing are left out
    states: Mapping[int, Segments]  # by KV group


# (token_ids [S], positions [S], the step) -> logits [S, vocab]
Forward = Callable[[torch.Tensor, torch.Tensor, StepViews], torch.Tensor]
# runs what was recorded on what the buffers hold now; its result is valid until the next replay
Replay = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """Turns work on fixed buffers into something that can be repeated."""

    def record(self, work: Callable[[], torch.Tensor]) -> Replay:
        """Record `work`, which uses the same memory every time and never waits for the device."""


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool. All ranks of an engine must record alike."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], torch.Tensor]) -> Replay:
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
    """List the batch sizes to record: powers of two, and the largest batch."""
    sizes = [1]
    while sizes[-1] * 2 < max_seqs:
        sizes.append(sizes[-1] * 2)
    return tuple(sorted({*sizes, max_seqs}))


class _TokenRows:
    """Holds what all buffers share: S rows of one token each."""

    def __init__(self, max_seqs: int, device: torch.device) -> None:
        self.max_seqs = max_seqs
        self.device = device
        self.starts = torch.arange(max_seqs + 1, dtype=torch.int32, device=device)

    def buffer(self, value: int, dtype: torch.dtype, *width: int) -> torch.Tensor:
        """Make [S, *width], filled with `value`."""
        return torch.full((self.max_seqs, *width), value, dtype=dtype, device=self.device)


class _AttentionBuffers:
    """Holds what one attention view sees of a step; views that differ in fast prefill only see the same."""

    def __init__(
        self, rows: _TokenRows, slots: torch.Tensor, *, width: int, block_size: int, most_keys: int
    ) -> None:
        """Take the slots of its KV group, and the most keys of a row in any step."""
        self._rows = rows
        self._slots = slots
        self._block_size = block_size
        self._most_keys = most_keys
        self._seq_lens = rows.buffer(1, torch.int32)
        self._table = rows.buffer(0, torch.int32, width)

    def fill(self, common: CommonAttentionMetadata, num_requests: int, size: int) -> None:
        """Copy a step in; rows from `num_requests` to `size` become padding."""
        assert common.num_requests == num_requests, "a decode step has one row a request in every view"
        assert common.max_seq_len <= self._most_keys, (common.max_seq_len, self._most_keys)
        width = min(common.block_table.shape[1], self._table.shape[1])
        # Columns beyond a row's keys keep older ids: nothing reads them.
        self._table[:num_requests, :width] = common.block_table[:, :width]
        self._table[num_requests:size, :1] = 0
        self._seq_lens[:num_requests] = common.seq_lens
        self._seq_lens[num_requests:size] = 1

    def metadata(self, size: int) -> CommonAttentionMetadata:
        """Make metadata of the first `size` rows. Host-side numbers hold for every step: lengths are the
        longest."""
        return CommonAttentionMetadata(
            query_start_loc=self._rows.starts[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_table=self._table[:size],
            slot_mapping=self._slots[:size],
            block_size=self._block_size,
            query_start_loc_cpu=tuple(range(size + 1)),
            seq_lens_cpu=(self._most_keys,) * size,
            num_tokens=size,
            max_query_len=1,
            max_seq_len=self._most_keys,
        )


class _StateBuffers:
    """One KV group's slots of states; every row is one segment."""

    def __init__(self, rows: _TokenRows) -> None:
        self._rows = rows
        self._reads, self._writes = (rows.buffer(NO_SLOT, torch.int64) for _ in "rw")

    def fill(self, segments: Segments, num_requests: int, size: int) -> None:
        self._reads[:num_requests] = segments.read_slots
        self._writes[:num_requests] = segments.write_slots
        self._reads[num_requests:size] = NO_SLOT
        self._writes[num_requests:size] = NO_SLOT

    def metadata(self, size: int) -> Segments:
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
    """Holds the recorded decode steps of one rank."""

    def __init__(
        self,
        forward: Forward,
        recorder: Recorder,
        *,
        table_shapes: Sequence[tuple[int, int] | None],
        views: Sequence[AttentionView],
        max_seqs: int,
        max_positions: int,
        device: torch.device,
    ) -> None:
        """Record every size. `table_shapes` has W of each KV group's block table, in kernel blocks, and the
        tokens of a kernel block; None for groups of states. `views` are those that layers have."""
        self.sizes = graph_sizes(max_seqs)
        rows = _TokenRows(max_seqs, device)
        self._token_ids = rows.buffer(0, torch.int64)
        self._positions = rows.buffer(0, torch.int64)
        self._slots = {g: rows.buffer(-1, torch.int64) for g, shape in enumerate(table_shapes) if shape}
        self._states = {g: _StateBuffers(rows) for g, shape in enumerate(table_shapes) if shape is None}
        self._views: dict[AttentionView, _AttentionBuffers] = {}
        for view in dict.fromkeys(map(_plain, views)):
            shape = table_shapes[view.kv_group]
            assert shape is not None, f"KV group {view.kv_group} keeps states"
            most_keys = most_keys_of(view, max_positions, shape[1])
            self._views[view] = _AttentionBuffers(
                rows,
                self._slots[view.kv_group],
                width=min(shape[0], -(-most_keys // shape[1])),
                block_size=shape[1],
                most_keys=most_keys,
            )
        self._all_views = tuple(views)
        # Largest first: later captures then find room in the pool that the first one took.
        self._replays = {
            size: self._record(forward, recorder, size) for size in sorted(self.sizes, reverse=True)
        }

    def fits(self, inputs: ModelInputs) -> bool:
        """Tell whether a recorded step computes just this."""
        num_requests = inputs.metadata[0].num_requests
        decodes = len(inputs.token_ids) == num_requests == len(inputs.logits_index)
        return decodes and inputs.prompt_index is None and num_requests <= self.sizes[-1]

    def replay(self, inputs: ModelInputs, seen: StepViews) -> torch.Tensor:
        """Compute logits [R, vocab] of a step that fits, valid until the next replay. `seen` is the step with
        all tokens wanted."""
        num_requests = len(inputs.token_ids)
        size = next(s for s in self.sizes if s >= num_requests)
        self._fill(inputs, seen, num_requests, size)
        return self._replays[size]()[:num_requests]

    def _fill(self, inputs: ModelInputs, seen: StepViews, num_requests: int, size: int) -> None:
        """Copy a step in, and make the rows up to `size` padding."""
        padding = slice(num_requests, size)
        self._token_ids[:num_requests] = inputs.token_ids
        self._positions[:num_requests] = inputs.positions
        self._token_ids[padding] = 0
        self._positions[padding] = 0
        for group, metadata in enumerate(inputs.metadata):
            if isinstance(metadata, Segments):
                self._states[group].fill(metadata, num_requests, size)
            else:
                self._slots[group][:num_requests] = metadata.slot_mapping
                self._slots[group][padding] = -1
        for view, common in {_plain(view): common for view, common in seen.attention.items()}.items():
            self._views[view].fill(common, num_requests, size)

    def _record(self, forward: Forward, recorder: Recorder, size: int) -> Replay:
        buffers = {view: buffers_of.metadata(size) for view, buffers_of in self._views.items()}
        seen = StepViews(
            attention={view: buffers[_plain(view)] for view in self._all_views},
            states={group: buffers_of.metadata(size) for group, buffers_of in self._states.items()},
        )
        return recorder.record(lambda: forward(self._token_ids[:size], self._positions[:size], seen))


def most_keys_of(view: AttentionView, max_positions: int, block_size: int) -> int:
    """Count the most keys that a row of a decode step has in a view: keys before the first kernel block that
    its token sees into are cut off."""
    most = max_positions
    if view.chunk is not None:
        most = min(most, view.chunk)
    if view.window is not None:
        most = min(most, view.window + block_size - 1)
    return most


def _plain(view: AttentionView) -> AttentionView:
    return replace(view, fast_prefill=False)

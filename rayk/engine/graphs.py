"""Decode steps replayed from CUDA graphs: one launch instead of hundreds.

A graph is captured per number of rows (1, 2, 4, ... max_seqs) over a buffer that never moves. A step's
inputs, padded to the next captured size, go there by one copy, then it is replayed. Padding rows compute one
token that sees only slot 0 of the null block and store nothing (slot -1); their states begin at zero and are
not kept. So no request can tell that they are there.

A row is a token: a request with drafts has one for its last token and one for each draft, and attention sees
them as it sees requests, each with the keys up to its own. Layers store the keys of all rows before any row
looks for them. States go from row to row of a request, so that models with states have graphs of their own
for steps with drafts: these find in the buffer where each request's rows start.

Each way of seeing a KV group (AttentionView) has block tables and lengths of its own, as wide as its window
or chunk needs them: a decode step is cut to what its tokens see straight from the block tables of all rows,
without the metadata that other steps are built into. Only a step where every request computes one token, and
its drafts, and wants the logits of all fits a graph; others run eagerly. So every view has all rows, and fast
prefill leaves nothing out.

A CPU records calls of its kernels (engine.replays) for each batch size by itself, since there padding rows
take time, and at the first step of that size.

Legend: R requests of a step, T their rows, S rows of a graph (S >= T), W width of a block table.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from rayk.attention.groups import AttentionView
from rayk.attention.metadata import CommonAttentionMetadata
from rayk.engine.inputs import BlockTables
from rayk.engine.rows import StepRows, padded_starts, rows_of
from rayk.engine.staging import HostBuffers, Layout, Mark
from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kv.scratch import StateScratch
from rayk.types.batch import UNKNOWN_TOKEN, ScheduledBatch


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


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """List the numbers of rows to record: powers of two, and the most."""
    sizes = [1]
    while sizes[-1] * 2 < max_rows:
        sizes.append(sizes[-1] * 2)
    return tuple(sorted({*sizes, max_rows}))


class _Form(NamedTuple):
    """Which recorded step: of so many rows, that follow each other in requests or are one each."""

    size: int
    is_chained: bool


class _Buffers:
    """What a recorded step reads: tensors that lie alike in the device's buffer and in the host's, from which
    a step comes by one copy. On a CPU they are one."""

    def __init__(self, staging: HostBuffers, layout: Layout, device: torch.Tensor) -> None:
        self._staging = staging
        self._buffer = device[: layout.num_bytes]
        self.there = layout.views(self._buffer)
        self._in_place = device.device.type == "cpu"
        self._here = [layout.arrays(self._buffer if self._in_place else b) for b in staging.buffers]

    def next(self) -> dict[Hashable, np.ndarray]:
        """Return the host's arrays, to be filled; they hold an older step."""
        return self._here[0 if self._in_place else self._staging.next(len(self._buffer))]

    def send(self) -> None:
        if not self._in_place:
            self._staging.send(self._buffer)


class DecodeGraphs:
    """Holds the recorded decode steps of one rank."""

    def __init__(
        self,
        forward: Forward,
        recorder: Recorder,
        *,
        tables: Sequence[BlockTables],
        views: Sequence[AttentionView],
        max_seqs: int,
        max_positions: int,
        device: torch.device,
        max_tokens: int | None = None,
        mark: Mark = lambda: lambda: None,
        sizes: Sequence[int] | None = None,
        max_drafts: int = 0,
        scratch: StateScratch | None = None,
    ) -> None:
        """Record every size of `graph_sizes`; or of `sizes`, ascending, the largest, and others at their
        first step. `tables` are each KV group's, up to date when a step is replayed. `views` are those that
        layers have. `mark`: see HostBuffers. `max_drafts`: of a request; where there are states, `scratch` is
        for those after them. `max_tokens`: of any step; None: a step may have the most of every request."""
        max_rows = max_seqs * (1 + max_drafts)
        if max_tokens is not None:
            max_rows, max_seqs = min(max_rows, max_tokens), min(max_seqs, max_tokens)
        self.sizes = tuple(sizes or graph_sizes(max_rows if scratch is None else max_seqs))
        self.chained_sizes = () if scratch is None else graph_sizes(max_rows)
        """Numbers of rows of steps with drafts, where states go from row to row."""
        self._tables = tuple(tables)
        self._max_positions = max_positions
        self._max_drafts = max_drafts
        self._scratch = scratch
        self._plain = {view: _plain(view) for view in views}
        self._most_keys = {view: self._most_keys_of(view) for view in dict.fromkeys(self._plain.values())}
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        forms = [_Form(n, False) for n in self.sizes] + [_Form(n, True) for n in self.chained_sizes]
        layouts = {form: self._layout(form) for form in forms}
        # One for all sizes: each step fills it anew.
        buffer = torch.zeros(
            max(layout.num_bytes for layout in layouts.values()), dtype=torch.uint8, device=device
        )
        self._buffers = {
            form: _Buffers(HostBuffers(device, mark, layout.num_bytes), layout, buffer)
            for form, layout in layouts.items()
        }
        self._record_form = partial(self._record, forward, recorder)
        # Largest first: later captures then find room in the pool that the first one took.
        at_once = forms if sizes is None else forms[-1:]
        self._replays = {form: self._record_form(form) for form in sorted(at_once, reverse=True)}

    def fits(self, batch: ScheduledBatch) -> bool:
        """Tell whether a recorded step computes just this."""
        most = 1 + self._max_drafts
        return batch.num_tokens <= self._sizes(self._has_drafts(batch))[-1] and all(
            1 + r.num_drafts == len(r.token_ids) <= most and r.needs_logits and not r.prompt_logits[1]
            for r in batch.requests
        )

    def _has_drafts(self, batch: ScheduledBatch) -> bool:
        return self._max_drafts > 0 and any(r.num_drafts for r in batch.requests)

    def _sizes(self, has_drafts: bool) -> tuple[int, ...]:
        return self.chained_sizes if has_drafts and self._scratch is not None else self.sizes

    def replay(
        self, batch: ScheduledBatch, prepare: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> torch.Tensor:
        """Compute logits [T, vocab] of a step that fits, valid until the next replay. `prepare`: takes the
        number of unknown tokens and, on the device, `token_ids` [T] (-1 - row for one that the row's last
        step samples) and `sampled_rows` [T], and may change the tokens."""
        has_drafts = self._has_drafts(batch)
        step = rows_of(batch.requests, has_drafts=has_drafts)
        num_rows = len(step.rows)
        size = next(s for s in self._sizes(has_drafts) if s >= num_rows)
        form = _Form(size, has_drafts and self._scratch is not None)
        if form not in self._replays:
            self._replays[form] = self._record_form(form)
        buffers = self._buffers[form]
        num_unknown = self._fill(buffers.next(), batch, step)
        buffers.send()
        token_ids, rows = buffers.there["token_ids"], buffers.there["sampled_rows"]
        if num_rows == size:
            prepare(num_unknown, token_ids, rows)
            return self._replays[form]()
        prepare(num_unknown, token_ids[:num_rows], rows[:num_rows])
        return self._replays[form]()[:num_rows]

    def _layout(self, form: _Form) -> Layout:
        layout, size = Layout(), form.size
        if form.is_chained:
            layout.add("starts", torch.int32, size + 1)
        for name in ("token_ids", "positions", "sampled_rows"):
            layout.add(name, torch.int64, size)
        for group, table in enumerate(self._tables):
            for name in ("reads", "writes") if table.is_state else ("slots",):
                layout.add((name, group), torch.int64, size)
        for view in self._most_keys:
            layout.add(("seq_lens", view), torch.int32, size)
            layout.add(("table", view), torch.int32, size, self._width_of(view))
        return layout

    def _tables_of(self, view: AttentionView) -> BlockTables:
        tables = self._tables[view.kv_group]
        assert not tables.is_state, f"KV group {view.kv_group} keeps states"
        return tables

    def _most_keys_of(self, view: AttentionView) -> int:
        return most_keys_of(view, self._max_positions, self._tables_of(view).block_size)

    def _width_of(self, view: AttentionView) -> int:
        width: int = self._tables_of(view).ids.shape[1]
        return min(width, -(-self._most_keys[view] // self._tables_of(view).block_size))

    def _fill(self, arrays: Mapping[Hashable, np.ndarray], batch: ScheduledBatch, step: StepRows) -> int:
        """Put a step in; the rows from T on become padding. Returns the number of unknown tokens."""

        def put(name: Hashable, values: Sequence[int] | np.ndarray, padding: int) -> None:
            array, num_values = arrays[name], len(values)
            array[:num_values] = values
            if num_values < len(array):
                array[num_values:] = padding

        rows, positions = step.rows, step.positions
        token_ids = [t for r in batch.requests for t in r.token_ids]
        num_unknown = token_ids.count(UNKNOWN_TOKEN)
        if num_unknown:
            named = zip(token_ids, rows.tolist(), strict=True)
            token_ids = [-1 - row if t == UNKNOWN_TOKEN else t for t, row in named]
        put("token_ids", token_ids, 0)
        put("positions", positions, 0)
        put("sampled_rows", rows, 0)
        if "starts" in arrays:
            assert step.starts is not None
            arrays["starts"][:] = padded_starts(step.starts, len(arrays["starts"]) - 1)
        for group, table in enumerate(self._tables):
            if table.is_state:
                reads, writes = self._slots_of_states(group, step)
                put(("reads", group), reads, NO_SLOT)
                put(("writes", group), writes, NO_SLOT)
            else:
                columns, offsets = np.divmod(positions, table.block_size)
                slots = table.ids[rows, columns].astype(np.int64) * table.block_size + offsets
                put(("slots", group), slots, -1)
        for view in self._most_keys:
            self._fill_view(arrays["seq_lens", view], arrays["table", view], view, rows, positions)
        return num_unknown

    def _slots_of_states(self, group: int, step: StepRows) -> tuple[np.ndarray, np.ndarray]:
        """Return where the state before each request [R] is, and where the one after each row [T] goes."""
        table = self._tables[group]
        rows, positions = step.rows, step.positions
        writes = table.ids[rows, positions // table.block_size]
        if step.starts is not None:
            assert self._scratch is not None, "an engine that speculates has a scratch for states"
            firsts, counts = step.starts[:-1], np.diff(step.starts)
            kept = (positions + 1) % table.block_size != 0
            kept[step.starts[1:] - 1] = False
            drafts = (np.arange(len(rows)) - np.repeat(firsts, counts))[kept]
            writes[kept] = self._scratch.blocks(group, rows[kept], drafts)
            rows, positions = rows[firsts], positions[firsts]
        before = table.ids[rows, np.maximum(positions - 1, 0) // table.block_size]
        assert writes.all(), "a state is to be kept in a block that nobody gave"
        assert before.all(), "a state is to be read from a block that nobody gave"
        return np.where(positions > 0, before, NO_SLOT), writes

    def _fill_view(
        self,
        seq_lens: np.ndarray,
        table: np.ndarray,
        view: AttentionView,
        rows: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """Put in the keys that the tokens at `positions` see: the blocks before the first of them are cut
        off, as attention.transforms do."""
        num_requests, ids = len(rows), self._tables[view.kv_group].ids
        block_size = self._tables[view.kv_group].block_size
        lengths = positions + 1
        if view.window is not None or view.chunk is not None:
            first = np.zeros_like(positions)
            if view.chunk is not None:
                first = positions // view.chunk * view.chunk
            if view.window is not None:
                first = np.maximum(first, lengths - view.window)
            columns = first // block_size
            lengths -= columns * block_size
        seq_lens[:num_requests], seq_lens[num_requests:] = lengths, 1
        # Columns beyond a row's keys keep older ids: nothing reads them.
        width = -(-int(lengths.max()) // block_size)
        assert width <= table.shape[1], (width, view)
        if view.window is None and view.chunk is None:
            table[:num_requests, :width] = ids[rows, :width]
        else:
            seen = np.minimum(columns[:, None] + np.arange(width), ids.shape[1] - 1)
            table[:num_requests, :width] = ids[rows[:, None], seen]
        table[num_requests:, 0] = 0

    def _record(self, forward: Forward, recorder: Recorder, form: _Form) -> Replay:
        buffers, size = self._buffers[form], form.size
        # As padding: one token that sees the null block, and stores nothing.
        padding: dict[Hashable, int] = {"slots": -1, "reads": NO_SLOT, "writes": NO_SLOT, "seq_lens": 1}
        arrays = buffers.next()
        for name, array in arrays.items():
            array[:] = padding.get(name[0], 0) if isinstance(name, tuple) else 0
        if form.is_chained:
            arrays["starts"][:] = np.arange(size + 1)
        buffers.send()
        there = buffers.there
        plain = {view: self._attention(view, size, there) for view in self._most_keys}
        seen = StepViews(
            attention={view: plain[other] for view, other in self._plain.items()},
            states={
                group: self._segments(group, form, there)
                for group, table in enumerate(self._tables)
                if table.is_state
            },
        )
        return recorder.record(lambda: forward(there["token_ids"], there["positions"], seen))

    def _attention(
        self, view: AttentionView, size: int, there: Mapping[Hashable, torch.Tensor]
    ) -> CommonAttentionMetadata:
        """Host-side numbers hold for every step: lengths are the longest."""
        most_keys = self._most_keys[view]
        return CommonAttentionMetadata(
            query_start_loc=self._starts[: size + 1],
            seq_lens=there["seq_lens", view],
            block_table=there["table", view],
            slot_mapping=there["slots", view.kv_group],
            block_size=self._tables_of(view).block_size,
            query_start_loc_cpu=tuple(range(size + 1)),
            seq_lens_cpu=(most_keys,) * size,
            num_tokens=size,
            max_query_len=1,
            max_seq_len=most_keys,
        )

    def _segments(self, group: int, form: _Form, there: Mapping[Hashable, torch.Tensor]) -> Segments:
        """Every row is one segment. Which rows are one request's, only the device knows of a chained step."""
        size = form.size
        starts = there["starts"] if form.is_chained else self._starts[: size + 1]
        known = () if form.is_chained else tuple(range(size + 1))
        return Segments(
            query_start_loc=starts,
            read_slots=there["reads", group],
            segment_start_loc=starts,
            segment_ends=self._starts[1 : size + 1],
            write_slots=there["writes", group],
            query_start_loc_cpu=known,
            segment_start_loc_cpu=known,
            segment_ends_cpu=known[1:],
            max_query_len=1 + self._max_drafts if form.is_chained else 1,
            longest_run=0,
        )


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

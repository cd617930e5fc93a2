"""Decode steps repeated from fixed buffers, as a CUDA graph repeats them, on any device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayk.actors import worker as worker_module
from rayk.attention import AttentionView, CommonAttentionMetadata
from rayk.engine.graphs import DecodeGraphs, Forward, Replay, StepViews, graph_sizes
from rayk.engine.inputs import BlockTables
from rayk.engine.rank import EngineRank
from rayk.handover import planted
from rayk.kernels.segments import NO_SLOT, Segments
from rayk.oracle.checkpoint import read_marker
from rayk.parallel.local import LocalComm
from rayk.types.batch import UNKNOWN_TOKEN, ScheduledBatch, ScheduledRequest
from rayk.types.config import EngineConfig
from tests.engine.stepped import run_greedy
from tests.spec_models import ALL_ROUTED


class Again:
    """Does the work again instead of replaying its kernels."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0

    def record(self, work: Callable[[], torch.Tensor]) -> Replay:
        self.num_recorded += 1
        work()  # as a capture does, before any input is there

        def replay() -> torch.Tensor:
            self.num_replays += 1
            return work()

        return replay


@pytest.mark.parametrize(
    ("max_seqs", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (16, (1, 2, 4, 8, 16)), (5, (1, 2, 4, 5))]
)
def test_sizes_are_powers_of_two_and_the_largest_batch(max_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_seqs) == sizes


def test_a_step_sees_only_its_own_rows_and_padding_that_stores_nothing() -> None:
    seen: list[dict[str, Any]] = []

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, step: StepViews) -> torch.Tensor:
        commons = [step.attention[view] for view in views]
        seen.append(
            {
                "token_ids": token_ids.tolist(),
                "positions": positions.tolist(),
                "seq_lens": commons[0].seq_lens.tolist(),
                "starts": commons[0].query_start_loc.tolist(),
                "slots": [c.slot_mapping.tolist() for c in commons],
                "tables": [c.block_table.tolist() for c in commons],
                "maxima": (commons[0].max_query_len, commons[0].max_seq_len),
            }
        )
        return token_ids[:, None].float()

    views = (AttentionView(kv_group=0), AttentionView(kv_group=1))
    tables = (_tables(4, 16), _tables(3, 16, first=100))
    graphs = _graphs(forward, views, tables)
    full = _decode([11, 12, 13, 14], [9, 20, 3, 30])
    assert graphs.fits(full)
    assert _replay(graphs, full).flatten().tolist() == [11, 12, 13, 14]
    rows = (3, 0, 2)
    short = _decode([21, 22, 23], [5, 26, 7], rows)
    assert _replay(graphs, short).flatten().tolist() == [21, 22, 23]
    last = seen[-1]
    assert last["token_ids"] == [21, 22, 23, 0]
    assert last["positions"] == [4, 25, 6, 0]
    assert last["seq_lens"] == [5, 26, 7, 1]
    assert last["starts"] == [0, 1, 2, 3, 4]
    assert [slots[3] for slots in last["slots"]] == [-1, -1]
    for group, table, slots in zip(tables, last["tables"], last["slots"], strict=True):
        assert [row[:2] for row in table[:3]] == [group.ids[row, :2].tolist() for row in rows]
        assert slots[:3] == [
            _slots(group.ids[row], n, 16)[-1] for row, n in zip(rows, (5, 26, 7), strict=True)
        ]
        assert table[3][0] == 0, "padding sees the null block"
    assert last["maxima"] == (1, 64), "what is captured holds for every length"


@pytest.mark.parametrize(
    ("view", "first_seen", "width"),
    [
        (AttentionView(kv_group=0), lambda position: 0, 8),
        (AttentionView(kv_group=0, chunk=16), lambda position: position // 16 * 16, 2),
        (AttentionView(kv_group=0, chunk=24), lambda position: position // 24 * 24, 3),
        (AttentionView(kv_group=0, window=8), lambda position: max(0, position - 7), 2),
        (AttentionView(kv_group=0, window=10), lambda position: max(0, position - 9), 3),
        (AttentionView(kv_group=0, window=60), lambda position: max(0, position - 59), 8),
        (AttentionView(kv_group=0, window=60, fast_prefill=True), lambda position: max(0, position - 59), 8),
    ],
)
def test_what_a_view_sees_is_in_its_own_buffers(
    view: AttentionView, first_seen: Callable[[int], int], width: int
) -> None:
    """Every key that a token sees, and before them at most a part of a block; long and short steps."""
    seen: list[CommonAttentionMetadata] = []
    other = AttentionView(kv_group=0, window=13)
    tables = _tables(8, 8)
    graphs = _graphs(
        lambda ids, _, step: (seen.append(step.attention[view]), ids[:, None].float())[1],
        (other, view),
        (tables,),
    )
    assert all(common.block_table.shape[1] == width for common in seen)
    steps = [[1, 8, 33, 64], [9, 64], [3], [24, 25, 48], [17, 16, 15, 40], list(range(30, 34))]
    for seq_lens in (*steps, [5, 6, 7], [8, 50, 9]):  # each of the host's buffers held longer ones
        _replay(graphs, _decode(list(range(len(seq_lens))), seq_lens))
        num_rows = len(seen[-1].seq_lens)
        for row, seq_len in enumerate(seq_lens):
            whole = _slots(tables.ids[row], seq_len, 8)
            found = _slots(seen[-1].block_table[row].numpy(), int(seen[-1].seq_lens[row]), 8)
            assert found == whole[first_seen(seq_len - 1) // 8 * 8 :]
        assert seen[-1].seq_lens[len(seq_lens) :].tolist() == [1] * (num_rows - len(seq_lens))
        assert seen[-1].block_table[len(seq_lens) :, 0].tolist() == [0] * (num_rows - len(seq_lens))
        assert seen[-1].max_seq_len >= int(seen[-1].seq_lens.max())


def _slots(blocks: np.ndarray, num_keys: int, block_size: int) -> list[int]:
    """Where a row's keys lie, by its table of blocks."""
    ids = blocks.tolist()
    return [ids[key // block_size] * block_size + key % block_size for key in range(num_keys)]


def test_states_of_a_step_lie_where_it_says_and_padding_keeps_none() -> None:
    seen: list[Segments] = []
    blocks = _tables(20, 3).ids
    graphs = _graphs(
        lambda ids, positions, step: (seen.append(step.states[0]), ids[:, None].float())[1],
        (AttentionView(kv_group=1),),
        (BlockTables(blocks, 3, is_state=True), _tables(4, 16)),
    )
    for seq_lens, rows in (([5, 1, 7, 9], (0, 1, 2, 3)), ([3, 4, 10], (2, 3, 0))):
        step = _decode(list(range(len(rows))), seq_lens, rows)
        reads, writes = [], []
        for row, seq_len in zip(rows, seq_lens, strict=True):
            # The state after each token, by the block that the token lies in.
            kept = [int(blocks[row, token // 3]) for token in range(seq_len)]
            reads.append(kept[-2] if seq_len > 1 else NO_SLOT)
            writes.append(kept[-1])
        assert graphs.fits(step)
        assert len(_replay(graphs, step)) == len(reads)
        padding = [NO_SLOT] * (4 - len(reads))
        assert seen[-1].read_slots.tolist() == reads + padding
        assert seen[-1].write_slots.tolist() == writes + padding
        assert seen[-1].query_start_loc.tolist() == seen[-1].segment_start_loc.tolist() == [0, 1, 2, 3, 4]
        assert seen[-1].segment_ends.tolist() == [1, 2, 3, 4]
        assert seen[-1].is_single_step


def test_tokens_that_are_not_known_yet_are_named_by_their_rows() -> None:
    graphs = _graphs(lambda ids, *_: ids[:, None].float(), (AttentionView(kv_group=0),), (_tables(4, 16),))
    found: list[Any] = []

    def prepare(num_unknown: int, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        found.append((num_unknown, token_ids.tolist(), rows.tolist()))
        token_ids[token_ids < 0] = 77

    step = _decode([5, UNKNOWN_TOKEN, UNKNOWN_TOKEN], [4, 5, 6], (1, 3, 0))
    assert graphs.replay(step, prepare).flatten().tolist() == [5, 77, 77]
    assert found == [(2, [5, -4, -1], [1, 3, 0])]


def test_only_whole_decode_steps_fit() -> None:
    views = (AttentionView(kv_group=0),)
    graphs = _graphs(lambda ids, *_: ids[:, None].float(), views, (_tables(4, 16),), max_seqs=2)
    whole = _decode([1, 2], [4, 5])
    assert graphs.fits(whole)
    assert not graphs.fits(_decode([1, 2, 3], [4, 5, 6])), "more rows than were recorded"

    def changed(**changes: Any) -> ScheduledBatch:
        first, second = whole.requests
        return dataclasses.replace(whole, requests=(first, dataclasses.replace(second, **changes)))

    assert not graphs.fits(changed(needs_logits=False)), "a chunk of one token wants no logits"
    assert not graphs.fits(changed(token_ids=(1, 2)))
    assert not graphs.fits(changed(prompt_logits=(0, 1)))


def _graphs(
    forward: Forward, views: Sequence[AttentionView], tables: Sequence[BlockTables], max_seqs: int = 4
) -> DecodeGraphs:
    return DecodeGraphs(
        forward,
        Again(),
        tables=tables,
        views=views,
        max_seqs=max_seqs,
        max_positions=64,
        device=torch.device("cpu"),
    )


def _replay(graphs: DecodeGraphs, batch: ScheduledBatch) -> torch.Tensor:
    return graphs.replay(batch, lambda num_unknown, token_ids, rows: None)


def _tables(width: int, block_size: int, first: int = 1) -> BlockTables:
    """Four rows of blocks, each another, from `first` on."""
    return BlockTables(np.arange(first, first + 4 * width, dtype=np.int32).reshape(4, width), block_size)


def _decode(token_ids: list[int], seq_lens: list[int], rows: Sequence[int] | None = None) -> ScheduledBatch:
    """Tokens of requests that have `seq_lens` with them, by default in the first rows."""
    return ScheduledBatch(
        step=1,
        requests=tuple(
            ScheduledRequest(
                request_id=str(row),
                row=row,
                num_computed_tokens=seq_len - 1,
                token_ids=(token,),
                new_block_ids=(),
                needs_logits=True,
            )
            for token, seq_len, row in zip(token_ids, seq_lens, rows or range(len(token_ids)), strict=True)
        ),
    )


def ending_one_by_one(
    checkpoint: Callable[..., Path], reference: Callable[..., Any], model: str
) -> tuple[Path, list[list[int]], list[int], list[list[int]]]:
    """A checkpoint, prompts, how many tokens each is to get, and the reference's."""
    family, _, hybrid = model.partition("-")
    overrides = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2}
    path = checkpoint(family, **({"overrides": overrides} if hybrid else {}))
    prompts = [list(p["prompt"]) for p in read_marker(path)["probes"]]
    lengths = [24, 10, 4]
    whole = reference(path).generate(prompts, 24, ignore_eos=True)
    return path, prompts, lengths, [list(o.token_ids[:n]) for o, n in zip(whole, lengths, strict=True)]


@pytest.mark.parametrize("model", ["llama", "qwen3-hybrid"])
def test_decoding_through_fixed_buffers_gives_the_reference_tokens(checkpoint, reference, model: str) -> None:
    """Requests of unlike lengths that end one by one, so that batches shrink through every size."""
    path, prompts, lengths, expected = ending_one_by_one(checkpoint, reference, model)
    recorder = Again()
    config = EngineConfig(
        model=str(path), attention_backend="reference", num_blocks=64, max_seqs=4, layout="BHLNC"
    )
    rank = EngineRank(config, LocalComm(), poison=-1, recorder=recorder)
    assert rank.graph_sizes == (1, 2, 4)
    assert recorder.num_recorded == 3
    outputs = run_greedy(rank, prompts, lengths)
    assert outputs == expected
    assert recorder.num_replays == 23, "every step but the prefill"


@pytest.mark.parametrize("hybrid_kv", [True, False])
@pytest.mark.parametrize("model", ["llama4", "llama4-small-chunks", "gemma3n"])
def test_recorded_steps_across_borders_of_chunks_and_windows(
    checkpoint: Callable[..., Path], reference: Callable[..., Any], model: str, hybrid_kv: bool
) -> None:
    """Chunks of 64 tokens: the request of 300 crosses a border at 320; of 40: that of 37, too. Without
    `hybrid_kv` layers that see everything lie in the same KV group, and see it otherwise."""
    family, _, small_chunks = model.partition("-")
    path = checkpoint(family, **({"overrides": dict(ALL_ROUTED)} if small_chunks else {}))
    prompts = [list(p["prompt"]) for p in read_marker(path)["probes"]]
    lengths = [24, 10, 24]
    expected = [o.token_ids for o in reference(path).generate(prompts, 24, ignore_eos=True)]
    config = EngineConfig(
        model=str(path), attention_backend="reference", num_blocks=200, max_seqs=4, hybrid_kv=hybrid_kv
    )
    recorder = Again()
    recorded = EngineRank(config, LocalComm(), poison=-1, recorder=recorder)
    outputs = run_greedy(recorded, prompts, lengths)
    assert outputs == [list(e[:n]) for e, n in zip(expected, lengths, strict=True)]
    assert recorder.num_replays == 23, "every step but the prefill"
    groups = recorded.attention_groups.groups
    assert (len({g.view.kv_group for g in groups}) == 1) == (not hybrid_kv)
    assert len({(g.view.window, g.view.chunk) for g in groups}) == 2
    assert run_greedy(EngineRank(config, LocalComm(), poison=-1), prompts, lengths) == outputs
    assert recorded.num_token_layers == len(recorded.decoder.layers) * (sum(map(len, prompts)) + 58 - 3)


@pytest.mark.parametrize(
    ("family", "state_block_size"),
    [
        *product(("mamba2", "jamba", "qwen3_next", "falcon_h1", "nemotron_h"), (None, 3)),
        ("deepseek_v3", None),
    ],
)
def test_recorded_steps_of_hybrid_models(
    checkpoint: Callable[..., Path],
    reference: Callable[..., Any],
    family: str,
    state_block_size: int | None,
) -> None:
    """mamba2 has no attention, falcon_h1 two caches in a layer, nemotron_h layers without any, deepseek_v3
    latents. Blocks of 3 tokens: every third step writes another slot than it read."""
    path = checkpoint(family)
    prompts = [list(p["prompt"]) for p in read_marker(path)["probes"]][:2]
    expected = [o.token_ids for o in reference(path).generate(prompts, 24, ignore_eos=True)]
    recorder = Again()
    config = EngineConfig(
        model=str(path),
        attention_backend="reference",
        num_blocks=160,
        max_seqs=3,
        layout="BHLNC",
        state_block_size=state_block_size,
    )
    rank = EngineRank(config, LocalComm(), poison=-1, recorder=recorder)
    outputs = run_greedy(rank, prompts, [12, 7])
    assert outputs == [list(expected[0][:12]), list(expected[1][:7])]
    assert recorder.num_replays == 11, "every step but the prefill"


@pytest.mark.parametrize("point", ["rope", "store_kv"])
def test_a_planted_fault_is_in_what_a_worker_records(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """A graph repeats the kernels it was recorded from: a layer replaced afterwards never runs."""
    wrong = {"rope": planted._OnePositionOn, "store_kv": planted._OneSlotOn}[point]
    forward, num_wrong = wrong.forward, 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal num_wrong
        num_wrong += 1
        return forward(*args)

    monkeypatch.setattr(wrong, "forward", counted)
    recorder = Again()
    monkeypatch.setattr("rayk.engine.build.EngineRank", functools.partial(EngineRank, recorder=recorder))
    config = EngineConfig(
        model=str(checkpoint("llama")), attention_backend="reference", num_blocks=64, max_seqs=4
    )
    fault = planted.PlantedFault(kind="wrong_kv", point=point, layer=1)
    spec = worker_module.RankSpec(
        engine="e",
        epoch=1,
        role="aggregated",
        rank=0,
        config=config,
        address="127.0.0.1:0",
        comm_timeout_s=10.0,
        lease_s=10.0,
        faults=(fault,),
    )
    worker = worker_module.Worker("w")
    try:
        worker.form(spec)
        assert recorder.num_recorded == 3
        assert num_wrong == 3, "once per recorded size"
    finally:
        worker.dissolve()


@pytest.mark.parametrize("model", ["llama", "qwen3-hybrid"])
def test_a_cpu_replays_calls_and_gives_the_same_tokens(checkpoint, reference, model: str) -> None:
    """Requests end one by one, so that every size is recorded on the way, at its first step."""
    path, prompts, lengths, expected = ending_one_by_one(checkpoint, reference, model)
    rank = EngineRank(EngineConfig(model=str(path), num_blocks=64, max_seqs=4), LocalComm(), poison=-1)
    assert rank.graphs_note == "1, 2, 3, 4"
    forward, num_forward = rank.decoder.forward, 0

    def counted(*args: Any) -> torch.Tensor:
        nonlocal num_forward
        num_forward += 1
        return forward(*args)

    rank.decoder.forward = counted
    outputs = run_greedy(rank, prompts, lengths)
    assert outputs == expected
    assert num_forward == 1 + 2 * 3, "a prefill, and a trial and a recording of each of 3 sizes"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replayed_step_has_the_bits_of_an_eager_one(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def logits(graphs: str) -> list[torch.Tensor]:
        config = EngineConfig(
            model=str(checkpoint("qwen3")), num_blocks=64, max_seqs=2, dtype=dtype, cuda_graphs=graphs
        )
        rank = EngineRank(config, LocalComm(), poison=-1)
        step, seen = rank.step, []
        monkeypatch.setattr(rank, "step", lambda batch: seen.append(step(batch).clone()) or seen[-1])
        run_greedy(rank, [[5, 6, 7, 8], [9, 10, 11]], [6, 4])
        return seen

    replayed, eager = logits("auto"), logits("never")
    assert len(replayed) == 6
    assert all(map(torch.equal, replayed, eager))


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("llama", {"cuda_graphs": "never"}, "engine.cuda_graphs: never"),
        ("llama", {"attention_backend": "reference"}, "attention backend reference works from the host"),
        ("llama", {"kv_dtype": "fp8_e4m3"}, "a CPU stores a quantised KV cache from the host"),
        ("mamba2", {}, "layer 0 works from the host on a CPU"),
        ("deepseek_v3", {}, "layer 0 works from the host on a CPU"),
    ],
)
def test_a_cpu_engine_says_why_it_replays_nothing(
    checkpoint: Callable[..., Path], family: str, settings: dict[str, str], why: str
) -> None:
    config = EngineConfig(model=str(checkpoint(family)), num_blocks=8, **settings)
    rank = EngineRank(config, LocalComm())
    assert rank.graph_sizes == ()
    assert rank.graphs_note == f"none: {why}"

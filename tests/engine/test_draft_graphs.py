"""Steps with drafts repeated from fixed buffers: by rows, whatever requests they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayk.attention import AttentionView
from rayk.engine.graphs import DecodeGraphs, StepViews
from rayk.engine.inputs import BlockTables, InputBuilder
from rayk.engine.rows import padded_starts
from rayk.kernels.segments import NO_SLOT, Segments
from rayk.kv.geometry import plan_rank
from rayk.kv.layout import LAYOUTS
from rayk.kv.scratch import StateScratch, plan_scratch
from rayk.models.layers import causal_conv, gdn, mamba1, mamba2
from rayk.types.batch import ScheduledBatch, ScheduledRequest
from tests.engine.by_hand import ByHand
from tests.engine.test_drafts import MAX_SEQS, NUM_DRAFTS, Drafted, Model, make_model, models
from tests.engine.test_graphs import Again
from tests.kv.brute import full
from tests.markers import interpreted, sweep, thorough
from tests.sched.world import one_layer_each, state

__all__ = ["models"]


def batch_of(*requests: tuple[int, int, tuple[int, ...]]) -> ScheduledBatch:
    """Of requests (row, tokens before, tokens of which all but the first are drafts)."""
    return ScheduledBatch(
        step=1,
        requests=tuple(
            ScheduledRequest(
                request_id=str(row),
                row=row,
                num_computed_tokens=before,
                token_ids=tokens,
                new_block_ids=((0, ()),) * 2,
                needs_logits=True,
                num_drafts=len(tokens) - 1,
            )
            for row, before, tokens in requests
        ),
    )


def make_graphs(
    forward: Callable[..., torch.Tensor],
    tables: tuple[BlockTables, ...],
    scratch: StateScratch | None,
    max_tokens: int | None = None,
) -> DecodeGraphs:
    group = next(i for i, table in enumerate(tables) if not table.is_state)
    return DecodeGraphs(
        forward,
        Again(),
        tables=tables,
        views=(AttentionView(kv_group=group),),
        max_seqs=3,
        max_positions=64,
        device=torch.device("cpu"),
        max_drafts=2,
        max_tokens=max_tokens,
        scratch=scratch,
    )


def replay(graphs: DecodeGraphs, batch: ScheduledBatch) -> torch.Tensor:
    assert graphs.fits(batch)
    return graphs.replay(batch, lambda num_unknown, token_ids, rows: None)


STEP = batch_of((2, 7, (11, 12, 13)), (0, 30, (14,)), (1, 15, (15, 16)))


def test_attention_sees_each_draft_as_a_request() -> None:
    seen: list[tuple[list[int], list[int], Any]] = []

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, step: StepViews) -> torch.Tensor:
        seen.append((token_ids.tolist(), positions.tolist(), step.attention[AttentionView(kv_group=0)]))
        return token_ids[:, None].float()

    ids = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
    graphs = make_graphs(forward, (BlockTables(ids, 16),), None)
    assert graphs.sizes == (1, 2, 4, 8, 9)
    assert graphs.chained_sizes == ()
    assert replay(graphs, STEP).flatten().tolist() == [11, 12, 13, 14, 15, 16]
    tokens, positions, common = seen[-1]
    assert tokens == [11, 12, 13, 14, 15, 16, 0, 0]
    assert positions == [7, 8, 9, 30, 15, 16, 0, 0]
    assert common.seq_lens.tolist() == [8, 9, 10, 31, 16, 17, 1, 1]
    assert common.query_start_loc.tolist() == list(range(9))
    rows = [2, 2, 2, 0, 1, 1]
    assert common.slot_mapping.tolist() == [
        *(int(ids[row, at // 16]) * 16 + at % 16 for row, at in zip(rows, positions, strict=False)),
        -1,
        -1,
    ]
    for row, own, length in zip(rows, common.block_table.tolist(), common.seq_lens.tolist(), strict=False):
        width = -(-length // 16)
        assert own[:width] == ids[row, :width].tolist()
    assert [own[0] for own in common.block_table.tolist()[6:]] == [0, 0]


@pytest.mark.parametrize(
    "batch",
    [
        batch_of((0, 5, (1, 2, 3, 4))),
        ScheduledBatch(
            step=1,
            requests=(
                ScheduledRequest(
                    request_id="0",
                    row=0,
                    num_computed_tokens=5,
                    token_ids=(1, 2, 3),
                    new_block_ids=(),
                    needs_logits=True,
                    num_drafts=1,
                ),
            ),
        ),
    ],
    ids=["more drafts than may be", "two tokens that are known"],
)
def test_other_steps_do_not_fit(batch: ScheduledBatch) -> None:
    ids = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
    for scratch in (None, StateScratch(50, 3, 2, (1,))):
        tables = (BlockTables(ids, 16), BlockTables(ids, 16, is_state=True))[: 1 if scratch is None else 2]
        assert not make_graphs(lambda ids, *_: ids[:, None].float(), tables, scratch).fits(batch)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_states_go_where_those_of_eager_steps_do(size: int) -> None:
    """The same segments as InputBuilder makes, padding aside."""
    groups = one_layer_each(full(16), state(size))
    scratch = plan_scratch(groups, num_blocks=200, max_seqs=3, num_drafts=2)
    assert scratch is not None
    geometry = plan_rank(groups, LAYOUTS["BHLNC"], num_blocks=200 + scratch.num_blocks)
    builder = InputBuilder(geometry, max_seqs=3, max_positions=64, scratch=scratch)
    for table in builder.tables:
        table.ids[...] = np.arange(1, 1 + table.ids.size).reshape(table.ids.shape)
    seen: list[Segments] = []
    graphs = make_graphs(
        lambda ids, _, step: (seen.append(step.states[1]), ids[:, None].float())[1], builder.tables, scratch
    )
    assert graphs.sizes == (1, 2, 3)
    assert graphs.chained_sizes == (1, 2, 4, 8, 9)
    for batch in (STEP, batch_of((1, 0, (1, 2))), batch_of((0, 2, (1,)), (2, 5, (2, 3, 4)))):
        eager = builder.build(batch).metadata[1]
        assert isinstance(eager, Segments)
        replay(graphs, batch)
        found = seen[-1]
        num_rows, num_requests = batch.num_tokens, len(batch.requests)
        padded = len(found.write_slots) - num_rows
        assert found.write_slots.tolist() == eager.write_slots.tolist() + [NO_SLOT] * padded
        assert found.read_slots.tolist()[:num_requests] == eager.read_slots.tolist()
        assert set(found.read_slots.tolist()[num_requests:]) <= {NO_SLOT}
        assert found.segment_ends.tolist() == list(range(1, len(found.write_slots) + 1))
        assert found.segment_ends.tolist()[:num_rows] == eager.segment_ends.tolist()
        starts = found.query_start_loc.tolist()
        assert starts == found.segment_start_loc.tolist()
        assert starts[: num_requests + 1] == eager.query_start_loc.tolist()
        counts = np.diff(starts).tolist()[num_requests:]
        assert counts == [1] * padded + [0] * (num_rows - num_requests)
        assert (found.longest_run, found.max_query_len) == (0, 3)
    replay(graphs, batch_of((1, 4, (1,))))
    assert seen[-1].is_single_step, "without drafts they are what they were"


def test_no_step_is_larger_than_a_batch_may_be() -> None:
    ids = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
    tables = BlockTables(ids, 16), BlockTables(ids, 16, is_state=True)
    for max_tokens, attention, states, chained in (
        (7, (1, 2, 4, 7), (1, 2, 3), (1, 2, 4, 7)),
        (2, (1, 2), (1, 2), (1, 2)),
        (100, (1, 2, 4, 8, 9), (1, 2, 3), (1, 2, 4, 8, 9)),
    ):
        graphs = make_graphs(lambda ids, *_: ids[:, None].float(), tables[:1], None, max_tokens)
        assert (graphs.sizes, graphs.chained_sizes) == (attention, ())
        scratch = StateScratch(50, 3, 2, (1,))
        graphs = make_graphs(lambda ids, *_: ids[:, None].float(), tables, scratch, max_tokens)
        assert (graphs.sizes, graphs.chained_sizes) == (states, chained)


def test_starts_of_padding() -> None:
    assert padded_starts(np.array([0, 3, 4]), 4).tolist() == [0, 3, 4, 4, 4]
    assert padded_starts(np.array([0, 3, 4]), 6).tolist() == [0, 3, 4, 5, 6, 6, 6]
    assert padded_starts(np.array([0, 1, 2]), 4).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_oss", marks=thorough)])
def test_replayed_steps_are_as_right_as_others(models: Callable[[str], Model], family: str) -> None:
    recorders: list[Again] = []

    def make_recorder() -> Again:
        recorders.append(Again())
        return recorders[-1]

    model = models(family)
    engine = ByHand(model.path, num_drafts=NUM_DRAFTS, max_seqs=MAX_SEQS, make_recorder=make_recorder)
    drafted = Drafted(model, engine, 0)
    drafted.finish()
    drafted.check()
    assert recorders[0].num_recorded == 5, "1, 2, 4, 8 and 12 rows"
    assert recorders[0].num_replays > 5


def test_a_cpu_replays_calls_of_steps_with_drafts(models: Callable[[str], Model]) -> None:
    """By as many rows as there are, at the first step of that size."""
    model = models("llama")
    engine = ByHand(model.path, num_drafts=NUM_DRAFTS, max_seqs=MAX_SEQS, attention_backend="cpu")
    (rank,) = engine.ranks
    assert rank.graph_sizes == tuple(range(1, 13))
    forward, step, num_forward = rank.decoder.forward, rank.step, 0
    fitting: list[int] = []
    """Rows of steps without a prompt."""

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal num_forward
        num_forward += 1
        return forward(*arguments)

    def watched(batch: ScheduledBatch) -> torch.Tensor:
        if all(r.needs_logits and len(r.token_ids) == 1 + r.num_drafts for r in batch.requests):
            fitting.append(batch.num_tokens)
        return step(batch)

    rank.decoder.forward, rank.step = counted, watched  # type: ignore[method-assign]
    num_steps = 0
    for seed in range(3):
        drafted = Drafted(model, engine, seed)
        drafted.finish()
        drafted.check()
        num_steps += engine.num_steps
        engine.restart()
    assert len(fitting) > 20
    assert any(rows > MAX_SEQS for rows in fitting)
    num_recorded = len({*fitting} - {12})
    assert num_forward == num_steps - len(fitting) + 2 * num_recorded, "a trial and a recording of each size"


SHORT: dict[str, dict[str, Any]] = {
    "mamba2": {"num_hidden_layers": 1},
    "jamba": {"num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
"""Few layers of each family: the interpreter takes its time."""


@sweep(2)
@interpreted
@pytest.mark.parametrize(
    "family", ["mamba2", *(pytest.param(f, marks=thorough) for f in ("jamba", "qwen3_next"))]
)
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # padding sees a null block of NaN
def test_recorded_steps_find_requests_by_tensors(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The Triton kernels of states, in Triton's interpreter, as a CUDA graph replays them."""
    for module, kernel in (
        (causal_conv, "causal_conv1d"),
        (mamba1, "selective_scan"),
        (mamba2, "ssd_scan"),
        (gdn, "gated_delta_rule"),
    ):
        monkeypatch.setattr(module, kernel, functools.partial(getattr(module, kernel), impl="triton"))
    model = make_model(checkpoint(family, overrides=SHORT[family]), num_tokens=6, lengths=(3, 2, 1))
    recorders: list[Again] = []

    def make_recorder() -> Again:
        recorders.append(Again())
        return recorders[-1]

    engine = ByHand(
        model.path,
        num_drafts=2,
        max_seqs=MAX_SEQS,
        make_recorder=make_recorder,
        attention_backend="triton",
        state_block_size=3,
        layout="LBNHC",
    )
    drafted = Drafted(model, engine, 1, num_drafts=2)
    drafted.finish()
    drafted.check()
    assert recorders[0].num_recorded == 3 + 5, (
        "1, 2 and 3 rows alone; 1, 2, 4, 8 and 9 that follow each other"
    )
    assert recorders[0].num_replays > 3
    assert drafted.num_rejected

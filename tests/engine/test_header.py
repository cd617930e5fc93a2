"""Batches and turns cross to the peers unchanged, request ids aside."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rayk.engine.header import decode_batch, encode_batch
from rayk.engine.loop import Turn, decode_turn, encode_turn
from rayk.types.batch import Rollback, ScheduledBatch, ScheduledRequest

INT32 = st.integers(0, 2**31 - 1)


@st.composite
def batches(draw: st.DrawFn) -> ScheduledBatch:
    num_groups = draw(st.integers(1, 4))
    rows = draw(st.lists(st.integers(0, 300), max_size=6, unique=True))
    ids = st.lists(INT32, max_size=5).map(tuple)
    counts_per_group = st.tuples(*[st.integers(0, 5)] * num_groups).map(
        lambda counts: counts if any(counts) else ()
    )
    return ScheduledBatch(
        step=draw(INT32),
        requests=tuple(
            ScheduledRequest(
                request_id=draw(st.text(max_size=5)),
                row=row,
                num_computed_tokens=draw(INT32),
                token_ids=draw(st.lists(INT32, min_size=1, max_size=9).map(tuple)),
                new_block_ids=tuple((draw(INT32), draw(ids)) for _ in range(num_groups)),
                num_filled_blocks=draw(counts_per_group),
                needs_logits=(needs_logits := draw(st.booleans())),
                num_drafts=draw(st.integers(0, 32)) if needs_logits else 0,
                prompt_logits=(draw(INT32), draw(INT32)),
            )
            for row in rows
        ),
    )


def without_ids(batch: ScheduledBatch) -> ScheduledBatch:
    requests = tuple(replace(r, request_id=f"row{r.row}") for r in batch.requests)
    return replace(batch, requests=requests)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches())
def test_a_batch_survives_the_header(batch: ScheduledBatch) -> None:
    payload = encode_batch(batch)
    assert decode_batch(payload) == without_ids(batch)
    num_ids = sum(3 + len(ids) for r in batch.requests for _, ids in r.new_block_ids)
    assert len(np.frombuffer(payload, np.int32)) == 3 + 6 * len(batch.requests) + num_ids + batch.num_tokens


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.none() | batches(),
    st.lists(st.text(max_size=3) | INT32, max_size=3).map(tuple),
    st.lists(st.text(max_size=3) | INT32, max_size=3).map(tuple),
    st.lists(st.tuples(INT32, st.integers(1, 32)).map(lambda pair: Rollback(*pair)), max_size=3).map(tuple),
    st.booleans(),
    st.booleans(),
)
def test_a_turn_survives_the_broadcast(
    batch: ScheduledBatch | None,
    commands: tuple[object, ...],
    step_commands: tuple[object, ...],
    rollbacks: tuple[Rollback, ...],
    gather: bool,
    stop: bool,
) -> None:
    orders = {"commands": commands, "step_commands": step_commands, "rollbacks": rollbacks}
    turn = Turn(batch=batch, gather=gather, stop=stop, **orders)
    expected = replace(turn, batch=None if batch is None else without_ids(batch))
    assert decode_turn(encode_turn(turn)) == expected

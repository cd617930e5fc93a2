"""Captured rows of an engine that divides tokens or layers, as ranks would have them that divide heads
alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayk.handover.commands import Captured, CapturedRows
from rayk.kv.groups import KVCacheGroup
from rayk.kv.specs import KVCacheSpec
from rayk.parallel.shard import EngineShape
from rayk.transfer.diagnose import join_rows
from rayk.transfer.verify import Rows


def join_ranks(
    captured: Sequence[Captured], groups: Sequence[KVCacheGroup], shape: EngineShape, num_tokens: int
) -> list[CapturedRows]:
    """Return what the ranks of a request's engine hold, one for each tensor-parallel rank: layers of all
    stages, and of each unit the rows of all ranks that its tokens are dealt over. `captured` by rank.

    Rows count for the tokens whose slots a rank's steps compute. Of a token that no rank takes for its own
    they are zero, as if it had never been written.
    """
    assert len(captured) == shape.num_ranks, "rows of every rank"
    if shape.dcp == 1 and shape.pp == 1:
        return [part.rows for part in captured]
    found: list[CapturedRows] = [{} for _ in range(shape.tp)]
    for tp_rank, joined in enumerate(found):
        for stage in range(shape.pp):
            rank = shape.rank_of(stage, tp_rank)
            # Ranks that share tokens follow each other.
            first = rank - shape.share(rank).dcp_rank
            run = captured[first : first + shape.dcp]
            for layer, rows in captured[rank].rows.items():
                joined[layer] = dict(rows)
            for group in (g for g in groups if g.spec.has_token_rows):
                for layer in (n for n in group.layers if n in captured[rank].rows):
                    live = group.seen_by(layer).live_rows(num_tokens)
                    joined[layer] |= _join(run, layer, group.spec, live)
    return found


def _join(run: Sequence[Captured], layer: int, spec: KVCacheSpec, live: range) -> Rows:
    """Return all live rows of a layer, from the ranks that they are dealt over."""
    positions = np.arange(live.start, live.stop, dtype=np.int64)
    names = {field.name for field in spec.fields()}
    parts = [
        (
            positions[part.tokens[layer].holds(positions)],
            {key: rows for key, rows in part.rows[layer].items() if key[0] in names},
        )
        for part in run
    ]
    return join_rows(positions, parts)

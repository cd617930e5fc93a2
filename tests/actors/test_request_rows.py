"""What the coordinator makes of a request's events. No Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rayk.actors.cell_run import CellOutcome, CellRun
from rayk.actors.engines import EngineHandle
from rayk.engine.leader import RequestEvent
from rayk.types.config import EngineConfig
from rayk.types.request import FinishReason
from rayk.types.rows import RequestRow


@pytest.mark.parametrize(
    ("role", "kv_path", "again", "expected"),
    [
        ("decode", "remote", 0, (0, "remote")),
        ("decode", "remote", 37, (37, "recomputed")),
        ("aggregated", "none", 37, (37, "none")),
        # P computed it twice, and handed all of it over.
        ("prefill", "none", 37, (0, "none")),
    ],
)
def test_a_row_counts_what_its_decoding_engine_computed_again(
    role: str, kv_path: str, again: int, expected: tuple[int, str]
) -> None:
    async def take() -> RequestRow:
        cell = SimpleNamespace(policy="round_robin")
        run = CellRun(cell, 0, CellOutcome(), [], capture=False)  # type: ignore[arg-type]
        row = RequestRow(
            cell_id="c", repeat=0, request_id="r", prompt_index=0, prompt_token_ids=[1], kv_path=kv_path
        )
        row.stage_ns |= {"queue": 0, "prefill": 0}
        info = {"num_preemptions": int(again > 0), "num_recomputed_tokens": again}
        end = RequestEvent(request_id="r", token_ids=(5,), finish_reason=FinishReason.LENGTH, info=info)
        run._take(EngineHandle("e", role, 1, EngineConfig(model="m"), []), row, end)
        return row

    row = asyncio.run(take())
    assert row.output_token_ids == [5]
    assert (row.num_recomputed_tokens, row.kv_path) == expected

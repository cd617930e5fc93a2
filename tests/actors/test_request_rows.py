"""What the coordinator makes of a request's events. No Ray."""

from __future__ import annotations

import asyncio

import pytest

from rayk.actors.engines import EngineHandle
from rayk.engine.event_info import EventInfo
from rayk.engine.leader import RequestEvent
from rayk.handover.request_record import RequestRecord, note_failure
from rayk.transfer.ticket import Reservation
from rayk.types.config import EngineConfig
from rayk.types.errors import TransferError
from rayk.types.request import FinishReason
from rayk.types.rows import RequestRow


class Unheard:
    """A request_run's log that nobody reads."""

    def delivered(self, *_: object) -> None:
        """No matter."""

    prefilled = transferred = captured = delivered

    def reserved(self, reservation: Reservation) -> Reservation:
        return reservation


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
        row = RequestRow(
            cell_id="c", repeat=0, request_id="r", prompt_index=0, prompt_token_ids=[1], kv_path=kv_path
        )
        info = EventInfo(num_preemptions=int(again > 0), num_recomputed_tokens=again)
        end = RequestEvent(request_id="r", token_ids=(5,), finish_reason=FinishReason.LENGTH, info=info)
        RequestRecord(row, Unheard()).take(EngineHandle("e", role, 1, EngineConfig(model="m"), []), end)
        return row

    row = asyncio.run(take())
    assert row.output_token_ids == [5]
    assert (row.num_recomputed_tokens, row.kv_path) == expected


@pytest.mark.parametrize(
    ("refused", "num_decoded", "exposed_ns"),
    [(False, 0, None), (False, 1, 30), (True, 0, None)],
)
def test_a_request_that_failed_before_its_first_decode_step_exposed_nothing(
    refused: bool, num_decoded: int, exposed_ns: int | None
) -> None:
    lost = TransferError("r", "lost")

    async def take() -> RequestRow:
        row = RequestRow(cell_id="c", repeat=0, request_id="r", prompt_index=0, prompt_token_ids=[1])
        row.output_token_ids, row.token_times_ns = [4], [100]
        record = RequestRecord(row, Unheard())
        engine = EngineHandle("decode0", "decode", 1, EngineConfig(model="m"), [])
        info = EventInfo(taken_ns=120, stage_ns={"reserve": 1})
        here = RequestEvent(request_id="r", time_ns=130, info=info, error=lost if refused else None)
        record.take(engine, here)
        assert row.exposed_ns == (None if refused else 30)
        for i in range(num_decoded):
            record.take(engine, RequestEvent(request_id="r", token_ids=(5,), time_ns=140 + i))
        note_failure(row, lost)
        return row

    row = asyncio.run(take())
    assert (row.exposed_ns, row.finish_reason) == (exposed_ns, "error")

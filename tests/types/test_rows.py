"""The little that plain data decides."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from rayk.types.batch import ScheduledBatch, ScheduledRequest
from rayk.types.config import EngineConfig
from rayk.types.request import FinishReason, Request, SamplingParams
from rayk.types.rows import CellRow, RequestRow, TransferRow


def test_a_batch_counts_the_tokens_of_its_requests():
    requests = tuple(
        ScheduledRequest(
            request_id=str(n),
            row=n,
            num_computed_tokens=0,
            token_ids=(1,) * n,
            new_block_ids=(),
            needs_logits=True,
        )
        for n in (1, 2, 4)
    )
    assert ScheduledBatch(step=0, requests=requests).num_tokens == 7
    assert ScheduledBatch(step=0, requests=()).num_tokens == 0


@pytest.mark.parametrize(
    ("expected", "verdict", "met"),
    [
        ("PASS", "PASS", True),
        ("PASS", "NEAR_TIE", True),
        ("PASS", "UNSUPPORTED", True),
        ("PASS", "KV_MISMATCH", False),
        ("KV_MISMATCH", "KV_MISMATCH", True),
        ("KV_MISMATCH", "PASS", False),
        ("KV_MISMATCH", "UNSUPPORTED", False),
    ],
)
def test_a_cell_meets_what_was_expected(expected: str, verdict: str, met: bool):
    assert CellRow(cell_id="c", axes={}, verdict=verdict, expected_verdict=expected).met == met


@pytest.mark.parametrize("verdict", ["PASS", "NEAR_TIE"])
def test_a_fault_that_never_struck_meets_nothing(verdict: str):
    assert not CellRow(cell_id="c", axes={}, verdict=verdict, has_idle_faults=True).met


def test_finish_reasons_are_their_names():
    assert [str(r) for r in FinishReason] == ["stop", "length", "abort", "error"]


@pytest.mark.parametrize(
    "value",
    [
        EngineConfig(model="m", tp=2),
        Request(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(stop_token_ids=(3,))),
        RequestRow(cell_id="c", repeat=0, request_id="r", prompt_index=0, prompt_token_ids=[1]),
        TransferRow(
            cell_id="c",
            repeat=0,
            request_id="r",
            producer_rank=0,
            consumer_rank=1,
            group=0,
            bytes=4,
            num_descriptors=1,
        ),
    ],
    ids=lambda v: type(v).__name__,
)
def test_plain_data_crosses_processes_and_json(value):
    assert pickle.loads(pickle.dumps(value)) == value  # noqa: S301
    json.dumps(dataclasses.asdict(value))


def test_what_is_shared_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").tp = 3  # type: ignore[misc]

"""Stages of real requests add up to their E2E, whatever happened to them; and what a cell had to wait for
counts for the limit that it is.

Nothing here depends on how fast the machine is: times are held against other moments of the same run, and
against delays that were planted. Which stage is which limit: tests/actors/test_stage_times.py, by a clock.
"""

from __future__ import annotations

import pandas as pd
import pytest

from rayk import Experiment
from rayk.reports import Result
from rayk.reports.fields import STAGES
from rayk.reports.moves import moves
from rayk.reports.stages import LIMITS, limit_rows, request_parts
from rayk.specs.cells import MAX_STREAMS
from tests.markers import nixl, ray, thorough

pytestmark = [ray, nixl, pytest.mark.timeout(240), thorough]

SLACK_MS = 0.01
"""Times are whole ns in rows and ms in tables; stages are end to end."""
HOLD_S = 0.6
LATE_S = 1.5

FEW = {"prompts.random.count": 3, "prompts.random.input_tokens": [[5, 37, 300]], "sampling.max_tokens": 6}
KINDS = {
    "pull": {"prefill.tp": 2, "decode.tp": 1},
    "push": {"prefill.tp": 1, "decode.tp": 2, "transfer.mode": "push"},
    "aggregated": {"mode": "aggregated"},
    "chunked": {"prefill.max_batch_tokens": 64},
    "local": {"policy": "conditional", "policy_settings.local_prompt_tokens": 40},
    "migrated": {"failure_policy": "migrate", "faults": [[{"kind": "corrupt", "point": "reserve"}]]},
}
"""Ways of requests, with the axes that lead them there."""


def delayed(number: int) -> list[list[dict[str, object]]]:
    """Every request's read is posted late."""
    return [
        [{"kind": "delay", "point": "post", "step": step, "delay_s": HOLD_S} for step in range(1, number + 1)]
    ]


LIMITED = {
    "prefill": {"prompts.random.input_tokens": [[900]], "sampling.max_tokens": 2},
    "decode step": {"prompts.random.input_tokens": [[5]], "sampling.max_tokens": 100},
    # 19 blocks and the null block: one request of 240 + 64 tokens at a time.
    "decode KV": {
        "prompts.random.input_tokens": [[240]],
        "prompts.random.count": 8,
        "sampling.max_tokens": 64,
        "decode.num_blocks": 20,
    },
    "link": {"prompts.random.input_tokens": [[37]], "sampling.max_tokens": 2, "faults": delayed(4)},
    "retries": {
        "deadlines.transfer_s": LATE_S,
        "prompts.random.input_tokens": [[37]],
        "prompts.random.count": 1,
        "sampling.max_tokens": 2,
        "failure_policy": "recompute",
        "faults": [[{"kind": "drop", "point": "mid_transfer"}]],
    },
    # More at once than the coordinator has places for.
    "queue": {
        "mode": "aggregated",
        "prompts.random.input_tokens": [[5]],
        "prompts.random.count": 400,
        "sampling.max_tokens": 1,
        "engine.max_seqs": 64,
    },
}
"""What is to limit a cell, with the axes that see to it."""


@pytest.fixture(scope="module")
def run(ray_address, checkpoint, tmp_path_factory) -> Result:
    matrix = [FEW | axes for axes in KINDS.values()]
    matrix += [{"prompts.random.count": 4} | axes for axes in LIMITED.values()]
    return Experiment(
        {
            "name": "stages",
            "model": str(checkpoint("qwen3")),
            "device": "cpu",
            "prompts": {"random": {"count": 4, "input_tokens": [5], "seed": 0}},
            "sampling": {"max_tokens": 6, "ignore_eos": True},
            "engine": {"num_blocks": 512, "max_batch_tokens": 1024},
            "matrix": matrix,
            "checks": ["kv_bytes"],
            "deadlines": {"cell_s": 90.0, "request_s": 60.0, "transfer_s": 20.0},
        }
    ).run(tmp_path_factory.mktemp("stages") / "run", address=ray_address)


def requests_of(run: Result, index: int) -> pd.DataFrame:
    """Of a cell, in the order of the matrix."""
    return run.requests[run.requests["cell_id"] == run.cells["cell_id"][index]]


def stage_ms(requests: pd.DataFrame, *names: str) -> pd.Series:
    """Some stages together; those that a request did not have are 0."""
    return requests[[f"stage_{name}_ns" for name in names]].fillna(0).sum(axis=1) / 1e6


def test_every_cell_ended_well(run: Result) -> None:
    assert run.cells["met"].all(), run.cells[["cell_id", "verdict", "reason"]].to_dict("records")
    assert len(run.cells) == len(KINDS) + len(LIMITED)
    assert run.requests["error"].isna().all()


def test_stages_add_up_to_the_request(run: Result) -> None:
    assert stage_ms(run.requests, *STAGES).tolist() == pytest.approx(
        run.requests["e2e_ms"].tolist(), abs=SLACK_MS
    )
    parts = request_parts(run)
    assert len(parts) == len(run.requests)
    assert parts["other"].max() <= SLACK_MS


def test_stages_before_the_first_token_are_its_time(run: Result) -> None:
    once = run.requests[run.requests["num_attempts"] == 1]
    is_push = once["cell_id"].isin(run.transfers.loc[run.transfers["mode"] == "push", "cell_id"])
    before = stage_ms(once, "queue", "dispatch", "prefill_queue", "prefill")
    assert before[~is_push].tolist() == pytest.approx(once.loc[~is_push, "ttft_ms"].tolist(), abs=SLACK_MS)
    assert is_push.sum() == 3
    moved = once[~is_push & (once["kv_path"] == "remote")]
    exposed = stage_ms(moved, "ticket", "digest", "handover", "reserve", "read", "fence", "verify", "notice")
    assert exposed.tolist() == pytest.approx(moved["exposed_ms"].tolist(), abs=SLACK_MS)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_have_the_stages_of_their_way(run: Result, kind: str) -> None:
    rows = requests_of(run, list(KINDS).index(kind))
    had = [{s for s in STAGES if pd.notna(row[f"stage_{s}_ns"])} for row in rows.to_dict("records")]
    local = {"queue", "dispatch", "prefill_queue", "prefill", "decode"}
    whole = set(STAGES) - {"retry", "lookup", "load", "relay", "swap"}  # there is no host tier
    others = {
        "aggregated": [local] * 3,
        "local": [local, local, whole],
        "push": [whole - {"fence"}] * 3,  # no generations are read: who writes waits for their blocks
    }
    expected = others.get(kind, [whole] * 3)
    if kind == "migrated":
        assert sum("retry" in found for found in had) == (rows["num_attempts"] == 2).sum() == 1
        expected = [want | ({"retry"} & found) for want, found in zip(expected, had, strict=True)]
    assert had == expected


def test_transfers_lie_within_their_reads(run: Result) -> None:
    """Begin and end are on the request's clock, and no pair of ranks takes longer than all together."""
    pulled = run.transfers[(run.transfers["mode"] == "pull") & (run.transfers["verdict"] == "OK")]
    rows = pulled.merge(run.requests, on=["cell_id", "repeat", "request_id"], suffixes=("", "_of_request"))
    rows = rows[rows["num_attempts"] == 1]
    first = stage_ms(rows, *list(STAGES)[: list(STAGES).index("read")])
    last = first + stage_ms(rows, "notice", "read")  # part of the notice comes before
    assert len(rows) > 20
    assert (rows["begin_ms"] >= first - SLACK_MS).all()
    assert (rows["end_ms"] <= last + SLACK_MS).all()
    assert (rows["end_ms"] - rows["begin_ms"]).tolist() == pytest.approx(
        rows["transfer_ms"].tolist(), abs=1e-3
    )
    found = moves(run.requests, run.transfers).set_index("request_id")
    by_request = pulled.groupby("request_id")["transfer_ms"]
    two = found[~found["is_push"].astype(bool) & (by_request.size().reindex(found.index) == 2)]
    # P 2 to D 1: one rank reads from one, then from the other.
    assert len(two) >= 3
    assert (two["ms"] >= by_request.max()[two.index] - SLACK_MS).all()
    assert (two["ms"] <= by_request.sum()[two.index] + SLACK_MS).all()
    assert found["is_span"].all()


def waited_ms(limit: str, requests: pd.DataFrame) -> float:
    """The least that all these requests together waited for what limits their cell, by moments that no stage
    tells: begins and ends of others, tokens, and what was planted."""
    due, ends = requests["due_ms"], sorted(requests["due_ms"] + requests["e2e_ms"])
    match limit:
        case "prefill":
            return float((requests["ttft_ms"] - stage_ms(requests, "queue", "dispatch")).sum())
        case "decode step":
            return float((requests["e2e_ms"] - requests["ttft_ms"] - requests["exposed_ms"]).sum())
        case "decode KV":
            # In the order in which they came in: each once the one before is done, in the next turns.
            here = sorted(due + stage_ms(requests, *list(STAGES)[: list(STAGES).index("reserve")]))
            waits = (max(0.0, end - at) for end, at in zip(ends[:-1], here[1:], strict=True))
            return sum(waits) - float(stage_ms(requests, "notice").sum())
        case "queue":
            # Who comes when all places are taken goes when so many before it are done.
            freed = zip(ends[:-MAX_STREAMS], sorted(due)[MAX_STREAMS:], strict=True)
            return sum(max(0.0, end - at) for end, at in freed)
        case "link":
            return 1000 * HOLD_S * len(requests)
        case _:
            # The deadline runs from within the stage before.
            return 1000 * LATE_S - float(stage_ms(requests, "reserve").sum())


@pytest.mark.parametrize("limit", LIMITED)
def test_what_a_cell_was_made_to_wait_for_is_counted_for_its_limit(run: Result, limit: str) -> None:
    index = len(KINDS) + list(LIMITED).index(limit)
    [row] = [row for row in limit_rows(run) if row["cell_id"] == run.cells["cell_id"][index]]
    requests = requests_of(run, index)
    counted_ms = row[limit] / 100 * requests["e2e_ms"].sum()
    assert counted_ms >= waited_ms(limit, requests) - SLACK_MS * len(requests), row
    assert row[row["limit"]] == max(row[name] for name in LIMITS)


def test_what_was_planted_is_found_where_it_was_planted(run: Result) -> None:
    at = len(KINDS) + list(LIMITED).index("link")
    assert (stage_ms(requests_of(run, at), "read") >= 1000 * HOLD_S).all()
    retried = requests_of(run, at + 1)
    [took], [before] = stage_ms(retried, "retry"), stage_ms(retried, "reserve")
    # The transfer's deadline runs from within the stage before.
    assert 1000 * LATE_S - before <= took <= retried["e2e_ms"].item() - before

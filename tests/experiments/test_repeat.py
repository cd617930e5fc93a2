"""`repeat: N`: one row per request and repeat, one verdict over all of them. No Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.experiments.judge import CellJudge, _ends
from rayk.experiments.references import References
from rayk.oracle.cache import AnswerStore
from rayk.reports import ResultWriter, load
from rayk.specs import Cell, expand, load_spec
from rayk.types.errors import DeadlineExceeded, EngineDied, KVMismatch, LayoutVetoed
from rayk.types.rows import RequestRow
from tests.specs.models import decoder, spec

EXPECTED = (7, 8, 9)


@dataclass
class _Answer:
    token_ids: tuple[int, ...] = EXPECTED


@dataclass
class _Step:
    gap: float


class _References:
    """A reference whose answer to every prompt is EXPECTED, and to whom other tokens are plainly wrong."""

    is_exact = True

    def outputs(self, prompts: Any, sampling: Any) -> list[_Answer]:
        return [_Answer() for _ in prompts]

    def forced(self, prompt: Any, output_ids: Any) -> list[_Step]:
        return [_Step(5.0) for _ in output_ids]


PROMPTS = [[1, 2], [3, 4, 5]]


@pytest.fixture
def cell() -> Cell:
    sampling = {"max_tokens": 3, "ignore_eos": True}
    (made,) = expand(
        load_spec(spec(device="cpu", repeat=3, sampling=sampling, prefill={"tp": 2})).spec, decoder()
    )
    assert made.repeat == 3
    return made


def outcome(cell: Cell, repeat: int, *, tokens: tuple[int, ...] = EXPECTED, **changes: Any) -> CellOutcome:
    """One repeat in which every request gave `tokens`; the second request's came 1 ms later per repeat."""
    rows = [
        RequestRow(
            cell_id=cell.cell_id,
            repeat=repeat,
            request_id=f"{cell.cell_id}/{repeat}/{i}",
            prompt_index=i,
            prompt_token_ids=prompt,
            output_token_ids=list(tokens),
            finish_reason="length",
            arrival_ns=0,
            token_times_ns=[(1 + repeat * i) * 1_000_000 + j for j in range(len(tokens))],
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    fields = {"requests": rows, "num_kv_bytes_checked": 100, "wall_ns": 10, "facts": {}}
    return CellOutcome(**{**fields, **changes})


@pytest.fixture
def judge(tmp_path: Path) -> CellJudge:
    made = CellJudge("m", decoder(), AnswerStore(tmp_path))
    made._references = lambda cell: _References()  # type: ignore[method-assign,assignment,return-value]
    return made


def test_all_repeats_good_is_a_pass_over_the_sum(cell: Cell, judge: CellJudge) -> None:
    row = judge.judge(cell, PROMPTS, [outcome(cell, i) for i in range(3)])
    assert (row.verdict, row.reason) == ("PASS", "")
    assert row.num_kv_bytes_checked == 300
    assert row.wall_ns == 30
    assert row.num_token_mismatches == 0


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"tokens": (7, 8, 1)}, "TOKEN_MISMATCH"),
        ({"errors": [EngineDied("decode0", "killed")]}, "ENGINE_ERROR"),
        ({"errors": [KVMismatch("r", 1, 0, "k", 0, 3, "one flipped bit", 100, 2)]}, "KV_MISMATCH"),
        ({"errors": [DeadlineExceeded("cell", 1.0)], "requests": []}, "TIMEOUT"),
    ],
)
def test_one_bad_repeat_decides(
    cell: Cell, judge: CellJudge, bad: int, changes: dict[str, Any], verdict: str
) -> None:
    outcomes = [outcome(cell, i, **(changes if i == bad else {})) for i in range(3)]
    row = judge.judge(cell, PROMPTS, outcomes)
    assert row.verdict == verdict
    assert row.reason
    assert row.num_token_mismatches == (2 if verdict == "TOKEN_MISMATCH" else 0)
    assert row.num_kv_bytes_mismatched == (2 if verdict == "KV_MISMATCH" else 0)


def test_the_row_says_since_when_an_earlier_run_kept_the_answers(
    cell: Cell, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = checkpoint("qwen3")
    right = outcome(cell, 0)
    for row, answer in zip(
        right.requests, References(str(path), None).outputs(PROMPTS, cell.sampling), strict=True
    ):
        row.output_token_ids = list(answer.token_ids)
    rows = [
        CellJudge(str(path), decoder(), AnswerStore(tmp_path, fresh=fresh)).judge(cell, PROMPTS, [right])
        for fresh in (False, False, True, False)
    ]
    assert [row.verdict for row in rows] == ["PASS"] * 4
    assert [row.reference_kept_since is None for row in rows] == [True, False, True, False]


def test_a_pass_says_that_kv_values_saw_too_little(cell: Cell, judge: CellJudge) -> None:
    looking = replace(cell, checks=("kv_bytes", "kv_values"))
    judge._check_values = lambda *_: None  # type: ignore[method-assign]
    whole = [outcome(cell, i, captured={0: [], 1: []}) for i in range(3)]
    row = judge.judge(looking, PROMPTS, whole)
    assert (row.reason, row.checks_done) == ("", ["kv_values", "kv_bytes"])
    for captured in (dict[int, list[Any]](), {0: []}):
        row = judge.judge(looking, PROMPTS, [*whole[:2], outcome(cell, 2, captured=captured)])
        assert (row.verdict, row.checks_done) == ("PASS", ["kv_bytes"])
        assert row.reason == "kv_values did not see every request: some ended with their first token"


def test_a_refused_layout_is_no_breakdown_of_kv_values(cell: Cell, judge: CellJudge) -> None:
    veto = LayoutVetoed((("LHBNC", "specs", "unlike"),))
    refused = replace(cell, checks=("tokens", "kv_values"), prefill=replace(cell.prefill, layout="LHBNC"))
    row = judge.judge(refused, PROMPTS, [outcome(cell, 0, requests=[], captured={}, errors=[veto])])
    assert row.verdict == "UNSUPPORTED"
    assert row.reason == str(veto)


STALE = {"kind": "wrong_kv", "point": "stale_state", "layer": 1}


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ([], ""),
        ([{"kind": "flip_bit", "expect": "PASS"}], ""),
        ([{"kind": "kill", "point": "decode", "step": 50}], "fault kill at decode (step 50) left no trace"),
        (
            [{"kind": "flip_bit", "request": 1}, STALE],
            "fault flip_bit (request 1), fault wrong_kv at stale_state (layer 1) left no trace: a page of "
            "states must be used again (fewer num_blocks, max_seqs: 1, more requests)",
        ),
    ],
)
def test_a_pass_says_which_fault_left_no_trace(
    judge: CellJudge, faults: list[dict[str, Any]], reason: str
) -> None:
    sampling = {"max_tokens": 3, "ignore_eos": True}
    loaded = load_spec(spec(device="cpu", sampling=sampling, faults=faults))
    (cell,) = expand(loaded.spec, decoder())
    row = judge.judge(cell, PROMPTS, [outcome(cell, 0)])
    assert (row.verdict, row.reason) == ("PASS", reason)
    assert row.met == (not reason)
    nothing = judge.judge(cell, PROMPTS, [outcome(cell, 0, num_kv_bytes_checked=0)])
    assert nothing.reason.startswith(reason or "no KV")
    assert "no KV was handed over" in nothing.reason


KILL = {"kind": "kill", "point": "post", "engine": 1}


@pytest.mark.parametrize("policy", ["recompute", "migrate"])
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_fault_to_be_recovered_from_that_never_struck_is_unmet(
    judge: CellJudge, policy: str, mode: str
) -> None:
    def cell_with(fault: dict[str, Any]) -> Cell:
        fields = {"failure_policy": policy, "transfer": {"mode": mode, "lease_s": 1.0}, "faults": [fault]}
        sampling = {"max_tokens": 3, "ignore_eos": True}
        loaded = load_spec(spec(device="cpu", sampling=sampling, prefill={"num_engines": 2}, **fields))
        (made,) = expand(loaded.spec, decoder())
        return made

    cell = cell_with(KILL)
    assert cell.expected_verdict == "PASS"
    idle = judge.judge(cell, PROMPTS, [outcome(cell, i) for i in range(2)])
    assert (idle.verdict, idle.met) == ("PASS", False)
    assert idle.reason == "fault kill at post (engine 1) left no trace"
    # An engine that died though no request needed it any more.
    died = outcome(cell, 1, survived=[EngineDied("prefill1", "killed")])
    assert judge.judge(cell, PROMPTS, [outcome(cell, 0), died]).met
    saved = outcome(cell, 1)
    saved.requests[1].failure, saved.requests[1].recovered_by = "prefill1 died", policy
    row = judge.judge(cell, PROMPTS, [outcome(cell, 0), saved])
    assert row.met
    assert row.reason == f"1 of 4 requests saved by {policy}: prefill1 died"
    # What leaves no trace by its nature, and what may.
    for kind, point in (
        ("delay", "post"),
        ("duplicate", "notify"),
        ("reorder", "mid_transfer"),
        ("drop", "lease_renewal"),
        ("corrupt", "free"),
        ("restart", "handshake"),
        ("kill", "free"),
    ):
        silent = cell_with({"kind": kind, "point": point})
        row = judge.judge(silent, PROMPTS, [outcome(silent, 0)])
        assert (row.met, row.reason) == (True, ""), (kind, point)


def test_pages_of_an_aggregated_engine_held_all_but_the_last_token(cell: Cell) -> None:
    class Caches:
        def kv(self, token_ids: list[int]) -> Any:
            return tuple(token_ids)

    run = outcome(cell, 0)
    references: Any = Caches()
    assert _ends(references, run, 0) == {1: (3, 4, 5, 7, 8)}
    run.requests[1].error = "killed"
    assert _ends(references, run, 0) == {}


def test_the_tables_have_a_row_per_repeat(cell: Cell, judge: CellJudge, tmp_path: Path) -> None:
    outcomes = [outcome(cell, i) for i in range(3)]
    requests = [row for o in outcomes for row in o.requests]
    writer = ResultWriter(tmp_path / "run", spec_yaml="name: n\n", environment={})
    writer.write_cell(judge.judge(cell, PROMPTS, outcomes), requests, [])
    result = load(tmp_path / "run")
    assert list(zip(result.requests["repeat"], result.requests["prompt_index"], strict=True)) == [
        (repeat, index) for repeat in range(3) for index in range(2)
    ]
    assert result.requests["request_id"].is_unique
    (cells,) = result.cells.to_dict("records")
    assert cells["num_requests"] == 6
    # Over all repeats: 1 ms each for the first prompt, 1, 2 and 3 ms for the second.
    assert cells["ttft_ms_p50"] == pytest.approx(1.0)
    assert cells["ttft_ms_p99"] == pytest.approx(2.95)
    spans_ns = [1_000_002, 2_000_002, 3_000_002]
    assert cells["output_tokens_per_s"] == pytest.approx(18 * 1e9 / sum(spans_ns))

"""What jobs/serve_stress.py sends, how it judges, and when it says that throughput is back. No Ray."""

from __future__ import annotations

import itertools
import random
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import serve_stress, stress_chaos, stress_forms, stress_load, stress_tables
from jobs.benchmarks.harness import Page
from rayk.bench.client import ABORTED, FAILED, OK, TIMEOUT, Observed
from rayk.bench.prompts import Planned
from rayk.cli.guard import run_guarded
from rayk.oracle.reference import ForcedStep

SECOND = 10**9
SAID = '{"name":"x","age":7,"kind":"a"}'


# --- what is sent -------------------------------------------------------------------------------------------


def test_prompts_are_of_all_lengths_and_the_same_again() -> None:
    prompts = stress_load.draw_prompts(60, (4, 400), 515, seed=3)
    lengths = [len(p) for p in prompts]
    assert (len(prompts), min(lengths), max(lengths)) == (60, 4, 400)
    assert sum(n < 40 for n in lengths) == sum(n > 40 for n in lengths), "even by ratio: 40 is in the middle"
    assert all(4 <= token < 515 for p in prompts for token in p)
    assert prompts == stress_load.draw_prompts(60, (4, 400), 515, seed=3)
    assert prompts != stress_load.draw_prompts(60, (4, 400), 515, seed=4)


def test_every_prompt_is_asked_once_per_round_and_some_clients_leave_half_way() -> None:
    cases = list(itertools.islice(stress_load.draw_cases(7, 40, 0.05, seed=1), 7000))
    for start in range(0, 7000, 7):
        assert sorted(c.prompt_index for c in cases[start : start + 7]) == list(range(7))
    assert {c.max_tokens for c in cases} == set(range(20, 41))
    leaving = [c for c in cases if c.leave_after is not None]
    assert 0.04 < len(leaving) / 7000 < 0.06
    assert all(c.max_tokens // 4 <= c.leave_after <= 3 * c.max_tokens // 4 for c in leaving)


# --- what answers are worth ---------------------------------------------------------------------------------


class Forced:
    """References that find each chosen token so far from the best."""

    def __init__(self, *gaps: float) -> None:
        self.gaps = gaps

    def forced(self, prompt: list[int], output_ids: list[int]) -> list[ForcedStep]:
        step = ForcedStep(
            chosen_id=0, argmax_id=0, gap=0.0, margin=0.0, chosen_logprob=0.0, top_ids=(), top_logits=()
        )
        return [replace(step, gap=gap) for gap in self.gaps[: len(output_ids)]]


def met(outcome: str, tokens: list[int], max_tokens: int = 4) -> Any:
    planned = Planned(index=0, due_ns=None, prompt=[5, 6], max_tokens=max_tokens, seed=0)
    seen = Observed(planned=planned, outcome=outcome, output_token_ids=tokens)
    return stress_load.Met(stress_load.Case(0, max_tokens, None), seen)


@pytest.mark.parametrize(
    ("outcome", "tokens", "verdict"),
    [
        (OK, [7, 8, 9, 10], "right"),
        (OK, [7, 8, 9], "wrong"),  # one is missing
        (OK, [7, 8, 8, 9], "wrong"),  # one is repeated
        (OK, [7, 8, 9, 10, 11], "wrong"),
        (OK, [7, 9, 10, 11], "wrong"),
        (ABORTED, [7, 8], "left"),
        (ABORTED, [], "left"),
        (ABORTED, [7, 9], "wrong"),
        (FAILED, [7, 8, 9], "failed"),
        (FAILED, [], "failed"),
        (FAILED, [7, 7], "wrong"),
        (TIMEOUT, [7, 8, 9], "hung"),
        (TIMEOUT, [8], "wrong"),
    ],
)
def test_what_was_delivered_must_be_the_references(outcome: str, tokens: list[int], verdict: str) -> None:
    found, _ = stress_load.judge(met(outcome, tokens), [5, 6], [7, 8, 9, 10, 11, 12], Forced(*[0.5] * 8))
    assert found == verdict


def test_a_choice_between_equals_is_no_wrong_token() -> None:
    expected = [7, 8, 9, 10, 11]
    verdict, note = stress_load.judge(met(OK, [7, 3, 4, 5]), [5, 6], expected, Forced(0, 5e-4, 0, 0))
    assert (verdict, "token 1: 3 instead of 8" in note) == ("near_tie", True)
    verdict, _ = stress_load.judge(met(OK, [7, 3, 4, 5]), [5, 6], expected, Forced(0, 5e-4, 0, 0.1))
    assert verdict == "wrong", "what follows must be the reference's choice after that token"


@pytest.mark.parametrize(
    ("outcome", "text", "verdict"),
    [
        (OK, SAID, "right"),
        (OK, SAID[:-1], "wrong"),
        (OK, SAID.replace("7", "8"), "wrong"),
        (FAILED, SAID[:9], "failed"),
        (FAILED, SAID[1:], "wrong"),
        (ABORTED, SAID[:9], "left"),
        (TIMEOUT, "", "hung"),
    ],
)
def test_answers_of_a_form_are_those_of_the_aggregated_engine(outcome: str, text: str, verdict: str) -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode()

    found, _ = stress_forms.judge_form(met(outcome, list(text.encode()), 99), SAID.encode(), decode)
    assert found == verdict


def test_answers_that_do_not_fit_their_schema_are_wrong_whoever_says_so() -> None:
    for bad in (SAID[:-1], SAID.replace('"a"', '"c"')):
        answer = met(OK, list(bad.encode()), 99)
        verdict, note = stress_forms.judge_form(answer, bad.encode(), lambda ids: bytes(ids).decode())
        assert (verdict, note[:22]) == ("wrong", "no answer of its form:")


# --- throughput ---------------------------------------------------------------------------------------------


def naive_rate(times: list[int], counts: list[int], end_s: float) -> float:
    return sum(n for at, n in zip(times, counts, strict=True) if end_s - 5 < at / SECOND <= end_s) / 5


def test_rates_are_those_of_a_sum_over_each_window() -> None:
    draw = random.Random(0)
    times = [draw.randrange(60 * SECOND) for _ in range(500)]
    counts = [draw.randint(0, 5) for _ in times]
    throughput = stress_chaos.Throughput(times, counts)
    for end_s in [0, 0.3, 4.9, 5, 17.77, 59, 64.9, 70, *(times[i] / SECOND for i in range(20))]:
        assert throughput.rate(end_s) == naive_rate(times, counts, end_s)
    rates = sorted(naive_rate(times, counts, 15 + i / 10) for i in range(101))
    assert throughput.median(10, 25) == pytest.approx(rates[50], rel=0.02), "ends are rounded otherwise"
    assert throughput.median(10, 14.9) is None


def test_throughput_is_back_with_the_first_full_window_behind_a_kill() -> None:
    # 10 tokens per second; none from 100 to 108.
    times = [round(i * SECOND / 10) for i in range(2000) if not 1000 < i <= 1080]
    throughput = stress_chaos.Throughput(times, [1] * len(times))
    assert throughput.median(50, 100) == 10
    # Half of it: 2.5 s of tokens in a window of 5 s.
    assert throughput.back_s(100, 150, enough=5) == pytest.approx(10.5, abs=0.11)
    assert throughput.back_s(100, 110, enough=5) is None, "not before the load ended"
    assert throughput.back_s(50, 150, enough=5) == 5, "no window may hold tokens from before the kill"
    assert throughput.back_s(98, 150, enough=5) == pytest.approx(5 + 7.5, abs=0.11)
    assert stress_chaos.Throughput([], []).back_s(0, 60, enough=1) is None


# --- what must not be ---------------------------------------------------------------------------------------


def run_of(**changes: Any) -> Any:
    """A run of 10 s, 10 tokens per second, one answer after the other."""
    run = stress_tables.Run(family="qwen3", began_ns=0, ended_ns=60 * SECOND, exit_status=0)
    for i in range(60):
        found = met(OK, list(range(10)), 10)
        found.observed.chunk_ns = [i * SECOND + j * SECOND // 10 for j in range(1, 11)]
        found.observed.chunk_tokens = [1] * 10
        found.observed.ended_ns = (i + 1) * SECOND
        run.met.append(found)
    run.blocks = {"prefill0": (255, 256), "decode0": (255, 256)}
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def told(run: Any, verdicts: list[str], num_requests: int | None) -> list[str]:
    pairs = [(v, "why" if v != "right" else "") for v in verdicts]
    tables: stress_tables.Tables = {
        "families": [stress_tables.family_row(run, pairs)],
        "kills": stress_tables.kill_rows(run),
        "requests": stress_tables.request_rows(run, pairs),
    }
    assert Counter(verdicts) == Counter(row["verdict"] for row in tables["requests"])
    page = Page({})
    serve_stress.show(page, tables)
    assert "| qwen3 | 60 |" in page.text
    assert [v for v in stress_load.VERDICTS if f"qwen3: {v}: why" in page.text] == [
        v for v in stress_load.VERDICTS if v in verdicts and v not in ("right", "left")
    ]
    found: list[str] = stress_tables.failures(tables, num_requests)
    return found


def kill(at_s: float, **changes: Any) -> Any:
    return stress_chaos.Kill(engine="decode0", rank=1, at_ns=int(at_s * SECOND), epoch=1, **changes)


def test_a_quiet_run_fails_for_anything_amiss() -> None:
    right = ["right"] * 60
    assert told(run_of(), right, 60) == []
    assert told(run_of(), [*right[3:], "left", "left", "near_tie"], 60) == []
    assert told(run_of(), right, 61) == ["qwen3: 60 of 61 requests ended"]
    assert told(run_of(), [*right[1:], "failed"], 60) == ["qwen3: 1 requests ended with an error"]
    assert told(run_of(), [*right[1:], "wrong"], 60) == [
        "qwen3: 1 answers have other tokens than the reference"
    ]
    assert told(run_of(), [*right[1:], "hung"], 60) == ["qwen3: 1 requests hung"]
    leaked = {"prefill0": (250, 256), "decode0": (255, 256)}
    assert told(run_of(blocks=leaked), right, 60) == ["qwen3: 5 blocks are held at the end"]
    assert told(run_of(blocks={}), right, 60) == ["qwen3: no engine told of its blocks"]
    assert told(run_of(requests_left=(1, 2)), right, 60) == ["qwen3: the server counts 3 requests at the end"]
    assert told(run_of(exit_status=-9), right, 60) == ["qwen3: the server ended with status -9"]


def test_under_fire_a_fifth_may_fail_but_throughput_must_be_back() -> None:
    fire = {"kills": [kill(20, restart_s=2.0), kill(30)], "restart_s": 2.0}
    assert told(run_of(**fire), ["right"] * 48 + ["failed"] * 12, None) == []
    assert told(run_of(**fire), ["right"] * 47 + ["failed"] * 13, None) == ["qwen3: only 78.3% were answered"]
    assert told(run_of(), ["right"] * 60, None) == ["qwen3: no rank was killed"]
    parts = {"try": 2, "num_replaced": 1, "workers_s": 0.5, "formed_s": 2.0, "joined_s": 2.25}
    parts["cpu_s"] = [
        {"start": 4.0, "load": 0.5, "transport": 0.25},
        {"start": 3.0, "load": 1, "transport": 1},
    ]
    run = run_of(kills=[kill(20, restart_s=3.0, parts=parts)])
    run.met = [m for m in run.met if not 20 * SECOND <= m.observed.chunk_ns[0] < 39 * SECOND]
    verdicts = ["right"] * len(run.met)
    (row,) = stress_tables.kill_rows(run)
    assert row["back_s"] == pytest.approx(19 + 2.5, abs=0.21)
    took = [row[k] for k in ("tries", "num_replaced", "workers_s", "form_s", "connect_s")]
    assert took == [2, 1, 0.5, 1.5, 0.25]
    assert (row["start_cpu_s"], row["form_cpu_s"]) == (4.0, 2.75)
    assert stress_tables.family_row(run, [(v, "") for v in verdicts])["num_late"] == 1


# --- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--requests 999", "are not to be split over 2 families"),
        ("--prompts 1", "--prompts is at least 2"),
        ("--max-tokens 7", "--max-tokens 8"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)]
    assert run_guarded(lambda: serve_stress.main([*arguments.split(), *out])) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("kill", "spares", "wanted"), [(False, None, 0), (True, None, 2), (True, 0, 0)])
def test_killing_has_spares_unless_told_otherwise(kill: bool, spares: int | None, wanted: int) -> None:
    options = Namespace(prompts=2, max_tokens=8, longest=4, requests=100, families=["a", "b"])
    options.kill, options.spares = kill, spares
    serve_stress.settle(options)
    assert (options.spares, options.requests) == (wanted, 50)

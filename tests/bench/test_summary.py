"""Numbers and verdicts of loads that were never sent, against loops over their requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from rayk.bench.client import FAILED, OK, REFUSED, TIMEOUT, Observed
from rayk.bench.generator import Sent
from rayk.bench.load import Load
from rayk.bench.prompts import Planned
from rayk.bench.summary import find_phases, summarize
from rayk.reports.load_page import rate_rows
from rayk.types.slo import parse_slo

MS = 1_000_000
URL = "http://127.0.0.1:1"
NUM_TOKENS = 5


def observe(index: int, due_ms: float, ttft_ms: float, gap_ms: float, **changes: Any) -> Observed:
    """A request that was answered with five tokens, one per chunk."""
    due = round(due_ms * MS)
    chunks = [due + round((ttft_ms + i * gap_ms) * MS) for i in range(NUM_TOKENS)]
    seen = Observed(
        planned=Planned(index=index, due_ns=due, prompt=[1, 2, 3], max_tokens=NUM_TOKENS, seed=index),
        due_ns=due,
        sent_ns=due + MS // 10,
        ended_ns=chunks[-1] + MS // 100,
        status=200,
        outcome=OK,
        chunk_ns=chunks,
        chunk_tokens=[1] * NUM_TOKENS,
        finish_reason="length",
        usage={"prompt_tokens": 3, "completion_tokens": NUM_TOKENS},
    )
    for name, value in changes.items():
        setattr(seen, name, value)
    return seen


def fail(seen: Observed, outcome: str = FAILED) -> Observed:
    """The same request without an answer."""
    seen.outcome, seen.error, seen.chunk_ns, seen.chunk_tokens, seen.usage = outcome, "planted", [], [], {}
    return seen


def steady(count: int = 800, *, seed: int = 0) -> Sent:
    """Requests every 10 ms, TTFT about 30 ms, gaps about 5 ms, from a punctual generator."""
    draw = np.random.default_rng(seed)
    requests = [
        observe(i, 1000 + 10 * i, 25 + 10 * draw.random(), 4 + 2 * draw.random()) for i in range(count)
    ]
    return Sent(
        requests=requests,
        began_ns=1000 * MS,
        ended_ns=max(seen.ended_ns for seen in requests),
        loop_lags_ns=[MS // 2] * 100,
        cpu_ns=100 * MS,
    )


def load_of(**options: Any) -> Load:
    return Load(url=URL, **({"rate": 100.0} | options))


def verdict_of(sent: Sent, **options: Any) -> tuple[str, str]:
    cell, _ = summarize(load_of(**options), "fake", sent)
    return cell["verdict"], cell["reason"]


def test_a_steady_load_is_valid_and_its_numbers_are_those_of_its_requests() -> None:
    sent = steady()
    cell, rows = summarize(load_of(slo=parse_slo("ttft=30ms,itl=5.5ms"), warmup=20), "fake", sent)
    assert (cell["verdict"], cell["reason"], cell["met"]) == ("VALID", "", True)
    measured = [seen for seen, row in zip(sent.requests, rows, strict=True) if row["phase"] == "measured"]
    first, last = measured[0], measured[-1]
    begin, end = first.due_ns, sent.requests[last.planned.index + 1].due_ns
    window_s = (end - begin) / 1e9
    assert cell["window_s"] == pytest.approx(window_s)
    assert cell["num_measured"] == len(measured)
    tokens = sum(begin < at <= end for seen in sent.requests for at in seen.chunk_ns)
    assert cell["output_tokens_per_s"] == pytest.approx(tokens / window_s)
    assert cell["answered_per_s"] == pytest.approx(
        sum(begin < seen.chunk_ns[-1] <= end for seen in sent.requests) / window_s
    )
    good = set()
    for seen in sent.requests:
        gaps = [(b - a) / MS for a, b in zip(seen.chunk_ns, seen.chunk_ns[1:], strict=False)]
        if (seen.chunk_ns[0] - seen.due_ns) / MS <= 30 and max(gaps) <= 5.5:
            good.add(seen.planned.index)
    num_good = sum(seen.planned.index in good for seen in measured)
    assert 0 < num_good < len(measured)
    assert cell["good_share"] == pytest.approx(num_good / len(measured))
    assert cell["goodput_per_s"] == pytest.approx(
        sum(begin < seen.chunk_ns[-1] <= end and seen.planned.index in good for seen in sent.requests)
        / window_s
    )
    ttft = sorted((seen.chunk_ns[0] - seen.due_ns) / MS for seen in measured)
    assert cell["ttft_ms_p50"] == pytest.approx(ttft[math.ceil(0.5 * len(ttft)) - 1])
    assert cell["ttft_ms_p99"] == pytest.approx(ttft[math.ceil(0.99 * len(ttft)) - 1])
    assert cell["ttft_ms_mean"] == pytest.approx(sum(ttft) / len(ttft))
    assert cell["ttft_ms_mean_low"] < cell["ttft_ms_mean"] < cell["ttft_ms_mean_high"]
    tpot = [(seen.chunk_ns[-1] - seen.chunk_ns[0]) / MS / (NUM_TOKENS - 1) for seen in measured]
    assert cell["tpot_ms_mean"] == pytest.approx(sum(tpot) / len(tpot))
    assert cell["num_itl_values"] == len(measured) * (NUM_TOKENS - 1)
    in_flight = sum(max(0, min(seen.ended_ns, end) - max(seen.sent_ns, begin)) for seen in sent.requests) / (
        end - begin
    )
    assert cell["mean_in_flight"] == pytest.approx(in_flight)
    assert cell["send_lag_ms_p90"] == pytest.approx(0.1)
    assert cell["generator_cpu_share"] == pytest.approx(100 * MS / (sent.ended_ns - sent.began_ns))


def test_rows_count_from_the_due_time() -> None:
    seen = observe(3, 2000, 40, 5)
    seen.sent_ns = seen.due_ns + 15 * MS
    _, rows = summarize(load_of(), "fake", Sent(requests=[seen], began_ns=1500 * MS, ended_ns=2100 * MS))
    row = rows[0]
    assert (row["ttft_ms"], row["tpot_ms"], row["e2e_ms"], row["send_lag_ms"]) == (40.0, 5.0, 60.0, 15.0)
    assert (row["due_ms"], row["itl_ms"], row["num_output_tokens"]) == (500.0, [5.0] * 4, 5)
    assert row["prompt_token_ids"] == [1, 2, 3]


def test_goodput_counts_no_answer_that_answered_does_not() -> None:
    """A queue that grows: each answer takes longer than the one before, all are good, few end in time."""
    sent = steady(400)
    for seen in sent.requests:
        seen.chunk_ns = [at + 5 * seen.planned.index * MS for at in seen.chunk_ns]
        seen.ended_ns = seen.chunk_ns[-1]
    cell, _ = summarize(load_of(slo=parse_slo("e2e=100s"), warmup=100, cooldown=100), "fake", sent)
    assert cell["good_share"] == 1
    assert cell["goodput_per_s"] == cell["answered_per_s"]
    assert cell["answered_per_s"] < 0.8 * cell["offered_per_s"]


def test_gaps_are_between_chunks_however_many_tokens_they_carry() -> None:
    times = [1020 * MS, 1030 * MS, 1045 * MS]
    seen = observe(0, 1000, 20, 0, chunk_ns=times, chunk_tokens=[1, 2, 2])
    sent = Sent(requests=[seen], began_ns=1000 * MS, ended_ns=1100 * MS)
    cell, rows = summarize(load_of(slo=parse_slo("itl=15ms")), "fake", sent)
    assert rows[0]["itl_ms"] == [10.0, 15.0], "no gap of 0 between tokens that came at once"
    assert rows[0]["tpot_ms"] == 25 / 4
    assert rows[0]["is_good"]
    assert (cell["num_itl_values"], cell["tokens_per_chunk"]) == (2, 5 / 3)
    assert not summarize(load_of(slo=parse_slo("itl=14ms")), "fake", sent)[1][0]["is_good"]


def test_cached_tokens_are_told_of_what_was_measured() -> None:
    sent = steady(60)
    cell, _ = summarize(load_of(), "fake", sent)
    assert (cell["num_prompt_tokens"], cell["num_cached_tokens"]) == (None, None), "the server does not say"
    for seen in sent.requests:
        seen.usage = {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": seen.planned.index % 2}
    sent.requests[20].usage["cached_tokens"] = None
    fail(sent.requests[21])
    cell, _ = summarize(load_of(warmup=10, cooldown=10), "fake", sent)
    assert (cell["num_prompt_tokens"], cell["num_cached_tokens"]) == (3 * 38, 19)


def test_drafts_are_told_of_what_was_measured_and_answered() -> None:
    sent = steady(60)
    cell, rows = summarize(load_of(), "fake", sent)
    assert (cell["num_drafted"], cell["acceptance_rate"], rows[0]["num_accepted"]) == (None, None, None)
    for seen in sent.requests:
        seen.usage = {"completion_tokens": 5, "accepted_tokens": 3, "rejected_tokens": 1}
    sent.requests[20].usage = {"completion_tokens": 5, "accepted_tokens": 0, "rejected_tokens": 0}
    fail(sent.requests[21])
    cell, rows = summarize(load_of(warmup=10, cooldown=10), "fake", sent)
    assert (cell["num_drafted"], cell["num_accepted"]) == (4 * 38, 3 * 38)
    assert cell["acceptance_rate"] == rows[0]["acceptance_rate"] == 0.75
    assert rows[20]["num_drafted"] is None, "servers of others tell 0 where nothing is proposed"
    assert rate_rows(pd.DataFrame([cell]))[0]["accepted_percent"] == 75.0


def test_small_samples_have_no_high_percentiles() -> None:
    cell, _ = summarize(load_of(), "fake", steady(100))
    assert cell["ttft_ms_p50"] is not None
    assert cell["ttft_ms_p99"] is None
    cell, _ = summarize(load_of(), "fake", steady(9))
    assert all(cell[f"ttft_ms_{name}"] is None for name in ("mean", "p50", "p90", "p99"))
    assert cell["verdict"] == "NOISY"
    assert "too few requests" in cell["reason"]


def test_warmup_and_the_end_are_cut_by_when_requests_came() -> None:
    sent = steady(400)
    for seen in sent.requests[:30]:
        late = (40 - seen.planned.index) * 3 * MS
        seen.chunk_ns = [at + late for at in seen.chunk_ns]
    phases = find_phases(load_of(), sent.requests)
    assert 25 <= phases.count("warmup") <= 60
    lives = sorted(seen.chunk_ns[-1] - seen.due_ns for seen in sent.requests)
    median = (lives[199] + lives[200]) / 2
    last = sent.requests[-1].due_ns
    expected = sum(seen.due_ns > last - median for seen in sent.requests)
    assert phases.count("cooldown") == expected
    assert phases == sorted(phases, key=["warmup", "measured", "cooldown"].index)
    assert find_phases(load_of(warmup=7, cooldown=9), sent.requests).count("measured") == 384
    closed = load_of(rate=None, concurrency=32)
    assert find_phases(closed, steady(400).requests).count("warmup") >= 32
    burst = [observe(i, 1000 + i * 0.01, 30, 5) for i in range(100)]
    assert set(find_phases(load_of(), burst)) == {"measured"}, "there was no steady state to cut out"
    assert find_phases(load_of(warmup=500), steady(60).requests).count("warmup") == 60


def late(sent: Sent) -> None:
    for seen in sent.requests[::5]:
        seen.sent_ns += 20 * MS


def slow_loop(sent: Sent) -> None:
    sent.loop_lags_ns = [MS] * 80 + [30 * MS] * 20


def a_little_late(sent: Sent) -> None:
    for seen in sent.requests[::50]:
        seen.sent_ns += 20 * MS


def busy(sent: Sent) -> None:
    sent.cpu_ns = round(0.95 * (sent.ended_ns - sent.began_ns))


def refuse(sent: Sent) -> None:
    for seen in sent.requests[::20]:
        fail(seen, REFUSED)


def fail_few(sent: Sent) -> None:
    fail(sent.requests[400], TIMEOUT)


def fail_all(sent: Sent) -> None:
    for seen in sent.requests:
        fail(seen)


def shorten(sent: Sent) -> None:
    sent.requests[300].chunk_tokens[-1] = 0


def other_prompt(sent: Sent) -> None:
    sent.requests[300].usage = {"prompt_tokens": 2, "completion_tokens": NUM_TOKENS}


def overload(sent: Sent) -> None:
    for seen in sent.requests:
        seen.chunk_ns = [at + seen.planned.index * MS for at in seen.chunk_ns]


def scatter(sent: Sent) -> None:
    draw = np.random.default_rng(1)
    for seen in sent.requests:
        wait = round(30 * MS * draw.pareto(1.2))
        seen.chunk_ns = [at + wait for at in seen.chunk_ns]


def no_counts(sent: Sent) -> None:
    for seen in sent.requests:
        seen.chunk_tokens, seen.usage = [], {}


def shift(sent: Sent) -> None:
    """By less than a drift is held against it."""
    for seen in sent.requests[480:]:
        seen.chunk_ns = [at + 4 * MS for at in seen.chunk_ns]


@pytest.mark.parametrize(
    ("change", "verdict", "says"),
    [
        (late, "INVALID", "requests leave late, which is 20.1 ms at p90"),
        (slow_loop, "INVALID", "its event loop wakes late, which is 30.0 ms at p90"),
        (a_little_late, "NOISY", "1% of the generator's stamps are 20.1 ms late or more"),
        (busy, "INVALID", "it took 95% of a core"),
        (refuse, "INVALID", "requests failed (5."),
        (fail_few, "NOISY", "1 request failed: means are of"),
        (fail_all, "INVALID", "no request was answered: planted"),
        (
            shorten,
            "INVALID",
            "1 answer is not as long as asked, such as request 300: 4 tokens instead of 5",
        ),
        (other_prompt, "INVALID", "counts other prompts than were sent, such as 2 tokens of 3"),
        (overload, "NOISY", "TTFT grows by"),
        (scatter, "NOISY", "means are known roughly, TTFT to"),
        (no_counts, "NOISY", "does not say how many tokens"),
        (shift, "NOISY", "intervals may be narrow"),
    ],
)
def test_what_is_held_against_a_load(change: Callable[[Sent], None], verdict: str, says: str) -> None:
    sent = steady()
    assert verdict_of(sent)[0] == "VALID"
    change(sent)
    found, reason = verdict_of(sent)
    assert says in reason
    assert found == verdict


@pytest.mark.parametrize(
    ("change", "twin"),
    [(late, "generator's stamps"), (slow_loop, "generator's stamps"), (refuse, "means are of")],
)
def test_what_makes_a_load_invalid_is_said_once(change: Callable[[Sent], None], twin: str) -> None:
    sent = steady()
    change(sent)
    verdict, reason = verdict_of(sent)
    assert verdict == "INVALID"
    assert twin not in reason


def test_requests_that_were_cut_off_are_not_late() -> None:
    sent = steady()
    for seen in sent.requests[:20]:
        seen.sent_ns = seen.due_ns + 300 * MS
    lags = [summarize(load_of(warmup=n), "fake", sent)[0]["send_lag_ms_p99"] for n in (0, 20)]
    assert lags == [pytest.approx(300.0), pytest.approx(0.1)]


def test_one_lag_does_not_hide_the_other() -> None:
    sent = steady()
    late(sent)
    sent.loop_lags_ns = [MS] * 98 + [30 * MS] * 2
    assert "1% of the generator's stamps are 30.0 ms late or more" in verdict_of(sent)[1]


def test_failures_may_be_allowed_and_still_are_not_good() -> None:
    sent = steady()
    refuse(sent)
    cell, rows = summarize(load_of(failed_share=0.1, slo=parse_slo("ttft=1s")), "fake", sent)
    assert cell["verdict"] == "NOISY"
    measured = [row for row in rows if row["phase"] == "measured"]
    refused = sum(row["outcome"] == REFUSED for row in measured)
    assert cell["num_refused"] == cell["num_failed"] == refused > 0
    assert cell["good_share"] == pytest.approx(1 - refused / len(measured))
    # 5% are infinitely late: p90 is of those who were answered, p99 is of those who were not.
    answered = sorted(row["ttft_ms"] for row in measured if row["outcome"] == OK)
    assert cell["ttft_ms_p90"] == pytest.approx(answered[math.ceil(0.9 * len(measured)) - 1])
    assert cell["ttft_ms_p99"] is None


def test_what_is_not_known_is_not_good() -> None:
    sent = steady(60)
    no_counts(sent)
    assert summarize(load_of(slo=parse_slo("tpot=1s")), "fake", sent)[0]["good_share"] == 0
    assert summarize(load_of(slo=parse_slo("ttft=1s")), "fake", sent)[0]["good_share"] == 1
    one = observe(0, 1000, 20, 0, chunk_tokens=[1], chunk_ns=[1020 * MS])
    sent = Sent(requests=[one], began_ns=1000 * MS, ended_ns=1030 * MS)
    assert summarize(load_of(slo=parse_slo("tpot=1ms,itl=1ms")), "fake", sent)[0]["good_share"] == 1
    one.chunk_tokens = [NUM_TOKENS]
    assert summarize(load_of(slo=parse_slo("itl=1ms")), "fake", sent)[0]["good_share"] == 1, "one chunk"

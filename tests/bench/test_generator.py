"""What the generator measures, against a server that writes down its own times (one clock for both)."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayk.bench.client import ABORTED, FAILED, OK, REFUSED, TIMEOUT, EventLines, Observed, take_event
from rayk.bench.generator import Sent, allow_files, drive
from rayk.bench.load import Load
from rayk.bench.prompts import Planned, plan_requests
from rayk.bench.rows import request_row
from rayk.reports.columns import make_table
from rayk.reports.load_fields import LOAD_REQUEST_FIELDS
from rayk.traces.drawn import Lengths
from rayk.types.slo import Slo
from tests.bench.fake_server import FakeServer, Script, serving
from tests.markers import thorough

NS_PER_MS = 1_000_000


def sent_to(server: FakeServer, **options: Any) -> Sent:
    """A load of short prompts, sent."""
    load = Load(
        url=server.url,
        **(
            {"input_tokens": Lengths(values=(7,)), "output_tokens": Lengths(values=(6,)), "timeout_s": 60.0}
            | options
        ),
    )
    sent = Sent()
    asyncio.run(drive(load, "fake", plan_requests(load, (0, 99)), sent))
    return sent


def by_index(server: FakeServer) -> dict[int, Any]:
    """What the server saw, by the seed that each request has."""
    return {seen.body["seed"]: seen for seen in server.seen}


def test_times_are_those_of_the_server_and_tokens_are_counted_by_it() -> None:
    """Between the server's writing of a chunk and its next step nothing else can have been stamped."""
    with serving(Script(ttft_s=0.03, gap_s=0.02, tokens_per_chunk=2, first_chunk=1)) as server:
        sent = sent_to(server, rate=30.0, num_requests=12)
    written = by_index(server)
    assert len(sent.requests) == 12
    for seen in sent.requests:
        theirs = written[seen.planned.seed]
        assert seen.outcome == OK
        assert seen.num_output_tokens == 6
        assert seen.output_token_ids == [0, 0, 1, 0, 1, 0]
        assert sum(seen.chunk_tokens) == 6
        assert len(seen.chunk_ns) == len(seen.chunk_tokens) == 4
        assert seen.due_ns <= seen.sent_ns <= theirs.received_ns
        assert all(ours >= at for ours, at in zip(seen.chunk_ns, theirs.chunk_ns, strict=True))
        assert seen.ended_ns >= seen.chunk_ns[-1]
        assert seen.usage == {"prompt_tokens": 7, "completion_tokens": 6, "cached_tokens": 3}
        body = theirs.body
        assert body["prompt"] == seen.planned.prompt
        assert (body["max_tokens"], body["stream"], body["ignore_eos"], body["temperature"]) == (
            6,
            True,
            True,
            0,
        )


def test_turns_of_a_session_leave_behind_its_answers(tmp_path: Path) -> None:
    """Its second is due 30 ms after the server's answer, its third at its own time, others meanwhile."""
    rows = [
        {"timestamp": 0, "session_id": "a", "input_length": 8, "output_length": 3},
        {"timestamp": 20, "input_length": 4, "output_length": 1},
        {"delay": 30, "session_id": "a", "input_length": 12, "output_length": 2},
        {"timestamp": 400, "session_id": "a", "input_length": 16, "output_length": 1},
    ]
    path = tmp_path / "agents.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with serving(Script(ttft_s=0.05, gap_s=0.01)) as server:
        sent = sent_to(server, trace=path)
    first, second, third = (s for s in sent.requests if s.planned.session == "a")
    assert second.due_ns == first.ended_ns + 30 * NS_PER_MS
    assert third.due_ns == sent.began_ns + 400 * NS_PER_MS
    assert all(s.outcome == OK and s.sent_ns >= s.due_ns for s in sent.requests)
    assert second.planned.prompt[:8] == first.planned.prompt
    other = next(s for s in sent.requests if s.planned.session is None)
    assert other.due_ns == sent.began_ns + 20 * NS_PER_MS


@thorough
def test_a_server_that_stalls_is_charged_for_everybody_it_kept_waiting() -> None:
    """One slot, and the first request holds it for a second. Requests due meanwhile are late by the rest of
    that second, though each was answered at once when its turn came."""

    def script(number: int, body: dict[str, Any]) -> Script:
        del body
        return Script(ttft_s=1.0 if number == 0 else 0.0)

    with serving(script, num_slots=1) as server:
        sent = sent_to(server, rate=50.0, process="constant", num_requests=20)
    written = by_index(server)
    first = sent.requests[0]
    released_ns = written[first.planned.seed].chunk_ns[0]
    kept_waiting = [s for s in sent.requests[1:] if s.due_ns < released_ns]
    assert len(kept_waiting) == 19, "they are due within 0.4 s"
    for seen in kept_waiting:
        assert seen.chunk_ns[0] - seen.due_ns >= released_ns - seen.due_ns
    gaps = [b.due_ns - a.due_ns for a, b in pairwise(sent.requests)]
    assert max(abs(gap - 20 * NS_PER_MS) for gap in gaps) <= 1, "due times know nothing of the server"


def test_an_open_load_does_not_wait_for_answers() -> None:
    """The server answers nobody before all are there."""
    with serving(Script(waits_for=5)) as server:
        sent = sent_to(server, rate=200.0, num_requests=5, timeout_s=30.0)
    assert server.max_open == 5
    assert [seen.outcome for seen in sent.requests] == [OK] * 5


def test_a_request_has_a_deadline() -> None:
    with serving(Script(hangs=True)) as server:
        sent = sent_to(server, rate=200.0, num_requests=3, timeout_s=0.5)
    assert [(seen.outcome, seen.error) for seen in sent.requests] == [(TIMEOUT, "no end within 0.5 s")] * 3
    assert all(seen.ended_ns - seen.sent_ns >= 500 * NS_PER_MS for seen in sent.requests)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_closed_load_has_so_many_in_flight_and_no_more(concurrency: int) -> None:
    with serving(Script(ttft_s=0.02)) as server:
        sent = sent_to(server, concurrency=concurrency, num_requests=13)
    assert server.max_open == concurrency
    assert [seen.planned.index for seen in sent.requests] == list(range(13))
    assert all(seen.outcome == OK for seen in sent.requests)
    ended = sorted(seen.ended_ns for seen in sent.requests)
    for i, seen in enumerate(sent.requests[concurrency:]):
        assert seen.due_ns >= ended[i], "it goes when another one has ended"


FAULTS: dict[str, tuple[Script, str, str]] = {
    "429": (Script(status=429), REFUSED, "HTTP 429: scripted 429"),
    "500": (Script(status=500), FAILED, "HTTP 500: scripted 500"),
    "cut": (Script(breaks_after=2), FAILED, "the stream broke: "),
    "error": (Script(error_after=2), FAILED, "in the stream: scripted failure"),
    "nothing": (Script(num_tokens=0), FAILED, "without a finish reason"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_failures_are_told_apart(name: str) -> None:
    script, outcome, says = FAULTS[name]
    with serving(lambda number, _: script if number % 2 else Script()) as server:
        sent = sent_to(server, concurrency=1, num_requests=6)
    assert [seen.outcome for seen in sent.requests] == [OK, outcome] * 3
    for seen in sent.requests[1::2]:
        assert says in (seen.error or "")
        assert len(seen.chunk_ns) == (2 if name in ("cut", "error") else 0)


def test_a_server_that_is_gone_fails_every_request() -> None:
    with serving(Script()) as server:
        pass
    sent = sent_to(server, rate=100.0, num_requests=5)
    assert [seen.outcome for seen in sent.requests] == [FAILED] * 5
    assert {seen.error for seen in sent.requests} == {"no server answers: nothing listens there"}


def test_tokens_are_not_chunks() -> None:
    """A server that tells usage alone: the count is right, what a chunk has is unknown. One that tells
    nothing: no count. One token per chunk: both agree."""
    scripts = [
        Script(tells_token_ids=False, tokens_per_chunk=2, first_chunk=2),
        Script(tells_token_ids=False, tells_usage=False),
        Script(tells_token_ids=False),
    ]
    with serving(lambda number, _: scripts[number]) as server:
        coarse, silent, fine = sent_to(server, concurrency=1, num_requests=3).requests
    assert (coarse.num_output_tokens, coarse.chunk_tokens, len(coarse.chunk_ns)) == (6, [], 3)
    assert (silent.num_output_tokens, silent.chunk_tokens, len(silent.chunk_ns)) == (None, [], 6)
    assert fine.num_output_tokens == len(fine.chunk_ns) == 6


def test_chat_starts_with_the_first_text_and_not_with_the_role(tmp_path: Any) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n', encoding="utf-8")
    with serving(Script(ttft_s=0.05, tells_token_ids=False)) as server:
        sent = sent_to(server, concurrency=1, prompts=path, use_chat=True, num_requests=2)
    for seen, theirs in zip(sent.requests, server.seen, strict=True):
        assert theirs.body["messages"] == [{"role": "user", "content": "hello"}]
        assert seen.chunk_ns[0] >= theirs.chunk_ns[0]
        assert len(seen.chunk_ns) == 6


def test_requests_in_flight_are_given_up_when_the_load_is() -> None:
    """Cancelling leaves what was seen so far, and the server sees its clients go."""
    load = Load(url="", concurrency=3, input_tokens=Lengths(values=(3,)), num_requests=9)

    async def cancelled(load: Load, planned: list[Planned], sent: Sent) -> None:
        task = asyncio.create_task(drive(load, "fake", planned, sent))
        while len(sent.requests) < 3 or not all(s.status for s in sent.requests):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(Script(hangs=True)) as server:
        load = replace(load, url=server.url)
        sent = Sent()
        asyncio.run(cancelled(load, plan_requests(load, (0, 9)), sent))
        wait_until(lambda: server.num_open == 0)
    assert [seen.outcome for seen in sent.requests] == [ABORTED] * 3
    assert sent.ended_ns > sent.began_ns > 0


def wait_until(holds: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Poll until it holds; fail after the deadline."""

    async def poll() -> None:
        async with asyncio.timeout(deadline_s):
            while not holds():
                await asyncio.sleep(0.02)

    asyncio.run(poll())


def test_keys_and_extra_fields_are_sent() -> None:
    with serving(Script()) as server:
        sent_to(
            server,
            concurrency=1,
            num_requests=1,
            api_key="secret",
            body={"top_k": 5, "return_token_ids": None},
        )
    assert server.seen[0].headers["Authorization"] == "Bearer secret"
    assert server.seen[0].body["top_k"] == 5
    assert "return_token_ids" not in server.seen[0].body


@thorough
def test_the_generator_watches_its_own_loop() -> None:
    """A blocked event loop shows in its lags and in those of the requests that were due meanwhile."""
    blocked: list[int] = []

    def block_once(seen: Observed) -> None:
        del seen
        if not blocked:
            blocked.append(time.monotonic_ns())
            time.sleep(0.3)
            blocked.append(time.monotonic_ns())

    sent = Sent()
    with serving(Script()) as server:
        load = Load(url=server.url, rate=50.0, process="constant", num_requests=30)
        asyncio.run(drive(load, "fake", plan_requests(load, (0, 9)), sent, block_once))
    assert max(sent.loop_lags_ns) >= 200 * NS_PER_MS
    meanwhile = [seen for seen in sent.requests if blocked[0] < seen.due_ns < blocked[1]]
    for seen in meanwhile:
        assert seen.sent_ns >= blocked[1]
        assert seen.chunk_ns[0] - seen.due_ns >= blocked[1] - seen.due_ns
    assert 0 < sent.cpu_ns < sent.ended_ns - sent.began_ns


def test_a_process_may_have_a_connection_per_request() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 300), hard))
        allow_files(400)
        found, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert found >= 400 or found == hard
        allow_files(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == found, "it never takes any away"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


EVENTS = [b"{}", b'{"a": 1}', b"[DONE]", "ünïcode".encode(), b""]


@given(
    st.lists(st.sampled_from(EVENTS), max_size=8),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_events_may_be_cut_anywhere(events: list[bytes], end: bytes, cuts: list[int]) -> None:
    text = b"".join(b": comment" + end + b"data: " + data + end + end for data in events) + b": bye\n"
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    lines = EventLines()
    found = [data for a, b in pairwise(at) for data in lines.feed(text[a:b])]
    assert found == events


def test_events_of_several_lines_are_joined() -> None:
    assert list(EventLines().feed(b"data: one\ndata:two\n\nevent: x\ndata:  three\n\n")) == [
        b"one\ntwo",
        b" three",
    ]


NAMES = ("choices", "usage", "token_ids", "delta", "text", "content", "finish_reason")
DRAFTED = ("completion_tokens_details", "accepted_prediction_tokens", "rejected_prediction_tokens")
COUNTED = ("completion_tokens", "prompt_tokens", "prompt_tokens_details", "cached_tokens", *DRAFTED)
PLAIN = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(width=16) | st.text(max_size=3)
SHAPES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
        | st.dictionaries(st.sampled_from(COUNTED), inner, max_size=3)
    ),
    max_leaves=8,
)
EVENT_SHAPES = SHAPES | st.fixed_dictionaries({}, optional={"choices": SHAPES, "usage": SHAPES})


@given(st.lists(EVENT_SHAPES, max_size=3))
def test_whatever_a_server_says_is_a_row_or_a_failure(events: list[Any]) -> None:
    """Events of any shape end in numbers that fit the table, never in an exception."""
    seen = Observed(planned=Planned(index=0, due_ns=None, prompt=[1], max_tokens=1, seed=0))
    for event in events:
        if not take_event(seen, json.dumps(event).encode(), 5):
            assert seen.outcome == FAILED
            assert seen.error
            break
    row = request_row(seen, cell_id="c", phase="measured", began_ns=0, slo=Slo())
    make_table([row], LOAD_REQUEST_FIELDS)


def test_an_event_that_is_no_json_is_a_failure() -> None:
    planned = Planned(index=0, due_ns=None, prompt=[1], max_tokens=1, seed=0)
    seen = Observed(planned=planned)
    assert not take_event(seen, b"oops", 5)
    assert (seen.outcome, seen.error) == (FAILED, "in the stream: oops")

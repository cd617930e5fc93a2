"""When engines say that requests came and were begun with: real engines in this process."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path

from rayk.engine.leader import RequestEvent
from tests.pd import Pair, make_request

PROMPT = tuple(range(5, 105))


def begun_ns(event: RequestEvent) -> int | None:
    """When a step first took the request, where the event tells that."""
    return None if event.info is None else event.info.first_step_ns


def told(stream: queue.SimpleQueue[RequestEvent]) -> list[RequestEvent]:
    """All events of a request."""
    events = [stream.get(timeout=60)]
    while not events[-1].is_last:
        events.append(stream.get(timeout=60))
    return events


def test_the_first_token_tells_when_the_request_came_and_a_step_took_it(
    checkpoint: Callable[..., Path],
) -> None:
    with Pair.open(checkpoint("qwen3"), max_batch_tokens=32) as pair:
        before_ns = time.monotonic_ns()
        request = make_request("r", PROMPT, 4)
        first, ticket = told(pair.start_prefill(request))
        # The prompt takes four steps: the first of them counts.
        came, step = first.info.submitted_ns, first.info.first_step_ns
        assert before_ns <= came <= step < first.time_ns <= ticket.time_ns
        assert ticket.info is None
        assert pair.p.engine.leader.scheduler.num_prompt_tokens == len(PROMPT)
        pair.p.handover.settle("r")
        completion = pair.prefill(make_request("again", PROMPT, 4))
        events = told(pair.start_decode(make_request("again", PROMPT, 4), completion))
        here, *tokens = events
        assert completion.payload.digest_ns[0] > 0  # type: ignore[attr-defined]
        assert ticket.time_ns < here.info.submitted_ns <= here.info.taken_ns
        assert here.info.taken_ns + sum(here.info.stage_ns.values()) <= here.time_ns
        assert here.time_ns <= tokens[0].info.first_step_ns < tokens[0].time_ns
        assert all(event.info is None for event in tokens[1:-1]), "most tell nothing else"
        assert all(begun_ns(event) is None for event in tokens[1:])


def test_who_waits_for_a_row_is_not_begun_with(checkpoint: Callable[..., Path]) -> None:
    with Pair.open(checkpoint("qwen3"), max_seqs=1) as pair:
        streams: list[queue.SimpleQueue[RequestEvent]] = [queue.SimpleQueue() for _ in range(2)]
        for number, stream in enumerate(streams):
            request = make_request(f"r{number}", PROMPT, 12)
            pair.p.handover.submit(request, stream.put, hand_over=False)
        first, second = map(told, streams)
        assert second[0].info.submitted_ns < first[-1].time_ns
        assert second[0].info.first_step_ns >= first[-1].time_ns


def test_a_request_that_is_preempted_was_begun_with_once(checkpoint: Callable[..., Path]) -> None:
    # 14 blocks of 16 tokens for two requests of 100 + 24: the later one gives its blocks up, and comes back.
    with Pair.open(checkpoint("qwen3"), num_blocks=15) as pair:
        streams: list[queue.SimpleQueue[RequestEvent]] = [queue.SimpleQueue() for _ in range(2)]
        for number, stream in enumerate(streams):
            pair.p.handover.submit(make_request(f"r{number}", PROMPT, 24), stream.put, hand_over=False)
        events = [event for stream in streams for event in told(stream)]
        assert pair.p.engine.leader.scheduler.num_preemptions > 0
        begun = [ns for event in events if (ns := begun_ns(event)) is not None]
        assert len(begun) == 2
        assert all(len(event.token_ids) == 1 for event in events)

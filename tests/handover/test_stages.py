"""Hand-overs between engines of unlike pipeline stages: digests are equal, tokens are transformers'."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayk.types.batch import ScheduledBatch
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.markers import one_per, thorough
from tests.pd import HANG_S, Pair, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gemma3n": ("gemma3n", {}),
    "falcon_h1": ("falcon_h1", {}),
}
Shape = tuple[int, int, tuple[int, ...]]
"""TP, DCP, layers of each stage."""


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


def settings(shape: Shape) -> dict[str, object]:
    _, dcp, layers = shape
    return {"dcp": dcp} | ({"pp": len(layers), "pp_layers": layers} if layers else {})


@one_per()
@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize(
    ("model", "p", "d"),
    [
        ("llama", (1, 1, (1, 3)), (1, 1, (2, 1, 1))),
        ("llama", (1, 1, (2, 2)), (2, 1, ())),
        ("llama", (1, 1, ()), (2, 1, (3, 1))),
        ("llama", (4, 2, ()), (1, 1, (2, 2))),
        ("gemma3n", (1, 1, (2, 4)), (2, 1, ())),
        ("falcon_h1", (2, 1, ()), (1, 1, (1, 3))),
    ],
)
def test_tokens_are_transformers(
    answers: Callable[[str], Answers], model: str, p: Shape, d: Shape, push: bool
) -> None:
    found = answers(model)
    changes = settings(p), settings(d)
    with Pair.open(found.path, tp=(p[0], d[0]), changes=changes, push=push, max_batch_tokens=70) as pair:
        assert pair.generate(found.prompts, NUM_TOKENS) == found.expected


@thorough
def test_an_abort_of_a_pushed_prefill_spoils_nothing(answers: Callable[[str], Answers]) -> None:
    """Stages still compute its chunks, and would push them, when its blocks at D are given to others."""
    llama = answers("llama")
    shape: Shape = (1, 1, (1, 1, 1, 1))
    with Pair.open(
        llama.path, changes=(settings(shape), settings((1, 1, ()))), push=True, max_batch_tokens=24
    ) as pair:
        for number in range(3):
            doomed = make_request(f"doomed {number}", llama.prompts[2], NUM_TOKENS)
            reservation = pair.reserve(doomed)
            events: list[Any] = []
            pair.p.handover.submit(doomed, events.append, hand_over=True, reservation=reservation)
            pair.p.engine.leader.abort(doomed.request_id)
            pair.d.engine.leader.abort(doomed.request_id)
            assert pair.generate(llama.prompts, NUM_TOKENS) == llama.expected


@thorough
def test_what_arrives_in_blocks_of_the_aborted_is_not_written_over(
    answers: Callable[[str], Answers],
) -> None:
    """D's last stages still compute a request's chunks when it is aborted, and its pool has no room for an
    arriving one but in its blocks."""
    llama = answers("llama")
    prompt, expected = llama.prompts[2], llama.expected[2]
    d = settings((1, 1, (1, 1, 1, 1))) | {"num_blocks": 24, "max_batch_tokens": 24}
    with Pair.open(llama.path, changes=({}, d)) as pair:
        scheduler, leader = pair.d.engine.leader.scheduler, pair.d.engine.leader
        schedule, arriving = scheduler.schedule, queue.SimpleQueue[Any]()
        waiting: list[tuple[str, Callable[[], Any]]] = []

        def abort_at_the_last_chunk() -> ScheduledBatch | None:
            batch = schedule()
            for share in batch.requests if batch is not None else ():
                ends = share.num_computed_tokens + len(share.token_ids)
                if waiting and share.request_id == waiting[0][0] and ends >= len(prompt) - 24:
                    doomed, start = waiting.pop()
                    arriving.put(start())
                    leader.abort(doomed)
            return batch

        scheduler.schedule = abort_at_the_last_chunk  # type: ignore[method-assign]
        for number in range(3):
            request = make_request(f"r{number}", prompt, NUM_TOKENS)
            prefilled = pair.prefill(request)
            doomed = make_request(f"doomed {number}", prompt[::-1], NUM_TOKENS)
            waiting.append((doomed.request_id, partial(pair.start_decode, request, prefilled)))
            pair.d.handover.submit(doomed, lambda _: None, hand_over=False)
            done = pair.d.engine.collect(arriving.get(timeout=HANG_S), into=prefilled)
            assert done.error is None
            assert done.token_ids == expected
        pair.check_all_free()

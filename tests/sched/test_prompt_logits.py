"""Which of a step's logits tell of prompt tokens: every prompt token's once, whatever is recomputed."""

from __future__ import annotations

import random

from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.sched.request_state import RequestState
from rayk.types.batch import ScheduledRequest
from rayk.types.request import Request, SamplingParams, TokenLogprobs
from tests.kv.brute import full
from tests.sched.world import one_layer_each

BLOCK = 4


def told_of(share: ScheduledRequest, prompt: tuple[int, ...]) -> list[TokenLogprobs]:
    """What a model's logits at the asked positions are about: the prompt's next tokens."""
    positions = [share.num_computed_tokens + at + 1 for at in range(*share.prompt_logits)]
    assert share.prompt_logits[1] <= len(share.token_ids)
    return [TokenLogprobs(token_id=prompt[p], logprob=-float(p), rank=1, top=()) for p in positions]


def test_every_prompt_token_is_told_of_once() -> None:
    num_partly_told = sum(run_requests(seed) for seed in range(12))
    assert num_partly_told > 3, "some were preempted inside their prompts"


def run_requests(seed: int) -> int:
    """Some requests under a short pool, checked; how often one was preempted inside its prompt."""
    draw = random.Random(seed)
    manager = KVCacheManager(one_layer_each(full(BLOCK)), 13)
    scheduler = Scheduler(manager, max_batch_tokens=draw.choice([1, 3, 7, 40]), max_seqs=3, max_positions=99)
    states: list[RequestState] = []
    for n in range(8):
        prompt = tuple(draw.randrange(50) for _ in range(draw.randint(1, 30)))
        sampling = SamplingParams(max_tokens=draw.randint(1, 12), prompt_logprobs=draw.choice([None, 0, 2]))
        states.append(scheduler.add(Request(request_id=str(n), prompt_token_ids=prompt, sampling=sampling)))
    partly_told = 0
    for _ in range(2000):
        before = {s.request_id: s.num_computed for s in states}
        batch = scheduler.schedule()
        for s in states:
            lost = before[s.request_id] > s.num_computed
            partly_told += lost and 1 < len(s.prompt_logprobs or ()) < len(s.request.prompt_token_ids)
        if batch is None:
            break
        told = {
            share.request_id: told_of(share, state.request.prompt_token_ids)
            for share, state in zip(batch.requests, scheduler.scheduled(batch), strict=True)
        }
        scheduler.update(batch, {s.request_id: 7 for s in batch.requests if s.needs_logits}, told)
    assert not scheduler.has_work
    for state in states:
        if state.request.sampling.prompt_logprobs is None:
            assert state.prompt_logprobs is None
        else:
            assert state.prompt_logprobs is not None
            assert state.prompt_logprobs[0] is None
            rest = [(e.token_id, e.logprob) for e in state.prompt_logprobs[1:] if e is not None]
            prompt = state.request.prompt_token_ids
            assert rest == [(token, -float(p)) for p, token in enumerate(prompt)][1:]
    return partly_told


def test_an_engine_that_got_the_prompts_kv_tells_nothing_of_it() -> None:
    manager = KVCacheManager(one_layer_each(full(BLOCK)), 9)
    scheduler = Scheduler(manager, max_batch_tokens=40, max_seqs=3, max_positions=99)
    request = Request(
        request_id="r", prompt_token_ids=tuple(range(10)), sampling=SamplingParams(prompt_logprobs=1)
    )
    assert manager.reserve_live("r", 10) is not None
    state = scheduler.add_prefilled(request, [3])
    for _ in range(2):
        batch = scheduler.schedule()
        assert batch is not None
        assert [r.prompt_logits for r in batch.requests] == [(0, 0)]
        scheduler.update(batch, {"r": 5})
        state.num_computed = 0  # as after a preemption

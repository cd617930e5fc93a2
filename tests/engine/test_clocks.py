"""An engine's loop and leader over a rank that computes nothing, by a clock that only its steps move on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from rayk.engine.leader import Leader, RequestEvent
from rayk.engine.loop import EngineLoop, NoExtension
from rayk.engine.sampling import PendingTokens
from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.types.batch import ScheduledBatch, StepTokens
from rayk.types.request import Request, SamplingParams
from tests.kv.brute import full

STEP_NS, TOKEN_NS = 1_000_000, 10_000


class SteppedLeader(Leader):
    """Waits for nothing; a request's n-th output token is n."""

    def wait(self) -> None:
        self.run_posted()

    def sample(
        self, batch: ScheduledBatch, logits: torch.Tensor, prompt_logits: Iterable[torch.Tensor]
    ) -> PendingTokens:
        del logits, prompt_logits
        states = zip(batch.requests, self.scheduler.scheduled(batch), strict=True)
        found = {r.request_id: len(s.output_token_ids) + 1 for r, s in states if r.needs_logits}
        return PendingTokens(tokens=torch.empty(0), finish=lambda _: StepTokens(token_ids=found))


class TimedRank:
    """Takes STEP_NS and TOKEN_NS for each token, of a clock that nothing else moves on."""

    def __init__(self) -> None:
        self.comm: Any = SimpleNamespace(rank=0, size=1)
        self.comms: Any = SimpleNamespace(before=None, after=None)
        self.stage, self.drafter, self.why_not_ahead = 0, None, "it computes before it returns"
        self.now_ns = 0
        self.measure: Callable[[], int] = lambda: 0

    def clock(self) -> int:
        return self.now_ns

    def step(self, batch: ScheduledBatch) -> torch.Tensor:
        took_ns = STEP_NS + TOKEN_NS * batch.num_tokens
        self.now_ns += took_ns
        self.measure = lambda: took_ns
        return torch.empty(0)

    def prompt_logits(self) -> Iterator[torch.Tensor]:
        return iter(())

    def fetch(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        del tokens
        return list


def test_a_loop_goes_by_the_clock_it_is_given() -> None:
    """Chunks of 8, 8 and 4 tokens, then a token a step: no time passes but the steps' own."""
    rank: Any = TimedRank()
    manager = KVCacheManager((KVCacheGroup(0, full(4), (0,), 1),), 16)
    scheduler = Scheduler(manager, max_batch_tokens=8, max_seqs=2, max_positions=64)
    leader = SteppedLeader(scheduler, manager, clock=rank.clock)
    loop = EngineLoop(rank, NoExtension(), leader, clock=rank.clock)
    events: list[tuple[int, RequestEvent]] = []
    prompt = tuple(range(20))
    leader.submit(
        Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=3)),
        lambda event: events.append((rank.now_ns, event)),
    )
    rank.now_ns = 5
    while scheduler.has_work or not events:
        loop.turn()
    steps_ns = [STEP_NS + TOKEN_NS * n for n in (8, 8, 4, 1, 1)]
    ends_ns = [5 + sum(steps_ns[:n]) for n in (3, 4, 5)]
    assert [(at_ns, event.token_ids) for at_ns, event in events] == list(
        zip(ends_ns, [(1,), (2,), (3,)], strict=True)
    )
    first = events[0][1].info
    assert first is not None
    assert first.first_step_ns == 5
    assert (loop.times.turn_ns, loop.times.model_ns) == (sum(steps_ns), sum(steps_ns))
    assert manager.pool.num_free_blocks == 15

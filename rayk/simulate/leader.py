"""Make an engine's leader one of a simulation: it waits for nothing, and its tokens follow a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rayk.engine.leader import Leader, RequestEvent
from rayk.engine.sampling import PendingTokens
from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.simulate.tokens import TokenRule
from rayk.types.batch import ScheduledBatch, StepTokens


class SimLeader(Leader):
    """A leader whose turns somebody else takes, told by `on_post` that there is something to do."""

    def __init__(
        self,
        scheduler: Scheduler,
        manager: KVCacheManager,
        *others: Any,
        rule: TokenRule,
        on_post: Callable[[], object] = int,
        **settings: Any,
    ) -> None:
        self._rule = rule
        self._on_post = on_post
        super().__init__(scheduler, manager, *others, **settings)

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything, without news from elsewhere."""
        return self._busy() or not self._inbox.empty()

    def post(self, action: Callable[[], None]) -> None:
        super().post(action)
        self._on_post()

    def wait(self) -> None:
        """Run what was posted."""
        self.run_posted()

    def sample(
        self, batch: ScheduledBatch, logits: torch.Tensor, prompt_logits: Iterable[torch.Tensor]
    ) -> PendingTokens:
        """Choose tokens by the rule: a request's next one, those in flight counted."""
        del logits, prompt_logits
        found = {}
        for share, state in zip(batch.requests, self.scheduler.scheduled(batch), strict=True):
            if share.needs_logits:
                number = state.num_tokens - len(state.request.prompt_token_ids)
                found[share.request_id] = self._rule.token(share.request_id, number)
        return PendingTokens(tokens=torch.empty(0), finish=lambda _: StepTokens(token_ids=found))

    def emit(self, event: RequestEvent, *, ends: bool = True) -> None:
        """Stamp the event by the engine's clock."""
        object.__setattr__(event, "time_ns", self.clock())  # nobody has seen it yet
        super().emit(event, ends=ends)

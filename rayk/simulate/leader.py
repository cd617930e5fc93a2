"""Make an engine's leader one of a simulation: it waits for nothing, and its tokens follow a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from rayk.engine.leader import Leader, Sink
from rayk.engine.sampling import PendingTokens
from rayk.handover.handover import TransferHandover
from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.sched.drafting import Drafter
from rayk.sched.request_state import RequestState
from rayk.simulate.late_sink import LateSink
from rayk.simulate.tokens import SimOutput, TokenRule
from rayk.types.batch import ScheduledBatch, ScheduledRequest, StepTokens
from rayk.types.errors import UserError
from rayk.types.request import TokenLogprobs

NO_TOKENS = torch.empty(0)


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
        self.proposer: Drafter | None = None
        """Says what a drafter on ranks proposes."""
        super().__init__(scheduler, manager, *others, **settings)

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything, without news from elsewhere."""
        return self._busy() or not self._inbox.empty()

    @property
    def is_quiet(self) -> bool:
        """Whether its next turn would be for the scheduler's batch alone."""
        is_asked = self._calls or self._stopping or not self._inbox.empty()
        handover = cast("TransferHandover | None", self._handover)
        return not is_asked and (handover is None or handover.is_quiet)

    def _outside_vocabulary(self, prompt: Sequence[int], vocab_size: int) -> UserError | None:
        """Look once at a prompt that many requests share."""
        return None if self._rule.knows(prompt) else super()._outside_vocabulary(prompt, vocab_size)

    def sink_of(self, request_id: str) -> Sink | None:
        """Find who hears of a request that is here."""
        return self._sinks.get(request_id)

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
        found, outputs = {}, self._rule.output
        verified: dict[str, list[int]] = {}
        for share, state in zip(batch.requests, self.scheduler.scheduled(batch), strict=True):
            if share.needs_logits:
                name = share.request_id
                number = len(state.tokens) + state.num_sampled_ahead - state.num_prompt
                if share.num_drafts:
                    verified[name] = _verified(share, outputs(name), number)
                else:
                    found[name] = outputs(name).token(number)
        tokens = StepTokens(token_ids=found, accepted=verified)
        return PendingTokens(tokens=NO_TOKENS, finish=lambda _: tokens)

    def take_proposals(self, proposals: Sequence[Sequence[int]], drawn_from: Mapping[int, Any]) -> None:
        """Keep what `proposer` says in place of ranks."""
        drafting = self.scheduler.drafting
        assert drafting is not None
        assert self.proposer is not None, "an engine with a drafter on its ranks has one"
        drafting.take([self.proposer.propose(state, num) for state, num in drafting.asked])

    def _deliver(self, state: RequestState, logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Tell of a request's last token; at once only if there is more to say than that."""
        sink = self._sinks.get(state.request.request_id)
        is_plain = state.is_reported and state.finish_reason is None and not state.waits_for_token
        if is_plain and isinstance(sink, LateSink):
            if state.num_new == 1:
                sink.note(state.tokens[-1], self.clock())
            else:
                sink.note_all(state.tokens[-state.num_new :], [self.clock()] * state.num_new)
        else:
            super()._deliver(state, logprobs)

    def tell_all(self, state: RequestState, tokens: list[int], times_ns: list[int]) -> None:
        """Tell of a request's last tokens, the last of which came now."""
        assert state.is_reported, "its first token comes of a single step"
        sink = self._sinks.get(state.request.request_id)
        assert isinstance(sink, LateSink), "a request that runs has a sink"
        if state.finish_reason is None:
            sink.note_all(tokens, times_ns)
        else:
            sink.note_all(tokens[:-1], times_ns[:-1])
            self._deliver(state, None)


def _verified(share: ScheduledRequest, output: SimOutput, number: int) -> list[int]:
    """Return the drafts of a step that are the output's tokens from this number on, and the one after them:
    what `accept: match` makes of them."""
    found: list[int] = []
    for draft in share.token_ids[-share.num_drafts :]:
        found.append(output.token(number + len(found)))
        if found[-1] != draft:
            return found
    return [*found, output.token(number + len(found))]

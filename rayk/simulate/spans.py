"""Take decode steps of a simulated engine at once, where they decide nothing: see sched.quiet.

A span is planned at the begin of a turn, and carried out when its last step ends, or when something reaches
the engine: then the steps are taken whose turns had begun, and the next turn is as if they had been taken one
by one. So what happens elsewhere costs nothing here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from rayk.costs import DecodeRun, decode_run
from rayk.sched.quiet import advance, num_quiet_steps
from rayk.sched.request_state import RequestState
from rayk.simulate.leader import SimLeader
from rayk.simulate.rank import StepTimer
from rayk.simulate.tokens import TokenRule

MAX_STEPS = 256
"""A span has no more of them."""


@dataclass(frozen=True, slots=True)
class QuietSpan:
    """Steps that are planned."""

    begin_ns: int
    run: DecodeRun
    model_ns: list[int]
    ends_ns: list[int]  # of their turns, each of which begins where the one before ends

    def begins_ns(self, index: int) -> int:
        return self.ends_ns[index - 1] if index else self.begin_ns

    def num_begun(self, is_past: Callable[[int], bool]) -> int:
        """Count the steps whose turns began at a time of which `is_past` is true; it is of the first."""
        return bisect_left(range(len(self.ends_ns)), True, key=lambda i: not is_past(self.begins_ns(i)))


class QuietSpans:
    """Plans and carries out spans of one engine."""

    def __init__(self, leader: SimLeader, timer: StepTimer, rule: TokenRule) -> None:
        self._leader = leader
        self._timer = timer
        self._rule = rule

    def plan(self, begin_ns: int, until_ns: int | None) -> QuietSpan | None:
        """Plan quiet steps from now on that end before `until_ns`; None: take a single step."""
        scheduler = self._leader.scheduler
        num = num_quiet_steps(scheduler, MAX_STEPS, self._num_left)
        if not num:
            return None
        run = decode_run([s.num_computed for s in scheduler.running], num, self._timer.windows)
        model_ns, host_ns = self._timer.ahead(run)
        ends_ns = list(accumulate((n + host_ns for n in model_ns), initial=begin_ns))[1:]
        if until_ns is not None:
            del ends_ns[bisect_left(ends_ns, until_ns) :]
        return QuietSpan(begin_ns, run, model_ns, ends_ns) if ends_ns else None

    def carry_out(
        self, span: QuietSpan, num_steps: int, watch: Callable[[int], object] | None = None
    ) -> None:
        """Take the first steps of a span, the last of which ends now; `watch` is that of sched.quiet."""
        scheduler, times_ns = self._leader.scheduler, span.ends_ns[:num_steps]
        states = list(scheduler.running)
        told: list[list[int]] = []

        def tokens_of(state: RequestState, num: int) -> list[int]:
            number = len(state.tokens) - len(state.request.prompt_token_ids) + 1
            told.append(self._rule.tokens(state.request_id, number, num))
            return told[-1]

        advance(scheduler, num_steps, tokens_of, watch)
        self._timer.passed(num_steps)
        for state, tokens in zip(states, told, strict=True):
            self._leader.tell_all(state, tokens, times_ns)

    def _num_left(self, state: RequestState) -> int:
        return self._rule.num_left(state.request_id, len(state.tokens) - len(state.request.prompt_token_ids))

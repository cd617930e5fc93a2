"""Take decode steps of a simulated engine at once, where they decide nothing: see sched.quiet.

A span is planned at the begin of a turn, and carried out when its last step ends, or when something reaches
the engine: then the steps are taken whose turns had begun, and the next turn is as if they had been taken one
by one. So what happens elsewhere costs nothing here.

Where an engine runs ahead, a turn queues a step and settles the one before: a span's first turn settles what
was in flight, and its last step stays in flight.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from rayk.costs import DecodeRun, StepFeatures, decode_run
from rayk.engine.loop import EngineLoop, StepInFlight
from rayk.sched.quiet import advance, later_batch, num_quiet_steps
from rayk.simulate.leader import SimLeader
from rayk.simulate.rank import NO_LOGITS, SimRank
from rayk.simulate.tokens import SimOutput, TokenRule

MAX_STEPS = 256
"""A span has no more of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledStep:
    """One of the steps that were taken."""

    features: StepFeatures
    begin_ns: int
    end_ns: int
    model_ns: int
    num_commands: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class QuietSpan:
    """Turns that are planned, one behind the other. Each queues a step of `run`, and settles that or, where
    one was in flight before, the one before that."""

    begin_ns: int
    ends_ns: list[int]  # of the turns
    run: DecodeRun
    model_ns: list[int]  # of its steps
    outputs: list[SimOutput]  # of the requests that run, in their order
    since_ns: int  # when the turn of the first step that is settled began
    free_ns: list[int] = field(default_factory=list)
    """When the device is done with each of the steps, where one was in flight before."""
    before: StepInFlight | None = None
    before_features: StepFeatures | None = None

    def begins_ns(self, index: int) -> int:
        return self.ends_ns[index - 1] if index else self.begin_ns

    def num_begun(self, at_ns: int, *, is_over: bool = True) -> int:
        """Count the turns that began up to a time; `is_over`: those at that very time have begun, too."""
        begins_ns = [self.begin_ns, *self.ends_ns[:-1]]
        return bisect_right(begins_ns, at_ns) if is_over else bisect_left(begins_ns, at_ns)

    def settled(self, index: int) -> SettledStep:
        """Describe the step that a turn settles."""
        when = {
            "begin_ns": self.begins_ns(index) if index else self.since_ns,
            "end_ns": self.ends_ns[index],
        }
        if self.before is None:
            return SettledStep(features=self.run.step(index), model_ns=self.model_ns[index], **when)
        if index:
            return SettledStep(features=self.run.step(index - 1), model_ns=self.model_ns[index - 1], **when)
        assert self.before_features is not None
        return SettledStep(
            features=self.before_features,
            model_ns=self.before.measure(),
            num_commands=self.before.num_commands,
            **when,
        )


class QuietSpans:
    """Plans and carries out spans of one engine."""

    def __init__(self, leader: SimLeader, rank: SimRank, loop: EngineLoop, rule: TokenRule) -> None:
        self._leader, self._rank, self._loop = leader, rank, loop
        self._timer = rank.timer
        self._runs_ahead = rank.why_not_ahead is None
        self._rule = rule

    def plan(self, begin_ns: int, until_ns: int | None, give_up_ns: int | None = None) -> QuietSpan | None:
        """Plan quiet turns from now on that have looked for news before `until_ns`; None: take a single one.
        `give_up_ns`: somebody waits for blocks, and none of the turns may begin later than this."""
        scheduler, before = self._leader.scheduler, self._loop.in_flight
        if self._runs_ahead and before is None:
            return None
        limit, outputs, befores = MAX_STEPS, [], []
        for state in scheduler.running:
            if not state.is_reported:  # more is told with a first token
                return None
            output = self._rule.output(state.request.request_id)
            num_left = output.length + state.num_prompt - len(state.tokens) - state.num_ahead
            if num_left < limit:
                limit = num_left
            outputs.append(output)
            befores.append(state.num_computed + state.num_ahead)
        num = num_quiet_steps(scheduler, limit, until_freed=give_up_ns is not None)
        if not num:
            return None
        run = decode_run(befores, num, self._timer.windows)
        model_ns, host_ns = self._timer.ahead(run)
        span = QuietSpan(
            begin_ns=begin_ns,
            ends_ns=list(accumulate((n + host_ns for n in model_ns), initial=begin_ns))[1:],
            run=run,
            model_ns=model_ns,
            outputs=outputs,
            since_ns=begin_ns,
        )
        if before is not None:
            self._put_beside(before, span, host_ns)
        if until_ns is not None:
            looks_ns = range(len(model_ns))
            key = span.ends_ns.__getitem__ if before is None else lambda i: span.begins_ns(i) + host_ns
            del span.ends_ns[bisect_left(looks_ns, until_ns, key=key) :]
        if give_up_ns is not None:
            del span.ends_ns[span.num_begun(give_up_ns) :]
        return span if span.ends_ns else None

    def _put_beside(self, before: StepInFlight, span: QuietSpan, host_ns: int) -> None:
        """Plan the same turns where this step is in flight: each queues a step, and then waits for the one
        before."""
        at_ns, done_ns = span.begin_ns, self._rank.free_ns
        span.ends_ns.clear()
        for model_ns in span.model_ns:
            queued_ns = at_ns + host_ns
            at_ns, done_ns = max(queued_ns, done_ns), max(queued_ns, done_ns) + model_ns
            span.ends_ns.append(at_ns)
            span.free_ns.append(done_ns)
        span.since_ns = self._loop.since_ns(before)
        span.before = before
        (span.before_features,) = self._rank.features

    def carry_out(
        self, span: QuietSpan, num_turns: int, watch: Callable[[int], object] | None = None
    ) -> None:
        """Take the first turns of a span, the last of which ends now; `watch` is that of sched.quiet."""
        scheduler, times_ns = self._leader.scheduler, span.ends_ns[:num_turns]
        states = list(scheduler.running)
        tokens = [
            output.tokens(len(state.tokens) - state.num_prompt + 1, num_turns)
            for state, output in zip(states, span.outputs, strict=True)
        ]
        advance(scheduler, num_turns, tokens, watch)
        self._timer.passed(num_turns)
        if span.before is not None:
            last = num_turns - 1
            self._rank.go_on(span.run.step(last), span.model_ns[last], span.free_ns[last])
            batch = later_batch(span.before.batch, num_turns)
            pending = self._leader.sample(batch, NO_LOGITS, ())
            self._loop.go_on(batch, pending, begun_ns=span.begins_ns(last), settled_ns=span.ends_ns[last])
        for state, new in zip(states, tokens, strict=True):
            self._leader.tell_all(state, new, times_ns)

"""Estimate from cost tables alone what engines can do, to leave out plans that simulations need not try.

Means stand for all requests and nobody queues, so an estimate is more than what a plan keeps: it sorts plans,
and simulations choose among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rayk.costs.features import StepFeatures, seen_in_window
from rayk.costs.table import EngineCosts
from rayk.planner.traffic import Profile
from rayk.types.draft_rates import DraftRates
from rayk.types.speculative import SpeculativeConfig

NS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSide:
    """A kind of engine, as far as estimates need it."""

    costs: EngineCosts
    windows: Sequence[int]
    max_batch_tokens: int
    max_places: int  # requests that decode at once: rows, streams, or what blocks hold
    runs_ahead: bool  # whether the host plans a step while the one before computes
    speculative: SpeculativeConfig | None = None
    rates: DraftRates | None = None
    """How often what it drafts is right, where it does."""

    def turn_ns(self, features: StepFeatures) -> float:
        turns = self.costs.turns_of(self.speculative)
        step = self.costs.table_of(features).ns(features)
        host = self.costs.turn_ns(features) if turns is None else turns.ns(features)
        return max(step, host) if self.runs_ahead else step + host

    @property
    def tokens_per_step(self) -> float:
        """Expect so many tokens of a request in a step that decodes it."""
        if self.speculative is None or self.rates is None:
            return 1.0
        return self.rates.tokens_per_step(self.speculative.num_tokens)

    def decodes(self, num_requests: int, context: float) -> list[tuple[float, StepFeatures]]:
        """List the steps in which so many requests decode behind `context` tokens each, with the share of
        each: some may have drafts, some not."""
        plain = alike(num_requests, 1, round(context), self.windows)
        if self.speculative is None or self.rates is None or not num_requests:
            return [(1.0, plain)]
        num_tokens = self.speculative.num_tokens
        num_drafts = num_requests * self.rates.drafts_per_step(num_tokens)
        if not num_drafts:
            return [(1.0, plain)]
        share = 1 - (1 - self.rates.share_drafted) ** num_requests
        return [(1 - share, plain), (share, drafted(plain, num_drafts / share))]

    def prompt_ns(self, num_tokens: float, num_cached: float = 0.0, *, alone: bool = False) -> float:
        """Tell what a prompt costs an engine that has enough of them to fill its steps, or `alone`."""
        num_new = max(1, round(num_tokens - num_cached))
        if num_new <= self.max_batch_tokens:
            together = 1 if alone else self.max_batch_tokens // num_new
            return self.turn_ns(alike(together, num_new, round(num_cached), self.windows)) / together
        total, before, left = 0.0, round(num_cached), num_new
        while left > 0:
            size = min(left, self.max_batch_tokens)
            chunk_ns = self.turn_ns(alike(1, self.max_batch_tokens, before, self.windows))
            # The last chunk shares its step with the next prompt, unless there is none.
            last_ns = self.turn_ns(alike(1, size, before, self.windows))
            total += last_ns if alone else chunk_ns * size / self.max_batch_tokens
            before, left = before + size, left - size
        return total

    def decode_ns(self, num_requests: int, context: float) -> float:
        """Tell what a step takes in which so many requests decode behind `context` tokens each."""
        return sum(share * self.turn_ns(step) for share, step in self.decodes(num_requests, context))

    def mixed_ns(
        self, num_decodes: int, context: float, num_prompts: float, prompt: tuple[int, int]
    ) -> float:
        """Tell what the mean step takes while so many requests decode behind `context` tokens each, and
        `num_prompts` prompts, of (tokens to compute, tokens before them), come per step."""
        num_new, num_before = prompt
        room = max(1, self.max_batch_tokens - num_decodes)
        if num_new > room:  # a prompt takes several steps
            num_prompts, num_new = num_prompts * num_new / room, room
        together = max(1, min(round(num_prompts), room // num_new))
        prompts = alike(together, num_new, num_before, self.windows)
        share, per_step = min(1.0, num_prompts / together), max(1.0, num_prompts / together)
        return sum(
            part
            * ((1 - share) * self.turn_ns(step) + share * per_step * self.turn_ns(_summed(step, prompts)))
            for part, step in self.decodes(num_decodes, context)
        )


def _summed(one: StepFeatures, other: StepFeatures) -> StepFeatures:
    numbers = ("requests", "tokens", "logits", "prefills", "pairs", "seen", "drafts")
    return StepFeatures(
        **{f"num_{n}": getattr(one, f"num_{n}") + getattr(other, f"num_{n}") for n in numbers},
        windowed=tuple(
            (pairs + more_pairs, seen + more_seen)
            for (pairs, seen), (more_pairs, more_seen) in zip(one.windowed, other.windowed, strict=True)
        ),
    )


def alike(num: int, num_new: int, num_before: int, windows: Sequence[int]) -> StepFeatures:
    """Make a step of `num` requests, each of which computes `num_new` tokens behind `num_before` others."""
    windowed = (seen_in_window(num_new, num_before, window) for window in windows)
    return StepFeatures(
        num_requests=num,
        num_tokens=num * num_new,
        num_logits=num,
        num_prefills=num if num_new > 1 or not num_before else 0,
        num_pairs=num * (num_new * num_before + num_new * (num_new + 1) // 2),
        num_seen=num * (num_before + num_new),
        windowed=tuple((num * pairs, num * seen) for pairs, seen in windowed),
    )


def drafted(step: StepFeatures, num_drafts: float) -> StepFeatures:
    """Return a decode step of which so many more tokens are drafts, dealt evenly among its requests. What a
    window leaves of the few more is not looked at."""
    num = step.num_requests
    each, before = num_drafts / num, step.num_seen / num - 1
    pairs = round(num * ((1 + each) * before + (1 + each) * (2 + each) / 2)) - step.num_pairs
    more = max(1, round(num_drafts))
    windowed = ((a + round(a * each), b + round(num_drafts)) for a, b in step.windowed)
    return replace(
        step,
        num_tokens=step.num_tokens + more,
        num_logits=step.num_logits + more,
        num_drafts=more,
        num_pairs=step.num_pairs + pairs,
        num_seen=step.num_seen + more,
        windowed=tuple(windowed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRates:
    """Requests per second that one engine of each side takes, and what a user sees at that rate."""

    prefill: float
    decode: float  # of an aggregated engine both are what it takes of whole requests
    tpot_ms: float
    ttft_ms: float  # of a prompt that waits for nobody
    e2e_s: float  # of a request at that rate
    why_not: str = ""
    """Why no request can be good here; empty: some can."""


def rates_of(
    prefill: EngineSide, decode: EngineSide | None, profile: Profile, limits_ms: dict[str, float]
) -> SideRates:
    """Estimate a pair of engines, or (`decode` None) one that does all of a request."""
    prompt_ns = prefill.prompt_ns(profile.input_tokens, profile.cached_tokens)
    alone_ns = prefill.prompt_ns(profile.input_tokens, profile.cached_tokens, alone=True)
    longest_ns = prefill.prompt_ns(profile.long_input_tokens, profile.cached_tokens, alone=True)
    context = profile.input_tokens + profile.output_tokens / 2
    side = prefill if decode is None else decode
    per_step = side.tokens_per_step
    steps = max(1.0, (profile.output_tokens - 1) / per_step)
    limit_ns = min(
        limits_ms.get("tpot", float("inf")) * 1e6,
        limits_ms.get("e2e", float("inf")) * 1e6 / max(1.0, profile.output_tokens),
    )
    num_new = max(1, round(profile.input_tokens - profile.cached_tokens))

    def step_ns_of(batch: int) -> float:
        if decode is not None:
            return side.decode_ns(batch, context)
        return side.mixed_ns(batch, context, batch / steps, (num_new, round(profile.cached_tokens)))

    batch = _largest(side.max_places, lambda b: step_ns_of(b) / per_step <= limit_ns)
    why = ""
    if longest_ns / 1e6 > limits_ms.get("ttft", float("inf")):
        why = f"a prompt alone takes {longest_ns / 1e6:,.0f} ms, and TTFT may be {limits_ms['ttft']:,.0f} ms"
    elif side.max_places < 1:
        why = "no request fits its blocks"
    elif batch < 1:
        limit_ms = limit_ns / 1e6
        each_ms = step_ns_of(1) / per_step / 1e6
        of = "a step of one request" if per_step == 1 else "a token of one request"
        why = f"{of} takes {each_ms:,.1f} ms, and TPOT may be {limit_ms:,.1f} ms"
    step_ns = step_ns_of(max(1, batch))
    per_s = batch * NS / (steps * step_ns)
    return SideRates(
        prefill=per_s if decode is None else NS / prompt_ns,
        decode=per_s,
        tpot_ms=step_ns / per_step / 1e6,
        ttft_ms=alone_ns / 1e6,
        e2e_s=(alone_ns + steps * step_ns) / NS,
        why_not=why,
    )


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """Find the largest number, up to `most`, of which something holds that then holds of all smaller ones."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low

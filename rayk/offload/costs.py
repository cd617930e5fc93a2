"""Whether moving KV is cheaper than computing it again, from what both have cost so far. Pure.

Moving costs so much per move and per byte, computing so much per step, per token, and per pair of a token and
one that it sees (the square of a prompt's length). The constants are fitted to the latest observations: least
errors relative to a size's usual cost, none negative, outliers counting little. What the observations cannot
tell apart (all of one size, say) is put down to bytes and to tokens.

Before the first move the defaults stand for it. Before the first step with a prompt's tokens nothing is
known of computing, and KV is moved: a move measures itself and has a deadline. A rate that was bad once is
tried again: every choice against moving lets what is known of it fade a little towards the defaults. An
engine that loads whatever it is asked computes a few tokens at a time, and what those cost says little of a
prompt: now and then it computes one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from rayk.types.offload import Weighing

MEMORY = 128  # the latest observations that count
SMALL_STEP_TOKENS = 64  # a step with as many tokens counts half
MIN_KNOWN = 0.4  # weight of the steps from which on the cost of computing is known: about one of 43 tokens
REACH = 8
"""What a step costs is a guess for steps with more than so many times the tokens of the largest one seen."""
BLIND = 32
"""The last of so many choices to load that rest on such a guess is to compute, which ends the guessing."""
_FEW = 1 / 3  # less is little weight
_ROUNDS = 8
_EXACT = 0.05  # a relative error that is as good as none
_TOKENS = 512
_PAIRS = _TOKENS**2 / 2  # a step's terms are counted in these, so that the fit is well conditioned
_SOFT = 1e-3  # how much terms that others can stand for are kept small


@dataclass(frozen=True, slots=True)
class LoadChoice:
    moves: bool
    move_ns: float  # estimated nanoseconds of the move, both ways where it is a swap
    recompute_ns: float | None  # estimated nanoseconds of computing; None: nothing is known of it yet


@dataclass(frozen=True, slots=True)
class _Seen:
    """One observation, relative to its usual cost."""

    terms: tuple[float, ...]
    cost: float
    weight: float


class _Fit:
    """Non-negative constants of a sum of terms: ns = constants . terms."""

    def __init__(self, softness: Sequence[float], prior: Sequence[float] | None = None) -> None:
        """`softness`, per term: how strongly its constant is drawn to the prior, if there is one (relative to
        one observation of this term alone), or to zero (relative to all observations)."""
        self._softness = np.array(softness)
        self._prior = None if prior is None else np.array(prior, dtype=float)
        self._seen = deque[_Seen](maxlen=MEMORY)
        self._few = deque[_Seen](maxlen=MEMORY // 4)
        """Observations that weigh little: apart, lest their number drives the others out."""
        self.num_observed = 0
        self._constants = np.zeros(len(softness)) if self._prior is None else self._prior
        self._is_fitted = True

    @property
    def weight(self) -> float:
        """How much all observations that count weigh together."""
        return sum(seen.weight for seen in (*self._seen, *self._few))

    def observe(self, terms: Sequence[float], ns: float, usual: float, weight: float = 1.0) -> None:
        """Something took `ns` > 0. `usual`: what errors are relative to; of the size alone, lest what was
        cheap weigh more."""
        seen = _Seen(tuple(term / usual for term in terms), ns / usual, weight)
        (self._seen if weight >= _FEW else self._few).append(seen)
        self.num_observed += 1
        self._is_fitted = False

    def fade(self) -> None:
        """Trust what was observed a little less."""
        for kept in (self._seen, self._few):
            if not kept:
                continue
            faded = [replace(seen, weight=seen.weight * (1 - 1 / MEMORY)) for seen in kept]
            kept.clear()
            kept.extend(faded)
            self._is_fitted = False

    @property
    def constants(self) -> NDArray[np.float64]:
        """They are in nanoseconds per unit of each term."""
        if not self._is_fitted:
            self._fit()
            self._is_fitted = True
        return self._constants

    def _fit(self) -> None:
        """Reweighted until errors count by their size, not by its square."""
        seen = [*self._seen, *self._few]
        terms = np.array([s.terms for s in seen])
        costs = np.array([s.cost for s in seen])
        weights = np.array([s.weight for s in seen])
        trust = np.ones(len(seen))
        for _ in range(_ROUNDS):
            self._constants = self._solve(terms, costs, weights * trust)
            expected = np.maximum(terms @ self._constants, costs / 1000)
            trust = _EXACT / np.maximum(np.abs(costs - expected) / expected, _EXACT)

    def _solve(
        self, terms: NDArray[np.float64], costs: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Solve least squares with no negative constant."""
        squares = (terms * weights[:, None]).T @ terms
        products = (terms * weights[:, None]).T @ costs
        drawn = self._softness * (1.0 if self._prior is not None else np.diag(squares))
        squares = squares + np.diag(drawn)
        if self._prior is not None:
            products = products + drawn * self._prior
        num, best, constants = len(products), 0.0, np.zeros(len(products))
        # Few terms: the best non-negative constants are those of the best set of terms, all if they can be.
        for chosen in (list(c) for size in range(num, 0, -1) for c in combinations(range(num), size)):
            found = np.linalg.solve(squares[np.ix_(chosen, chosen)], products[chosen])
            gain = float(found @ products[chosen])
            if (found >= 0).all() and gain > best:
                best, constants = gain, np.zeros(num)
                constants[chosen] = found
                if len(chosen) == num:
                    break
        return constants


class _Moves:
    """What moving bytes one way costs."""

    def __init__(self, gb_per_s: float, latency_ns: float) -> None:
        self._scale = np.array([latency_ns, 1 / gb_per_s])
        # In units of the defaults, so that the fit is well conditioned. The default rate is soon outweighed,
        # the latency only by moves of many sizes.
        self._fit = _Fit([3e-3, 1e-3], [1.0, 1.0])

    def observe(self, num_bytes: int, ns: float) -> None:
        if num_bytes > 0 and ns > 0:
            terms = [self._scale[0], num_bytes * self._scale[1]]
            self._fit.observe(terms, ns, usual=sum(terms))

    def cost_ns(self, num_bytes: int) -> float:
        if num_bytes <= 0:
            return 0.0
        latency_ns, byte_ns = self._scale * self._fit.constants
        return float(latency_ns + num_bytes * byte_ns)

    def fade(self) -> None:
        self._fit.fade()

    def describe(self, direction: str) -> dict[str, float]:
        latency_ns, byte_ns = map(float, self._scale * self._fit.constants)
        rate = {f"{direction}_gb_per_s": 1 / byte_ns} if byte_ns else {}
        return {**rate, f"{direction}_latency_ns": latency_ns, f"num_{direction}": self._fit.num_observed}


class CostModel:
    """Running estimates of what one engine's moves and steps cost. Not for several threads."""

    def __init__(
        self,
        default_out_gb_per_s: float = 2.0,
        default_in_gb_per_s: float = 2.0,
        default_latency_ns: float = 5e6,
    ) -> None:
        """Rates are in 10^9 bytes per second; `default_latency_ns` is what a move costs whatever its size."""
        self._out = _Moves(default_out_gb_per_s, default_latency_ns)
        self._in = _Moves(default_in_gb_per_s, default_latency_ns)
        self._steps = _Fit([_SOFT, 1e-9, _SOFT])
        self._largest_step = 0  # tokens
        self._num_blind = 0
        self.max_step_tokens = 0
        """The engine's steps compute at most so many; 0: as many as the largest one seen."""

    def observe_prefill(self, num_tokens: int, ns: float, num_pairs: float | None = None) -> None:
        """A step computed so many tokens in `ns`. `num_pairs`: of a token and each that it sees, itself
        included; None: as of one prompt from its first token. Steps with few tokens weigh little: what they
        cost is not their tokens'."""
        if num_tokens <= 0 or ns <= 0:
            return
        pairs = _pairs(num_tokens) if num_pairs is None else num_pairs
        weight = num_tokens / (num_tokens + SMALL_STEP_TOKENS)
        terms = [1.0, num_tokens / _TOKENS, pairs / _PAIRS]
        self._steps.observe(terms, ns, 1 + num_tokens / _TOKENS, weight)
        self._largest_step = max(self._largest_step, num_tokens)

    def observe_out(self, num_bytes: int, ns: float) -> None:
        """So many bytes went from the engine to the tier in `ns`, all waits included."""
        self._out.observe(num_bytes, ns)

    def observe_in(self, num_bytes: int, ns: float) -> None:
        """So many bytes came from the tier to the engine in `ns`, all waits included."""
        self._in.observe(num_bytes, ns)

    def recompute_ns(self, num_tokens: int, num_here: int = 0) -> float | None:
        """Of `num_tokens` tokens of a sequence behind the first `num_here`, which they see and which need not
        be computed, in steps as large as can be; None: nothing is known of it yet."""
        if self._steps.weight < MIN_KNOWN:
            return None
        step_ns, token_ns, pair_ns = self._step_costs()
        num_steps = -(-num_tokens // (self.max_step_tokens or self._largest_step))
        return num_steps * step_ns + num_tokens * token_ns + _pairs(num_tokens, num_here) * pair_ns

    def swap(self, bytes_out: int, bytes_in: int, num_tokens: int, setting: Weighing = "auto") -> LoadChoice:
        """Whether to move `bytes_out` out and `bytes_in` in later, or to compute `num_tokens` tokens again.
        `setting`: always or never do so, whatever the estimates."""
        move_ns = self._out.cost_ns(bytes_out) + self._in.cost_ns(bytes_in)
        return self._choose(move_ns, self.recompute_ns(num_tokens), setting, (self._out, self._in))

    def load(
        self, bytes_in: int, num_tokens: int, setting: Weighing = "auto", *, num_here: int = 0
    ) -> LoadChoice:
        """Whether to move `bytes_in` in, or to compute `num_tokens` tokens, which lie behind `num_here` that
        the engine has. `setting`: see `swap`."""
        recompute_ns = self.recompute_ns(num_tokens, num_here)
        choice = self._choose(self._in.cost_ns(bytes_in), recompute_ns, setting, (self._in,))
        if setting == "auto" and choice.moves and num_tokens > REACH * self._largest_step:
            self._num_blind += 1
            return replace(choice, moves=self._num_blind % BLIND != 0)
        return choice

    def describe(self) -> dict[str, float]:
        """Return what is believed: rates in 10^9 bytes per second, nanoseconds, numbers of observations.
        Estimates of steps are absent until they are known."""
        told = {**self._out.describe("out"), **self._in.describe("in")}
        told["num_steps"] = self._steps.num_observed
        if self._steps.weight >= MIN_KNOWN:
            names = ("prefill_step_ns", "prefill_token_ns", "prefill_pair_ns")
            told |= dict(zip(names, self._step_costs(), strict=True))
            told["prefill_512_ns"] = self.recompute_ns(512) or 0.0
            told["largest_step_tokens"] = self._largest_step
        return told

    def _step_costs(self) -> tuple[float, float, float]:
        step, token, pair = map(float, self._steps.constants)
        return step, token / _TOKENS, pair / _PAIRS

    def _choose(
        self, move_ns: float, recompute_ns: float | None, setting: Weighing, move_costs: Sequence[_Moves]
    ) -> LoadChoice:
        if setting != "auto":
            return LoadChoice(setting == "always", move_ns, recompute_ns)
        moves = recompute_ns is None or move_ns < recompute_ns
        if not moves:
            for cost in move_costs:
                cost.fade()
        return LoadChoice(moves, move_ns, recompute_ns)


def _pairs(num_tokens: int, num_here: int = 0) -> float:
    """Of a token and each that it sees, itself included, of so many tokens of a prompt behind the first
    `num_here`."""
    return num_tokens * num_here + num_tokens * (num_tokens + 1) / 2

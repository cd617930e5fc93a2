"""Propose tokens in a simulation, of which as many are right as somebody says: what a model makes of drafts
cannot be known without it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from rayk.sched.request_state import RequestState
from rayk.simulate.tokens import TokenRule
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import UserError

RATES = "their acceptance, by position: simulate_cell's `drafts`, or those of arrivals"


class SimDrafter:
    """Draws, for each step of a request, how many tokens are proposed and how many of them are right.

    A draw depends on the seed, the request and the number of its output tokens alone: so it is the same
    whatever runs beside it, and after a preemption. Implements sched.drafting.Drafter.
    """

    def __init__(self, num_tokens: int, rule: TokenRule, rates: DraftRates | None, *, seed: int) -> None:
        """`rates`: of requests whose output has none of its own."""
        self.num_tokens = num_tokens
        self._rule, self._rates, self._seed = rule, rates, seed

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        output, number = self._rule.output(state.request_id), len(state.tokens) - state.num_prompt
        rates = output.drafts or self._rates
        if rates is None:
            raise UserError("drafts are simulated, and nobody says how often they are right", mend=RATES)
        num = min(num_tokens, rates.num_proposed(_draw(self._seed, output.drawn_by, number, "proposed")))
        if not num:
            return ()
        num_right = min(num, rates.num_accepted(_draw(self._seed, output.drawn_by, number, "accepted")))
        wrong = (self._rule.other_than(output.token(number + n + 1)) for n in range(num_right, num))
        return (*(output.token(number + n + 1) for n in range(num_right)), *wrong)


def _draw(seed: int, *counters: object) -> float:
    """Return a number in [0, 1) that depends on these alone."""
    text = "/".join(map(str, (seed, *counters)))
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest()) / (1 << 48)

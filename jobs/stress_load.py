"""Streaming clients for jobs/serve_stress.py: what they send, when they leave, and what their answers are
worth against transformers' tokens."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rayk.bench.client import ABORTED, OK, TIMEOUT, Observed, request_body, send
from rayk.bench.generator import make_session
from rayk.bench.load import Load
from rayk.bench.prompts import Planned
from rayk.types.request import SamplingParams
from rayk.types.rows import RequestRow

if TYPE_CHECKING:
    from rayk.experiments.references import References

VERDICTS = ("right", "near_tie", "left", "failed", "wrong", "hung")
"""What became of a request: all its tokens are the reference's; they differ where the reference itself is all
but undecided; its client left and what it had is right; it ended with an error and what was delivered is
right; some token is wrong or missing; it had not ended when its client's patience did."""
LEAVE_POLL_S = 0.005
PAUSE_S = 0.2
"""After a request that failed: a client that is refused does not ask again at once."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request. Its client leaves when it has `leave_after` tokens, if that is a number."""

    prompt_index: int
    max_tokens: int
    leave_after: int | None


@dataclass(frozen=True, slots=True)
class Met:
    """A request that was sent, and what came of it."""

    case: Case
    observed: Observed


def draw_prompts(count: int, tokens: tuple[int, int], vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, their lengths spread evenly by ratio between two ends, which both occur.
    At least two."""
    draw = random.Random(f"prompts {seed}")
    low, high = tokens
    lengths = [round(low * (high / low) ** (i / (count - 1))) for i in range(count)]
    # Ids below 4 are special ones of tiny checkpoints.
    return [[draw.randrange(4, vocab_size) for _ in range(length)] for length in lengths]


def draw_cases(num_prompts: int, max_tokens: int, leave_share: float, seed: int) -> Iterator[Case]:
    """Requests without end: every prompt once per round, in another order each time. Of 1 / `leave_share`
    requests one client leaves, in the middle half of its answer. At least 8 tokens."""
    draw = random.Random(f"cases {seed}")
    order: list[int] = []
    while True:
        order = order or draw.sample(range(num_prompts), num_prompts)
        asked = draw.randint(max_tokens // 2, max_tokens)
        leaves = draw.random() < leave_share
        yield Case(order.pop(), asked, draw.randint(asked // 4, 3 * asked // 4) if leaves else None)


class Clients:
    """`count` clients in a closed load: each sends its next request when the last one has ended."""

    def __init__(
        self,
        url: str,
        model: str,
        prompts: Sequence[Sequence[int]],
        patience_s: float,
        fields_of: Callable[[int], Mapping[str, Any]] = lambda prompt_index: {},
    ) -> None:
        """patience_s: after so long a request that has not ended is given up, and counts as hung. fields_of:
        more fields of a prompt's requests."""
        self._load = Load(url=url, model=model, concurrency=1)
        self._model = model
        self._prompts = prompts
        self._patience_s = patience_s
        self._fields_of = fields_of
        self.met: list[Met] = []
        """In the order in which they ended."""
        self.unfinished: set[int] = set()
        """Numbers of those that have not."""
        self._numbers = 0

    async def run(self, count: int, cases: Iterator[Case], until: asyncio.Event | None = None) -> None:
        """Send all cases, or those that there is time for before `until` is set; return when all ended."""
        async with make_session(self._load) as session:

            async def client() -> None:
                while until is None or not until.is_set():
                    case = next(cases, None)
                    if case is None:
                        return
                    await self._ask(session, case)

            await asyncio.gather(*(client() for _ in range(count)))

    async def _ask(self, session: Any, case: Case) -> None:
        number, self._numbers = self._numbers, self._numbers + 1
        planned = Planned(
            index=number,
            due_ns=None,
            prompt=list(self._prompts[case.prompt_index]),
            max_tokens=case.max_tokens,
            seed=number,
        )
        seen = Observed(planned=planned)
        load = replace(self._load, body=self._fields_of(case.prompt_index))
        body = request_body(load, planned, self._model)
        url = f"{self._load.url}/v1/completions"
        self.unfinished.add(number)
        task = asyncio.create_task(send(session, url, body, seen, self._patience_s))
        if case.leave_after is not None:
            while not task.done() and len(seen.output_token_ids) < case.leave_after:
                await asyncio.sleep(LEAVE_POLL_S)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.unfinished.discard(number)
        self.met.append(Met(case, seen))
        if seen.outcome not in (OK, ABORTED):
            await asyncio.sleep(PAUSE_S)


def judge(
    met: Met, prompt: Sequence[int], expected: Sequence[int], references: References
) -> tuple[str, str]:
    """One of VERDICTS and, unless it is `right` or `left`, what there is to say.

    expected: the reference's tokens, at least as many as were asked for. What a request that did not end
    well has delivered must be right, too.
    """
    seen, found = met.observed, met.observed.output_token_ids
    is_whole = seen.outcome == OK
    row = RequestRow(
        cell_id="",
        repeat=0,
        request_id="",
        prompt_index=met.case.prompt_index,
        prompt_token_ids=list(prompt),
        output_token_ids=found,
    )
    # Imported here: what clients send needs no torch.
    from rayk.experiments.compare import compare_tokens

    wanted = list(expected[: met.case.max_tokens if is_whole else len(found)])
    compared = compare_tokens(row, wanted, references, SamplingParams(max_tokens=met.case.max_tokens))
    if compared.first_divergence is not None and not compared.near_tie:
        return "wrong", compared.reason
    if seen.outcome == TIMEOUT:
        return "hung", seen.error or ""
    if not is_whole:
        return ("left", "") if seen.outcome == ABORTED else ("failed", seen.error or "")
    return ("near_tie", compared.reason) if compared.near_tie else ("right", "")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else None

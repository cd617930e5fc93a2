"""Engines with drafts and without, whose turns a benchmark takes on its own thread; and their prompts."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.benchmarks.harness import ROOT
from rayk.actors.tokenizer import load_encoder
from rayk.engine.build import make_leader, make_rank
from rayk.engine.leader import RequestEvent
from rayk.engine.loop import EngineLoop, NoExtension
from rayk.engine.rank import EngineRank
from rayk.parallel.local import LocalComm
from rayk.sched.drafting import Drafting
from rayk.sched.ngram import NgramIndex
from rayk.sched.request_state import RequestState
from rayk.types.batch import ScheduledBatch
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams
from rayk.types.speculative import DraftCounts, SpeculativeConfig

PROMPTS = ROOT / "jobs" / "draft_prompts.jsonl"
BLOCK_SIZE = 32
NUM_CONTINUED = 8
"""Prompts of each kind that a model goes on behind."""
CONTINUED_TOKENS = 64
"""Tokens of such a prompt."""


@dataclass(frozen=True)
class Prompt:
    kind: str
    token_ids: tuple[int, ...]
    ends: bool
    """Whether the model ends its answer."""


@dataclass(frozen=True)
class Drafts:
    """What an engine drafts with."""

    method: str
    num_tokens: int
    model: Path | None = None
    """Checkpoint of a drafter on ranks."""

    @property
    def name(self) -> str:
        return f"{self.method} {self.num_tokens}"

    @property
    def config(self) -> SpeculativeConfig:
        model = None if self.model is None else str(self.model)
        return SpeculativeConfig(method=self.method, num_tokens=self.num_tokens, model=model)


@dataclass(frozen=True)
class Step:
    num_drafts: int
    took_ms: float
    """Of its whole turn."""
    drafter_ms: float = 0.0
    """Of a drafter on ranks in it."""


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    steps: list[Step]
    """Those behind the one that gave the first token."""
    counts: DraftCounts

    @property
    def num_later(self) -> int:
        """Tokens after the first."""
        return len(self.token_ids) - 1

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.num_later / sum(step.took_ms for step in self.steps)


class LastBatch:
    """Remembers the batch of the last turn. Implements engine.loop.TurnStats."""

    batch: ScheduledBatch | None = None

    def stepped(self, batch: ScheduledBatch, busy_ns: int, model_ns: int, num_commands: int) -> None:
        self.batch = batch

    def turned(self) -> None: ...


class Contestant:
    """An engine whose turns this thread takes."""

    def __init__(
        self, model: Path, dtype: str, drafts: Drafts | None, prompts: Sequence[Prompt], most_behind: int
    ) -> None:
        """Make an engine with room for all prompts, so that each is computed once, and `most_behind` tokens
        after each. Raises CheckpointError, and Unsupported for drafts that the engine cannot make."""
        self.drafts = drafts
        config = EngineConfig(
            model=str(model),
            dtype=dtype,
            block_size=BLOCK_SIZE,
            num_blocks=2 + sum((len(p.token_ids) + most_behind) // BLOCK_SIZE + 2 for p in prompts),
            max_batch_tokens=512,
            max_seqs=1,
            prefix_caching=True,
            speculative=None if drafts is None else drafts.config,
        )
        rank = make_rank(config, LocalComm())
        self.leader = make_leader(rank)
        self._last = LastBatch()
        self._loop = EngineLoop(rank, NoExtension(), self.leader, stats=self._last)
        self._num_runs = 0
        self._drafter_ns = 0
        if rank.drafter is not None:
            self._time(rank)

    def _time(self, rank: EngineRank) -> None:
        """Time a drafter on ranks."""
        propose = rank.propose

        def timed(*arguments: Any) -> Any:
            began_ns = time.thread_time_ns()
            proposed = propose(*arguments)
            self._drafter_ns += time.thread_time_ns() - began_ns
            return proposed

        rank.propose = timed  # type: ignore[method-assign]

    @property
    def name(self) -> str:
        return "none" if self.drafts is None else self.drafts.name

    def run(self, prompt: Sequence[int], **sampling: Any) -> list[tuple[Step, list[RequestEvent]]]:
        """Run one request; returns its steps, with what each told. Raises what it ends with."""
        events: list[RequestEvent] = []
        self._num_runs += 1
        self.leader.submit(
            Request(
                request_id=str(self._num_runs),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(**sampling),
            ),
            events.append,
        )
        found = []
        num_seen = 0
        while not (events and events[-1].is_last):
            self._last.batch, self._drafter_ns = None, 0
            began_ns = time.thread_time_ns()
            self._loop.turn()
            took_ms = (time.thread_time_ns() - began_ns) / 1e6
            if self._last.batch is not None:
                (share,) = self._last.batch.requests
                found.append((Step(share.num_drafts, took_ms, self._drafter_ns / 1e6), events[num_seen:]))
                num_seen = len(events)
        if events[-1].error is not None:
            raise events[-1].error
        return found

    def answer(self, prompt: Sequence[int], num_tokens: int, *, ends: bool) -> Answer:
        """Answer with that many tokens, or up to as many if it `ends`."""
        tokens: list[int] = []
        steps: list[Step] = []
        told: dict[str, Any] = {}
        for step, events in self.run(prompt, max_tokens=num_tokens, ignore_eos=not ends):
            if tokens:
                steps.append(step)
            for event in events:
                tokens += event.token_ids
                told |= {} if event.info is None else event.info.told()
        counts = DraftCounts(list(told.get("drafted_at", ())), list(told.get("accepted_at", ())))
        return Answer(tokens, steps, counts)

    def largest_gap(self, prompt: Sequence[int], found: Sequence[int], first: int) -> float:
        """Return how far tokens of an answer from the `first` on lie below the best, in logits, when they are
        computed as a prompt."""
        given = (*prompt, *found)
        for _, events in self.run(given, max_tokens=1, prompt_logprobs=1, ignore_eos=True):
            for event in events:
                if event.prompt_logprobs is not None:
                    told = event.prompt_logprobs[len(prompt) + first :]
                    return max(each.top[0][1] - each.logprob for each in told if each is not None)
        raise AssertionError("no logits of the prompt")


# --- what a step costs ------------------------------------------------------------------------------


class DraftsInTurn:
    """Proposes 0, 1, 2... tokens in turn, whatever was said. Implements sched.drafting.Drafter."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._turn = 0

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        self._turn += 1
        return [0] * min(self._turn % (self.num_tokens + 1), num_tokens)


@dataclass(frozen=True)
class Costs:
    """What steps take by themselves."""

    steps_ms: dict[int, float]
    """Of so many drafts, without what a drafter on ranks takes."""
    drafter_ms: float
    """Of a drafter on ranks in a step; 0 of others."""


def step_costs(contestant: Contestant, prompt: Sequence[int], steps_of_a_size: int) -> Costs:
    """Time steps of 0 to as many drafts as the contestant makes; medians."""
    most = 0 if contestant.drafts is None else contestant.drafts.num_tokens
    scheduler = contestant.leader.scheduler
    own = scheduler.drafting
    if own is not None:
        scheduler.drafting = Drafting(DraftsInTurn(most), scheduler.allocator)
    # The first steps of each size record it.
    for num_rounds in (2, steps_of_a_size):
        answer = contestant.answer(prompt, 1 + num_rounds * (most + 1), ends=False)
    scheduler.drafting = own
    took: dict[int, list[float]] = {}
    for step in answer.steps:
        took.setdefault(step.num_drafts, []).append(step.took_ms - step.drafter_ms)
    return Costs(
        {num_drafts: statistics.median(took[num_drafts]) for num_drafts in sorted(took)},
        statistics.median(step.drafter_ms for step in answer.steps),
    )


def look_up_ms(answers: Mapping[Prompt, Answer], config: SpeculativeConfig) -> float:
    """Time n-gram look-ups of answers by themselves: milliseconds a step, indexing of prompts included."""
    took_ns = num_steps = 0
    for prompt, answer in answers.items():
        tokens = [*prompt.token_ids, answer.token_ids[0]]
        share = max(1, round(answer.num_later / max(1, len(answer.steps))))
        began_ns = time.thread_time_ns()
        index = NgramIndex(tokens, config.prompt_lookup_min, config.prompt_lookup_max)
        for at in range(1, len(answer.token_ids), share):
            index.propose(tokens, config.num_tokens)
            tokens += answer.token_ids[at : at + share]
            num_steps += 1
        took_ns += time.thread_time_ns() - began_ns
    return took_ns / 1e6 / max(1, num_steps)


# --- prompts ----------------------------------------------------------------------------------------


def continued_prompts(model: Path) -> list[Prompt]:
    """Make prompts for a model that goes on behind any text. Raises CheckpointError."""
    encode = load_encoder(str(model))
    return [*_pages(encode), *_random(encode)]


def asked_prompts(model: Path) -> list[Prompt]:
    """Make prompts for a model that answers in chats. Raises CheckpointError."""
    encode = load_encoder(str(model))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    prompts = []
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        asked = [{"role": "user", "content": row["text"]}]
        text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        prompts.append(Prompt(row["kind"], tuple(encode(text)), ends=True))
    return prompts


def _pages(encode: Any) -> Iterator[Prompt]:
    pages = sorted(ROOT.glob("docs/*.md"))
    tokens = encode("\n".join(page.read_text(encoding="utf-8") for page in pages))
    stride = len(tokens) // NUM_CONTINUED
    for at in range(0, stride * NUM_CONTINUED, stride):
        yield Prompt("pages", tuple(tokens[at : at + CONTINUED_TOKENS]), ends=False)


def _random(encode: Any) -> Iterator[Prompt]:
    draw = random.Random(0)
    known = sorted(set(encode(PROMPTS.read_text(encoding="utf-8"))))
    for _ in range(NUM_CONTINUED):
        yield Prompt("random", tuple(draw.choices(known, k=CONTINUED_TOKENS)), ends=False)

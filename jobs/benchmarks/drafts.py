"""Tokens a second of an engine that drafts, on one CPU thread, beside the same engine without drafts.

    make bench-drafts [ARGS='--record']
    python jobs/benchmarks/drafts.py [--models DIR ...] [--continued DIR ...] [--dtypes float32 ...]
                                     [--ngram 2 4 8] [--heads 1 3] [--rounds 2] [--tokens 48]
                                     [--out DIR] [--check] [--record]

One request at a time, greedy. --models answer the prompts of jobs/draft_prompts.jsonl: `edits` and
`extraction`, whose answers repeat much of the prompt, and `chat`, whose answers do not. Models that are
--continued go on behind stretches of docs/*.md (`pages`) and behind random tokens (`random`), and end
nowhere.

In each round every prompt is answered without drafts and with each kind of them, in an order that turns. A
speed is that of the tokens after the first, in seconds of the thread's processor time: on a machine without
other work, of any clock. `measured` is the speed with drafts by that without: of a prompt the median over
rounds, of a kind the median over prompts, with its 95% interval. Tokens must be those without drafts, or
nearly tied with them.

A model with a head in a folder of its own name and -eagle3 (see `make train-draft`) drafts with that, too.

Steps are also timed by themselves, in engines that are given 0, 1, 2... drafts in turn which nobody looked
for. So what drafts are worth can be told from what is accepted of them, with a step of the engine without
drafts as the unit:

    expected = tokens a step / (cost of its steps + cost of its drafter)

where the steps cost what those of as many drafts took by themselves, and so does the drafter: n-grams their
look-ups, a head what it computes of a step. Drafts pay where that is over 1.

Target: n-gram drafts of some length are 1.3 times as fast in edits and in extraction.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads OpenMP

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.draft_engines import (
    Answer,
    Contestant,
    Costs,
    Drafts,
    Prompt,
    asked_prompts,
    continued_prompts,
    look_up_ms,
    step_costs,
)
from jobs.benchmarks.harness import ROOT, Page, above_zero, run
from rayk.experiments.compare import NEAR_TIE_LOGITS
from rayk.reports.intervals import median_interval
from rayk.types.errors import UserError

ASKED = (ROOT / "checkpoints" / "smollm2-135m",)
CONTINUED = (ROOT / "checkpoints" / "llama-taught",)
REPEATING = ("edits", "extraction")
"""Kinds of prompts whose answers repeat them."""
TARGET = 1.3
CONFIDENCE = 0.95
STEPS_OF_A_SIZE = 12
"""Steps of each number of drafts that are timed by themselves."""


# --- what drafts came to ----------------------------------------------------------------------------


@dataclass
class Tally:
    """What one contestant's answers of one kind came to."""

    steps: Counter[int] = field(default_factory=Counter)
    """How many had so many drafts."""
    num_later: int = 0
    """Tokens that they gave."""
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)

    def add(self, answer: Answer) -> None:
        self.steps.update(step.num_drafts for step in answer.steps)
        self.num_later += answer.num_later
        self.drafted_at.update(dict(enumerate(answer.counts.drafted_at)))
        self.accepted_at.update(dict(enumerate(answer.counts.accepted_at)))

    @property
    def tokens_a_step(self) -> float:
        return self.num_later / self.steps.total()

    def steps_cost(self, costs: Mapping[int, float]) -> float:
        """Return what a step cost on average, given what one of so many drafts does."""
        return sum(num * costs[drafts] for drafts, num in self.steps.items()) / self.steps.total()

    def expected(self, costs: Mapping[int, float], drafter: float) -> float:
        """Return the speed-up. All costs are in steps of one token."""
        return self.tokens_a_step / (self.steps_cost(costs) + drafter)

    @property
    def by_position(self) -> str:
        """The share of what was proposed at each position that was accepted."""
        return " ".join(f"{self.accepted_at[j] / n:.2f}" for j, n in sorted(self.drafted_at.items()))


Answers = dict[str, dict[Prompt, list[Answer]]]
"""By contestant and prompt: of each round."""


def take_turns(
    everybody: Sequence[Contestant], prompts: Sequence[Prompt], num_tokens: int, num_rounds: int
) -> Answers:
    """Have everybody answer every prompt in each round. The first prompt is answered once more before."""
    found: Answers = {contestant.name: {} for contestant in everybody}
    for contestant in everybody:
        contestant.answer(prompts[0].token_ids, min(16, num_tokens), ends=False)
    for turn in range(num_rounds):
        for number, prompt in enumerate(prompts):
            at = (turn + number) % len(everybody)
            for each in (*everybody[at:], *everybody[:at]):
                answer = each.answer(prompt.token_ids, num_tokens, ends=prompt.ends)
                found[each.name].setdefault(prompt, []).append(answer)
    return found


def ratios_of(found: Answers, name: str, kind: str) -> list[float]:
    """Return a contestant's speeds by those without drafts: of each prompt the median over rounds."""
    ratios = []
    for prompt, answers in found[name].items():
        if prompt.kind == kind and answers[0].num_later > 0:
            pairs = zip(answers, found["none"][prompt], strict=True)
            ratios.append(statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs))
    return ratios


def check_tokens(page: Page, plain: Contestant, found: Answers) -> int:
    """Compare all tokens with those without drafts; returns the number of answers that differ by a near tie,
    and tells the page of others."""
    num_near = 0
    for prompt, right in found["none"].items():
        for name, answers in found.items():
            for answer in answers[prompt]:
                if (first := _first_other(right[0].token_ids, answer.token_ids)) is None:
                    continue
                gap = plain.largest_gap(prompt.token_ids, answer.token_ids, first)
                if gap <= NEAR_TIE_LOGITS:
                    num_near += 1
                else:
                    where = f"{name}, {prompt.kind}: token {first} of an answer"
                    page.wrong.append(f"{where} is not that without drafts, {gap:.3g} logits below the best")
    return num_near


def _first_other(right: Sequence[int], found: Sequence[int]) -> int | None:
    """Find the first token that differs; where one answer is a beginning of the other, its last."""
    if list(right) == list(found):
        return None
    pairs = zip(right, found, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(right), len(found)) - 1)


# --- the page ---------------------------------------------------------------------------------------

STEP_TITLES = ("model", "dtype", "drafts", "tokens of a step", "ms", "in steps without drafts")
TITLES = (
    "model",
    "dtype",
    "answers",
    "drafts",
    "accepted, by position",
    "tokens a step",
    "full step",
    "its steps",
    "drafter",
    "expected",
    "measured",
    "95% of it",
    "tokens/s without",
    "with",
)


@dataclass(frozen=True)
class Measured:
    """What one model's answers came to."""

    name: str
    dtype: str
    all_drafts: Sequence[Drafts]
    costs: dict[str, Costs]
    """By contestant."""
    found: Answers

    @property
    def unit_ms(self) -> float:
        """Return what a step without drafts takes."""
        return self.costs["none"].steps_ms[0]

    @property
    def longest(self) -> list[Drafts]:
        """List the longest drafts of each method."""
        return list({drafts.method: drafts for drafts in self.all_drafts}.values())

    def in_units(self, name: str) -> dict[int, float]:
        """Return what a contestant's steps of so many drafts cost."""
        return {drafts: ms / self.unit_ms for drafts, ms in self.costs[name].steps_ms.items()}

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(prompt.kind for prompt in self.found["none"]))

    def steps(self, drafts: Drafts) -> list[tuple[object, ...]]:
        """Rows of STEP_TITLES."""
        costs = self.in_units(drafts.name)
        pairs = self.costs[drafts.name].steps_ms.items()
        return [
            (self.name, self.dtype, drafts.name, 1 + d, f"{ms:.2f}", f"{costs[d]:.2f}") for d, ms in pairs
        ]

    def row(self, kind: str, drafts: Drafts) -> tuple[object, ...]:
        """A row of TITLES."""
        first = {p: answers[0] for p, answers in self.found[drafts.name].items() if p.kind == kind}
        tally = Tally()
        for answer in first.values():
            tally.add(answer)
        costs = self.in_units(drafts.name)
        drafter_ms = self.costs[drafts.name].drafter_ms
        if drafts.method == "ngram":
            drafter_ms = look_up_ms(first, drafts.config)
        drafter = drafter_ms / self.unit_ms
        ratios = ratios_of(self.found, drafts.name, kind)
        interval = median_interval(ratios, CONFIDENCE)
        return (
            self.name,
            self.dtype,
            kind,
            drafts.name,
            tally.by_position,
            f"{tally.tokens_a_step:.2f}",
            f"{costs[drafts.num_tokens]:.2f}",
            f"{tally.steps_cost(costs):.2f}",
            f"{drafter:.3f}",
            f"{tally.expected(costs, drafter):.2f}",
            f"{statistics.median(ratios):.2f}",
            "{:.2f} to {:.2f}".format(*interval) if interval else "",
            f"{_speed(self.found, 'none', kind):.1f}",
            f"{_speed(self.found, drafts.name, kind):.1f}",
        )

    def missed(self) -> list[str]:
        """Say which targets n-grams miss."""
        all_drafts = [drafts for drafts in self.all_drafts if drafts.method == "ngram"]
        lines = []
        for kind in self.kinds:
            if kind in REPEATING:
                most = max(statistics.median(ratios_of(self.found, d.name, kind)) for d in all_drafts)
                if most < TARGET:
                    where = f"{self.name}, {self.dtype}, {kind}"
                    lines.append(f"{where}: {most:.2f} times as fast at most, the target is {TARGET:g}")
        return lines


def measure(
    model: Path, prompts: Sequence[Prompt], dtype: str, options: argparse.Namespace, page: Page
) -> Measured:
    """Measure one model, and tell the page of tokens that are not those without drafts."""
    wanted = drafts_of(model, options)
    most = max(drafts.num_tokens for drafts in wanted)
    most_behind = 1 + max(options.tokens, max(2, options.steps) * (1 + most)) + most
    plain, *drafting = [Contestant(model, dtype, drafts, prompts, most_behind) for drafts in (None, *wanted)]
    everybody = [plain, *drafting]
    costs = {each.name: step_costs(each, prompts[0].token_ids, options.steps) for each in everybody}
    found = take_turns(everybody, prompts, options.tokens, options.rounds)
    if num_near := check_tokens(page, plain, found):
        where = f"{model.name}, {dtype}"
        page.say(f"{where}: {num_near} answers differ from those without drafts by a near tie.", "")
    return Measured(model.name, dtype, wanted, costs, found)


def drafts_of(model: Path, options: argparse.Namespace) -> list[Drafts]:
    """List what is measured of a model: n-grams, and its head's drafts if it has a head."""
    head = model.with_name(f"{model.name}-eagle3")
    found = [Drafts("ngram", k) for k in sorted(options.ngram)]
    if (head / "config.json").exists():
        found += [Drafts("eagle3", k, head) for k in sorted(options.heads)]
    return found


def _speed(found: Answers, name: str, kind: str) -> float:
    """Return the median tokens a second, over prompts and rounds."""
    answers = [a for prompt, several in found[name].items() if prompt.kind == kind for a in several]
    return statistics.median(answer.tokens_per_s for answer in answers if answer.num_later > 0)


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Measure each model, and add both tables; returns the targets that are missed."""
    torch.set_num_threads(1)
    page.environment["threads"] = 1
    for model in (*options.models, *options.continued):
        if not (model / "config.json").exists():
            raise UserError("no checkpoint", where=str(model), mend="make bench-drafts")
    wanted = {model: asked_prompts(model) for model in options.models}
    wanted |= {model: continued_prompts(model) for model in options.continued}
    found = [
        measure(model, prompts, dtype, options, page)
        for model, prompts in wanted.items()
        for dtype in options.dtypes
    ]
    page.say(
        f"Answers of up to {options.tokens} tokens, {options.rounds} rounds. Costs are in steps without "
        "drafts: `full step` is that of a step of all drafts, `its steps` that of those that there were.",
        "",
    )
    page.table(TITLES, [each.row(kind, d) for each in found for kind in each.kinds for d in each.all_drafts])
    page.say("", "What a step costs by itself, without its drafter:", "")
    page.table(STEP_TITLES, [row for each in found for d in each.longest for row in each.steps(d)])
    return [line for each in found for line in each.missed()]


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        fill,
        __file__,
        title="Drafts on one CPU thread, beside none",
        argv=argv,
        models={"type": Path, "nargs": "*", "default": ASKED, "help": "that answer"},
        continued={"type": Path, "nargs": "*", "default": CONTINUED, "help": "that go on behind any text"},
        dtypes={"nargs": "+", "default": ["float32"], "help": "of weights and activations"},
        ngram={"type": above_zero, "nargs": "+", "default": [2, 4, 8], "help": "tokens of n-gram drafts"},
        heads={"type": above_zero, "nargs": "+", "default": [1, 3], "help": "tokens of heads' drafts"},
        rounds=2,
        tokens=48,
        steps=STEPS_OF_A_SIZE,
    )


if __name__ == "__main__":
    sys.exit(main())

"""jobs/benchmarks/drafts.py: what drafts are worth by the formula, by turns, and whether tokens are right."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.benchmarks.draft_engines import (
    Answer,
    Contestant,
    Drafts,
    Prompt,
    Step,
    asked_prompts,
    step_costs,
)
from rayk.oracle.eagle3 import write_eagle3
from rayk.types.errors import UserError
from rayk.types.speculative import DraftCounts
from tests.conftest import CheckpointFactory


@pytest.fixture(scope="module")
def job() -> Iterator[Any]:
    threads = os.environ.get("OMP_NUM_THREADS")
    yield importlib.import_module("jobs.benchmarks.drafts")
    if threads is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = threads


PROMPT = (7, 8, 9, 10) * 6


class Told:
    """A page that keeps what is said of it."""

    def __init__(self) -> None:
        self.wrong: list[str] = []


def answer(tokens: list[int], took_ms: float, drafts: tuple[int, ...] = (0,)) -> Answer:
    """An answer whose steps after the first took so long together."""
    steps = [Step(d, took_ms / len(drafts)) for d in drafts]
    return Answer(tokens, steps, DraftCounts())


def test_what_is_expected_is_worked_out_by_hand(job: Any) -> None:
    """Two steps of one token at 1 and three of five at 1.5 cost 1.3 on average, and 0.2 for the drafter."""
    tally = job.Tally(Counter({0: 2, 4: 3}), num_later=15)
    assert tally.tokens_a_step == 3.0
    assert tally.steps_cost({0: 1.0, 4: 1.5}) == pytest.approx(1.3)
    assert tally.expected({0: 1.0, 4: 1.5}, drafter=0.2) == pytest.approx(2.0)


def test_a_tally_adds_answers_up(job: Any) -> None:
    tally = job.Tally()
    for tokens, counts in (([1, 2, 3], ([2, 1], [1, 0])), ([4, 5], ([2, 1], [2, 1]))):
        tally.add(Answer(tokens, [Step(2, 1.0), Step(0, 1.0)], DraftCounts(*counts)))
    assert (tally.steps, tally.num_later) == (Counter({0: 2, 2: 2}), 3)
    assert tally.by_position == "0.75 0.50"


def test_a_ratio_is_of_one_prompt_and_round(job: Any) -> None:
    """A slow round of everybody changes none; an answer of one token has no speed."""
    first, other, short = (Prompt(kind, (i,), True) for i, kind in enumerate(("edits", "chat", "edits")))
    found = {
        "none": {
            first: [answer([1, 2, 3], ms) for ms in (4.0, 40.0, 4.0)],
            other: [answer([1, 2], 1.0)] * 3,
        },
        "ngram 2": {
            first: [answer([1, 2, 3], ms) for ms in (2.0, 20.0, 8.0)],
            other: [answer([1, 2], 0.25)] * 3,
            short: [Answer([1], [], DraftCounts())] * 3,
        },
    }
    assert job.ratios_of(found, "ngram 2", "edits") == [2.0]
    assert job.ratios_of(found, "ngram 2", "chat") == [4.0]
    measured = job.Measured("m", "float32", [Drafts("ngram", 2)], {}, found)
    assert measured.missed() == []
    found["ngram 2"][first] = [answer([1, 2, 3], ms) for ms in (3.2, 32.0, 3.2)]
    (line,) = measured.missed()
    assert "edits: 1.25 times" in line


@pytest.fixture(scope="module")
def engines(checkpoint: CheckpointFactory) -> Any:
    """A small model's engine without drafts, and one with."""
    folder = checkpoint("llama")
    prompts = [Prompt("random", PROMPT, ends=False)]
    wanted = (None, Drafts("ngram", 3))
    return [Contestant(folder, "float32", drafts, prompts, most_behind=40) for drafts in wanted]


def test_answers_are_those_without_drafts(engines: Any) -> None:
    """Steps account for every token after the first, and drafts for the tokens beyond one a step."""
    right, found = (engine.answer(PROMPT, 20, ends=False) for engine in engines)
    assert right.token_ids == found.token_ids
    assert len(right.token_ids) == 20
    assert [step.num_drafts for step in right.steps] == [0] * 19
    assert found.num_later == len(found.steps) + found.counts.num_accepted_tokens
    assert sum(step.num_drafts for step in found.steps) == found.counts.num_draft_tokens > 0
    assert found.tokens_per_s == pytest.approx(19e3 / sum(step.took_ms for step in found.steps))


def test_steps_of_every_size_are_timed(engines: Any) -> None:
    """After that the engine drafts as it did."""
    drafting = engines[1].leader.scheduler.drafting
    plain, costs = (step_costs(engine, PROMPT, 3) for engine in engines)
    assert list(plain.steps_ms) == [0]
    assert list(costs.steps_ms) == [0, 1, 2, 3]
    assert all(ms > 0 for ms in costs.steps_ms.values())
    assert plain.drafter_ms == costs.drafter_ms == 0
    assert engines[1].leader.scheduler.drafting is drafting


def test_other_tokens_are_told_of_unless_they_are_nearly_tied(
    job: Any, engines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = engines[0]
    right = plain.answer(PROMPT, 8, ends=False)
    assert abs(plain.largest_gap(PROMPT, right.token_ids, 0)) < 1e-3
    prompt, tokens = Prompt("edits", PROMPT, True), list(right.token_ids)
    tokens[5] ^= 1
    other = answer(tokens, 1.0)
    found = {"none": {prompt: [right, right]}, "ngram 3": {prompt: [right, other]}}
    page = Told()
    assert job.check_tokens(page, plain, found) == 0
    (line,) = page.wrong
    assert line.startswith("ngram 3, edits: token 5 ")
    # A beginning of the right answer is another answer.
    found["ngram 3"][prompt] = [right, answer(tokens[:5], 1.0)]
    monkeypatch.setattr(plain, "largest_gap", lambda prompt, found, first: {4: 0.01}[first])
    assert job.check_tokens(page, plain, found) == 0
    assert len(page.wrong) == 2
    found["ngram 3"][prompt] = [right, other]
    monkeypatch.setattr(plain, "largest_gap", lambda prompt, found, first: {5: 0.0009}[first])
    assert job.check_tokens(page, plain, found) == 1
    assert len(page.wrong) == 2


def test_a_page(
    job: Any, checkpoint: CheckpointFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row for each kind and length, of the head beside the model, too; a step of each size."""
    folder = tmp_path / "tiny"
    folder.symlink_to(checkpoint("llama"))
    write_eagle3(tmp_path / "tiny-eagle3", folder, seed=3)
    words = ["--models", "--continued", str(folder), "--ngram", "2", "3", "--heads", "2", "--rounds", "1"]
    assert job.main([*words, "--tokens", "12", "--steps", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [line.strip("| ").split(" | ") for line in printed if line.startswith("|")]
    tables = {tuple(line) for line in lines}
    assert job.TITLES in tables
    assert job.STEP_TITLES in tables
    rows = [dict(zip(job.TITLES, line, strict=True)) for line in lines if len(line) == len(job.TITLES)]
    rows = [row for row in rows if row["model"] == "tiny"]
    names = ["ngram 2", "ngram 3", "eagle3 2"]
    assert [(row["answers"], row["drafts"]) for row in rows] == [
        (kind, name) for kind in ("pages", "random") for name in names
    ]
    assert all(float(row["drafter"]) > 0 for row in rows if row["drafts"] == "eagle3 2")
    for row in rows:
        costs = float(row["its steps"]) + float(row["drafter"])
        assert float(row["expected"]) == pytest.approx(float(row["tokens a step"]) / costs, abs=0.05)
    steps = [line[2:4] for line in lines if len(line) == len(job.STEP_TITLES) and line[0] == "tiny"]
    assert steps == [["ngram 3", n] for n in "1234"] + [["eagle3 2", n] for n in "123"]


def test_prompts_are_chats_that_a_model_ends(checkpoint: CheckpointFactory) -> None:
    prompts = asked_prompts(checkpoint("llama"))
    assert Counter(prompt.kind for prompt in prompts) == dict.fromkeys(("edits", "extraction", "chat"), 8)
    assert all(prompt.ends for prompt in prompts)


def test_a_checkpoint_that_is_not_there(job: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint"):
        job.main(["--models", str(tmp_path), "--continued"])

"""Turns of recorded steps last until the next one where an engine went on without a pause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rayk.costs.features import StepFeatures
from rayk.costs.steps import RecordedStep
from rayk.planner.recorded import EngineStep, RecordedCell, settled, until_next


def step(
    begin_ns: int, turn_ns: int = 100, *, prefills: int = 0, requests: int = 2, **changes: Any
) -> EngineStep:
    features = StepFeatures(
        num_requests=requests,
        num_tokens=requests,
        num_logits=requests,
        num_prefills=prefills,
        num_pairs=requests,
        num_seen=requests,
    )
    recorded = RecordedStep(features=features, turn_ns=turn_ns, model_ns=80)
    told: dict[str, Any] = {"repeat": 0, "engine": "prefill0", "num_commands": 0} | changes
    return EngineStep(begin_ns=begin_ns, recorded=recorded, **told)


def lengths(*steps: EngineStep) -> list[int]:
    return [s.recorded.turn_ns for s in until_next(steps)]


def test_what_passes_between_turns_is_a_part_of_them() -> None:
    assert lengths(step(0), step(107), step(215)) == [107, 108, 100]
    assert lengths(step(0), step(107, prefills=1), step(215)) == [107, 108, 100], "one still decodes"
    assert lengths(step(107), step(0)) == [100, 107], "in whatever order they were written"


def test_an_engine_that_had_a_pause_waited_for_somebody() -> None:
    """A step of nothing but prompts may come after any time, as may one behind a hand-over's commands."""
    assert lengths(step(0), step(900, prefills=2)) == [100, 100]
    assert lengths(step(0), step(107, num_commands=1), step(215)) == [100, 100, 100]


def test_engines_and_repeats_go_on_by_themselves() -> None:
    others = [step(50, engine="prefill1"), step(50, repeat=1)]
    assert lengths(step(0), *others, step(107)) == [107, 100, 100, 100]


def test_steps_that_overlap_last_as_long_as_was_told() -> None:
    """An engine that runs ahead begins a turn before the last one's step is over."""
    assert lengths(step(0), step(60), step(150)) == [100, 100, 100]


def test_first_steps_are_left_out_and_the_first_of_each_size_of_batch() -> None:
    """Kernels are chosen for a batch of a size as the first one comes. Prompts have any number of tokens."""
    sizes = [3, 3, 3, 2, 2, 3, 1]
    steps = [step(100 * i, requests=size) for i, size in enumerate(sizes)]
    steps += [step(900, requests=9, prefills=9), step(950, requests=2, repeat=1)]
    steps += [step(1000 + i, requests=2, repeat=1) for i in range(2)]
    steps += [step(2000 + i, requests=2, engine="prefill1") for i in range(3)]
    cell = cast(RecordedCell, SimpleNamespace(steps=steps))
    assert [s.begin_ns for s in settled(cell)] == [200, 400, 500, 900, 1001, 2002]

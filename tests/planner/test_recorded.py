"""Turns of recorded steps last until the next one where an engine went on without a pause."""

from __future__ import annotations

from typing import Any

from rayk.costs.features import StepFeatures
from rayk.costs.steps import RecordedStep
from rayk.planner.recorded import EngineStep, until_next


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

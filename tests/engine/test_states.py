"""Models with recurrent states under everything that batching does to a request: equal tokens, always.

A state is read from one slot and written to another, so that cuts, preemption and small blocks of states all
change where it lies, and must never change what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayk.oracle.checkpoint import read_marker
from tests.engine.stepped import Stepped
from tests.families import HYBRID
from tests.markers import one_per, slow

FAMILIES = ("mamba2", "jamba", "qwen3_next", "falcon_h1")
"""Mamba2 alone, Mamba1 and a gated delta net between layers of attention, Mamba2 beside attention."""
OTHERS = tuple(f for f in HYBRID if f not in FAMILIES)
"""Their layers are of these kinds, too, or keep latents."""
of_all = pytest.mark.parametrize("model", HYBRID, indirect=True)
of_others = pytest.mark.parametrize("model", OTHERS, indirect=True)
of_others_slowly = pytest.mark.parametrize(
    "model", [*FAMILIES, *(pytest.param(f, marks=slow) for f in OTHERS)], indirect=True
)
NUM_TOKENS = 8


class Model:
    """A checkpoint, prompts of 5, 37 and 61 tokens and what transformers answers."""

    def __init__(self, path: Path, reference: Any) -> None:
        self.path = path
        probes = [list(probe["prompt"]) for probe in read_marker(path)["probes"]]
        self.prompts = [probes[0], probes[1], probes[2][:61]]
        answers = reference.generate(self.prompts, 3 * NUM_TOKENS, ignore_eos=True)
        self.long_answers = [list(o.token_ids) for o in answers]
        self.expected = [tokens[:NUM_TOKENS] for tokens in self.long_answers]


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], reference: Callable[..., Any]
) -> Model:
    path = checkpoint(request.param)
    return Model(path, reference(path))


@pytest.fixture(scope="module")
def ranks(model: Model) -> dict[int | None, Stepped]:
    """By state block size."""
    return {size: Stepped(model.path, state_block_size=size) for size in (None, 1, 5, 64)}


EXAMPLES = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
SIZES = st.sampled_from([None, 1, 5, 64])


@of_others_slowly
@EXAMPLES
@given(size=SIZES, cuts=st.sets(st.integers(1, 60), max_size=5))
def test_a_prompt_may_be_cut_at_any_token(
    model: Model, ranks: dict[int | None, Stepped], size: int | None, cuts: set[int]
) -> None:
    check_cuts(model, ranks[size], cuts)


@of_others
@pytest.mark.parametrize(("size", "cuts"), [(None, {1, 2, 40}), (1, {3}), (5, {7, 30, 60}), (64, {36, 37})])
def test_a_prompt_may_be_cut(
    model: Model, ranks: dict[int | None, Stepped], size: int | None, cuts: set[int]
) -> None:
    check_cuts(model, ranks[size], cuts)


def check_cuts(model: Model, engine: Stepped, cuts: set[int]) -> None:
    """Prefill the longest prompt in steps that end at the cuts."""
    prompt = model.prompts[2]
    engine.restart(140)
    state = engine.add("r", prompt, NUM_TOKENS)
    ends = [*sorted(cuts), len(prompt)]
    for start, end in zip([0, *ends], ends, strict=False):
        assert state.num_computed == start
        engine.step(end - start)
    engine.finish()
    assert state.output_token_ids == model.expected[2]


@slow
@of_all
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [None, 1, 5, 64])
def test_a_prompt_is_cut_at_every_token(
    model: Model, ranks: dict[int | None, Stepped], size: int | None
) -> None:
    for cut in range(1, len(model.prompts[2])):
        check_cuts(model, ranks[size], {cut})


@of_others_slowly
@EXAMPLES
@given(data=st.data(), size=SIZES, num_blocks=st.integers(3, 20))
def test_requests_that_come_and_go_keep_their_states(
    model: Model, ranks: dict[int | None, Stepped], data: st.DataObject, size: int | None, num_blocks: int
) -> None:
    """They arrive at any step, in chunks of any size, may be aborted, and push each other out of the pool."""
    engine = ranks[size]
    engine.restart(num_blocks)
    asked = [n for n in (1, 0, 2, 1) if engine.fits(len(model.prompts[n]) + NUM_TOKENS)]
    states = []
    for i, n in enumerate(asked):
        states.append((n, engine.add(str(i), model.prompts[n], NUM_TOKENS)))
        for _ in range(data.draw(st.integers(0, 4))):
            engine.step(data.draw(st.integers(1, 50)))
    if asked and data.draw(st.booleans()):
        engine.scheduler.remove(str(data.draw(st.integers(0, len(asked) - 1))))
    engine.finish()
    for n, state in states:
        if state.finish_reason is not None:
            assert state.output_token_ids == model.expected[n]


@one_per()
@of_all
@pytest.mark.parametrize("size", [5, 64])
def test_preempted_requests_begin_again_without_a_state(
    model: Model, ranks: dict[int | None, Stepped], size: int
) -> None:
    """In the smallest pools that hold any one of them, requests lose their blocks and compute all again."""
    engine, chunk, num_preemptions = ranks[size], 11, 0
    smallest = engine.manager.max_request_blocks(len(model.prompts[2]) + NUM_TOKENS, chunk) + 1
    for num_blocks in range(smallest, smallest + 3):
        engine.restart(num_blocks)
        states = [(n, engine.add(str(i), model.prompts[n], NUM_TOKENS)) for i, n in enumerate((1, 2, 0, 1))]
        engine.finish(chunk)
        for n, state in states:
            assert state.output_token_ids == model.expected[n]
        num_preemptions += engine.scheduler.num_preemptions
    assert num_preemptions > 0

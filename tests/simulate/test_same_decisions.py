"""A real engine's decisions and a simulated one's are equal, step by step: batches, blocks included."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rayk.costs import EngineCosts
from rayk.engine.build import make_leader
from rayk.engine.loop import EngineLoop, NoExtension
from rayk.engine.rank import EngineRank
from rayk.engine.speculation import make_drafting
from rayk.handover.handover import TransferHandover
from rayk.models.families import load_config
from rayk.oracle.tiny import HYBRID
from rayk.parallel.local import LocalComm
from rayk.parallel.shard import EngineShape
from rayk.sched.drafting import Drafter
from rayk.sched.request_state import RequestState
from rayk.simulate.clock import EventQueue
from rayk.simulate.engine import SimEngine
from rayk.simulate.rank import StepTimer
from rayk.simulate.tokens import SimOutput, TokenRule
from rayk.types.batch import UNKNOWN_TOKEN, ScheduledBatch
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams
from rayk.types.speculative import SpeculativeConfig
from tests.markers import one_per, thorough
from tests.pd import NAN_POISON

STEP_NS = 1_000


@dataclass(frozen=True)
class Case:
    """So few blocks of an engine that requests are preempted, and the lengths of what these share."""

    num_blocks: int
    unit: int = 8
    """Prompts begin alike for 0, 1 or 3 times as many tokens: the least that a prefix cache of the model
    finds, or a multiple of it."""
    settings: Mapping[str, int] = field(default_factory=dict)


# A state is as large as the keys and values of 68 tokens of falcon_h1, so its blocks have at least so many.
CASES = {
    "qwen3": Case(24),
    "qwen3-hybrid": Case(40),
    "mamba2": Case(6, settings={"state_block_size": 8}),
    "falcon_h1": Case(12, unit=68, settings={"state_block_size": 68, "max_batch_tokens": 48}),
}


@dataclass(frozen=True)
class Asked:
    """A request, and the turn before which it comes."""

    turn: int
    prompt: tuple[int, ...]
    max_tokens: int


class NotedOutput(SimOutput):
    """The tokens that a real engine chose, as they come to be known."""

    def __init__(self, chosen: list[int], end: int) -> None:
        super().__init__([], end, 0, None)
        self._chosen = chosen

    def token(self, number: int) -> int:
        return self._chosen[number - 1]

    def tokens(self, number: int, count: int) -> list[int]:
        return self._chosen[number - 1 : number - 1 + count]


class Noted(TokenRule):
    """Gives the tokens that a real engine chose: what a prefix cache finds depends on them."""

    def __init__(self, config: Any, outputs: dict[str, list[int]]) -> None:
        super().__init__(config)
        self._chosen = outputs

    def output(self, request_id: str) -> SimOutput:
        return NotedOutput(self._chosen[request_id], self.end)


def requests(seed: int, unit: int = 8, num: int = 14) -> list[Asked]:
    """Prompts of which some begin alike, arriving between the steps of others."""
    draw = random.Random(seed)
    prefixes = [tuple(draw.randrange(3, 200) for _ in range(3 * unit)) for _ in range(2)]
    found = []
    for _ in range(num):
        shared = draw.choice(prefixes)[: unit * draw.choice([0, 1, 3])]
        own = tuple(draw.randrange(3, 200) for _ in range(draw.randrange(1, 30)))
        found.append(Asked(draw.randrange(40), shared + own, draw.randrange(1, 14)))
    return sorted(found, key=lambda asked: asked.turn)


def request_of(number: int, asked: Asked) -> Request:
    sampling = SamplingParams(max_tokens=asked.max_tokens, ignore_eos=True)
    return Request(request_id=f"r{number}", prompt_token_ids=asked.prompt, sampling=sampling)


class RealEngine:
    """A real rank, loop and leader, turned by hand."""

    def __init__(self, config: EngineConfig) -> None:
        self.batches: list[ScheduledBatch] = []
        self.outputs: dict[str, list[int]] = {}
        self.rank = EngineRank(config, LocalComm(), poison=NAN_POISON)
        handover = TransferHandover(engine="prefill0", epoch=1, shape=EngineShape())
        self.leader = make_leader(self.rank, handover)
        self.handover = handover
        self.loop = EngineLoop(self.rank, NoExtension(), self.leader)
        step = self.rank.step

        def noted(batch: ScheduledBatch) -> Any:
            self.batches.append(batch)
            return step(batch)

        self.rank.step = noted  # type: ignore[method-assign]

    def run(self, asked: Sequence[Asked]) -> None:
        waiting, turn = list(enumerate(asked)), 0
        while waiting or self.leader.scheduler.has_work:
            while waiting and waiting[0][1].turn <= turn:
                number, one = waiting.pop(0)
                tokens = self.outputs.setdefault(f"r{number}", [])
                take = lambda event, tokens=tokens: tokens.extend(event.token_ids)  # noqa: E731
                self.handover.submit(request_of(number, one), take, hand_over=False)
            self.loop.turn()
            turn += 1
            assert turn < 1000, "requests wait for ever"


class Proposed:
    """The drafter of a real engine, which knows what was said before: its tokens are right up to some place.
    Notes what it proposes."""

    def __init__(self, num_tokens: int, said: Mapping[str, Sequence[int]], seed: int) -> None:
        self.found: dict[tuple[str, int, int], tuple[int, ...]] = {}
        self.num_tokens = num_tokens
        self._said, self._draw = said, random.Random(seed)

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        done = len(state.tokens) - state.num_prompt
        tokens = list(self._said[state.request_id][done : done + self._draw.randint(0, num_tokens)])
        for wrong in range(self._draw.randint(0, self.num_tokens), len(tokens)):
            tokens[wrong] = (tokens[wrong] + 1) % 200
        key = state.request_id, len(state.tokens), num_tokens
        self.found[key] = tuple(tokens)
        return self.found[key]


class Foretold:
    """Proposes what that one did."""

    def __init__(self, num_tokens: int, found: Mapping[tuple[str, int, int], tuple[int, ...]]) -> None:
        self.num_tokens, self._found = num_tokens, found

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        return self._found[state.request_id, len(state.tokens), num_tokens]


def simulated(
    config: EngineConfig, real: RealEngine, asked: Sequence[Asked], drafter: Drafter | None = None
) -> list[ScheduledBatch]:
    """Run the same requests through a simulated engine, each of whose turns takes STEP_NS. `drafter`: what
    it proposes, in place of what is drawn."""
    model = real.rank.model_config
    world, batches = EventQueue(), []
    rule = Noted(model, real.outputs)
    timer = StepTimer(EngineCosts.flat(STEP_NS))
    engine = SimEngine(world, "prefill0", "aggregated", config, model, timer, rule, fast=False)
    if drafter is not None and config.drafts_on_ranks:
        engine.leader.proposer = drafter
    elif drafter is not None:
        engine.scheduler.drafting = make_drafting(config, engine.manager, drafter)
    # Tokens end nothing here: the real engine's requests ignore its EOS.
    engine.scheduler._eos_token_ids = frozenset()
    step = engine.rank.step

    def noted(batch: ScheduledBatch) -> Any:
        batches.append(batch)
        return step(batch)

    engine.rank.step = noted
    ended: list[str] = []
    for number, one in enumerate(asked):
        request = request_of(number, one)
        take = lambda event: ended.append(event.request_id) if event.is_last else None  # noqa: E731
        world.at(one.turn * STEP_NS, lambda request=request, take=take: engine.submit(request, take))
    world.run()
    engine.leader.check_integrity()
    assert len(ended) == len(asked)
    return batches


@pytest.fixture(scope="session")
def model_of(checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        family, _, hybrid = name.partition("-")
        return checkpoint(family, overrides=dict(HYBRID)) if hybrid else checkpoint(family)

    return make


@thorough
def test_decisions_of_engines_that_run_ahead_are_equal(model_of: Callable[[str], Path]) -> None:
    """Steps are planned before the tokens of those before are known. All requests come at once."""
    config = EngineConfig(
        model=str(model_of("qwen3")),
        num_blocks=CASES["qwen3"].num_blocks,
        max_batch_tokens=12,
        max_seqs=4,
        block_size=4,
        prefix_caching=True,
        async_scheduling="always",
    )
    asked = [replace(one, turn=0) for one in requests(5)]
    real = RealEngine(config)
    real.run(asked)
    assert simulated(config, real, asked) == real.batches
    assert any(UNKNOWN_TOKEN in share.token_ids for batch in real.batches for share in batch.requests)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", list(CASES))
@one_per()
def test_decisions_are_equal(model_of: Callable[[str], Path], name: str, caching: bool) -> None:
    path, case = model_of(name), CASES[name]
    sizes = {"max_batch_tokens": 12, "max_seqs": 4, "block_size": 4, **case.settings}
    config = EngineConfig(model=str(path), num_blocks=case.num_blocks, prefix_caching=caching, **sizes)
    assert load_config(path).max_positions >= 6 * case.unit
    num_preempted = num_cached = 0
    for seed in range(2):
        asked = requests(seed, case.unit)
        real = RealEngine(config)
        real.run(asked)
        found = simulated(config, real, asked)
        for mine, theirs in zip(found, real.batches, strict=False):
            assert mine == theirs
        assert len(found) == len(real.batches)
        num_preempted += real.leader.scheduler.num_preemptions
        num_cached += real.leader.scheduler.num_found_tokens
    assert num_preempted > 0
    assert (num_cached > 0) == caching


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "qwen3-hybrid", "mamba2"])
@one_per()
def test_decisions_of_engines_that_draft_are_equal(
    model_of: Callable[[str], Path], name: str, caching: bool
) -> None:
    """The simulated engine is told what the real one's drafter proposed, and what its model said: all else
    it decides itself."""
    path, case = model_of(name), CASES[name]
    settings = {"max_batch_tokens": 12, "max_seqs": 4, "block_size": 4, **case.settings}
    plain = EngineConfig(model=str(path), num_blocks=case.num_blocks, prefix_caching=caching, **settings)
    config = replace(plain, speculative=SpeculativeConfig(method="ngram", num_tokens=3))
    num_preempted = num_drafted = num_accepted = 0
    for seed in range(2):
        asked = [replace(one, max_tokens=one.max_tokens + 6) for one in requests(seed, case.unit, num=10)]
        before, real = RealEngine(plain), RealEngine(config)
        before.run(asked)
        proposed = Proposed(3, before.outputs, seed)
        drafting = real.leader.scheduler.drafting = make_drafting(config, real.leader.manager, proposed)
        real.run(asked)
        assert real.outputs == before.outputs
        found = simulated(config, real, asked, Foretold(3, proposed.found))
        for mine, theirs in zip(found, real.batches, strict=False):
            assert mine == theirs
        assert len(found) == len(real.batches)
        assert drafting is not None
        num_preempted += real.leader.scheduler.num_preemptions
        num_drafted += drafting.counts.num_draft_tokens
        num_accepted += drafting.counts.num_accepted_tokens
    assert num_preempted > 0
    assert num_drafted > num_accepted > 10, (num_drafted, num_accepted)


@one_per()
@pytest.mark.parametrize("name", ["qwen3", "qwen3-hybrid"])
def test_decisions_of_engines_with_a_drafter_on_their_ranks_are_equal(
    model_of: Callable[[str], Path], name: str
) -> None:
    """The model drafts for itself; what it proposed is told to the simulated engine."""
    path, case = model_of(name), CASES[name]
    config = EngineConfig(
        model=str(path),
        num_blocks=case.num_blocks,
        max_batch_tokens=12,
        max_seqs=4,
        block_size=4,
        speculative=SpeculativeConfig(method="draft", model=str(path), num_tokens=2),
    )
    asked = [replace(one, max_tokens=one.max_tokens + 6) for one in requests(1, case.unit, num=8)]
    real = RealEngine(config)
    drafting = real.leader.scheduler.drafting
    assert drafting is not None
    found: dict[tuple[str, int, int], tuple[int, ...]] = {}
    take = drafting.take

    def noted(proposals: Sequence[Sequence[int]], *others: Any) -> None:
        for (state, num), tokens in zip(drafting.asked, proposals, strict=True):
            found[state.request_id, len(state.tokens), num] = tuple(tokens[:num])
        take(proposals, *others)

    drafting.take = noted  # type: ignore[method-assign]
    real.run(asked)
    simulated_batches = simulated(config, real, asked, Foretold(2, found))
    for mine, theirs in zip(simulated_batches, real.batches, strict=False):
        assert mine == theirs
    assert len(simulated_batches) == len(real.batches)
    assert drafting.counts.num_accepted_tokens > 10
    assert real.leader.scheduler.num_preemptions > 0

"""What engines lose to each other comes out of records of steps that were made up beside each other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from rayk.costs import EngineCosts, StepFeatures
from rayk.costs.losses import StepLosses
from rayk.costs.steps import RecordedStep
from rayk.planner import neighbours
from rayk.planner.neighbours import fit_losses, form_s
from rayk.planner.recorded import EngineStep
from rayk.types.config import EngineConfig

ALONE_NS = {True: 1_000_000, False: 3_000_000}
"""What a decode step takes, and a prefill step."""
LOSS = {
    "llama": {(False, False): 0.3, (False, True): 0.4, (True, False): 0.2, (True, True): 0.6},
    "hybrid": {(False, False): 0.1, (False, True): 0.35, (True, False): 0.8, (True, True): 0.05},
}
"""What engines of a kind lose: (is it a decode step, is that of its neighbour) -> share."""
NAMES = {False: "prefill", True: "decode"}


@dataclass
class Turning:
    """An engine that takes steps, and has breaks between them."""

    name: str
    kind: str
    steps: list[tuple[bool, float]]  # decode, after a break of so many ns
    at: float = 0.0  # when the next one begins, or the one under way began
    left_ns: float = 0.0  # of what it takes alone
    is_busy: bool = False
    done: list[tuple[float, float, bool]] = field(default_factory=list)  # begin, end, decode

    @property
    def is_decode(self) -> bool:
        return self.steps[0][0]

    def go_on(self, now: float) -> None:
        """Begin a step, or end the one under way."""
        if not self.is_busy:
            self.is_busy, self.left_ns = True, ALONE_NS[self.is_decode]
            return
        self.done.append((self.at, now, self.is_decode))
        self.steps.pop(0)
        self.is_busy, self.at = False, now + (self.steps[0][1] if self.steps else 0.0)


def drawn(seed: int, kinds: tuple[str, str], num: int = 300) -> list[Turning]:
    draw = random.Random(seed)
    engines = []
    for number, kind in enumerate(kinds):
        steps = [(draw.random() < 0.6, draw.choice([0.0, 0.0, 1e5, 2e6])) for _ in range(num)]
        engines.append(Turning(f"prefill{number}", kind, steps, at=steps[0][1]))
    return engines


def run_beside(first: Turning, second: Turning) -> None:
    """Let both take their steps on two cores, from moment to moment: of a step beside another so much less is
    done in the same time."""
    now, pair = 0.0, (first, second)
    while first.steps or second.steps:
        rates, nexts = [], []
        for own, other in (pair, pair[::-1]):
            is_beside = own.is_busy and other.is_busy
            rate = 1 / (1 + LOSS[own.kind][own.is_decode, other.is_decode]) if is_beside else 1.0
            rates.append(rate)
            nexts.append(now + own.left_ns / rate if own.is_busy else own.at)
        until = min(at for own, at in zip(pair, nexts, strict=True) if own.steps)
        for own, rate, at in zip(pair, rates, nexts, strict=True):
            if own.is_busy:
                own.left_ns -= (until - now) * rate
            if own.steps and at == until:
                own.go_on(until)
        now = until


def recorded(engines: list[Turning], *, noise: float = 0.0, seed: int = 0) -> Any:
    """The cell that recorded them: engines of the first's kind are named by block_size 16, others by 32."""
    draw = random.Random(seed)
    configs = {
        e.name: EngineConfig(model="m", block_size=16 if e.kind == engines[0].kind else 32) for e in engines
    }
    steps = []
    for engine in engines:
        for begin, end, decode in engine.done:
            features = StepFeatures(
                num_requests=1,
                num_tokens=1 if decode else 9,
                num_logits=1,
                num_prefills=0 if decode else 1,
                num_pairs=9,
                num_seen=9,
            )
            turn_ns = round(end - begin)
            model_ns = round(turn_ns * draw.uniform(1 - noise, 1 + noise))
            step = RecordedStep(features=features, turn_ns=turn_ns, model_ns=model_ns)
            steps.append(
                EngineStep(repeat=0, engine=engine.name, begin_ns=round(begin), num_commands=0, recorded=step)
            )
    return SimpleNamespace(
        is_alone=False,
        cell=SimpleNamespace(engines=tuple(configs.values())),
        steps=steps,
        config=None,
        engine_config=configs.__getitem__,
    )


def costs_of(block_size: int, device: str = "cpu") -> EngineCosts:
    flat = EngineCosts.flat(0)
    tables = {
        NAMES[decode]: replace(flat.decode, terms=("one",), constants=(ns,))
        for decode, ns in ALONE_NS.items()
    }
    return replace(flat, key=flat.key._replace(block_size=block_size, device=device), **tables)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[Any, EngineCosts]:
    """Costs of two kinds of engines, which differ in their block size."""
    flat = EngineCosts.flat(0).key
    monkeypatch.setattr(
        neighbours, "engine_key", lambda config, engine: flat._replace(block_size=engine.block_size)
    )
    return {(costs := costs_of(size)).key: costs for size in (16, 32)}


def planted(kind: str) -> dict[str, float]:
    return {f"{NAMES[own]}_beside_{NAMES[other]}": loss for (own, other), loss in LOSS[kind].items()}


def as_dict(losses: StepLosses) -> dict[str, float]:
    return {name: getattr(losses, name) for name in StepLosses.__slots__}


@pytest.mark.parametrize("seed", range(3))
def test_planted_losses_come_out_of_records(engines: Mapping[Any, EngineCosts], seed: int) -> None:
    """Of both engines, each with constants of its own; steps overlap by any part."""
    pair = drawn(seed, ("llama", "hybrid"))
    run_beside(*pair)
    found = fit_losses([recorded(pair)], engines, num_cores=2)
    for key, kind in zip(engines, ("llama", "hybrid"), strict=True):
        assert as_dict(found.losses[key]) == pytest.approx(planted(kind), abs=1e-3)
        assert not found.unknown[key]


def test_times_that_scatter_tell_the_same(engines: Mapping[Any, EngineCosts]) -> None:
    cells = []
    for seed in range(3):
        pair = drawn(seed, ("hybrid", "hybrid"))
        run_beside(*pair)
        cells.append(recorded(pair, noise=0.1, seed=seed))
    found = fit_losses(cells, engines, num_cores=2)
    (key, other) = engines
    assert as_dict(found.losses[key]) == pytest.approx(planted("hybrid"), abs=0.03)
    assert found.losses[other] == StepLosses(), "no engine of the kind is there"
    assert len(found.unknown[other]) == 4


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, True)])
def test_what_too_few_steps_tell_of_is_named(
    engines: Mapping[Any, EngineCosts], first: bool, second: bool
) -> None:
    """One engine takes steps of one class only, and so does its neighbour."""
    pair = [
        Turning(f"prefill{n}", "llama", [(decode, 0.0)] * 200) for n, decode in enumerate((first, second))
    ]
    run_beside(*pair)
    found = fit_losses([recorded(pair)], engines, num_cores=2)
    key = next(iter(engines))
    known = {f"{NAMES[a]}_beside_{NAMES[b]}" for a, b in ((first, second), (second, first))}
    assert set(StepLosses.__slots__) - set(found.unknown[key]) == known
    for name, loss in planted("llama").items():
        assert getattr(found.losses[key], name) == pytest.approx(loss if name in known else 0, abs=1e-3)


def test_a_neighbour_counts_by_its_share_of_the_other_cores(engines: Mapping[Any, EngineCosts]) -> None:
    """On five cores a rank is a quarter of the others: what it takes is a quarter of the loss."""
    pair = drawn(0, ("llama", "llama"))
    run_beside(*pair)
    key = next(iter(engines))
    few, many = (fit_losses([recorded(pair)], engines, num_cores=n).losses[key] for n in (2, 5))
    assert as_dict(many) == pytest.approx({name: 4 * loss for name, loss in as_dict(few).items()}, rel=1e-3)


def test_cores_that_lack_are_no_loss(engines: Mapping[Any, EngineCosts]) -> None:
    """On a single core two steps take turns, and each takes twice as long: nothing is left to explain."""
    steps = [Turning(f"prefill{n}", "llama", [], done=[]) for n in range(2)]
    for engine in steps:
        engine.done = [(2e6 * i, 2e6 * (i + 1), True) for i in range(60)]
    found = fit_losses([recorded(steps)], engines, num_cores=1)
    assert found.losses[next(iter(engines))].decode_beside_decode == pytest.approx(0, abs=1e-6)


def test_steps_of_devices_take_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_of(16, device="cuda")
    monkeypatch.setattr(neighbours, "engine_key", lambda config, engine: costs.key)
    pair = drawn(0, ("llama", "llama"))
    run_beside(*pair)
    found = fit_losses([recorded(pair)], {costs.key: costs}, num_cores=2)
    assert found.losses[costs.key] == StepLosses()


@pytest.mark.parametrize("is_told", [True, False])
def test_an_engine_is_formed_anew_in_the_time_that_a_start_took(is_told: bool) -> None:
    stages = {"waiting for the workers": 30.0, "engines are formed": 0.7, "engines are connected": 0.2}
    startup = {
        "stages": [{"stage": name, "wall_s": took, "cpu_s": None} for name, took in stages.items()],
        "rank_cpu_s": {"prefill0": [{"start": 3.1, "load": 9.0}, {"start": 3.3, "load": 0.1}]},
    }
    assert form_s({"startup": startup} if is_told else {}) == (pytest.approx(4.2) if is_told else 0.0)

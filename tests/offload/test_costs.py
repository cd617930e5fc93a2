"""The cost model against machines whose costs are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from rayk.offload.costs import BLIND, CostModel
from tests.markers import thorough

GB = 10**9


@dataclass(frozen=True)
class Machine:
    """What moves and steps cost here, in nanoseconds."""

    latency_ns: float
    out_byte_ns: float
    in_byte_ns: float
    step_ns: float
    token_ns: float
    pair_ns: float
    token_bytes: int
    max_step_tokens: int

    def step(self, start: int, stop: int) -> tuple[float, int]:
        """What computing tokens of a prompt costs, and how many each sees, counted one by one."""
        num_pairs = sum(position + 1 for position in range(start, stop))
        return self.step_ns + (stop - start) * self.token_ns + num_pairs * self.pair_ns, num_pairs

    def recompute(self, num_tokens: int, num_here: int = 0) -> float:
        """All steps of a prompt's tokens behind its first ones."""
        chunk, stop = self.max_step_tokens, num_here + num_tokens
        return sum(self.step(i, min(i + chunk, stop))[0] for i in range(num_here, stop, chunk))

    def move_out(self, num_bytes: int) -> float:
        return self.latency_ns + num_bytes * self.out_byte_ns

    def move_in(self, num_bytes: int) -> float:
        return self.latency_ns + num_bytes * self.in_byte_ns


def some_machine(draw: random.Random) -> Machine:
    """From a slow node with a small model to a fast one with a large model, such that both ways are near."""
    token_ns = 10 ** draw.uniform(4, 6.3)
    token_bytes = draw.choice([2, 24, 128]) * 1024
    byte_ns = token_ns / token_bytes * 10 ** draw.uniform(-0.5, 0.8)
    return Machine(
        latency_ns=10 ** draw.uniform(5.5, 7.5),
        out_byte_ns=byte_ns * draw.uniform(0.2, 0.8),
        in_byte_ns=byte_ns * draw.uniform(0.2, 0.8),
        step_ns=10 ** draw.uniform(5, 7.3),
        token_ns=token_ns,
        pair_ns=draw.choice([0, token_ns / 500, token_ns / 4000]),
        token_bytes=token_bytes,
        max_step_tokens=draw.choice([64, 512, 2048]),
    )


def noise(draw: random.Random) -> float:
    """Some percent; now and then something else had the machine."""
    return draw.uniform(0.93, 1.07) * (draw.uniform(5, 30) if draw.random() < 0.03 else 1)


def learn(model: CostModel, machine: Machine, draw: random.Random, num_prompts: int = 60) -> None:
    """What an engine sees: prompts in chunks, decode steps in between, moves of all sizes."""
    for _ in range(num_prompts):
        num_tokens = draw.randint(1, 4096)
        for start in range(0, num_tokens, machine.max_step_tokens):
            stop = min(start + machine.max_step_tokens, num_tokens)
            ns, num_pairs = machine.step(start, stop)
            model.observe_prefill(stop - start, ns * noise(draw), num_pairs)
        for _ in range(20):
            # Decode steps of few requests: each reads all its KV, which is no prefill's cost.
            num_running = draw.randint(1, 4)
            context_ns = num_running * draw.randint(1, 4096) * machine.pair_ns * draw.uniform(0.5, 5)
            model.observe_prefill(num_running, machine.step_ns + context_ns, num_running)
        num_bytes = int(2 ** draw.uniform(4, 12)) * machine.token_bytes
        model.observe_out(num_bytes, machine.move_out(num_bytes) * noise(draw))
        model.observe_in(num_bytes, machine.move_in(num_bytes) * noise(draw))


@thorough
def test_the_choice_is_the_cheaper_one_but_near_the_break_even() -> None:
    sides = [0, 0]
    for seed in range(60):
        draw = random.Random(seed)
        machine, model = some_machine(draw), CostModel()
        learn(model, machine, draw)
        for _ in range(25):
            num_tokens = int(2 ** draw.uniform(5, 12.5))
            out_bytes, in_bytes = (
                draw.randint(0, num_tokens) * machine.token_bytes,
                num_tokens * machine.token_bytes,
            )
            recompute_ns = machine.recompute(num_tokens)
            load_ns = machine.move_in(in_bytes)
            swap_ns = (machine.move_out(out_bytes) if out_bytes else 0) + load_ns
            for choice, move_ns in (
                (model.swap(out_bytes, in_bytes, num_tokens), swap_ns),
                (model.load(in_bytes, num_tokens), load_ns),
            ):
                if not 0.8 < move_ns / recompute_ns < 1.25:
                    assert choice.moves == (move_ns < recompute_ns), (seed, num_tokens, machine)
                    sides[choice.moves] += 1
    assert min(sides) > 400, "both were right often"


@thorough
def test_estimates_come_near_the_truth() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        machine, model = some_machine(draw), CostModel()
        learn(model, machine, draw)
        for num_tokens in (512, 1024, 4096):
            found = model.load(num_tokens * machine.token_bytes, num_tokens)
            assert found.recompute_ns == pytest.approx(machine.recompute(num_tokens), rel=0.2)
            assert found.move_ns == pytest.approx(machine.move_in(num_tokens * machine.token_bytes), rel=0.2)


def test_tokens_behind_others_are_weighed_with_what_they_see_of_them() -> None:
    draw = random.Random(5)
    sides = [0, 0]
    for _ in range(40):
        token_ns = 10 ** draw.uniform(4, 6)
        machine = replace(some_machine(draw), token_ns=token_ns, pair_ns=token_ns / 500, max_step_tokens=512)
        model = CostModel()
        for _ in range(100):
            start, num_tokens = draw.randint(0, 16_384), draw.randint(1, 512)
            ns, num_pairs = machine.step(start, start + num_tokens)
            model.observe_prefill(num_tokens, ns, num_pairs)
            model.observe_in(num_tokens << 12, machine.move_in(num_tokens << 12))
        model.observe_prefill(512, *machine.step(0, 512))
        for num_here in (0, 1, 1000, 12_288):
            num_tokens = int(2 ** draw.uniform(6, 12.5))
            expected = machine.recompute(num_tokens, num_here)
            num_bytes = int(expected * draw.choice([0.5, 1.5]) / machine.in_byte_ns)
            choice = model.load(num_bytes, num_tokens, num_here=num_here)
            assert choice.recompute_ns == pytest.approx(expected, rel=0.1), (num_here, num_tokens, machine)
            assert choice.recompute_ns == model.recompute_ns(num_tokens, num_here)
            move_ns = machine.move_in(num_bytes)
            if not 0.8 < move_ns / expected < 1.25:
                assert choice.moves == (move_ns < expected), (num_here, num_tokens, machine)
                sides[choice.moves] += 1
    assert min(sides) > 20, "both were right often"


def test_nothing_known_of_computing_moves() -> None:
    model = CostModel(default_out_gb_per_s=1, default_in_gb_per_s=4, default_latency_ns=1e6)
    choice = model.swap(GB, GB, 100)
    assert (choice.moves, choice.recompute_ns) == (True, None)
    assert choice.move_ns == pytest.approx(1e9 + 0.25e9 + 2e6)
    assert model.load(GB, 100).move_ns == pytest.approx(0.25e9 + 1e6)
    assert model.load(0, 100).move_ns == 0, "nothing to move"
    model.observe_prefill(1, 5e6)
    assert model.load(GB, 100).recompute_ns is None, "a decode step tells nothing of a prompt"
    model.observe_prefill(100, 50e6)
    assert model.load(GB, 100) == model.load(GB, 100)
    assert model.load(GB, 100).recompute_ns == pytest.approx(50e6, rel=0.1)
    assert not model.load(GB, 100).moves


@pytest.mark.parametrize("num_tokens", [8, 128, 2048])
def test_what_cannot_be_told_apart_is_put_down_to_tokens_and_bytes(num_tokens: int) -> None:
    model = CostModel()
    for _ in range(100):
        model.observe_prefill(num_tokens, num_tokens * 1e5)
        model.observe_in(num_tokens * 10**6, num_tokens * 1e6)
    for factor in (0.5, 1, 2, 4):
        found = model.load(int(factor * num_tokens * 10**6), int(factor * num_tokens))
        assert found.recompute_ns == pytest.approx(factor * num_tokens * 1e5, rel=0.05)
        if num_tokens >= 128:  # else the default latency is most of it
            assert found.move_ns == pytest.approx(factor * num_tokens * 1e6, rel=0.05)


def test_steps_with_few_tokens_weigh_little() -> None:
    model = CostModel()
    for _ in range(50):
        model.observe_prefill(1024, 100e6)
    for _ in range(2000):
        model.observe_prefill(2, 30e6)  # long contexts are read
    found = model.recompute_ns(1024)
    assert found == pytest.approx(100e6, rel=0.1)


def test_rates_that_changed_are_learnt_anew() -> None:
    model = CostModel()
    for _ in range(200):
        model.observe_in(10**8, 1e8)
    assert model.load(10**8, 1).move_ns == pytest.approx(1e8, rel=0.1)
    for _ in range(4 * 64):
        model.observe_in(10**8, 1e9)
    assert model.load(10**8, 1).move_ns == pytest.approx(1e9, rel=0.1)


def test_a_few_outliers_change_little() -> None:
    model = CostModel()
    for n in range(100):
        model.observe_out(10**8, 50e6 if n % 20 else 5e9)
        model.observe_prefill(512, 50e6 if n % 20 else 5e9)
    assert model.swap(10**8, 0, 512).move_ns == pytest.approx(50e6, rel=0.25)
    assert model.recompute_ns(512) == pytest.approx(50e6, rel=0.25)


def test_a_move_that_was_slow_once_is_tried_again() -> None:
    model = CostModel()
    for _ in range(64):
        model.observe_prefill(1000, 1e9)
    for _ in range(3):
        model.observe_in(10**7, 60e9)
    choices = [model.load(10**7, 1000).moves for _ in range(1000)]
    assert not any(choices[:50])
    assert any(choices)
    model.observe_in(10**7, 10e6)
    assert model.load(10**7, 1000).moves


def test_a_prompt_takes_as_few_steps_as_the_engine_can() -> None:
    """Only ends of prompts were computed so far."""
    model, draw = CostModel(), random.Random(1)
    model.max_step_tokens = 256
    for _ in range(100):
        num_tokens = draw.randint(1, 60)
        model.observe_prefill(num_tokens, 7e6 + 2e4 * num_tokens)
    assert model.recompute_ns(600) == pytest.approx(3 * 7e6 + 600 * 2e4, rel=0.1)


@thorough
@pytest.mark.parametrize(("move_ns", "is_cheaper"), [(150e6, False), (9e6, True)])
def test_who_loads_every_prompt_computes_one_now_and_then_and_learns_what_it_costs(
    move_ns: float, is_cheaper: bool
) -> None:
    """17 tokens of each are left to compute, in a step that takes as long as one of 512 nearly does."""
    model, choices = CostModel(), []
    model.max_step_tokens = 2048
    for _ in range(400):
        choice = model.load(10**7, 500)
        choices.append(choice.moves)
        if choice.moves:
            model.observe_in(10**7, move_ns)
        num_tokens = 17 if choice.moves else 517
        model.observe_prefill(num_tokens, 10e6 + 1.5e4 * num_tokens)
    first = choices.index(False)
    assert first == BLIND - 1
    assert choices[-200:].count(is_cheaper) > 190
    assert (choices.count(False) < 8) == is_cheaper


def test_settings_overrule_and_estimates_are_told() -> None:
    model = CostModel()
    model.observe_prefill(1000, 1e9)
    cheap, dear = model.load(1000, 1000), model.swap(50 * GB, 50 * GB, 1000)
    assert (cheap.moves, dear.moves) == (True, False)
    never = model.load(1000, 1000, "never")
    assert (never.moves, never.move_ns, never.recompute_ns) == (False, cheap.move_ns, cheap.recompute_ns)
    assert model.swap(50 * GB, 50 * GB, 1000, "always").moves
    told = model.describe()
    assert told["out_gb_per_s"] == pytest.approx(2)
    assert told["prefill_token_ns"] == pytest.approx(1e6, rel=0.05)
    assert (told["num_in"], told["num_out"], told["num_steps"]) == (0, 0, 1)
    assert told["prefill_512_ns"] == model.recompute_ns(512)
    assert told["largest_step_tokens"] == 1000
    assert set(CostModel().describe()) == {
        *("out_gb_per_s", "out_latency_ns", "num_out", "in_gb_per_s", "in_latency_ns", "num_in", "num_steps")
    }


def test_useless_observations_are_left_out() -> None:
    model = CostModel()
    for num, ns in ((0, 5.0), (5, 0.0), (-1, 5.0)):
        model.observe_prefill(num, ns)
        model.observe_out(num, ns)
        model.observe_in(num, ns)
    assert [model.describe()[f"num_{what}"] for what in ("in", "out", "steps")] == [0, 0, 0]

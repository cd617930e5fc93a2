"""Every fault, at every point, in both modes, under every policy, in simulated worlds of many seeds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from rayk.types.fault_table import (
    FAILURE_POLICIES,
    KINDS,
    MODES,
    POINTS,
    RANK_KINDS,
    ROLES,
    ExpectedOutcome,
    Fault,
    all_faults,
    table_text,
)
from tests.markers import sweep, thorough
from tests.transfer.simulator.__main__ import main, story
from tests.transfer.simulator.checks import check, simulate
from tests.transfer.simulator.request_state import Stream
from tests.transfer.simulator.world import World

NUM_SEEDS = 48
"""Of each row of the table, in each mode and under each policy."""
NUM_SEEDS_SLOW = 400


def fail(world: World, problems: list[str], again: World) -> None:
    """`again`: the same world, traced."""
    faults = " ".join(
        f"--fault {s.fault.kind}:{s.fault.point}" + (f":{s.fault.role}" if s.fault.role else "")
        for s in world.faults
    )
    command = f"python -m tests.transfer.simulator --seed {world.seed} {faults} --mode {world.mode}"
    raise AssertionError(f"{command} --policy {world.policy}\n{story(again.run())}\n" + "\n".join(problems))


def run_all(faults: list[Fault], mode: str, seeds: range) -> None:
    for fault, policy in product(faults, FAILURE_POLICIES):
        # A fault that strikes a rank has two rows in the table, one per side: each gets its share of seeds.
        roles = (fault.role,) if fault.role is None else ROLES
        for seed in seeds[roles.index(fault.role) :: len(roles)]:
            world, problems = simulate(seed, fault, mode, policy)
            if problems:
                fail(world, problems, World(seed, (fault,), mode=mode, policy=policy, tracing=True))


@sweep(16)
@thorough
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", range(8))
def test_every_fault_leads_to_its_verdict(block: int, mode: str):
    """It strikes; all ends in time, with every block given back on both sides, every stream whole and no
    wrong token in it."""
    run_all(list(all_faults())[block::8], mode, range(NUM_SEEDS))


def test_the_table_is_whole():
    """Kinds and points are those that experiments name; each fault has an outcome in every case."""
    assert set(KINDS) == {"drop", "delay", "reorder", "duplicate", "corrupt", "kill", "stop", "restart"}
    assert list(POINTS) == [
        "handshake", "reserve", "post", "mid_transfer", "notify", "free", "lease_renewal",
    ]  # fmt: skip
    faults = list(all_faults())
    assert len(faults) == len(POINTS) * (len(KINDS) + len(RANK_KINDS) * (len(ROLES) - 1))


def test_a_page_has_the_table():
    page = Path(__file__).parents[2] / "docs/verdicts-and-faults.md"
    assert table_text() in page.read_text(encoding="utf-8")


def test_a_world_is_told_from_the_command_line(capsys: pytest.CaptureFixture[str]):
    asked = ["--seed", "3", "--mode", "push", "--policy", "migrate", "--fault", "kill:mid_transfer:prefill"]
    assert main(asked) == 0
    told = capsys.readouterr().out
    assert "*** kill at mid_transfer of prefill" in told
    assert told.endswith("verdict PASS; PASS, recovered is to come out\n")
    assert main(["--table"]) == 0
    assert capsys.readouterr().out == table_text() + "\n"


@pytest.mark.parametrize(
    ("fault", "problem", "allowed"),
    [
        ("foo:post", "no kind 'foo'", KINDS),
        ("", "no kind ''", KINDS),
        ("drop", "no point", POINTS),
        ("kill:nope:prefill", "no point 'nope'", POINTS),
        ("kill:post:x", "no role 'x'", ROLES),
        ("kill:post:prefill:decode", "no role 'prefill:decode'", ROLES),
        ("drop:post:prefill", "takes no role", RANK_KINDS),
    ],
)
def test_an_unknown_fault_is_refused(
    fault: str, problem: str, allowed: Sequence[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(["--fault", fault])
    assert ended.value.code == 2
    *usage, line = capsys.readouterr().err.splitlines()
    assert usage[0].startswith("usage:")
    assert problem in line
    assert ", ".join(allowed) in line


@thorough
@pytest.mark.parametrize("mode", MODES)
def test_every_kind_of_ending_occurs(mode: str):
    """Worlds are worth something only if each way to end is one that they take."""
    seen: Counter[str] = Counter()
    worlds = list(product(all_faults(), FAILURE_POLICIES, range(3)))
    worlds += product([Fault("corrupt", "mid_transfer")], FAILURE_POLICIES, range(3, 40))
    for fault, policy, seed in worlds:
        world = World(seed, (fault,), mode=mode, policy=policy, tracing=True).run()
        seen[world.verdict()] += 1
        told = " ".join(text for _, text in world.trace)
        for what in ("has ended by itself", "leaves its blocks to what is in flight", "is preempted"):
            seen[what] += what in told
        for request in world.requests:
            if request.num_valid is not None and policy == "recompute" and request.is_recovered:
                seen["all kept" if request.num_valid == request.num_tokens else "computed again"] += 1
                seen["part kept"] += 0 < request.num_valid < request.num_tokens
    wanted = {"PASS", "TRANSFER_ERROR", "KV_MISMATCH", "ENGINE_ERROR", "computed again", "part kept"}
    wanted |= {"has ended by itself", "leaves its blocks to what is in flight"}
    wanted |= {"is preempted", "all kept"} if mode == "push" else set()
    assert not [what for what in wanted if not seen[what]], seen


@pytest.mark.parametrize("mode", MODES)
def test_worlds_without_faults_pass(mode: str):
    for seed in range(120):
        policy = FAILURE_POLICIES[seed % len(FAILURE_POLICIES)]
        world = World(seed, mode=mode, policy=policy).run()
        problems = check(world, ExpectedOutcome("PASS"))
        if problems or world.is_recovered:
            fail(world, problems, World(seed, mode=mode, policy=policy, tracing=True))


@thorough
@pytest.mark.parametrize("mode", MODES)
def test_a_request_given_up_at_any_time_leaves_nothing_behind(mode: str):
    stages: Counter[int] = Counter()
    for seed, policy in product(range(400), FAILURE_POLICIES):
        world = World(seed, mode=mode, policy=policy, abort=True).run()
        stages[len(world.requests[0].stream.token_ids)] += 1
        problems = check(world, ExpectedOutcome("PASS", is_recovered=None))
        if problems:
            again = World(seed, mode=mode, policy=policy, abort=True, tracing=True)
            fail(world, ["--abort", *problems], again)
    assert all(stages[num_tokens] for num_tokens in range(5)), "given up before, within and after its stream"


def two_faults(seeds: range) -> None:
    faults = list(all_faults())
    for seed in seeds:
        draw = random.Random(seed)
        chosen = draw.sample(faults, 2)
        mode, policy = draw.choice(MODES), draw.choice(FAILURE_POLICIES)
        abort = draw.random() < 0.2
        world = World(seed, chosen, mode=mode, policy=policy, abort=abort).run()
        problems = check(world)
        if problems:
            again = World(seed, chosen, mode=mode, policy=policy, abort=abort, tracing=True)
            fail(world, [*(["--abort"] if abort else []), *problems], again)


@thorough
def test_two_faults_at_once_break_nothing():
    two_faults(range(2000))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_two_faults_at_once_break_nothing_for_long(block: int):
    two_faults(range(10_000 + block * 1000, 11_000 + block * 1000))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", POINTS)
def test_every_fault_leads_to_its_verdict_for_long(point: str, mode: str):
    faults = [fault for fault in all_faults() if fault.point == point]
    run_all(faults, mode, range(NUM_SEEDS, NUM_SEEDS_SLOW))


def test_a_world_is_its_seed():
    fault = Fault("drop", "notify")
    first, second = (
        World(11, (fault,), mode="push", policy="recompute", tracing=True).run() for _ in range(2)
    )
    assert first.trace == second.trace
    other = World(12, (fault,), mode="push", policy="recompute", tracing=True).run()
    assert other.trace != first.trace


def test_a_stream_delivers_each_token_once():
    stream = Stream()
    assert stream.take(0, 0, (5, 6)) == (5, 6)
    assert stream.take(0, 1, (6, 7)) == (7,)
    assert stream.begin_again() == 1
    assert stream.take(0, 3, (8,)) == (), "late news of an attempt that was given up"
    assert stream.take(1, 0, (5,)) == ()
    assert stream.take(1, 3, (8, 9)) == (8, 9)
    assert stream.token_ids == [5, 6, 7, 8, 9]
    with pytest.raises(AssertionError, match="never came"):
        stream.take(1, 6, (1,))

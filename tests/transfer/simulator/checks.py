"""What must hold when a world is over."""

from __future__ import annotations

from rayk.types.fault_table import ExpectedOutcome, FailurePolicy, Fault, expected
from tests.transfer.simulator.consumer import Consumer
from tests.transfer.simulator.producer import TICK
from tests.transfer.simulator.requests import MAX_OUTPUT, right_token
from tests.transfer.simulator.world import REQUEST_DEADLINE, World


def check(world: World, wanted: ExpectedOutcome | None = None) -> list[str]:
    """Everything that is wrong with a world that is over, one line each; `wanted`: what had to come out."""
    problems = list(world.violations)
    for request in world.requests:
        name = f"r{request.index}"
        if request.ended != 1:
            problems.append(f"{name} ended {request.ended} times, at {request.stage}")
        if request.ended_at > REQUEST_DEADLINE:
            problems.append(f"{name} ended at {request.ended_at}, after its deadline")
        right = [right_token(request.index, i) for i in range(MAX_OUTPUT)]
        found = request.stream.token_ids
        is_short = request.error is not None or request.is_aborted
        if found != (right[: len(found)] if is_short else right):
            problems.append(f"{name} streamed {found} instead of {right}")
    problems += _check_ledgers(world)
    if wanted is not None:
        problems += _check_outcome(world, wanted)
    return problems


def _check_ledgers(world: World) -> list[str]:
    problems = []
    for engine in world.engines:
        memory = engine.memory
        if engine.alive and memory.num_held:
            holders = {h for h in memory.holders if h is not None}
            problems.append(
                f"{memory.name} took {memory.num_taken} blocks and holds {memory.num_held}: {holders}"
            )
        for incoming in engine.jobs.values() if isinstance(engine, Consumer) and engine.alive else ():
            for rank in range(engine.tp if incoming.deadline else 0):
                name = f"{memory.name} rank {rank}"
                late = incoming.finished_at.get(rank, 0) - incoming.deadline
                if rank not in incoming.outcomes:
                    problems.append(f"{name} has no verdict")
                elif late > TICK:
                    problems.append(f"{name} has its verdict {late} late")
                elif rank not in incoming.drained:
                    problems.append(f"{name} still has something in flight")
    return problems


def _check_outcome(world: World, wanted: ExpectedOutcome) -> list[str]:
    if not world.all_faults_hit:
        return ["its fault has not struck"]
    found = ExpectedOutcome(world.verdict(), world.is_recovered)
    # A write of an attempt that was begun again is void, whatever befell it.
    hits_writes = any(s.fault.point in ("post", "mid_transfer") for s in world.faults)
    may_miss = world.num_preempted > 0 and world.mode == "push" and hits_writes
    if may_miss and found == ExpectedOutcome("PASS", is_recovered=False):
        return []
    if found.verdict != wanted.verdict:
        return [f"the verdict is {found}, not {wanted}"]
    if wanted.is_recovered not in (None, found.is_recovered):
        return [f"it ended in {found}, not {wanted}"]
    return []


def simulate(
    seed: int, fault: Fault, mode: str, policy: FailurePolicy, *, tracing: bool = False
) -> tuple[World, list[str]]:
    """A world with one fault, over, and what is wrong with it."""
    world = World(seed, (fault,), mode=mode, policy=policy, tracing=tracing).run()
    return world, check(world, expected(fault, mode, policy))

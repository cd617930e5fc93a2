"""The life of an engine on its workers: formed, connected to its partners, watched, ended.

Runs inside the actor that owns the workers: a coordinator's for the engines of a cell, a server's fleet.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from rayk.actors.engines import CONTROL_S, EngineHandle
from rayk.actors.nodes import FORM_S
from rayk.actors.placement import kill
from rayk.actors.serving import EngineAccount
from rayk.actors.worker import RankSpec
from rayk.engine.warm_up import WARM_UP_S
from rayk.handover.commands import Connect, Describe, EndReads, WarmUp
from rayk.handover.receiving import IN_FLIGHT
from rayk.types.errors import DeadlineExceeded, EngineDied, RaykError

END_S = 30.0
"""Deadline for the end of a server's engine."""
STOP_S = 10.0
"""Deadline for each part of an engine's end; after it the workers are killed."""
DRAIN_S = 12.0
"""How long reads that are in flight at the end may take to end."""
RELEASE_POLL_S = 0.02
SECRET_BYTES = 32
COMM_S = 60.0
"""How long a rank waits for its peers in a collective; deaths are noticed sooner, by other means."""
HEAR_S = 1.0
"""Seconds between two signs of life of an engine's rank."""
TURN_POLL_S = 0.1
WIRE_POLL_S = 0.01

RankSpecs = Callable[[int, str], RankSpec]
"""What a rank becomes, given the address that the ranks meet at."""


async def form_engine(engine: EngineHandle, spec_of: RankSpecs) -> None:
    """Have an engine's workers become its ranks, and run their loops. Raises RaykError."""
    secret = secrets.token_bytes(SECRET_BYTES)
    address = await engine.guard(engine.leader.reserve_address.remote(), "an address", CONTROL_S)
    replies = [
        worker.form.options(concurrency_group="control").remote(
            replace(spec_of(rank, address), secret=secret)
        )
        for rank, worker in enumerate(engine.workers)
    ]
    limit_s = FORM_S + (0 if engine.config.device == "cpu" else WARM_UP_S)
    facts = await engine.guard(all_of(replies), "forming", limit_s)
    by_rank = {key: [f[key] for f in facts] for key in ("buffer_bytes", "load_memory", "cpu_s")}
    scales = {layer: scale for f in facts for layer, scale in f["kv_scales"].items()}
    weights = told_by_stages([f["weights"] for f in facts[:: engine.config.tp]])
    whole = {"node": engine.node, "kv_scales": scales, "weights": weights}
    engine.facts = {**facts[0], **whole, **by_rank}
    await measure_clock(engine)
    engine.start()


def told_by_stages(texts: Sequence[str]) -> str:
    """Say what the stages of an engine, the last one first, say of themselves: once where it is the same."""
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"stage {stage}: {text}" for stage, text in enumerate(reversed(texts)))


async def measure_clock(engine: EngineHandle) -> None:
    """Find how far this process's clock is from that of the engine's host. Raises RaykError."""
    before = time.monotonic_ns()
    theirs = await engine.guard(engine.leader.clock_ns.remote(), "its clock", CONTROL_S)
    after = time.monotonic_ns()
    # Within one host both clocks are one and the offset is noise.
    offset = (before + after) // 2 - theirs
    engine.clock_offset_ns = 0 if before <= theirs <= after else offset


async def connect(p: EngineHandle, d: EngineHandle, wire_s: float, *, is_push: bool) -> None:
    """Connect two engines: exchange handshakes and set up the network between them within `wire_s`. Raises
    what they refuse, or die of."""
    for engine in (p, d):
        if not engine.descriptions:
            engine.descriptions = tuple(await _of(engine, Describe(), (p, d)))
    landings = await _of(d, Connect(p.descriptions, d.descriptions), (p, d))
    while not all(await _of(d, WarmUp(p.name, wire_s), (p, d))):
        await asyncio.sleep(WIRE_POLL_S)
    at = tuple(landings) if is_push else ()
    await _of(p, Connect(p.descriptions, d.descriptions, at), (p, d))


async def _of(engine: EngineHandle, command: object, both: Sequence[EngineHandle]) -> list[Any]:
    """Return an engine's answer. Raises what it or the other engine died of."""
    answer = asyncio.create_task(engine.call(command, CONTROL_S))
    try:
        waiting: set[asyncio.Future[Any]] = {answer, *(e.died for e in both)}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for e in both:
            e.raise_if_dead()
        return await answer
    finally:
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)


async def end_reads(lost: EngineHandle, readers: Sequence[EngineHandle]) -> None:
    """Have engines that may be reading from a lost one fail those reads now, not at their deadlines."""
    live = [d for d in readers if not d.died.done()]
    ended = (d.call(EndReads(lost.name, lost.epoch), CONTROL_S) for d in live)
    await asyncio.gather(*ended, return_exceptions=True)


def _nobody(engine: EngineHandle) -> None:
    del engine


async def until_it_hangs(
    engine: EngineHandle, patience_s: float, on_turn: Callable[[EngineHandle], None] = _nobody
) -> None:
    """Look at the engine until it is dead. `on_turn` is called each time it was seen to take a turn."""
    while not engine.died.done():
        await see_a_turn(engine, patience_s)
        if not engine.died.done():
            on_turn(engine)
        await asyncio.sleep(patience_s / 2)


async def hear(engine: EngineHandle, patience_s: float, on_word: Callable[[EngineHandle], None]) -> None:
    """Ask every rank for a word until the engine is dead; `on_word` is called each time all have answered.
    Ranks answer in the middle of long steps, too: only a process that stands still is silent."""
    while not engine.died.done():
        words = [w.status.options(concurrency_group="control").remote() for w in engine.workers]
        try:
            await engine.guard(all_of(words), "a word", patience_s)
        except RaykError:
            pass  # `died` tells of those that are gone
        else:
            on_word(engine)
        await asyncio.sleep(HEAR_S)


async def see_a_turn(engine: EngineHandle, patience_s: float) -> None:
    """Declare an engine dead and end it if its loop stands still for so long; an idle loop turns, too."""
    until, first = time.monotonic() + patience_s, None
    while not engine.died.done():
        status = engine.leader.status.options(concurrency_group="control").remote()
        try:
            found = await engine.guard(status, "a sign of life", max(0.1, until - time.monotonic()))
        except EngineDied:
            return
        except RaykError:
            found = {}
        turns = found.get("num_turns", first)
        if first is not None and turns != first:
            return
        first = turns
        if time.monotonic() > until:
            engine.declare_dead(f"it hangs: no turn in {patience_s:g} s")
            for worker in engine.workers:
                kill(worker)  # what is read from it can end only when it is gone
            return
        await asyncio.sleep(TURN_POLL_S)


async def survivors(engine: EngineHandle, within_s: float) -> set[int]:
    """Return the ranks of a dead engine whose processes have forgotten it, and can be ranks of another."""

    async def survives(worker: Any) -> bool:
        try:
            async with asyncio.timeout(within_s):
                return bool(await worker.release.options(concurrency_group="control").remote(within_s / 2))
        except (RayError, TimeoutError):
            return False

    if len(engine.workers) == 1:
        return set()
    found = await asyncio.gather(*(survives(w) for w in engine.workers))
    return {rank for rank, is_sound in enumerate(found) if is_sound}


async def stop_loops(engine: EngineHandle, lease_s: float) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Let an engine's loops end once nobody reads from it any more, or `lease_s` and STOP_S are over.

    Returns its leader's status then, with what all stages computed, and the leases that never ended. Raises
    what the engine died of.
    """
    engine.raise_if_dead()
    leaked = await _await_releases(engine, STOP_S + lease_s)
    engine.leader.stop.options(concurrency_group="control").remote()
    await engine.guard(engine.stopped(), "stopping", STOP_S)
    engine.raise_if_dead()
    await engine.guard(engine.leader.check_integrity.remote(), "its blocks", STOP_S)
    # Ranks of a stage compute the same layers.
    told = all_of([worker.status.remote() for worker in engine.workers[:: engine.config.tp]])
    stages = await engine.guard(told, "what it computed", STOP_S)
    return stages[0] | {"num_token_layers": sum(s["num_token_layers"] for s in stages)}, leaked


async def dissolve(engine: EngineHandle) -> bool:
    """Let the workers forget an engine whose loops have ended; returns whether they did. A transport may
    break down over reads behind a dead link while it is taken apart. That changes nothing: everything was
    reported before."""
    try:
        await engine.guard(all_of([w.dissolve.remote() for w in engine.workers]), "dissolving", STOP_S)
    except RaykError:
        return False
    return True


async def end_engine(engine: EngineHandle, lease_s: float) -> EngineAccount:
    """Stop an engine within END_S and `lease_s`, and account for its blocks."""
    try:
        async with asyncio.timeout(END_S + lease_s):
            status, leaked = await stop_loops(engine, lease_s)
            await dissolve(engine)
    except TimeoutError:
        error: RaykError = DeadlineExceeded(f"the end of {engine.name}", END_S)
        return EngineAccount(engine=engine.name, errors=(error,))
    except RaykError as found:
        return EngineAccount(engine=engine.name, errors=(found,))
    return EngineAccount(
        engine=engine.name,
        ledger=status["ledger"],
        num_free_blocks=status["num_free_blocks"],
        num_blocks=status["num_blocks"],
        leaked=leaked,
    )


async def _await_releases(engine: EngineHandle, timeout_s: float) -> tuple[str, ...]:
    """Wait until every lease has ended, by its readers' notifications or its own deadline; returns those that
    do not. Blocks left to reads that never end are no leak: they go with their worker."""
    began = time.monotonic()
    while True:
        status = await engine.guard(engine.leader.status.remote(), "its leases", STOP_S)
        leases = status.get("leases", ())
        leaked = tuple(i for i in leases if not i.startswith(IN_FLIGHT))
        waited_s = time.monotonic() - began
        if not leases or waited_s > timeout_s or (not leaked and waited_s > DRAIN_S):
            return leaked
        await asyncio.sleep(RELEASE_POLL_S)


async def all_of(refs: Sequence[Any]) -> list[Any]:
    """Wait for every reply, and return them in order."""
    return list(await asyncio.gather(*refs))

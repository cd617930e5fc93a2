"""The engines of one cell: what its spec asks of them, and how its requests reach them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from rayk.actors.cell_outcome import CellOutcome
from rayk.actors.deployment import Deployment, DeploymentRules
from rayk.actors.deployment_metrics import Losses
from rayk.actors.engines import EngineHandle
from rayk.actors.forming import dissolve, see_a_turn, stop_loops
from rayk.actors.members import Member
from rayk.actors.nodes import cell_demands, placement_of, weights_of
from rayk.actors.placement import this_node
from rayk.actors.pool import WorkerPool
from rayk.actors.push_flow import push_settings
from rayk.actors.tiers import HostTiers
from rayk.engine.record import RecordedSteps
from rayk.handover.fault_injection import DESCRIBE, exchanged_blocks
from rayk.handover.planted import PlantedFault
from rayk.sched.dispatcher import Dispatcher, FormAgain, Place
from rayk.sched.policies import get_policy
from rayk.sched.recovery import attempt_id, cause_of
from rayk.specs import Cell
from rayk.specs.experiment import FaultSpec
from rayk.specs.faults import CORRUPT_HANDSHAKE, committing_role, side_of
from rayk.specs.serving import cell_engines, cell_rules
from rayk.transfer.faults import TransferFault
from rayk.transfer.staging import StagingSettings
from rayk.transfer.ticket import Reservation
from rayk.types.bugs import bug
from rayk.types.errors import DeadlineExceeded, EngineDied, InternalError, RaykError
from rayk.types.fault_table import POINTS, RANK_KINDS

END_S = 20.0
"""Deadline for the ends of all engines of a cell together."""


class CellDeployment(Deployment):
    """The engines of one cell. An engine that the spec wants restarted is formed again once."""

    def __init__(
        self,
        cell: Cell,
        outcome: CellOutcome,
        pool: WorkerPool,
        tiers: HostTiers | None,
        epochs: Iterator[int],
        losses: Losses,
    ) -> None:
        entries = cell_engines(cell)
        roles = {f.engine_role for f in cell.faults if f.kind == "restart"}
        restarts = frozenset(e.name for e in entries if e.name.rstrip("0123456789") in roles)
        dispatcher = Dispatcher(
            get_policy(cell.policy, cell.policy_settings),
            cell_rules(cell, restarts),
        )
        limits = cell.deadlines
        rules = DeploymentRules(
            transfer=cell.spec.transfer,
            request_s=limits.request_s,
            transfer_s=limits.transfer_s,
            hang_s=limits.transfer_s if _looks_for_hangs(cell) else None,
            has_lines=False,
        )
        super().__init__([Member(e, e.role) for e in entries], rules, dispatcher, pool, tiers, epochs)
        for name in restarts:
            self.members[name].next_life = asyncio.get_running_loop().create_future()
        self.is_serving = False
        """Whether requests have begun."""
        self._cell = cell
        self._outcome = outcome
        self._losses = losses
        if tiers is not None:
            tiers.told = dispatcher

    @property
    def lives(self) -> list[EngineHandle]:
        """Return the current handle of each engine that has workers."""
        return [m.handle for m in self.members.values() if m.handle is not None]

    def rank_options(self, engine: EngineHandle, rank: int) -> dict[str, Any]:
        """Return a rank's staging, push and fault settings. Only an engine's first life commits faults."""
        cell, transfer = self._cell, self._cell.spec.transfer
        role = "decode" if engine.role == "decode" else "prefill"
        is_first = not self.members[engine.name].num_restarts
        kinds = {f.kind for f in cell.faults} if is_first else set()
        index, num_ranks = int(engine.name.removeprefix(role)), engine.config.num_ranks
        return {
            "staging": StagingSettings(
                transfer.staging if role == "decode" else "never", transfer.staging_mib << 20
            ),
            "push": push_settings(transfer) if engine.role == "prefill" else None,
            "notices_deaths": cell.failure_policy != "fail" or not kinds.isdisjoint(RANK_KINDS),
            "faults": faults_of(cell, role, index, rank, num_ranks) if is_first else (),
        }

    async def replace_workers(self, member: Member) -> int:
        cell, num_workers = self._cell, member.entry.config.num_ranks
        await self.pool.replace_workers(member.name, num_workers)
        demands, weights = cell_demands(cell, this_node()), weights_of(cell.prefill)
        await self.pool.prepare(demands, placement_of(cell), weights)
        return num_workers

    def begun(self, engine: EngineHandle) -> None:
        self._losses.watch(engine)

    def opened(self, member: Member) -> None:
        self.dispatcher.open(member.name, member.role, member.entry.config.num_ranks, time.monotonic_ns())
        if member.next_life is not None and member.num_restarts:
            member.next_life.set_result(None)

    def lost(self, member: Member, again: FormAgain | None) -> None:
        """Note what an engine died of if it is formed again; the end of the cell reports the others."""
        if again is None:
            return
        error = member.life.died.exception()
        assert isinstance(error, RaykError), error
        survives = self._cell.failure_policy != "fail" or not self.is_serving
        is_survived = survives and not isinstance(error, InternalError)
        (self._outcome.survived if is_survived else self._outcome.errors).append(error)

    async def live(self, name: str) -> EngineHandle:
        """Return an engine once it is formed. Raises what it, or the forming of it, died of."""
        member = self.members[name]
        if member.next_life is not None and not member.is_live:
            await asyncio.shield(member.next_life)
        member.life.raise_if_dead()
        return member.life

    def note_deaths(self) -> None:
        """Have no request placed on an engine that has died, even before its watcher has noticed."""
        for member in self.members.values():
            if member.life.died.done():
                self.note_death(member)

    def failed(self, attempt: Place, error: RaykError) -> Place | None:
        """Return the next place of a request whose attempt met this error; None: the request ends with it."""
        self.note_deaths()
        engines = attempt.placement
        cause = cause_of(error, producer=engines.prefill or "", consumer=engines.decode or "")
        return self.dispatcher.failed(attempt.name, cause, time.monotonic_ns())

    def abort(self, request_id: str, num_attempts: int) -> None:
        """Stop every attempt of a request, wherever it is."""
        for engine in self.lives:
            for number in range(num_attempts):
                name = attempt_id(request_id, number)
                engine.leader.abort.options(concurrency_group="control").remote(name)

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Look after the engines within the block: they may die or, where that is looked for, hang."""
        tasks = [asyncio.create_task(self._see_to(m)) for m in self.members.values()]
        try:
            yield
            # A life that has begun is seen through: the next cell gets whole workers.
            if (hang_s := self._rules.hang_s) is not None:
                await asyncio.gather(*(see_a_turn(m.life, hang_s) for m in self.ready()))
            again = [m.next_life for m in self.members.values() if m.next_life and not m.is_live]
            await asyncio.gather(*again, return_exceptions=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def end_all(self) -> None:
        """Free the workers for the next cell, and note what the engines and their host tiers leave."""
        await asyncio.gather(*(self._end(m) for m in self.members.values() if m.handle is not None))
        if self.host_tiers is None:
            return
        for engine in self.lives:
            await self.host_tiers.detach(engine)
        outcome = self._outcome
        outcome.tiers = await self.host_tiers.status()
        outcome.errors += await self.host_tiers.leaks()
        outcome.tier_losses = list(self.host_tiers.losses)
        self.host_tiers.losses.clear()

    async def _end(self, member: Member) -> None:
        """End an engine by its own loops if it lives, else by replacing its workers."""
        engine, is_told = member.life, member.decided is member.life and member.again is not None
        errors, lease_s = self._outcome.errors, self._rules.transfer.lease_s or 0.0
        of_losses = errors if self._cell.failure_policy == "fail" else self._outcome.survived
        try:
            if engine.is_running and not is_told:
                async with asyncio.timeout(END_S + lease_s):
                    if await self._stop(engine, lease_s):
                        return
        except TimeoutError:
            errors.append(DeadlineExceeded(f"the end of {engine.name}", END_S))
        except DeadlineExceeded as error:
            # An engine that does not answer any more, unless something else took too long before.
            is_late = any(isinstance(e, DeadlineExceeded) for e in errors)
            of_losses.append(error if is_late else EngineDied(engine.name, f"it hangs: {error}"))
        except EngineDied as error:
            if str(error) not in {str(e) for e in errors}:
                of_losses.append(error)
        except RaykError as error:
            if isinstance(error, InternalError) and engine.died.done():
                self._losses.found_late(engine.name)
            errors.append(error)
        await self.pool.replace_workers(engine.name, len(engine.workers))

    async def _stop(self, engine: EngineHandle, lease_s: float) -> bool:
        """Let the loops end, then let the workers forget the engine. Returns False where the workers must be
        replaced. Raises what the engine died of, and EngineDied where blocks leaked."""
        status, leaked = await stop_loops(engine, lease_s)
        outcome = self._outcome
        engine.facts["num_token_layers"] = status["num_token_layers"]
        if "pace" in status:
            engine.facts["pace"] = status["pace"]
        outcome.ledgers[engine.name] = status["ledger"]
        if engine.config.record_steps:
            await self._take_steps(engine)
        if "offload" in status:
            outcome.offload[engine.name] = status["offload"]
        if leaked:
            raise EngineDied(engine.name, f"blocks leaked: {', '.join(leaked)} never ended")
        return await dissolve(engine) and not status["leases"]

    async def _take_steps(self, engine: EngineHandle) -> None:
        """Keep the engine's steps, in the time of the repeat."""
        asked = engine.leader.recorded_steps.remote()
        found: RecordedSteps = await engine.guard(asked, "its steps", END_S)
        if not self._outcome.requests:
            return
        first = self._outcome.requests[0]
        self._outcome.steps += found.rows(
            cell_id=first.cell_id,
            repeat=first.repeat,
            engine=engine.name,
            started_ns=first.arrival_ns - first.due_ns - engine.clock_offset_ns,
        )

    async def _see_to(self, member: Member) -> None:
        try:
            await self.look_after(member)
        except Exception as error:  # noqa: BLE001 - whatever it is, somebody may wait for another life
            found = error if isinstance(error, RaykError) else bug(f"the watch over {member.name}", error)
            member.life.declare_dead(str(found))
            self.dispatcher.not_formed(member.name, found)
            if member.next_life is not None and not member.next_life.done():
                member.next_life.set_exception(found)
                member.next_life.exception()  # nobody may be waiting


def _looks_for_hangs(cell: Cell) -> bool:
    """Return whether requests can be saved from a hanging engine, or one is planted. Elsewhere deadlines
    suffice: steps may be long."""
    return cell.failure_policy != "fail" or any(f.kind == "stop" for f in cell.faults)


def faults_of(cell: Cell, role: str, index: int, rank: int, num_ranks: int) -> tuple[PlantedFault, ...]:
    """Return the faults that a rank of engine `index` of this role commits, or sets off at a rank of the
    other side.

    A fault that names no rank belongs to the last one; wrong drafts to all, each of which may propose.
    """
    planted: list[PlantedFault] = []
    for fault in cell.faults:
        is_own = role == committing_role(fault, cell.spec.transfer.mode)
        ranks = range(num_ranks) if fault.kind == "wrong_drafts" else (num_ranks - 1,)
        is_rank = rank in (ranks if fault.rank is None else (fault.rank,))
        is_here = is_own and fault.engine in (None, index) and is_rank
        if fault.point not in POINTS:
            planted += [_planted(fault)] if is_here else []
            continue
        transfer_fault = _transfer_fault(fault, cell.spec.transfer.mode)
        if is_here or (transfer_fault.remote is not None and not is_own):
            planted.append(_planted(fault, transfer_fault))
    return tuple(planted)


def _planted(fault: FaultSpec, transfer_fault: TransferFault | None = None) -> PlantedFault:
    return PlantedFault(
        kind=fault.kind,
        point=fault.point,
        layer=fault.layer,
        step=fault.step,
        request=fault.request,
        seed=fault.seed,
        transfer_fault=transfer_fault,
    )


def _transfer_fault(fault: FaultSpec, mode: str) -> TransferFault:
    point = fault.point or ""
    is_of_rank = fault.kind in RANK_KINDS
    if point == "handshake" and (is_of_rank or (fault.kind, point) == CORRUPT_HANDSHAKE):
        point = DESCRIBE
    is_remote = is_of_rank and point != DESCRIBE and fault.engine_role != side_of(point, mode)
    return TransferFault(
        kind=fault.kind,
        point=point,
        step=fault.step or 1,
        delay_s=fault.delay_s,
        byte=fault.seed // 8 % 8,
        bit=fault.seed % 8,
        remote=fault.engine_role if is_remote else None,
    )


def as_it_arrives(cell: Cell, reservation: Reservation, number: int) -> Reservation:
    """Return a cell's `number`-th reservation, from 1, as the prefill engine gets it, faults included."""
    faults = [f for f in cell.faults if (f.kind, f.point) == ("corrupt", "reserve")]
    if all((f.step or 1) != number for f in faults):
        return reservation
    return replace(reservation, block_tables=exchanged_blocks(reservation.block_tables))

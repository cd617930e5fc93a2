"""Coordinator: forms engines on workers, places requests, hands them from prefill to decode engines.

A plain class whose async methods run in one Ray actor; `launch` makes it remote. It sees requests and
events, never a token loop: those run inside the engines.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import replace

from rayk.actors.cell_run import CellOutcome, CellRun
from rayk.actors.deployment_metrics import EngineNow, Losses, beating, begin_outcomes, watch_engines
from rayk.actors.engines import EngineHandle
from rayk.actors.forming import COMM_S, dissolve, form_engine, stop_loops
from rayk.actors.nodes import EngineAsk, Node, cell_asks, placement_of
from rayk.actors.placement import this_node
from rayk.actors.planting import faults_of
from rayk.actors.pool import WorkerPool, name_lost_nodes
from rayk.actors.push_flow import push_settings
from rayk.actors.ray_metrics import make_meter
from rayk.actors.tiers import HostTiers
from rayk.actors.worker import RankSpec
from rayk.handover.planted import PlantedFault
from rayk.metrics import Meter
from rayk.specs import Cell
from rayk.transfer.staging import StagingSettings
from rayk.types.bugs import bug
from rayk.types.config import EngineConfig
from rayk.types.errors import DeadlineExceeded, EngineDied, InternalError, RaykError
from rayk.types.fault_table import RANK_KINDS
from rayk.types.offload import OffloadSettings
from rayk.types.waiting import busy

END_S = 20.0
"""Deadline for all of them together."""


class Coordinator:
    """Runs cells one after the other on a pool of workers.

    `keep_workers`: engines' workers stay for later cells (the cluster holds those of all cells at once);
    else every cell gives back what the next has no use for.
    """

    def __init__(self, name: str, keep_workers: bool = True) -> None:
        self.name = name
        self._pool = WorkerPool(name.rpartition("/")[2], keep=keep_workers)
        self._epoch = 0
        self._in_use: list[EngineHandle] = []
        self._nodes: dict[str, Node] = {}
        """Of the engines in use, by name."""
        self._losses: Losses | None = None
        """Of the cell that runs."""
        self._tiers: HostTiers | None = None
        """Those of the last cell that had any."""

    def __repr__(self) -> str:
        return f"Coordinator({self.name})"

    async def prepare(
        self, asks: Sequence[EngineAsk], placement: str = "auto", model: str | None = None
    ) -> dict[str, int]:
        """Place these engines and start their workers; worker name -> process id. See WorkerPool.prepare."""
        return await self._pool.prepare(asks, placement, model)

    async def run_cell(
        self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int, *, capture: bool
    ) -> CellOutcome:
        """Form the cell's engines, run all its requests, dissolve the engines. Never raises a RaykError and
        never outlasts the cell's deadline by more than END_S and the time to kill workers."""
        async with beating(make_meter(cell.prefill.model)) as meter:
            begin_outcomes(meter)
            watch_engines(meter, self._engines_now)
            self._losses = Losses(meter)
            outcome = await self._run_cell(cell, prompts, repeat, capture, meter)
            for error in (*outcome.errors, *outcome.survived):
                if isinstance(error, EngineDied):
                    self._losses.found_late(error.engine)
        return outcome

    async def _run_cell(
        self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int, capture: bool, meter: Meter
    ) -> CellOutcome:
        outcome = CellOutcome()
        started = time.monotonic_ns()
        engines: list[EngineHandle] = []
        try:
            async with asyncio.timeout(cell.deadlines.cell_s):
                engines += await self._form(cell)
                if self._tiers is not None:
                    outcome.tiers_before = await self._tiers.status()
                form_again = functools.partial(self._form_again, cell, outcome)
                run = CellRun(cell, repeat, outcome, engines, capture, form_again, meter)
                if self._tiers is not None:
                    self._tiers.on_lost = run.dispatcher.tier_lost
                await run.run(prompts)
        except TimeoutError:
            outcome.errors.append(DeadlineExceeded(f"cell {cell.cell_id}", cell.deadlines.cell_s, busy()))
        except RaykError as error:
            outcome.errors.append(error)
        except Exception as error:  # noqa: BLE001 - one broken cell must not end the run
            outcome.errors.append(bug("the coordinator", error))
        assert self._losses is not None
        self._losses.is_over = True
        await asyncio.gather(*(self._end(e, cell, outcome) for e in self._in_use))
        await self._end_tiers(cell, outcome)
        await name_lost_nodes(outcome.errors, self._nodes)
        self._in_use = []
        outcome.facts = {e.name: e.facts for e in engines}
        outcome.wall_ns = time.monotonic_ns() - started
        return outcome

    async def _end_tiers(self, cell: Cell, outcome: CellOutcome) -> None:
        """What host tiers say of a cell that is over."""
        if self._tiers is None or cell.spec.offload.settings() is None:
            return
        for engine in self._in_use:
            await self._tiers.detach(engine)
        outcome.tiers = await self._tiers.status()
        outcome.errors += await self._tiers.leaks()
        outcome.tier_losses = list(self._tiers.losses)
        self._tiers.losses.clear()

    def _engines_now(self) -> list[EngineNow]:
        return [EngineNow(e.name, e.role, e.is_running) for e in self._in_use if not e.died.done()]

    async def shutdown(self) -> None:
        """Give every placement group back; its workers end, and so do host tiers."""
        if self._tiers is not None:
            await self._tiers.close()
        self._pool.free_all()

    async def _form(self, cell: Cell) -> list[EngineHandle]:
        self._epoch += 1
        wanted: list[tuple[str, str, EngineConfig]] = []
        role = "aggregated" if cell.decode is None else "prefill"
        wanted += [(f"prefill{i}", role, cell.prefill) for i in range(cell.num_prefill_engines)]
        if cell.decode is not None:
            wanted += [(f"decode{i}", "decode", cell.decode) for i in range(cell.num_decode_engines)]
        asks = cell_asks(cell, this_node())
        await self._pool.prepare(asks, placement_of(cell), cell.prefill.model)
        self._nodes = {}
        for name, role, config in wanted:
            workers, self._nodes[name] = self._pool.engine(name, config.tp)
            node = str(self._nodes[name])
            self._in_use.append(EngineHandle(name, role, self._epoch, config, workers, node))
        await asyncio.gather(*(self._form_engine(cell, e) for e in self._in_use))
        await self._attach_all(cell)
        return self._in_use

    async def _attach_all(self, cell: Cell) -> None:
        """Give the cell's engines their nodes' host tiers, if it has any."""
        settings = _offload_of(cell)
        if self._tiers is not None and self._tiers.settings != settings:
            await self._tiers.close()
            self._tiers = None
        if settings is None:
            return
        if self._tiers is None:
            self._tiers = HostTiers(f"{self.name}/{self._epoch}", settings)
        elif cell.spec.offload.keep == "cell":
            await self._tiers.clear()
        await self._tiers.attach_all([(e, self._nodes[e.name].node_id) for e in self._in_use])

    async def _form_again(
        self, cell: Cell, outcome: CellOutcome, lost: EngineHandle, *, was_serving: bool
    ) -> EngineHandle:
        """A new life of a lost engine on new workers in its place; it commits no faults. Raises RaykError."""
        try:
            lost.raise_if_dead()
        except InternalError as error:
            outcome.errors.append(error)
        except RaykError as error:
            survives = cell.failure_policy != "fail" or not was_serving
            (outcome.survived if survives else outcome.errors).append(error)
        self._epoch += 1
        self._in_use.remove(lost)
        await self._pool.replace_workers(lost.name, len(lost.workers))
        asks = cell_asks(cell, this_node())
        await self._pool.prepare(asks, placement_of(cell), cell.prefill.model)
        workers, self._nodes[lost.name] = self._pool.engine(lost.name, lost.config.tp)
        node = str(self._nodes[lost.name])
        engine = EngineHandle(lost.name, lost.role, self._epoch, lost.config, workers, node)
        self._in_use.append(engine)
        await self._form_engine(replace(cell, faults=()), engine)
        if self._tiers is not None:
            await self._tiers.detach(lost)
            await self._tiers.attach(engine, self._nodes[engine.name].node_id)
        return engine

    async def _form_engine(self, cell: Cell, engine: EngineHandle) -> None:
        spans_nodes = len({n.node_id for n in self._nodes.values()}) > 1

        def spec_of(rank: int, address: str) -> RankSpec:
            return RankSpec(
                engine=engine.name,
                epoch=engine.epoch,
                role=engine.role,
                rank=rank,
                config=engine.config,
                address=address,
                comm_timeout_s=COMM_S,
                # A ticket may wait for the consumer's blocks as long as its request may last.
                lease_s=cell.deadlines.request_s + cell.deadlines.transfer_s,
                renewed_lease_s=cell.spec.transfer.lease_s,
                staging=_staging_of(cell, engine),
                push=push_settings(cell.spec.transfer) if engine.role == "prefill" else None,
                spans_nodes=spans_nodes,
                notices_deaths=_may_lose_engines(cell),
                faults=_planted(cell, engine, rank),
                offload=_offload_of(cell),
            )

        assert self._losses is not None
        self._losses.watch(engine)
        await form_engine(engine, spec_of)

    async def _end(self, engine: EngineHandle, cell: Cell, outcome: CellOutcome) -> None:
        """Free an engine's workers for the next one: by its leave if it lives, else by replacing them."""
        survives = cell.failure_policy != "fail"
        try:
            if engine.is_running:
                async with asyncio.timeout(END_S + (cell.spec.transfer.lease_s or 0.0)):
                    if await self._stop(engine, cell, outcome):
                        return
        except TimeoutError:
            outcome.errors.append(DeadlineExceeded(f"the end of {engine.name}", END_S))
        except DeadlineExceeded as error:
            # An engine that does not answer any more, unless something else took too long before.
            is_late = any(isinstance(e, DeadlineExceeded) for e in outcome.errors)
            hangs = EngineDied(engine.name, f"it hangs: {error}")
            (outcome.survived if survives else outcome.errors).append(error if is_late else hangs)
        except EngineDied as error:
            if str(error) not in {str(e) for e in outcome.errors}:
                (outcome.survived if survives else outcome.errors).append(error)
        except RaykError as error:
            if isinstance(error, InternalError) and self._losses is not None and engine.died.done():
                self._losses.found_late(engine.name)
            outcome.errors.append(error)
        await self._pool.replace_workers(engine.name, len(engine.workers))

    async def _stop(self, engine: EngineHandle, cell: Cell, outcome: CellOutcome) -> bool:
        """Let the loops end, then let the workers forget the engine; False where they must be replaced.
        Raises what the engine died of, and EngineDied where blocks leaked."""
        status, leaked = await stop_loops(engine, cell.spec.transfer.lease_s or 0.0)
        engine.facts["num_token_layers"] = status["num_token_layers"]
        outcome.ledgers[engine.name] = status["ledger"]
        if "offload" in status:
            outcome.offload[engine.name] = status["offload"]
        if leaked:
            raise EngineDied(engine.name, f"blocks leaked: {', '.join(leaked)} never ended")
        return await dissolve(engine) and not status["leases"]


def _offload_of(cell: Cell) -> OffloadSettings | None:
    """How its engines use host tiers, within its deadlines."""
    limits = cell.deadlines
    return cell.spec.offload.settings(transfer_s=limits.transfer_s, request_s=limits.request_s)


def _staging_of(cell: Cell, engine: EngineHandle) -> StagingSettings:
    """Who reads stages."""
    transfer = cell.spec.transfer
    mode = transfer.staging if engine.role == "decode" else "never"
    return StagingSettings(mode, transfer.staging_mib << 20)


def _may_lose_engines(cell: Cell) -> bool:
    """Whether a cell is meant to go on, or to end in order, when ranks die."""
    kinds = {f.kind for f in cell.faults}
    return cell.failure_policy != "fail" or not kinds.isdisjoint(RANK_KINDS)


def _planted(cell: Cell, engine: EngineHandle, rank: int) -> tuple[PlantedFault, ...]:
    role = "decode" if engine.role == "decode" else "prefill"
    index = int(engine.name.removeprefix(role))
    return faults_of(cell, role, index, rank, engine.config.tp)

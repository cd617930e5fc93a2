"""Coordinator: forms engines on workers, places requests, hands them from prefill to decode engines.

A plain class whose async methods run in one Ray actor; `launch` makes it remote. It sees requests and
events, never a token loop: those run inside the engines.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from rayk.actors.cell_deployment import CellDeployment
from rayk.actors.cell_outcome import CellOutcome
from rayk.actors.cell_run import CellRun
from rayk.actors.deployment_metrics import EngineNow, Losses, beating, begin_outcomes, watch_engines
from rayk.actors.engines import EngineHandle
from rayk.actors.nodes import cell_demands, placement_of, weights_of
from rayk.actors.placement import this_node
from rayk.actors.pool import WorkerPool, name_lost_nodes
from rayk.actors.ray_metrics import make_meter
from rayk.actors.tiers import HostTiers
from rayk.actors.vllm_cell import VllmCellRun
from rayk.actors.vllm_engines import VllmEngines
from rayk.specs import Cell
from rayk.types.bugs import bug
from rayk.types.errors import DeadlineExceeded, EngineDied, RaykError
from rayk.types.offload import OffloadSettings
from rayk.types.waiting import busy


class Coordinator:
    """Runs cells one after the other on a pool of workers.

    `pool` may have workers already.
    """

    def __init__(self, name: str, pool: WorkerPool) -> None:
        self.name = name
        self._pool = pool
        self._epochs = itertools.count(1)
        self._engines: CellDeployment | None = None
        """The deployment of the cell that runs."""
        self._vllm = VllmEngines(f"{name.rpartition('/')[2]}/vllm")
        self._vllm_engines: list[EngineHandle] = []
        """The engines of the cell that runs."""
        self._tiers: HostTiers | None = None
        """Those of the last cell that had any."""

    def __repr__(self) -> str:
        return f"Coordinator({self.name})"

    async def run_cell(
        self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int, *, capture: bool
    ) -> CellOutcome:
        """Form the cell's engines, run all its requests, dissolve the engines. Never raises a RaykError. It
        outlasts the cell's deadline by at most END_S, the time to kill workers, and the time that vLLM's
        engines may take to start."""
        outcome, started = CellOutcome(), time.monotonic_ns()
        async with beating(make_meter(cell.prefill.model)) as meter:
            begin_outcomes(meter)
            watch_engines(meter, self._engines_now)
            losses = Losses(meter)
            try:
                if cell.vllm:
                    await self._form_vllm(cell, outcome, losses)  # within the engines' own start_s
                async with asyncio.timeout(cell.deadlines.cell_s):
                    if cell.vllm:
                        run = VllmCellRun(cell, repeat, outcome, self._vllm_engines, capture, meter)
                        await run.run(prompts)
                    else:
                        engines = await self._form(cell, outcome, losses)
                        await CellRun(cell, repeat, outcome, engines, capture, meter).run(prompts)
            except TimeoutError:
                outcome.errors.append(DeadlineExceeded(f"cell {cell.cell_id}", cell.deadlines.cell_s, busy()))
            except RaykError as error:
                outcome.errors.append(error)
            except Exception as error:  # noqa: BLE001 - one broken cell must not end the run
                outcome.errors.append(bug("the coordinator", error))
            losses.is_over = True
            if self._engines is not None:
                await self._engines.end_all()
                await name_lost_nodes(outcome.errors, self._engines.nodes)
            self._engines = None
            if self._vllm_engines:
                left = await self._vllm.settle(self._vllm_engines)
                dead = {e.engine for e in outcome.errors if isinstance(e, EngineDied)}
                outcome.errors += [e for e in left if not isinstance(e, EngineDied) or e.engine not in dead]
                await name_lost_nodes(outcome.errors, self._vllm.nodes)
            self._vllm_engines = []
            outcome.wall_ns = time.monotonic_ns() - started
            for found in (*outcome.errors, *outcome.survived):
                if isinstance(found, EngineDied):
                    losses.found_late(found.engine)
        return outcome

    async def _form(self, cell: Cell, outcome: CellOutcome, losses: Losses) -> CellDeployment:
        if cell.prefill.device == "cuda":
            self._vllm.free_all()
        await self._pool.prepare(
            cell_demands(cell, this_node()), placement_of(cell), weights_of(cell.prefill)
        )
        outcome.moments["workers are there"] = time.monotonic_ns()
        await self._ready_tiers(cell)
        engines = CellDeployment(cell, outcome, self._pool, self._tiers, self._epochs, losses)
        self._engines = engines
        await engines.form_all()
        outcome.moments["engines are formed"] = time.monotonic_ns()
        outcome.facts = {e.name: e.facts for e in engines.lives}
        if self._tiers is not None:
            outcome.tiers_before = await self._tiers.status()
        return engines

    async def _form_vllm(self, cell: Cell, outcome: CellOutcome, losses: Losses) -> None:
        if cell.prefill.device == "cuda":  # which rayk's idle workers hold
            self._pool.free_all()
        self._vllm_engines = await self._vllm.ready(cell)
        for engine in self._vllm_engines:
            losses.watch(engine)
        outcome.facts = {e.name: e.facts for e in self._vllm_engines}

    def _engines_now(self) -> list[EngineNow]:
        lives = self._vllm_engines if self._engines is None else self._engines.lives
        return [EngineNow(e.name, e.role, e.is_running) for e in lives if not e.died.done()]

    async def shutdown(self) -> None:
        """Give every placement group back; its workers end, and so do host tiers."""
        if self._tiers is not None:
            await self._tiers.close()
        self._pool.free_all()
        self._vllm.free_all()

    async def _ready_tiers(self, cell: Cell) -> None:
        """Open the host tiers that the cell wants, if it wants any."""
        settings = _offload_of(cell)
        if self._tiers is not None and self._tiers.settings != settings:
            await self._tiers.close()
            self._tiers = None
        if settings is not None and self._tiers is None:
            self._tiers = HostTiers(f"{self.name}/{next(self._epochs)}", settings)
        elif self._tiers is not None and cell.spec.offload.keep == "cell":
            await self._tiers.clear()


def _offload_of(cell: Cell) -> OffloadSettings | None:
    """Return how the cell's engines use host tiers, with waits within its deadlines."""
    limits = cell.deadlines
    return cell.spec.offload.settings(transfer_s=limits.transfer_s, request_s=limits.request_s)

"""The Coordinator as drivers see it. It asks for workers before it imports torch, as they then do, too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rayk.actors.pool import WorkerPool

if TYPE_CHECKING:
    from rayk.actors.cell_outcome import CellOutcome
    from rayk.actors.coordinator import Coordinator
    from rayk.actors.nodes import EngineDemand
    from rayk.specs import Cell


class CoordinatorActor:
    """Passes calls on to a Coordinator, which is imported in the actor's process alone.

    `keep_workers`: engines' workers stay for later cells (the cluster holds those of all cells at once);
    else every cell gives back what the next has no use for.
    """

    def __init__(self, name: str, keep_workers: bool = True) -> None:
        self._name = name
        self._pool = WorkerPool(name.rpartition("/")[2], keep=keep_workers, on_started=self._made)
        self._coordinator: asyncio.Future[Coordinator] | None = None

    def __repr__(self) -> str:
        return f"Coordinator({self._name})"

    async def prepare(
        self, demands: Sequence[EngineDemand], placement: str = "auto", model: str | None = None
    ) -> dict[str, int]:
        """Place these engines and start their workers; worker name -> process id. See WorkerPool.prepare."""
        return await self._pool.prepare(demands, placement, model)

    async def run_cell(
        self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int, *, capture: bool
    ) -> CellOutcome:
        coordinator = await asyncio.shield(self._made())
        return await coordinator.run_cell(cell, prompts, repeat, capture=capture)

    async def shutdown(self) -> None:
        coordinator = await asyncio.shield(self._made())
        await coordinator.shutdown()

    def _made(self) -> asyncio.Future[Coordinator]:
        """Return the coordinator, whose import takes a thread some seconds from the first time on."""
        if self._coordinator is None:
            self._coordinator = asyncio.ensure_future(asyncio.to_thread(self._make))
        return self._coordinator

    def _make(self) -> Coordinator:
        from rayk.actors.coordinator import Coordinator

        return Coordinator(self._name, self._pool)

"""The Coordinator as drivers see it, without torch, which commands that only join a cluster do not need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayk.actors.cell_outcome import CellOutcome
    from rayk.actors.nodes import EngineDemand
    from rayk.specs import Cell


class CoordinatorActor:
    """Passes calls on to a Coordinator, which is imported in the actor's process alone."""

    def __init__(self, name: str, **arguments: Any) -> None:
        from rayk.actors.coordinator import Coordinator

        self._coordinator = Coordinator(name, **arguments)

    def __repr__(self) -> str:
        return repr(self._coordinator)

    async def prepare(
        self, demands: Sequence[EngineDemand], placement: str = "auto", model: str | None = None
    ) -> dict[str, int]:
        return await self._coordinator.prepare(demands, placement, model)

    async def run_cell(
        self, cell: Cell, prompts: Sequence[Sequence[int]], repeat: int, *, capture: bool
    ) -> CellOutcome:
        return await self._coordinator.run_cell(cell, prompts, repeat, capture=capture)

    async def shutdown(self) -> None:
        await self._coordinator.shutdown()

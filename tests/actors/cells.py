"""A cell's engines with nobody behind them, for tests that need no workers."""

from __future__ import annotations

import itertools
from typing import Any

from rayk.actors.cell_deployment import CellDeployment
from rayk.actors.cell_outcome import CellOutcome
from rayk.actors.deployment_metrics import Losses
from rayk.actors.engines import EngineHandle
from rayk.metrics import Meter
from rayk.specs import Cell


def cell_deployment(cell: Cell, outcome: CellOutcome | None = None, pool: Any = None) -> CellDeployment:
    """Every engine lives already. Made on the event loop that uses it."""
    losses = Losses(Meter())
    engines = CellDeployment(cell, outcome or CellOutcome(), pool, None, itertools.count(1), losses)
    for member in engines.members.values():
        member.handle = EngineHandle(member.name, member.role, 1, member.entry.config, [])
    return engines

"""Run one repeat of a cell under a virtual clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rayk.costs.book import CostBook
from rayk.models.config import DecoderConfig
from rayk.simulate.arrivals import Arrival
from rayk.simulate.deaths import EngineDeath
from rayk.simulate.outcome import SimOutcome
from rayk.specs.cells import Cell


def simulate_cell(
    cell: Cell,
    config: DecoderConfig,
    arrivals: Iterable[Arrival],
    costs: CostBook,
    *,
    repeat: int = 0,
    seed: int = 0,
    noise: bool = False,
    strict: bool = True,
    fast: bool = True,
    deaths: Sequence[EngineDeath] = (),
) -> SimOutcome:
    """Simulate a repeat of a cell: the engines' own scheduler, leader and hand-over, over ranks that compute
    nothing and take the time that `costs` says.

    `arrivals`: in the order of their times; read one ahead (see arrivals.cell_arrivals). `noise`: steps and
    gaps are drawn, by `seed`, from what was measured; else each takes its mean or median. `strict`: raises
    OutsideHull for a step unlike those measured; else such steps are counted. `fast`: decode steps that admit
    and finish nobody are advanced together, which changes no result. `deaths`: engines that die.

    Raises UserError for what is not simulated, and where `costs` lacks an engine.
    """
    raise NotImplementedError

"""Hold what a simulation found, and make a cell's row of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rayk.costs import CostBook
from rayk.specs.cells import Cell
from rayk.types.rows import CellRow, RequestRow, TransferRow
from rayk.types.steps import StepRow

_SUMMED = (
    "num_steps", "busy_ns", "read_ns", "num_preemptions", "num_prompt_tokens", "num_cached_tokens",
    "num_expired_leases",
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class SimEngineAccount:
    """What became of one simulated engine."""

    num_steps: int = 0
    busy_ns: int = 0  # inside steps
    max_waiting: int = 0
    max_blocks: int = 0  # in use at once
    num_blocks: int = 0  # of its pool
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of them
    num_deaths: int = 0
    num_expired_leases: int = 0  # that nobody released or renewed in time
    read_ns: int = 0  # with reads of others' KV under way

    def add(self, life: SimEngineAccount) -> None:
        """Add a life to those before it."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(life, name))
        self.max_waiting = max(self.max_waiting, life.max_waiting)
        self.max_blocks = max(self.max_blocks, life.max_blocks)


@dataclass(kw_only=True, slots=True)
class SimOutcome:
    """What one repeat of a cell came to. Times are of the virtual clock, which began at 0."""

    requests: list[RequestRow] = field(default_factory=list)  # in the order of arrivals
    transfers: list[TransferRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    engines: dict[str, SimEngineAccount] = field(default_factory=dict)
    tiers: dict[str, dict[str, object]] = field(default_factory=dict)  # HostTier.status of each
    end_ns: int = 0  # of the last event
    num_outside_hull: int = 0  # steps that the tables do not cover
    reads_as_coded: bool = False  # nobody measured reads between such engines: their costs are the code's
    num_events: int = 0
    cpu_s: float = 0.0


def prediction_facts(
    costs: CostBook, outcomes: Sequence[SimOutcome], *, noise: bool = False
) -> dict[str, Any]:
    """Say, for environment.json of a simulated run, what its times were made of; reports begin with it."""
    return {
        "predicted": {
            "costs": costs.folder,
            "unmeasured": not costs.is_measured,
            "outside_hull": sum(outcome.num_outside_hull for outcome in outcomes),
            "reads_as_coded": any(outcome.reads_as_coded for outcome in outcomes),
            "noise": noise,
        }
    }


def cell_row(cell: Cell, outcomes: list[SimOutcome]) -> CellRow:
    """Make the row of a simulated cell of its repeats: PREDICTED, whatever its requests came to."""
    failed = [r for outcome in outcomes for r in outcome.requests if r.error is not None]
    reason = f"{len(failed)} requests failed, the first: {failed[0].error}" if failed else ""
    return CellRow(
        cell_id=cell.cell_id,
        axes=cell.axes,
        verdict="PREDICTED",
        reason=reason,
        wall_ns=sum(outcome.end_ns for outcome in outcomes),
    )

"""The engines that do all of it by themselves, which disaggregated cells are compared with: runs of their own
on the same cluster, kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rayk.specs import Cell
from rayk.types.config import EngineConfig
from rayk.types.rows import RequestRow

if TYPE_CHECKING:  # torch is imported when there is something to judge
    from rayk.actors.cell_outcome import CellOutcome

Prompts = Sequence[Sequence[int]]


def token_twin_of(cell: Cell) -> Cell | None:
    """Make the cell whose tokens a quantised one's are compared with; None where there is none."""
    if cell.decode is None or not cell.is_quantised or cell.is_converted or "tokens" not in cell.checks:
        return None
    return replace(_alone(cell, cell.prefill, "aggregated"), vllm=cell.vllm[:1])


def draft_twin_of(cell: Cell) -> Cell | None:
    """Make the cell whose proposals a disaggregated cell's are compared with; None where nothing of it is."""
    if cell.decode is None or "drafts" not in cell.checks or not _has_drafter(cell.decode):
        return None
    return _alone(cell, cell.decode, "drafted")


def _alone(cell: Cell, engine: EngineConfig, name: str) -> Cell:
    return replace(
        cell,
        cell_id=f"{cell.cell_id}~{name}",
        mode="aggregated",
        prefill=engine,
        decode=None,
        vllm=(),
        num_prefill_engines=1,
        num_decode_engines=0,
        faults=(),
        repeat=1,
    )


def _has_drafter(engine: EngineConfig | None) -> bool:
    """Tell whether something on an engine's ranks drafts."""
    return engine is not None and engine.speculative is not None and engine.speculative.method != "ngram"


class Twins:
    """Keeps the requests of aggregated engines, by engine, prompts and sampling."""

    def __init__(self) -> None:
        self._rows: dict[str, Mapping[int, RequestRow]] = {}

    def missing(self, cell: Cell, prompts: Prompts) -> list[Cell]:
        """Find the cells to run before this one can be judged."""
        twins = [twin for twin in (token_twin_of(cell), draft_twin_of(cell)) if twin is not None]
        by_key = {_key(twin, prompts): twin for twin in twins}
        return [twin for key, twin in by_key.items() if key not in self._rows]

    def keep(self, cell: Cell, prompts: Prompts, outcome: CellOutcome) -> None:
        """Remember the requests that ended well of an aggregated cell that others may be compared with."""
        is_twin = cell.is_quantised or _has_drafter(cell.prefill)
        if cell.decode is None and is_twin and not cell.faults:
            rows = {row.prompt_index: row for row in outcome.requests if row.error is None}
            self._rows.setdefault(_key(cell, prompts), rows)

    def rows(self, twin: Cell | None, prompts: Prompts) -> Mapping[int, RequestRow]:
        """Look up by prompt index the requests of a twin; none that did not end well."""
        return {} if twin is None else self._rows.get(_key(twin, prompts), {})


def _key(cell: Cell, prompts: Prompts) -> str:
    return repr((cell.prefill, [list(p) for p in prompts], cell.sampling))

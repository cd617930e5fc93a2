"""The cells of jobs/transfer_sweep.yaml, or of a file of the same form."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from jobs.sweep_oracle import QUERY_HEADS, SHAPES, make_specs
from rayk.kv.geometry import layout_veto
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS, get_layout
from rayk.types.errors import SpecError, UserError

SPEC = Path(__file__).with_name("transfer_sweep.yaml")
CHOICES = {
    "shape": SHAPES,
    "mode": ("pull", "push"),
    "tables": ("scattered", "dense"),
    "staging": ("auto", "never", "always"),
}
"""Axes of names, and what they may be."""
Pair = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """One transfer; pairs are (producer, consumer)."""

    shape: str
    layouts: tuple[str, str]
    tp: tuple[int, int]
    block_sizes: tuple[int, int]
    mode: str
    tables: str
    """Whether block ids lie anywhere (scattered) or follow each other (dense)."""
    staging: str
    """Of pulls."""
    num_tokens: int

    @property
    def sides(self) -> dict[str, Any]:
        return {
            "tp": "{}->{}".format(*self.tp),
            "layouts": "{}->{}".format(*self.layouts),
            "block_sizes": "{}->{}".format(*self.block_sizes),
            "tables": self.tables,
            "staging": self.staging,
        }

    @property
    def cell_id(self) -> str:
        sides = (
            f"tp{t}-{layout}-b{b}"
            for t, layout, b in zip(self.tp, self.layouts, self.block_sizes, strict=True)
        )
        return "-".join((self.shape, self.mode, self.tables, self.staging, "-to-".join(sides)))


@dataclass(frozen=True, kw_only=True)
class Sweep:
    name: str
    cells: tuple[SweepCell, ...]
    ceiling: tuple[SweepCell, ...]
    rounds: int
    refused: tuple[tuple[SweepCell, str], ...]
    """Cells whose layout cannot hold the shape's groups in one pool, and why."""


AXES = tuple(f.name for f in fields(SweepCell) if f.name != "num_tokens")


def load_sweep(path: Path) -> Sweep:
    """Raises UserError for a file that cannot be read, SpecError for what is wrong in it."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the sweep: {error}", where=str(path)) from error
    where = str(path)
    ceiling = _section(raw, "ceiling", where)
    unknown = sorted(set(raw) - {"name", "num_tokens", "matrix", "ceiling"})
    if unknown:
        raise SpecError(f"unknown key {unknown[0]!r}", where=where, mend="name, num_tokens, matrix, ceiling")
    cells = _cells(raw, where)
    refused = [(cell, why) for cell in cells if (why := _veto(cell))]
    refused_cells = {cell for cell, _ in refused}
    return Sweep(
        name=str(raw.get("name", path.stem)),
        cells=tuple(c for c in cells if c not in refused_cells),
        ceiling=tuple(_cells(ceiling, f"{where}: ceiling")) if ceiling else (),
        rounds=int(ceiling.get("rounds", 9)),
        refused=tuple(refused),
    )


def some_of(cells: Sequence[SweepCell], limit: int | None) -> Sequence[SweepCell]:
    """So many, spread over all. Neighbours differ in their mode: every other one is a neighbour."""
    if limit is None or limit >= len(cells):
        return cells
    return [cells[min(len(cells) * i // limit + i % 2, len(cells) - 1)] for i in range(limit)]


def _section(raw: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise SpecError("the sweep is not a mapping", where=where)
    section = raw.get(name, {})
    if not isinstance(section, dict):
        raise SpecError(f"{name} is not a mapping", where=where)
    return section


def _cells(raw: Mapping[str, Any], where: str) -> list[SweepCell]:
    """Cross products of each entry, each cell once."""
    found: dict[SweepCell, None] = {}
    for number, entry in enumerate(raw.get("matrix", ())):
        at = f"{where}: matrix entry {number}"
        if not isinstance(entry, dict) or sorted(entry) != sorted(AXES):
            raise SpecError("an entry names every axis", where=at, mend=", ".join(AXES))
        axes = [_axis(name, entry[name], at) for name in AXES]
        for point in itertools.product(*axes):
            values = dict(zip(AXES, point, strict=True))
            found[SweepCell(**values, num_tokens=int(raw.get("num_tokens", 100)))] = None
    return list(found)


def _axis(name: str, values: Any, where: str) -> list[Any]:
    if name in CHOICES:
        known = CHOICES[name]
        wrong = [v for v in values if v not in known]
        if wrong:
            raise SpecError(f"unknown {name} {wrong[0]!r}", where=where, mend=", ".join(known))
        return list(values)
    if values == "all":
        one = list(LAYOUTS) if name == "layouts" else [n for n in (1, 2, 3, 4, 6) if QUERY_HEADS % n == 0]
        return list(itertools.product(one, one))
    pairs = [tuple(v) if isinstance(v, list) else v for v in values]
    kind = str if name == "layouts" else int
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(v, kind) for v in pair)):
            raise SpecError(f"{name}: {pair!r} is no pair of a producer's and a consumer's", where=where)
        if name == "layouts":
            for layout in pair:
                get_layout(layout)
    return pairs


def _veto(cell: SweepCell) -> str | None:
    """Why one side's layout cannot hold the shape's groups."""
    for layout, size in zip(cell.layouts, cell.block_sizes, strict=True):
        why = layout_veto(group_layers(make_specs(cell.shape, size)), get_layout(layout))
        if why:
            return why
    return None

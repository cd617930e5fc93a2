"""Say how the engines of a cell divide KV beside tensor parallelism: tokens over ranks, layers over stages.

Cells are only held together, averaged or drawn as one where they divide it alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from rayk.reports.page import Column
from rayk.reports.values import is_null, parsed
from rayk.types.config import beside_tp

SIDES = ("prefill", "decode")
COLUMN = Column("divided by", "divided")
AXES = tuple(f"{side}.{leaf}" for side in SIDES for leaf in ("pp", "pp_layers", "dcp", "dcp_interleave"))


def divided_side(cell: Mapping[Any, Any], side: str) -> str:
    """Say how one side's engines divide tokens and layers, e.g. `DCP 2 by 4 tokens, PP 2`; empty where TP
    says it all, as in runs of an older rayk."""
    dcp, interleave, pp = (_size(cell, f"{side}.{leaf}") for leaf in ("dcp", "dcp_interleave", "pp"))
    layers = parsed(cell.get(f"{side}.pp_layers"))
    return ", ".join(beside_tp(dcp, interleave, pp, layers if isinstance(layers, list) else None))


def divided(cell: Mapping[Any, Any]) -> str:
    """Say it of both sides, e.g. `P DCP 2, D PP 2`; empty where TP says it all."""
    sides = {name[0].upper(): divided_side(cell, name) for name in SIDES}
    return ", ".join(f"{letter} {text}" for letter, text in sides.items() if text)


def divided_texts(cells: pd.DataFrame) -> pd.Series[Any]:
    """Make the texts of `divided`, a row per cell."""
    texts = [divided(cell) for cell in cells.to_dict(orient="records")]
    return pd.Series(texts, index=cells.index, dtype="object")


def is_alike(cell: Mapping[Any, Any]) -> bool:
    """Whether both sides divide tokens and layers alike, so that they differ in TP at most."""
    return divided_side(cell, "prefill") == divided_side(cell, "decode")


def is_division(axis: str, value: Any) -> bool:
    """Whether an axis divides something, so that tables say it even where all cells agree in it."""
    return axis in AXES and not is_null(value) and value not in (0, 1)


def num_stages(cell: Mapping[Any, Any], side: str) -> int:
    return _size(cell, f"{side}.pp")


def _size(cell: Mapping[Any, Any], axis: str) -> int:
    value = cell.get(axis)
    return 1 if value is None or is_null(value) else int(value)

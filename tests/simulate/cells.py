"""Cells to simulate, made by hand, whose steps take STEP_NS, and TOKEN_NS for each token."""

from __future__ import annotations

from typing import Any

from rayk.costs import CostBook
from rayk.costs.table import Gap, GapTable
from rayk.models.config import DecoderConfig
from rayk.specs import Cell, expand, load_spec
from tests.specs.models import decoder, spec

STEP_NS, TOKEN_NS, DISPATCH_NS = 1_000_000, 10_000, 500_000
MODEL = decoder()
BOOK = CostBook.flat(STEP_NS, TOKEN_NS, gaps=GapTable(dispatch=Gap(quantiles=(DISPATCH_NS,))))


def sim_cell(config: DecoderConfig = MODEL, **changes: Any) -> Cell:
    """An aggregated cell of one engine; `changes` replace keys of its spec."""
    wanted = {"mode": "aggregated", "block_size": 4, **changes}
    block_size = wanted.pop("block_size")
    prefill = {"block_size": block_size, **wanted.pop("prefill", {})}
    (found,) = expand(load_spec(spec(prefill=prefill, **wanted)).spec, config, device="cpu")
    return found

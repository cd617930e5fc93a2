"""Cells to simulate, made by hand, whose steps take STEP_NS, and TOKEN_NS for each token."""

from __future__ import annotations

from typing import Any

from rayk.costs import CostBook, EngineCosts
from rayk.costs.table import Gap, GapTable, LinearCost, ReadCosts, TransferTable, read_name
from rayk.models.config import DecoderConfig
from rayk.specs import Cell, expand, load_spec
from tests.specs.models import decoder, spec

STEP_NS, TOKEN_NS, DISPATCH_NS = 1_000_000, 10_000, 500_000
HANDOVER_NS, RELEASE_NS = 700_000, 90_000
MODEL = decoder()
BOOK = CostBook.flat(STEP_NS, TOKEN_NS, gaps=GapTable(dispatch=Gap(quantiles=(DISPATCH_NS,))))
DIGEST = LinearCost(fixed_ns=100_000, byte_ns=1.0)
FENCE = LinearCost(fixed_ns=20_000)
VERIFY = LinearCost(fixed_ns=50_000, byte_ns=0.5)
POST = LinearCost(fixed_ns=10_000, descriptor_ns=2_000, byte_ns=0.25)
WAIT = LinearCost(fixed_ns=5_000, byte_ns=0.125)


def sim_cell(config: DecoderConfig = MODEL, device: str = "cpu", **changes: Any) -> Cell:
    """An aggregated cell of one engine; `changes` replace keys of its spec."""
    wanted = {"mode": "aggregated", "block_size": 4, **changes}
    block_size = wanted.pop("block_size")
    prefill = {"block_size": block_size, **wanted.pop("prefill", {})}
    (found,) = expand(load_spec(spec(prefill=prefill, **wanted)).spec, config, device=device)
    return found


def pair_cell(config: DecoderConfig = MODEL, **changes: Any) -> Cell:
    """A cell whose engines hand over: one of each, unless `changes` say otherwise."""
    decode = {"block_size": 4, **changes.pop("decode", {})}
    return sim_cell(config, mode="disaggregated", decode=decode, **changes)


def pair_book(cell: Cell, *, wait: LinearCost = WAIT, spread: float = 0.0, **gaps: float) -> CostBook:
    """Costs of a hand-over. `gaps` are in ns, `spread` how far they go up and down from there."""
    assert cell.decode is not None
    commands = {"MakeTicket": DIGEST, "fence": FENCE, "verify": VERIFY}
    times = {"dispatch": DISPATCH_NS, "handover": HANDOVER_NS, "release": RELEASE_NS, **gaps}
    shares = (1 - spread, 1.0, 1 + spread) if spread else (1.0,)
    found = {name: Gap(quantiles=tuple(share * ns for share in shares)) for name, ns in times.items()}
    reads = {read_name(cell.prefill, cell.decode): ReadCosts(post=POST, wait=wait)}
    return CostBook(
        any_engine=EngineCosts.flat(STEP_NS, TOKEN_NS, commands=commands),
        transfers=TransferTable(reads=reads),
        gaps=GapTable(**found),
        folder="flat",
    )

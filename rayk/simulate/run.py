"""Run one repeat of a cell under a virtual clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from rayk.costs.book import CostBook
from rayk.kv.formats import engine_format
from rayk.models.config import DecoderConfig
from rayk.simulate.arrivals import Arrival, ArrivalSource, InOrder
from rayk.simulate.deaths import EngineDeath
from rayk.simulate.fleet import OnRow, SimFleet
from rayk.simulate.outcome import SimOutcome
from rayk.specs.cells import Cell
from rayk.specs.experiment import OffloadSpec
from rayk.specs.serving import ServerSettings
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import UserError


def simulate_cell(
    cell: Cell,
    config: DecoderConfig,
    arrivals: Iterable[Arrival] | ArrivalSource,
    costs: CostBook,
    *,
    repeat: int = 0,
    seed: int = 0,
    noise: bool = False,
    strict: bool = True,
    fast: bool = True,
    server: ServerSettings | None = None,
    deaths: Sequence[EngineDeath] = (),
    sink: OnRow | None = None,
    drafts: DraftRates | None = None,
) -> SimOutcome:
    """Simulate a repeat of a cell: the engines' own scheduler, leader and hand-over, over ranks that compute
    nothing and take the time that `costs` says.

    `arrivals`: in the order of their times (see arrivals.cell_arrivals), or a source that hears of ends.
    `noise`: steps and gaps are drawn, by `seed`, from what was measured; else each takes its mean or median.
    `strict`: raises OutsideHull for a step unlike those measured; else such steps are counted. `fast`: decode
    steps that admit and finish nobody are advanced together, which changes no result. `server`: engines,
    limits, policy and what becomes of lost requests are this server's, which `cell` only names the rows of.
    `deaths`: engines that die. `sink` gets each request's row when it is over; rows are then not kept, nor
    are those of transfers and steps. `drafts`: how often tokens that engines draft are right, drawn by
    `seed`; None: arrivals say so, or nobody drafts.

    Raises UserError for what is not simulated, and where `costs` lacks an engine.
    """
    began = time.process_time()
    if (problem := why_not_simulated(cell, server)) is not None:
        raise UserError(f"not simulated: {problem}", where=f"cell {cell.cell_id}")
    fleet = SimFleet(
        cell,
        config,
        costs,
        repeat=repeat,
        seed=seed,
        noise=noise,
        strict=strict,
        fast=fast,
        server=server,
        deaths=deaths,
        sink=sink,
        drafts=drafts,
    )
    with _few_collections():
        outcome = fleet.run(InOrder(arrivals) if isinstance(arrivals, Iterable) else arrivals)
    outcome.cpu_s = time.process_time() - began
    return outcome


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for garbage seldom, and not among what was there before: a simulation makes many small objects
    that live for a request, beside the hundred thousands of a program that has imported torch."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def why_not_simulated(cell: Cell, server: ServerSettings | None = None) -> str | None:
    """Name the first thing of a cell, or of a server in its place, that cannot be simulated; None: all of it
    can."""
    engines = cell.engines if server is None else [entry.config for entry in server.engines]
    formats = {engine_format(e.dtype, e.kv_dtype, e.kv_scales) for e in engines}
    hands_over = cell.decode is not None if server is None else not server.is_aggregated
    settings = server or cell.spec
    transfer, offload = settings.transfer, settings.offload
    on_ranks = any(engine.drafts_on_ranks for engine in engines)
    problems = {
        cell.unsupported or "": cell.unsupported is not None,
        "engines of vLLM": not cell.is_rayks,
        "pushes (transfer.mode: push)": hands_over and transfer.mode == "push",
        "KV formats that differ (kv_dtype)": hands_over and len(formats) > 1,
        "faults": bool(cell.faults),
        "pipelines (pp over 1)": any(engine.pp > 1 for engine in engines),
        "hand-overs of drafters on ranks (speculative.method)": on_ranks and hands_over,
        "prefix caches of drafters on ranks (speculative.method)": on_ranks and engines[0].prefix_caching,
        "host tiers of drafters on ranks (speculative.method)": on_ranks and offload.settings() is not None,
        "a disk tier (offload.disk_folder)": offload.disk_folder is not None,
        "hand-overs through a host tier (transfer.path: host)": hands_over and transfer.path == "host",
        "outboxes of a host tier (offload.outbox_mib)": has_outboxes(offload, engines[0].device),
        "sampling.prompt_logprobs": cell.sampling.prompt_logprobs is not None,
    }
    return next((name for name, is_so in problems.items() if is_so), None)


def has_outboxes(offload: OffloadSpec, device: str) -> bool:
    """Tell whether engines on such a device copy what they store for a host tier to read it there."""
    settings = offload.settings()
    return settings is not None and bool(settings.on(device).outbox_bytes)

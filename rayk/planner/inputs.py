"""Read what a plan rests on: its spec, model, machine, costs and traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayk.costs.book import CostBook
from rayk.costs.roofline import Hardware
from rayk.models.config import DecoderConfig
from rayk.models.families import read_config
from rayk.models.hub import config_file
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.planner.candidates import Space, engine_of
from rayk.planner.drafts import rates_of
from rayk.planner.hardware import read_hardware, roofline_book
from rayk.planner.machine import PlanMachine, machine_of
from rayk.planner.traffic import Profile, Traffic, check_fits
from rayk.specs.cells import resolved_dtype
from rayk.specs.plan import LoadedPlan, PlanSpec, load_plan
from rayk.types.draft_rates import DraftRates


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All that a search starts from."""

    loaded: LoadedPlan
    config: DecoderConfig  # in the dtype that engines have
    machine: PlanMachine
    costs: CostBook
    traffic: Traffic
    profile: Profile
    space: Space
    drafts: DraftRates | None  # how often what engines draft is right, where that is searched
    extrapolates: bool
    budget_s: float

    @property
    def spec(self) -> PlanSpec:
        return self.loaded.spec

    @property
    def refused(self) -> Sequence[str]:
        """Why some engines were not tried."""
        return tuple(dict.fromkeys(self.space.refused.values()))


def read_inputs(
    spec: str | Path | Mapping[str, Any] | PlanSpec,
    overrides: Sequence[str],
    *,
    costs: CostBook | None,
    extrapolates: bool,
    budget_s: float,
) -> PlanInputs:
    """Read a spec and all that it names. Raises UserError."""
    loaded = load_plan(spec, overrides)
    asked = loaded.spec
    config = read_config(config_file(asked.model)[1])
    config = replace(config, dtype=resolved_dtype(asked.dtype, config))
    hardware = None if asked.hardware is None else read_hardware(asked.hardware)
    machine = machine_of(loaded, hardware)
    book = costs or _read_costs(asked, config, machine, hardware)
    has_prefixes = bool(asked.engine.prefix_caching)
    traffic = Traffic(asked.traffic, vocab_size=config.vocab_size, has_prefixes=has_prefixes)
    profile = traffic.profile(asked.slo.good)
    check_fits(profile, config.max_positions, loaded)
    drafts = None if asked.search.speculative is None else rates_of(asked.search.speculative)
    return PlanInputs(
        loaded=loaded,
        config=config,
        machine=machine,
        costs=book,
        traffic=traffic,
        profile=profile,
        space=Space(asked, config, machine, book, profile, drafts),
        drafts=drafts,
        extrapolates=extrapolates,
        budget_s=budget_s,
    )


def _read_costs(
    spec: PlanSpec, config: DecoderConfig, machine: PlanMachine, hardware: Hardware | None
) -> CostBook:
    if hardware is None:
        assert spec.costs is not None, "a spec names costs or hardware"
        return CostBook.load(spec.costs)
    search = spec.search
    asked = {*(search.tp or []), *(search.prefill_tp or []), *(search.decode_tp or [])}
    sizes = sorted(asked | {2**n for n in range(machine.largest.bit_length())})
    sizes = [tp for tp in sizes if tp <= machine.largest and why_tp_unsupported(config, tp) is None]
    like = engine_of(spec, config)
    books = [
        roofline_book(hardware, config, tp=sizes, dtype=config.dtype, block_size=size, like=like)
        for size in search.block_size
    ]
    engines = {key: costs for book in books for key, costs in book.engines.items()}
    return replace(books[0], engines=engines, folder=str(spec.hardware))

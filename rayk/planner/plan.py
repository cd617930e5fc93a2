"""Plan a deployment: read a spec, search, and say what to start and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayk.costs.book import CostBook
from rayk.costs.roofline import Hardware
from rayk.models.config import DecoderConfig
from rayk.models.families import read_config
from rayk.models.hub import config_file
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.planner.candidates import Space
from rayk.planner.hardware import read_hardware, roofline_book
from rayk.planner.machine import PlanMachine, machine_of
from rayk.planner.pool import TrialPool
from rayk.planner.search import Search, SearchProgress
from rayk.planner.summary import plan_facts, plan_rows
from rayk.planner.traffic import Profile, Traffic, check_fits
from rayk.planner.trial import PlanWorld, TrialResult
from rayk.reports.plans import check_plan_folder, plan_frame, write_plans
from rayk.specs.cells import resolved_dtype
from rayk.specs.plan import LoadedPlan, PlanSpec, dump_plan, load_plan

if TYPE_CHECKING:
    import pandas as pd

BUDGET_S = 120.0


class Quiet:
    """Implements SearchProgress: nobody watches."""

    def stage(self, text: str, num_trials: int) -> None:
        """Tell nobody."""

    def done(self, result: TrialResult) -> None:
        """Tell nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """What a search came to."""

    plans: pd.DataFrame
    """A row per plan that was simulated, the best first: columns as `rayk report --columns` tells them."""
    facts: Mapping[str, Any]
    """What plan.json holds: the best plan, why, its range and sensitivity, and how far to trust it."""

    @property
    def is_met(self) -> bool:
        """Whether the best plan keeps the SLO."""
        return bool(self.facts["met"])

    @property
    def best(self) -> str:
        """The best plan's `plan_id`."""
        return str(self.facts["best"])

    @property
    def command(self) -> str:
        """The `rayk serve` command that starts it."""
        return str(self.facts["command"])

    @property
    def why(self) -> Sequence[str]:
        return tuple(self.facts["why"])

    @property
    def front(self) -> pd.DataFrame:
        """The plans that no other beats in both goodput per GPU and interactivity."""
        return self.plans[self.plans["on_front"]]


class Plan:
    """A plan to be made: `Plan(spec).run()`.

    With several `num_jobs` simulations run in processes that import the main module, so a script must call
    `run` under `if __name__ == "__main__":`.
    """

    def __init__(
        self,
        spec: str | Path | Mapping[str, Any] | PlanSpec,
        overrides: Sequence[str] = (),
        *,
        costs: CostBook | None = None,
        extrapolates: bool = False,
        num_jobs: int | None = 1,
        budget_s: float = BUDGET_S,
    ) -> None:
        """`spec`: a file, or its contents. `overrides`: KEY=VALUE. `costs`: tables in place of those that the
        spec names. `extrapolates`: steps that no table covers are predicted, counted and told. `num_jobs`:
        processes; None: one for each core. `budget_s`: how long the search may take. Raises UserError."""
        self.loaded: LoadedPlan = load_plan(spec, overrides)
        self.spec = self.loaded.spec
        self._extrapolates, self._num_jobs, self._budget_s = extrapolates, num_jobs, budget_s
        config = read_config(config_file(self.spec.model)[1])
        self.config: DecoderConfig = replace(config, dtype=resolved_dtype(self.spec.dtype, config))
        hardware = None if self.spec.hardware is None else read_hardware(self.spec.hardware)
        self.machine: PlanMachine = machine_of(self.loaded, hardware)
        self.costs = costs or self._costs(hardware)
        has_prefixes = bool(self.spec.engine.prefix_caching)
        self.traffic = Traffic(self.spec.traffic, vocab_size=config.vocab_size, has_prefixes=has_prefixes)
        self.profile: Profile = self.traffic.profile(self.spec.slo.good)
        check_fits(self.profile, config.max_positions, self.loaded)
        self.space = Space(self.spec, self.config, self.machine, self.costs, self.profile)

    def run(self, out: str | Path | None = None, *, progress: SearchProgress | None = None) -> PlanResult:
        """Search. Writes tables and a page into the folder `out`, if given. Raises UserError where no plan is
        possible, and OutsideHull where all plans take steps that the tables do not cover."""
        text = dump_plan(self.spec)
        if out is not None:
            check_plan_folder(Path(out), text)
        world = PlanWorld(
            spec=self.spec, config=self.config, costs=self.costs, extrapolates=self._extrapolates
        )
        with TrialPool(world, num_jobs=self._num_jobs, budget_s=self._budget_s) as pool:
            search = Search(self.space, pool, progress or Quiet(), rate=self.traffic.rate)
            best = search.run()
            search.vary(best)
            rows = plan_rows(search, best, self.space)
            facts = plan_facts(search, best, self, pool, rows)
        if out is not None:
            from rayk.reports.report import write_html

            write_plans(Path(out), text, rows, facts)
            write_html(out)
        return PlanResult(plans=plan_frame(rows), facts=facts)

    @property
    def budget_s(self) -> float:
        return self._budget_s

    @property
    def refused(self) -> Sequence[str]:
        """Why some engines were not tried."""
        return tuple(dict.fromkeys(self.space.refused.values()))

    @property
    def extrapolates(self) -> bool:
        return self._extrapolates

    def _costs(self, hardware: Hardware | None) -> CostBook:
        if hardware is None:
            assert self.spec.costs is not None, "a spec names costs or hardware"
            return CostBook.load(self.spec.costs)
        search = self.spec.search
        asked = {*(search.tp or []), *(search.prefill_tp or []), *(search.decode_tp or [])}
        sizes = sorted(asked | {2**n for n in range(self.machine.largest.bit_length())})
        sizes = [
            tp for tp in sizes if tp <= self.machine.largest and why_tp_unsupported(self.config, tp) is None
        ]
        books = [
            roofline_book(hardware, self.config, tp=sizes, dtype=self.config.dtype, block_size=size)
            for size in search.block_size
        ]
        engines = {key: costs for book in books for key, costs in book.engines.items()}
        return replace(books[0], engines=engines, folder=str(self.spec.hardware))

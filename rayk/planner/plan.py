"""Plan a deployment: read a spec, search, and say what to start and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayk.costs.book import CostBook
from rayk.planner.inputs import read_inputs
from rayk.planner.pool import TrialPool
from rayk.planner.search import Search, SearchProgress
from rayk.planner.summary import plan_facts, plan_rows
from rayk.planner.trial import PlanWorld, TrialResult
from rayk.reports.plans import PlanResult, check_plan_folder, plan_result, write_plans
from rayk.specs.plan import PlanSpec, dump_plan

BUDGET_S = 120.0


class UnwatchedSearch:
    """Implements SearchProgress: nobody watches."""

    def stage(self, text: str, num_trials: int) -> None:
        """Tell nobody."""

    def done(self, result: TrialResult) -> None:
        """Tell nobody."""


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
        self.inputs = read_inputs(spec, overrides, costs=costs, extrapolates=extrapolates, budget_s=budget_s)
        self._num_jobs = num_jobs

    def run(self, out: str | Path | None = None, *, progress: SearchProgress | None = None) -> PlanResult:
        """Search. Writes tables and a page into the folder `out`, if given. Raises UserError where no plan is
        possible, and OutsideHull where all plans take steps that the tables do not cover."""
        inputs = self.inputs
        text = dump_plan(inputs.spec)
        if out is not None:
            check_plan_folder(Path(out), text)
        world = PlanWorld(
            spec=inputs.spec,
            config=inputs.config,
            costs=inputs.costs,
            extrapolates=inputs.extrapolates,
            drafts=inputs.drafts,
        )
        with TrialPool(world, num_jobs=self._num_jobs, budget_s=inputs.budget_s) as pool:
            search = Search(inputs.space, pool, progress or UnwatchedSearch(), rate=inputs.traffic.rate)
            best = search.run()
            search.vary(best)
            rows = plan_rows(search, best, inputs.space)
            facts = plan_facts(search, best, inputs, pool, rows)
        if out is not None:
            from rayk.reports.report import write_html

            write_plans(Path(out), text, rows, facts)
            write_html(out)
        return plan_result(rows, facts)

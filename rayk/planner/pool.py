"""Run simulations on all cores, each once, until a budget of time is over."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from types import TracebackType

from rayk.planner.trial import PlanWorld, Trial, TrialResult, run_trial, simulation_of

OnResult = Callable[[TrialResult], object]


class TrialPool:
    """Runs trials in as many processes as asked for. A context manager."""

    def __init__(
        self,
        world: PlanWorld,
        *,
        num_jobs: int | None = None,
        budget_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_jobs`: 1 runs them in this process; None: one for each core."""
        self._world = world
        self._num_jobs = num_jobs or os.cpu_count() or 1
        self._pool: ProcessPoolExecutor | None = None
        self._clock = clock
        self._began, self._budget_s = clock(), budget_s
        self._known: dict[tuple[object, ...], TrialResult] = {}
        """Holds what each simulation came to, by `simulation_of`."""
        self.num_run = 0
        self.num_left_out = 0

    def __enter__(self) -> TrialPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget_s - self.spent_s

    def is_late(self, share: float) -> bool:
        """Tell whether so much of the budget is over."""
        return self.spent_s > share * self._budget_s

    def run(
        self, trials: Sequence[Trial], *, share: float = 1.0, on_result: OnResult = id
    ) -> list[TrialResult]:
        """Run trials and return their results in the trials' order, without those that were not begun when
        `share` of the budget was over; of those that are not known one is always run. Raises what a
        simulation raises."""
        names = [simulation_of(self._world, trial) for trial in trials]
        new = {name: trial for name, trial in zip(names, trials, strict=True) if name not in self._known}
        num_known = len(self._known)
        self._simulate(new, share * self._budget_s, on_result)
        self.num_run += len(self._known) - num_known
        found: list[TrialResult] = []
        for name, trial in zip(names, trials, strict=True):
            if name not in self._known:
                break
            found.append(self._known[name].told_of(trial))
            if new.get(name) is not trial:
                on_result(found[-1])
        self.num_left_out += len(trials) - len(found)
        return found

    def _simulate(
        self, trials: Mapping[tuple[object, ...], Trial], until_s: float, on_result: OnResult
    ) -> None:
        """Run trials in order, and keep what they come to."""
        if self._num_jobs > 1 and len(trials) > 1:
            self._simulate_beside(trials, until_s, on_result)
            return
        for number, (name, trial) in enumerate(trials.items()):
            if number and self.spent_s > until_s:
                return
            self._known[name] = run_trial(self._world, trial)
            on_result(self._known[name])

    def _simulate_beside(
        self, trials: Mapping[tuple[object, ...], Trial], until_s: float, on_result: OnResult
    ) -> None:
        """Do the same in several processes."""
        pool, left = self._opened(), iter(trials.items())
        under_way: dict[Future[TrialResult], tuple[object, ...]] = {}
        num_begun = 0
        while num_begun < len(trials) or under_way:
            is_late = num_begun > 0 and self.spent_s > until_s
            while num_begun < len(trials) and len(under_way) < self._num_jobs and not is_late:
                name, trial = next(left)
                under_way[pool.submit(run_trial, self._world, trial)] = name
                num_begun += 1
            if not under_way:
                return
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                self._known[under_way.pop(future)] = future.result()
            for future in done:
                on_result(future.result())

    def _opened(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._num_jobs,
                mp_context=multiprocessing.get_context("spawn"),
            )
        return self._pool

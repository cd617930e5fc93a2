"""Run simulations on all cores, until a budget of time is over."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from types import TracebackType

from rayk.planner.trial import PlanWorld, Trial, TrialResult, run_trial

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
        `share` of the budget was over; the first is always run. Raises what a simulation raises."""
        found: dict[int, TrialResult] = {}
        until_s = share * self._budget_s
        if self._num_jobs == 1 or len(trials) == 1:
            for index, trial in enumerate(trials):
                if index and self.spent_s > until_s:
                    break
                found[index] = run_trial(self._world, trial)
                on_result(found[index])
        else:
            self._run_beside(trials, found, until_s, on_result)
        self.num_run += len(found)
        self.num_left_out += len(trials) - len(found)
        return [found[index] for index in sorted(found)]

    def _run_beside(
        self, trials: Sequence[Trial], found: dict[int, TrialResult], until_s: float, on_result: OnResult
    ) -> None:
        pool = self._opened()
        under_way: dict[Future[TrialResult], int] = {}
        next_index = 0
        while next_index < len(trials) or under_way:
            is_late = next_index > 0 and self.spent_s > until_s
            while next_index < len(trials) and len(under_way) < self._num_jobs and not is_late:
                under_way[pool.submit(run_trial, self._world, trials[next_index])] = next_index
                next_index += 1
            if not under_way:
                return
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                found[under_way.pop(future)] = future.result()
            for future in done:
                on_result(future.result())

    def _opened(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._num_jobs,
                mp_context=multiprocessing.get_context("spawn"),
            )
        return self._pool

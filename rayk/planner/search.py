"""Search plans: by estimate first, then by simulations that grow longer as fewer plans are left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from rayk.planner.candidates import Candidate, Space
from rayk.planner.front import RateSearch
from rayk.planner.pool import TrialPool
from rayk.planner.trial import Trial, TrialResult
from rayk.types.errors import OutsideHull

SCREEN_REQUESTS = 200
RATE_REQUESTS = 600
PER_ENGINE = 12  # requests of the shortest simulation, for each engine: all of them have something to do
STAND_IN_ENGINES = 24
"""A larger fleet is tried by one of so many engines; the best one is simulated as it is, too."""
STEADY = 4
"""A simulation lasts so many times as long as a request may."""
PATIENCE, SHORT_PATIENCE = 20, 6
"""It lasts so many times as long as a request may wait for its first token, too: where 1/20 more comes than
engines take, the last requests wait too long then. Those that only sort plans out are shorter."""
MAX_SIMULATED = 200_000
WITHOUT_DRAFTS = "no drafts"
"""Names what the best plan is compared with, where it drafts."""
SAME = 1 - 1e-9  # rates that differ by no more are one
WHOLE_PARTS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.5)
"""Parts of the highest rate of a smaller fleet at which a whole one is tried, until one is kept."""
SLACK = 0.9  # share of the asked rate that a plan's estimate must reach to be simulated
WIDTH = 6  # plans of one size that are simulated
MAX_SIZES = 10  # numbers of GPUs that are tried first, where there are more
FINALISTS = 4
MAX_RUNS = 6  # of one search for a highest rate
SCREEN_SHARE, CONFIRM_SHARE, RATE_SHARE = 0.3, 0.45, 0.65
"""Shares of the budget at whose end the simulations of a stage end."""


class SearchProgress(Protocol):
    """Told what a search does: stages, each of so many simulations, and each one that is done."""

    def stage(self, text: str, num_trials: int) -> None: ...

    def done(self, result: TrialResult) -> None: ...


@dataclass(slots=True, kw_only=True)
class PlanTrials:
    """What is known of one plan."""

    candidate: Candidate
    result: TrialResult  # the one that counts: of the most requests
    max_rate: float | None = None
    """The highest rate that keeps the SLO, as far as it was looked for."""
    beyond: TrialResult | None = None
    """What came of the lowest rate that does not keep it."""
    ranged: list[tuple[str, TrialResult]] = field(default_factory=list)  # what was changed, and its result


class Search:
    """Looks for plans of a spec: `found` has all that were simulated, by plan."""

    def __init__(
        self, space: Space, pool: TrialPool, progress: SearchProgress, *, rate: float | None
    ) -> None:
        """`rate`: that is asked for; None: the highest is looked for."""
        self.spec = space.spec
        self.found: dict[str, PlanTrials] = {}
        self.notes: list[str] = []
        self.num_candidates = 0
        self.num_estimated_away = 0
        self.num_bisected = 0
        self._space, self._pool, self._progress = space, pool, progress
        self.asked = rate
        self.goal = "max_rate"
        self._good = space.spec.slo.good
        self._seed = space.spec.traffic.seed
        self._most = space.spec.traffic.num_requests
        limits_ms = space.spec.slo.limits_ms
        self._patience_s = min(limits_ms[name] for name in ("ttft", "e2e") if name in limits_ms) / 1e3

    def run(self) -> PlanTrials:
        """Search, and return the best plan. Raises OutsideHull where all plans take steps that the tables do
        not cover."""
        candidates = [c for family in self._space.families for c in self._space.counts(family)]
        self.num_candidates = len(candidates)
        able = [c for c in candidates if self.asked is not None and c.bound >= SLACK * self.asked]
        if able and self.asked is not None and self.spec.resolved_objective == "fewest_gpus":
            self.num_estimated_away = len(candidates) - len(able)
            best = self._fewest(able, self.asked)
        else:
            if self.asked is not None and not able:
                self.notes.append(
                    "no plan takes the rate, by the estimate: the highest rates were looked for"
                )
            best = self._highest(candidates)
        best = self._as_it_is(best)
        if best.result.refusal:
            raise OutsideHull(
                problem=f"every plan takes steps unlike those measured: {best.result.refusal}",
                where=self.spec.costs or "",
                mend="measure such steps (`rayk costs`), or --extrapolate",
            )
        return best

    def _as_it_is(self, best: PlanTrials) -> PlanTrials:
        """Simulate a fleet of which only a smaller one was. Where it does not keep what that did, the next
        best is tried, or a lower rate if the highest is looked for; nothing that would take longer than the
        budget has left."""
        if self.goal == "max_rate":
            self._find_whole_rate(best)
            return best
        others = [p for p in self._by_rank() if p is not best]
        tried = []
        for plan in [best, *others][:FINALISTS]:
            tried.append(plan)
            if not self.keeps(plan.result):
                break
            if (result := self._whole(plan, plan.result.trial.rate)) is None:
                return plan
            plan.result = result
            if self.keeps(result):
                plan.max_rate = max(plan.max_rate or 0.0, result.trial.rate)
                return plan
        return min(tried, key=self.rank)

    def _find_whole_rate(self, plan: PlanTrials) -> None:
        """Lower a plan's highest rate, which a smaller fleet kept, until the whole fleet keeps it, too."""
        highest = plan.result.trial.rate
        if not self.keeps(plan.result):
            return
        for part in WHOLE_PARTS:
            if (result := self._whole(plan, part * highest)) is None:
                return
            self._keep(plan, result, keeps=self.keeps(result), is_first=part == WHOLE_PARTS[0])
            if self.keeps(result):
                plan.max_rate = result.trial.rate
                return
        plan.max_rate = None

    def _whole(self, plan: PlanTrials, rate: float) -> TrialResult | None:
        """Simulate a fleet as it is; None where no smaller one stood for it, or for lack of time, which is
        noted."""
        known = plan.result
        if known.trial.stand_in is None and known.trial.rate == rate:
            return None
        trial = self._trial(plan.candidate, rate, self._most, whole=True)
        takes_s = trial.num_requests * known.cpu_s / max(1, known.trial.num_requests)
        if takes_s > self._pool.left_s:
            self.notes.append(
                f"simulated by a smaller fleet in the same ratio: {plan.candidate.num_engines} engines "
                f"would take about {takes_s:,.0f} s (--budget-s)"
            )
            return None
        self._progress.stage("simulating the whole fleet", 1)
        (result,) = self._pool.run([trial], on_result=self._progress.done)
        return result

    def keeps(self, result: TrialResult) -> bool:
        """Tell whether enough requests of a simulation were good."""
        return not result.refusal and result.good_share >= self._good

    def is_met(self, result: TrialResult) -> bool:
        """Tell whether they were, at the rate that is asked for or a higher one."""
        return self.keeps(result) and (self.asked is None or result.trial.rate >= SAME * self.asked)

    # The fewest GPUs that keep the SLO at the asked rate.

    def _fewest(self, able: Sequence[Candidate], rate: float) -> PlanTrials:
        self.goal = "fewest_gpus"
        sizes = sorted({c.num_gpus for c in able})
        met_at = self._least_size(able, sizes, rate)
        self._add_for_front(able, [n for n in sizes if met_at is None or n > met_at], rate)
        self._add_policies(rate)
        finalists = self._confirmed(self._leaders(self._by_rank()), rate)
        while not any(self.is_met(p.result) for p in finalists):
            # Long simulations show what short ones did not: go on to those that are next.
            rest = [p for p in self._by_rank() if self.is_met(p.result) and p not in finalists]
            if not rest or self._pool.is_late(CONFIRM_SHARE):
                break
            finalists = self._confirmed(self._leaders(rest), rate)
        kept = [p for p in finalists if self.is_met(p.result)] or finalists[:1]
        self._bisect(kept[:FINALISTS], self._num(RATE_REQUESTS))
        return min(finalists, key=self.rank)

    def _leaders(self, ranked: Sequence[PlanTrials]) -> list[PlanTrials]:
        """Choose finalists: of the first one's size as many shapes of engines as there are, then others."""
        first = ranked[0]
        alike = [
            p
            for p in ranked
            if self.keeps(p.result) == self.keeps(first.result)
            and p.candidate.num_gpus == first.candidate.num_gpus
        ]
        places = {p.candidate.plan_id: n for n, p in enumerate(alike)}
        shapes = _diverse((p.candidate for p in alike), key=lambda c: places[c.plan_id], num=FINALISTS)
        chosen = [self.found[c.plan_id] for c in shapes]
        return [*chosen, *(p for p in ranked if p not in chosen)][:FINALISTS]

    def _least_size(self, able: Sequence[Candidate], sizes: Sequence[int], rate: float) -> int | None:
        """Find the fewest GPUs on which some plan keeps the SLO in a short simulation: from few to many, then
        between the last two sizes."""
        failed = 0
        for num in _thinned(sizes):
            if not self._any_met(able, num, rate):
                failed = num
                if self._pool.is_late(SCREEN_SHARE):
                    return None
                continue
            between = [n for n in sizes if failed < n < num]
            while between:
                middle = between[len(between) // 2]
                if self._any_met(able, middle, rate):
                    num, between = middle, [n for n in between if n < middle]
                else:
                    between = [n for n in between if n > middle]
            return num
        return None

    def _any_met(self, able: Sequence[Candidate], num_gpus: int, rate: float) -> bool:
        chosen = _diverse((c for c in able if c.num_gpus == num_gpus), key=lambda c: -c.bound, num=WIDTH)
        return any(self.is_met(p.result) for p in self._screen(chosen, rate))

    def _add_for_front(self, able: Sequence[Candidate], sizes: Sequence[int], rate: float) -> None:
        """Simulate plans on more GPUs, whose users wait less for each token."""
        chosen = [
            c
            for num in _thinned(sizes)[:MAX_SIZES]
            for c in _diverse(
                (c for c in able if c.num_gpus == num), key=lambda c: c.family.rates.tpot_ms, num=2
            )
        ]
        self._screen(chosen, rate)

    def _add_policies(self, rate: float) -> None:
        """Try the other policies with the plans that are best so far."""
        self._screen([c for p in self._by_rank()[:2] for c in self._of_other_policies(p.candidate)], rate)

    def _of_other_policies(self, candidate: Candidate) -> list[Candidate]:
        """List the same plan under the other policies; a policy chooses nothing among engines of which each
        side has one."""
        if max(candidate.num_prefill, candidate.num_decode) == 1 and "conditional" not in self.spec.policies:
            return []
        return [replace(candidate, policy=name) for name in self.spec.policies if name != candidate.policy]

    # The highest rate that keeps the SLO.

    def _highest(self, candidates: Sequence[Candidate]) -> PlanTrials:
        most = max(c.bound for c in candidates)
        able = [c for c in candidates if c.bound >= 0.6 * most]
        self.num_estimated_away = len(candidates) - len(able)
        chosen = dict.fromkeys(_diverse(able, key=lambda c: -c.bound, num=2 * WIDTH))
        chosen |= dict.fromkeys(_diverse(candidates, key=lambda c: -c.bound / c.num_gpus, num=WIDTH))
        chosen |= dict.fromkeys(_diverse(able, key=lambda c: c.family.rates.tpot_ms, num=WIDTH // 2))
        plans = [self._untried(c) for c in chosen]
        short = self._num(SCREEN_REQUESTS)
        is_short = short < self._most
        how = {"max_runs": 4, "patience": SHORT_PATIENCE} if is_short else {}
        self._bisect(plans, short, start=lambda p: 0.8 * p.candidate.bound, **how)
        plans.sort(key=lambda p: -(p.max_rate or 0.0))
        likely = {p.candidate.plan_id: p.max_rate for p in plans if p.max_rate}
        others = []
        for plan in plans[:2]:
            for candidate in self._of_other_policies(plan.candidate):
                others.append(self._untried(candidate))
                likely[others[-1].candidate.plan_id] = plan.max_rate or 0.8 * plan.candidate.bound
        finalists = [p for p in plans if p.max_rate][:FINALISTS] + others
        self._bisect(
            finalists if is_short else others, self._most, start=lambda p: likely[p.candidate.plan_id]
        )
        plans += others
        self.found = {p.candidate.plan_id: p for p in plans if p.result.num_requests or p.result.refusal}
        return min(finalists or plans[:1], key=self.rank)

    def _untried(self, candidate: Candidate) -> PlanTrials:
        """Begin with a plan of which nothing is known."""
        trial = self._trial(candidate, candidate.bound, 1)
        return PlanTrials(candidate=candidate, result=TrialResult(trial=trial))

    def rank(self, plan: PlanTrials) -> tuple[bool, float, float, float]:
        """Order plans, the best first: those that keep the SLO, then by the fewest GPUs or the highest rate,
        whichever is looked for."""
        keeps = self.keeps(plan.result)
        size = float(plan.candidate.num_gpus)
        highest = -(plan.max_rate or 0.0)
        if self.goal == "max_rate":
            return not keeps, highest, size, -plan.result.good_share
        tail = highest if keeps else -plan.result.good_share
        return not keeps, size if keeps else 0.0, tail, -plan.candidate.bound

    def _by_rank(self) -> list[PlanTrials]:
        return sorted(self.found.values(), key=self.rank)

    # Simulations.

    def _screen(self, candidates: Sequence[Candidate], rate: float) -> list[PlanTrials]:
        new = [c for c in candidates if c.plan_id not in self.found]
        trials = [self._trial(c, rate, self._num(SCREEN_REQUESTS), patience=SHORT_PATIENCE) for c in new]
        sizes = sorted({c.num_gpus for c in new})
        text = f"trying {'-'.join(map(str, dict.fromkeys(sizes[:1] + sizes[-1:])))} GPUs"
        self._simulate(text, trials, SCREEN_SHARE)
        return [p for c in candidates if (p := self.found.get(c.plan_id)) is not None]

    def _confirmed(self, plans: Sequence[PlanTrials], rate: float) -> list[PlanTrials]:
        """Simulate plans with all requests."""
        trials = [self._trial(p.candidate, rate, self._most) for p in plans]
        self._simulate("confirming", trials, CONFIRM_SHARE)
        return list(plans)

    def _simulate(self, text: str, trials: Sequence[Trial], share: float) -> None:
        if not trials:
            return
        self._progress.stage(text, len(trials))
        for result in self._pool.run(trials, share=share, on_result=self._progress.done):
            candidate = result.trial.candidate
            plan = self.found.setdefault(candidate.plan_id, PlanTrials(candidate=candidate, result=result))
            plan.result = result

    def _bisect(
        self,
        plans: Sequence[PlanTrials],
        num_requests: int,
        *,
        start: Callable[[PlanTrials], float] | None = None,
        max_runs: int = MAX_RUNS,
        patience: int = PATIENCE,
    ) -> None:
        """Find each plan's highest rate, all plans side by side: from `start`, or from the rate of what is
        known of it, which is not tried again."""
        searches = []
        for plan in plans:
            begin = plan.result.trial.rate if start is None else start(plan)
            search = RateSearch(begin, ceiling=plan.candidate.bound / SLACK, max_runs=max_runs)
            if start is None:
                keeps = self.keeps(plan.result)
                self._keep(plan, plan.result, keeps=keeps, is_first=False)
                search.note(keeps=keeps)
            searches.append((plan, search))
        self.num_bisected += len(plans)
        for number in range(1, max_runs + 1):
            live = [
                (p, s, rate)
                for p, s in searches
                if (rate := s.next_rate) is not None and not _is_beaten(p, s, searches)
            ]
            if not live:
                break
            self._progress.stage(f"looking for the highest rates, {number} of {max_runs}", len(live))
            trials = [self._trial(p.candidate, rate, num_requests, patience=patience) for p, _, rate in live]
            results = self._pool.run(trials, share=RATE_SHARE, on_result=self._progress.done)
            for (plan, search, _), result in zip(live, results, strict=False):
                keeps = self.keeps(result)
                self._keep(plan, result, keeps=keeps, is_first=start is not None and not search.num_runs)
                search.note(keeps=keeps)
            if len(results) < len(live):
                break
        for plan, search in searches:
            if search.num_runs:
                plan.max_rate = search.low or None

    def _keep(self, plan: PlanTrials, result: TrialResult, *, keeps: bool, is_first: bool) -> None:
        """Keep of a plan the result at its highest rate, where that is looked for, and the one beyond it.
        `is_first`: of longer simulations than those before, which count no more."""
        if is_first:
            plan.beyond = None
        if not keeps and (plan.beyond is None or result.trial.rate < plan.beyond.trial.rate):
            plan.beyond = result
        if self.goal != "max_rate":
            return
        is_better = result.trial.rate >= plan.result.trial.rate or not self.keeps(plan.result)
        if is_first or (is_better if keeps else not self.keeps(plan.result)):
            plan.result = result

    def base_name(self, plan: PlanTrials) -> str:
        """Say at which rate a plan's result holds."""
        at_asked = self.asked is not None and abs(plan.result.trial.rate / self.asked - 1) <= 1 - SAME
        return "as asked" if at_asked else "at its highest rate"

    def vary(self, plan: PlanTrials) -> None:
        """Simulate a plan under more and less traffic, with other costs, and, where traffic is drawn, from
        other seeds."""
        base = self._trial(plan.candidate, plan.result.trial.rate, self._most)
        drafts = self._drafts_beside(plan.candidate)
        changes = {name: replace(base, candidate=other) for name, other in drafts.items()}
        changes |= {
            "traffic -20 %": replace(base, rate=0.8 * base.rate),
            "traffic +20 %": replace(base, rate=1.2 * base.rate),
            "costs -10 %": replace(base, slowed=0.9),
            "costs +10 %": replace(base, slowed=1.1),
        }
        if self.spec.traffic.trace is None:  # what was recorded is the same from every seed
            changes |= {f"seed {n}": replace(base, seed=base.seed + n) for n in (1, 2)}
        self._progress.stage("varying the best plan", len(changes))
        results = self._pool.run(list(changes.values()), on_result=self._progress.done)
        plan.ranged = list(zip(changes, results, strict=False))
        if len(results) < len(changes):
            left = ", ".join(list(changes)[len(results) :])
            self.notes.append(f"the budget ended before these were tried: {left}")

    def _drafts_beside(self, candidate: Candidate) -> dict[str, Candidate]:
        """Name what a plan is compared with, where drafts are tried: without them, or with the fewest."""
        tried = self.spec.search.num_drafts
        if len(tried) == 1:
            return {}
        num = 0 if candidate.family.num_drafts else min(tried[1:])
        other = self._space.with_drafts(candidate, num)
        if other is None:
            return {}
        return {f"{num} drafts" if num else WITHOUT_DRAFTS: other}

    def _trial(
        self,
        candidate: Candidate,
        rate: float,
        num_requests: int,
        *,
        patience: int = PATIENCE,
        whole: bool = False,
    ) -> Trial:
        """Make a trial of at least so many requests, of a large fleet by a smaller one unless `whole`."""
        stand_in = None if whole else candidate.shrunk(STAND_IN_ENGINES)
        trial = Trial(candidate=candidate, rate=rate, num_requests=1, seed=self._seed, stand_in=stand_in)
        simulated, part = trial.simulated
        lasts_s = max(STEADY * candidate.family.rates.e2e_s, patience * self._patience_s)
        num = max(num_requests, PER_ENGINE * simulated.num_engines, round(part * rate * lasts_s))
        return replace(trial, num_requests=min(num, MAX_SIMULATED))

    def _num(self, num_requests: int) -> int:
        return min(self._most, num_requests)


def _is_beaten(plan: PlanTrials, search: RateSearch, others: Sequence[tuple[PlanTrials, RateSearch]]) -> bool:
    """Tell whether some other plan is known to keep more than this one can, in all and per GPU."""
    if search.high is None:
        return False
    per_gpu = search.high / plan.candidate.num_gpus
    return any(o.low >= search.high and o.low / p.candidate.num_gpus >= per_gpu for p, o in others)


def _thinned(sizes: Sequence[int]) -> list[int]:
    """Choose sizes, the first and the last among them, that grow by about the same factor."""
    if len(sizes) <= MAX_SIZES:
        return list(sizes)
    growth = (sizes[-1] / sizes[0]) ** (1 / (MAX_SIZES - 1))
    wanted = (sizes[0] * growth**n for n in range(MAX_SIZES))
    return list(dict.fromkeys(min(sizes, key=lambda size: abs(size - want)) for want in wanted))


def _diverse(
    candidates: Iterable[Candidate], *, key: Callable[[Candidate], float], num: int
) -> list[Candidate]:
    """Choose the best by `key`, of each shape of engines one before any has a second."""
    turns: dict[tuple[str, int, int | None, int], list[Candidate]] = {}
    for c in sorted(candidates, key=lambda c: (key(c), c.plan_id)):
        f = c.family
        turns.setdefault((f.mode, f.prefill_tp, f.decode_tp, f.num_drafts), []).append(c)
    rounds = max(map(len, turns.values()), default=0)
    dealt = (of[n] for n in range(rounds) for of in turns.values() if n < len(of))
    return list(islice(dealt, num))

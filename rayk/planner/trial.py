"""Simulate one plan under one load, and say what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rayk.costs.book import CostBook
from rayk.costs.table import EngineCosts, Gap, GapTable, LinearCost, ReadCosts, TransferTable
from rayk.models.config import DecoderConfig
from rayk.planner.candidates import Candidate
from rayk.planner.command import planned_server
from rayk.planner.traffic import Traffic
from rayk.specs.plan import PlanSpec
from rayk.types.draft_rates import DraftRates
from rayk.types.errors import OutsideHull
from rayk.types.rows import RequestRow
from rayk.types.slo import Slo

if TYPE_CHECKING:
    from rayk.simulate.outcome import SimEngineAccount

WARM_UP = 10
"""One request of so many, the first ones, is not counted: queues and batches have not filled up yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWorld:
    """What all simulations of a search have in common."""

    spec: PlanSpec
    config: DecoderConfig
    costs: CostBook
    extrapolates: bool = False
    drafts: DraftRates | None = None

    @property
    def traffic(self) -> Traffic:
        return Traffic(
            self.spec.traffic,
            vocab_size=self.config.vocab_size,
            has_prefixes=bool(self.spec.engine.prefix_caching),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One simulation that is to be run."""

    candidate: Candidate
    rate: float
    num_requests: int
    seed: int = 0
    slowed: float = 1.0  # by how much all costs are multiplied
    stand_in: Candidate | None = None
    """A smaller fleet that is simulated in its place, at as much less of the rate."""

    @property
    def simulated(self) -> tuple[Candidate, float]:
        """The plan that is simulated, and its part of the rate."""
        if self.stand_in is None:
            return self.candidate, 1.0
        parts = [self.stand_in.num_prefill / self.candidate.num_prefill]
        if self.candidate.num_decode:
            parts.append(self.stand_in.num_decode / self.candidate.num_decode)
        return self.stand_in, min(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What a simulation came to. Of the sides: `prefill` (aggregated engines, too) and `decode`."""

    trial: Trial
    refusal: str = ""  # why there is no more than this
    num_requests: int = 0
    good_share: float = 0.0
    ttft_ms: tuple[float, float] = (float("nan"), float("nan"))  # p50, p90; likewise below
    tpot_ms: tuple[float, float] = (float("nan"), float("nan"))
    queue_ms: float = 0.0  # median, before the first engine computes
    output_tokens_per_s: float = 0.0
    missed: dict[str, float] = field(default_factory=dict)  # share of requests by the limit they break
    stages_ms: dict[str, float] = field(default_factory=dict)  # mean time of each stage
    busy: dict[str, float] = field(default_factory=dict)  # share of time inside steps, by side
    kv_peak: dict[str, float] = field(default_factory=dict)  # share of the fullest engine's blocks, by side
    link_busy: float | None = None  # share of time in which a decode engine reads
    preemptions: float = 0.0  # per request
    cached_share: float = 0.0  # of prompt tokens
    num_steps: int = 0
    tokens_per_step: float = 1.0  # of a request, that decode steps gave
    decodes_at_once: float = 0.0  # requests that the mean step decodes, where engines draft
    num_outside_hull: int = 0
    reads_as_coded: bool = False  # reads between such engines were not measured
    cpu_s: float = 0.0  # that the simulation took

    @property
    def goodput(self) -> float:
        """Good requests per second."""
        return self.good_share * self.trial.rate

    def told_of(self, trial: Trial) -> TrialResult:
        """Return what another trial comes to that is the same simulation."""
        before, now = self.trial.simulated[1], trial.simulated[1]
        return replace(self, trial=trial, output_tokens_per_s=self.output_tokens_per_s * (before / now))


def simulation_of(world: PlanWorld, trial: Trial) -> tuple[object, ...]:
    """Name what a trial simulates: of two with one name the second need not be run. See `told_of`."""
    candidate, part = trial.simulated
    num_requests = world.traffic.count(trial.num_requests)
    return candidate.plan_id, part * trial.rate, num_requests, trial.seed, trial.slowed


def run_trial(world: PlanWorld, trial: Trial) -> TrialResult:
    """Simulate. Steps outside the tables end it, unless the world extrapolates."""
    from rayk.simulate import simulate_cell

    spec = world.spec
    candidate, part = trial.simulated
    server = planned_server(spec, candidate, world.config)
    costs = world.costs if trial.slowed == 1.0 else slowed_book(world.costs, trial.slowed)
    traffic = world.traffic
    num = traffic.count(trial.num_requests)
    seen = _CountedRequests(num // WARM_UP, counts_steps=candidate.family.num_drafts > 0)
    try:
        outcome = simulate_cell(
            server.cell,
            world.config,
            traffic.arrivals(trial.rate * part, num, trial.seed),
            costs,
            seed=trial.seed,
            strict=not world.extrapolates,
            server=server.settings,
            sink=seen.note,
            drafts=world.drafts,
        )
    except OutsideHull as error:
        return TrialResult(trial=trial, refusal=error.problem)
    accounts = outcome.engines
    sides = {
        side: of
        for side in ("prefill", "decode")
        if (of := [a for name, a in accounts.items() if name.startswith(side)])
    }
    sums = seen.summed(Slo(limits_ms=spec.slo.limits_ms))
    prompt_tokens = sum(a.num_prompt_tokens for a in accounts.values())
    decoding = sides.get("decode") or sides.get("prefill", [])
    return TrialResult(
        trial=trial,
        **sums,
        output_tokens_per_s=seen.num_output_tokens / (part * max(1e-9, outcome.end_ns / 1e9)),
        link_busy=_share_of_time(sides.get("decode"), "read_ns", outcome.end_ns),
        busy={side: _share_of_time(of, "busy_ns", outcome.end_ns) or 0.0 for side, of in sides.items()},
        kv_peak={s: max(a.max_blocks / max(1, a.num_blocks - 1) for a in of) for s, of in sides.items()},
        preemptions=sum(a.num_preemptions for a in accounts.values()) / max(1, num),
        cached_share=sum(a.num_cached_tokens for a in accounts.values()) / max(1, prompt_tokens),
        num_steps=sum(a.num_steps for a in accounts.values()),
        tokens_per_step=seen.tokens_per_step,
        decodes_at_once=seen.num_decode_steps / max(1, sum(a.num_steps for a in decoding)),
        num_outside_hull=outcome.num_outside_hull,
        reads_as_coded=outcome.reads_as_coded,
        cpu_s=outcome.cpu_s,
    )


def _share_of_time(accounts: Sequence[SimEngineAccount] | None, name: str, end_ns: int) -> float | None:
    """Tell for which share of the time a side's mean engine did something; None where there is none."""
    if not accounts:
        return None
    return float(sum(getattr(a, name) for a in accounts) / (len(accounts) * max(1, end_ns)))


class _CountedRequests:
    """Keeps of each request what sums need."""

    def __init__(self, num_first: int, *, counts_steps: bool = False) -> None:
        """`num_first`: requests of the warm-up, which are left out. `counts_steps`: those that decode each
        are counted, too."""
        self._num_first = num_first
        self._counts_steps = counts_steps
        self.num_decode_steps = self._num_decoded = 0
        self.num_output_tokens = 0
        self._rows: list[dict[str, Any]] = []
        self._stages: dict[str, float] = {}

    def note(self, row: RequestRow) -> None:
        self.num_output_tokens += len(row.output_token_ids)
        if self._counts_steps and row.token_times_ns:
            # The tokens of one step have one time.
            self.num_decode_steps += len(set(row.token_times_ns)) - 1
            self._num_decoded += len(row.token_times_ns) - 1
        if row.prompt_index < self._num_first:
            return
        is_answered = row.error is None
        self._rows.append(
            {
                "num_output_tokens": len(row.output_token_ids),
                "ttft_ms": _ms(row.ttft_ns) if is_answered else None,
                "tpot_ms": _ms(row.tpot_ns) if is_answered else None,
                "e2e_ms": _ms(row.e2e_ns) if is_answered else None,
                "queue_ms": sum(row.stage_ns.get(s, 0) for s in ("queue", "dispatch", "prefill_queue")) / 1e6,
            }
        )
        for stage, ns in row.stage_ns.items():
            self._stages[stage] = self._stages.get(stage, 0.0) + ns / 1e6

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens that a step gave a request after its first one; 1 where nobody counted."""
        return self._num_decoded / self.num_decode_steps if self.num_decode_steps else 1.0

    def summed(self, slo: Slo) -> dict[str, Any]:
        """Return fields of TrialResult."""
        rows = self._rows
        num = max(1, len(rows))
        missed = {}
        for name in slo.limits_ms:
            one = Slo(limits_ms={name: slo.limits_ms[name]})
            missed[name] = sum(not one.is_kept(row) for row in rows) / num
        return {
            "num_requests": len(rows),
            "good_share": sum(slo.is_kept(row) for row in rows) / num,
            "ttft_ms": _percentiles(rows, "ttft_ms"),
            "tpot_ms": _percentiles(rows, "tpot_ms"),
            "queue_ms": _percentiles(rows, "queue_ms")[0],
            "missed": missed,
            "stages_ms": {stage: ms / num for stage, ms in self._stages.items()},
        }


def _ms(length_ns: float | None) -> float | None:
    return None if length_ns is None else length_ns / 1e6


def _percentiles(rows: list[dict[str, Any]], name: str) -> tuple[float, float]:
    known = [row[name] for row in rows if row[name] is not None]
    if not known:
        return float("nan"), float("nan")
    p50, p90 = np.percentile(known, (50, 90)).tolist()
    return p50, p90


def slowed_book(book: CostBook, factor: float) -> CostBook:
    """Return a book in which everything takes `factor` times as long."""
    return replace(
        book,
        engines={key: slowed_engine(costs, factor) for key, costs in book.engines.items()},
        any_engine=None if book.any_engine is None else slowed_engine(book.any_engine, factor),
        transfers=TransferTable(
            reads={
                name: ReadCosts(post=_slowed_linear(r.post, factor), wait=_slowed_linear(r.wait, factor))
                for name, r in book.transfers.reads.items()
            }
        ),
        gaps=GapTable(**{f.name: _slowed_gap(getattr(book.gaps, f.name), factor) for f in fields(GapTable)}),
    )


def slowed_engine(costs: EngineCosts, factor: float) -> EngineCosts:
    """Return the costs of an engine whose steps, host and commands take `factor` times as long."""
    return replace(
        costs.scaled(factor),
        host_ns=costs.host_ns * factor,
        request_host_ns=costs.request_host_ns * factor,
        prefill_host_ns=costs.prefill_host_ns * factor,
        drafting={name: turns.scaled(factor) for name, turns in costs.drafting.items()},
        commands={name: _slowed_linear(cost, factor) for name, cost in costs.commands.items()},
    )


def _slowed_linear(cost: LinearCost, factor: float) -> LinearCost:
    return LinearCost(
        fixed_ns=cost.fixed_ns * factor,
        descriptor_ns=cost.descriptor_ns * factor,
        byte_ns=cost.byte_ns * factor,
    )


def _slowed_gap(gap: Gap, factor: float) -> Gap:
    return replace(
        gap,
        quantiles=tuple(q * factor for q in gap.quantiles),
        stream_ns=gap.stream_ns * factor,
        core_ns=gap.core_ns * factor,
    )

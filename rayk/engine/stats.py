"""What one rank reports of its steps, and rank 0 of its engine's requests and blocks.

The engine's loop calls `StepStats` at each turn, which adds up; the meter hears of it when it flushes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from rayk.costs.sheets import peaks_of
from rayk.engine.costs import StepCosts
from rayk.parallel.shard import engine_shape
from rayk.parallel.timed import TimedComm
from rayk.types.batch import ScheduledBatch

if TYPE_CHECKING:
    from rayk.engine.leader import Leader
    from rayk.engine.rank import EngineRank
    from rayk.metrics import Meter

ENDINGS = ("stop", "length", "abort", "error", "handed_over")  # how requests end at an engine


@dataclass(slots=True)
class _PhaseSteps:
    num_steps: int = 0
    busy_ns: int = 0
    model_ns: int = 0
    seconds: list[float] = field(default_factory=list)
    """Each step's since the last flush: folding them together costs a step least."""


def phase_of(batch: ScheduledBatch) -> str:
    """Say prefill, decode or mixed. One token behind others counts as decode, also where it ends a prompt,
    and drafts with it."""
    num_decoding = sum(
        1 for r in batch.requests if len(r.token_ids) == 1 + r.num_drafts and r.num_computed_tokens
    )
    if not num_decoding:
        return "prefill"
    return "decode" if num_decoding == len(batch.requests) else "mixed"


class StepStats:
    """Counts one rank's steps; rank 0 also reports the batches. Implements TurnStats."""

    def __init__(
        self,
        meter: Meter,
        *,
        is_leader: bool = False,
        costs: StepCosts | None = None,
        comm: TimedComm | None = None,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        """`comm`: where collectives take the host's time. `device`: its name, which with the model's `dtype`
        says what peaks it has."""
        self.meter = meter
        self._is_leader = is_leader
        self._costs = costs
        self._comm = comm
        self._peaks = peaks_of(device, dtype)
        self._num_turns = 0
        self._phases = {name: _PhaseSteps() for name in ("prefill", "decode", "mixed")}
        self._num_tokens: list[float] = []
        self._num_requests: list[float] = []  # each step's since the last flush
        self._flops = self._read_bytes = 0
        self._last = (0, 0, 0)
        meter.on_flush(self._report)

    def stepped(self, batch: ScheduledBatch, busy_ns: int, model_ns: int, num_commands: int = 0) -> None:
        name = phase_of(batch)
        phase = self._phases[name]
        phase.num_steps += 1
        phase.busy_ns += busy_ns
        phase.model_ns += model_ns
        if self._costs is not None:
            flops, read_bytes = self._costs.count(batch)
            self._flops += flops
            self._read_bytes += read_bytes
        phase.seconds.append(busy_ns / 1e9)
        if self._is_leader:
            self._num_tokens.append(batch.num_tokens)
            self._num_requests.append(len(batch.requests))

    def turned(self) -> None:
        self._num_turns += 1
        self.meter.tick()

    def _report(self) -> None:
        total = self.meter.total
        total("rayk_turns_total", self._num_turns)
        for name, phase in self._phases.items():
            total("rayk_steps_total", phase.num_steps, phase=name)
            total("rayk_step_busy_seconds_total", phase.busy_ns / 1e9, phase=name)
            total("rayk_model_seconds_total", phase.model_ns / 1e9, phase=name)
            self.meter.observe_all("rayk_step_seconds", _drain(phase.seconds), phase=name)
        if self._comm is not None:
            total("rayk_collective_seconds_total", self._comm.collective_ns / 1e9)
        if self._costs is not None:
            self._report_costs()
        if self._is_leader:
            self.meter.observe_all("rayk_iteration_tokens", _drain(self._num_tokens))
            self.meter.observe_all("rayk_batch_requests", _drain(self._num_requests))

    def _report_costs(self) -> None:
        meter = self.meter
        meter.total("rayk_estimated_flops_per_gpu_total", self._flops)
        meter.total("rayk_estimated_read_bytes_per_gpu_total", self._read_bytes)
        now = (self._flops, self._read_bytes, sum(p.model_ns for p in self._phases.values()))
        flops, read_bytes, model_ns = (a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        rates = (flops / model_ns * 1e9, read_bytes / model_ns * 1e9) if model_ns else (0.0, 0.0)
        meter.set("rayk_model_flops_per_second", rates[0])
        meter.set("rayk_model_bytes_per_second", rates[1])
        if self._peaks is not None:
            meter.set("rayk_model_flops_utilization", rates[0] / self._peaks.flops_per_s)
            meter.set("rayk_model_bandwidth_utilization", rates[1] / self._peaks.bytes_per_s)


def _drain(values: list[float]) -> list[float]:
    """Empty the list: its values are reported once."""
    drained = values.copy()
    values.clear()
    return drained


def rank_stats(meter: Meter, rank: EngineRank, leader: Leader | None) -> StepStats:
    """Return the counts of a rank's steps. The meter reports where the rank stands in its engine, and on
    rank 0 what the leader counts."""
    share = engine_shape(rank.config, rank.model_config.num_layers).share(rank.comm.rank)
    places = {"stage": share.stage, "tp_rank": share.tp_rank, "dcp_rank": share.dcp_rank}
    meter.set("rayk_engine_rank_info", 1, **{name: str(place) for name, place in places.items()})
    device = torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "cpu"
    comm = rank.comm if isinstance(rank.comm, TimedComm) else None
    # A rank that only keeps time multiplies nothing.
    costs = StepCosts(rank) if rank.config.compute == "real" else None
    dtype = rank.config.dtype
    if leader is not None:
        meter.on_flush(lambda: _report_leader(meter, leader))
        if rank.config.max_drafts:
            meter.on_flush(lambda: _report_drafts(meter, leader, rank.config.max_drafts))
    return StepStats(meter, is_leader=leader is not None, costs=costs, comm=comm, device=device, dtype=dtype)


def _report_leader(meter: Meter, leader: Leader) -> None:
    total, scheduler = meter.total, leader.scheduler
    for reason in ENDINGS:
        total("rayk_requests_total", leader.num_ended[reason], finish_reason=reason)
    total("rayk_not_finite_requests_total", leader.num_not_finite)
    total("rayk_prompt_tokens_total", scheduler.num_prompt_tokens)
    total("rayk_generation_tokens_total", scheduler.num_output_tokens)
    total("rayk_num_preemptions_total", scheduler.num_preemptions)
    if leader.manager.prefixes is not None:
        total("rayk_prefix_cache_queries_total", scheduler.num_looked_up_tokens)
        total("rayk_prefix_cache_hits_total", scheduler.num_found_tokens)
    meter.set("rayk_num_requests_running", scheduler.num_running)
    meter.set("rayk_num_requests_waiting", scheduler.num_waiting)
    counts = leader.manager.count_blocks()
    num_blocks = leader.manager.pool.num_blocks - 1
    for group, states in counts.items():
        for state, number in states.items():
            meter.set("rayk_kv_blocks", number, group=group, state=state)
    num_taken = counts["pool"]["used"] + counts["pool"]["leased"]
    meter.set("rayk_kv_pool_blocks", num_blocks)
    meter.set("rayk_kv_cache_usage_perc", num_taken / num_blocks)


def _report_drafts(meter: Meter, leader: Leader, num_positions: int) -> None:
    drafting = leader.scheduler.drafting
    assert drafting is not None, "an engine whose settings say so drafts"
    counts, total = drafting.counts, meter.total
    total("rayk_spec_decode_num_drafts_total", counts.num_drafts)
    total("rayk_spec_decode_num_draft_tokens_total", counts.num_draft_tokens)
    total("rayk_spec_decode_num_accepted_tokens_total", counts.num_accepted_tokens)
    by_position = dict.fromkeys(range(num_positions), 0) | dict(enumerate(counts.accepted_at))
    for position, number in by_position.items():
        name = "rayk_spec_decode_num_accepted_tokens_per_pos_total"
        total(name, number, position=str(position))
    if leader.manager.has_riders:
        total("rayk_spec_decode_num_undrafted_requests_total", drafting.num_undrafted)
        total("rayk_spec_decode_num_undrafted_tokens_total", leader.manager.num_undrafted_tokens)

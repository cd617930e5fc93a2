"""What one rank tells of its steps. Called by the engine's loop.

Steps are added up here; a sink hears of them when it passes its values on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rayk.engine.costs import StepCosts, peaks_of
from rayk.metrics import BufferedSink
from rayk.types.batch import ScheduledBatch

if TYPE_CHECKING:
    from rayk.parallel.timed import TimedComm


@dataclass(slots=True)
class _Phase:
    num_steps: int = 0
    busy_ns: int = 0
    model_ns: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each step since the last flush: folding them together costs a step least."""


def phase_of(batch: ScheduledBatch) -> str:
    """prefill, decode or mixed. One token behind others counts as decode, also where it ends a prompt."""
    num_decoding = sum(1 for r in batch.requests if len(r.token_ids) == 1 and r.num_computed_tokens)
    if not num_decoding:
        return "prefill"
    return "decode" if num_decoding == len(batch.requests) else "mixed"


class StepMeter:
    """One rank's steps; rank 0 also tells of the batches."""

    def __init__(
        self,
        sink: BufferedSink,
        *,
        is_leader: bool = False,
        costs: StepCosts | None = None,
        comm: TimedComm | None = None,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        """`comm`: where collectives take the host's time. `device`: its name, for the peaks it may have in
        the model's `dtype`."""
        self.sink = sink
        self._is_leader = is_leader
        self._costs = costs
        self._comm = comm
        self._peaks = peaks_of(device, dtype)
        self._num_turns = 0
        self._phases = {name: _Phase() for name in ("prefill", "decode", "mixed")}
        self._num_tokens: list[float] = []
        self._num_requests: list[float] = []
        """Of each step since the last flush."""
        self._flops = self._read_bytes = 0
        self._last = (0, 0, 0)
        sink.on_flush(self._report)

    def stepped(self, batch: ScheduledBatch, busy_ns: int, model_ns: int) -> None:
        """A turn with a step is over; `model_ns` of it were the forward pass."""
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
        """A turn is over."""
        self._num_turns += 1
        self.sink.tick()

    def _report(self) -> None:
        total = self.sink.total
        total("rayk_turns_total", self._num_turns)
        for name, phase in self._phases.items():
            total("rayk_steps_total", phase.num_steps, phase=name)
            total("rayk_step_busy_seconds_total", phase.busy_ns / 1e9, phase=name)
            total("rayk_model_seconds_total", phase.model_ns / 1e9, phase=name)
            self.sink.observe_all("rayk_step_seconds", _drain(phase.seconds), phase=name)
        if self._comm is not None:
            total("rayk_collective_seconds_total", self._comm.collective_ns / 1e9)
        if self._costs is not None:
            self._report_costs()
        if self._is_leader:
            self.sink.observe_all("rayk_iteration_tokens", _drain(self._num_tokens))
            self.sink.observe_all("rayk_batch_requests", _drain(self._num_requests))

    def _report_costs(self) -> None:
        sink = self.sink
        sink.total("rayk_estimated_flops_per_gpu_total", self._flops)
        sink.total("rayk_estimated_read_bytes_per_gpu_total", self._read_bytes)
        now = (self._flops, self._read_bytes, sum(p.model_ns for p in self._phases.values()))
        flops, read_bytes, model_ns = (a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        rates = (flops / model_ns * 1e9, read_bytes / model_ns * 1e9) if model_ns else (0.0, 0.0)
        sink.set("rayk_model_flops_per_second", rates[0])
        sink.set("rayk_model_bytes_per_second", rates[1])
        if self._peaks is not None:
            sink.set("rayk_model_flops_utilization", rates[0] / self._peaks.flops_per_s)
            sink.set("rayk_model_bandwidth_utilization", rates[1] / self._peaks.bytes_per_s)


def _drain(values: list[float]) -> list[float]:
    """They are told now, and no more later."""
    taken = values.copy()
    values.clear()
    return taken

"""Metrics through Ray, which shows them on every node's Prometheus endpoint, under `ray_` and their name."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from rayk.engine.costs import StepCosts
from rayk.engine.metering import StepMeter
from rayk.metrics import METRICS, BufferedSink, MetricKind, MetricsSink, NullSink
from rayk.parallel.timed import TimedComm

if TYPE_CHECKING:
    from rayk.actors.handover import TransferHandover
    from rayk.engine.leader import Leader
    from rayk.engine.rank import EngineRank
    from rayk.parallel.comm import Comm


class RaySink:
    """Implements MetricsSink. A call costs some 3 us: see metrics.BufferedSink."""

    def __init__(self, **known: str) -> None:
        """`known`: labels of every value, such as model, engine, role and rank."""
        self._known = known

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter."""
        _metric(name).inc(value, self._known | labels)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. Ray forgets it two seconds later."""
        _metric(name).set(value, self._known | labels)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add one observation to a histogram."""
        _metric(name).observe(value, self._known | labels)


@functools.cache
def _metric(name: str) -> Any:
    """Ray's own, of which a process has one per name."""
    from ray.util.metrics import Counter, Gauge, Histogram

    metric = METRICS[name]
    what = metric.name, f"{metric.help} [{metric.unit}]"
    if metric.kind is MetricKind.COUNTER:
        return Counter(*what, tag_keys=metric.labels)
    if metric.kind is MetricKind.GAUGE:
        return Gauge(*what, tag_keys=metric.labels)
    return Histogram(*what, boundaries=list(metric.buckets), tag_keys=metric.labels)


def make_sink(**known: str) -> BufferedSink:
    """Where a process of a Ray cluster reports; nowhere outside of one."""
    import ray

    sink: MetricsSink = RaySink(**known) if ray.is_initialized() else NullSink()
    return BufferedSink(sink)


def model_label(path: str) -> str:
    """How a model is named in labels: its folder's name."""
    return path.rstrip("/").rpartition("/")[2] or path


def sink_of_rank(rank: EngineRank, *, engine: str, role: str) -> BufferedSink:
    """Where one rank of an engine reports."""
    model = model_label(rank.config.model)
    return make_sink(model=model, engine=engine, role=role, rank=str(rank.comm.rank))


def timed(comm: Comm) -> Comm:
    """The comm, watched where that tells anything: a GPU's collectives end on its stream, not on the host."""
    return TimedComm(comm) if comm.size > 1 and comm.name != "nccl" else comm


def make_meter(
    sink: BufferedSink, rank: EngineRank, leader: Leader | None, handover: TransferHandover | None
) -> StepMeter:
    """What tells of a rank's turns; `leader` and `handover` on rank 0."""
    device = torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "cpu"
    if handover is not None:
        sink.on_flush(lambda: sink.set("rayk_num_requests_receiving", handover.num_awaited))
    comm = rank.comm if isinstance(rank.comm, TimedComm) else None
    return StepMeter(sink, leader=leader, costs=StepCosts(rank), comm=comm, device=device)

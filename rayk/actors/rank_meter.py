"""What tells of one rank of an engine: where it reports, and what watches its turns and collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rayk.actors.ray_metrics import make_sink, model_label
from rayk.engine.costs import StepCosts
from rayk.engine.leader_metrics import report_leader
from rayk.engine.metering import StepMeter
from rayk.handover.leader_metrics import report_offload, report_requests
from rayk.metrics import BufferedSink, beginnings
from rayk.parallel.timed import TimedComm

if TYPE_CHECKING:
    from rayk.engine.leader import Leader
    from rayk.engine.rank import EngineRank
    from rayk.handover.handover import TransferHandover
    from rayk.parallel.comm import Comm

OF_TRANSFERS = ("rayk_nixl_", "rayk_kv_")
"""What names of counters begin with that a rank without partners does not have."""


def sink_of_rank(rank: EngineRank, *, engine: str, role: str) -> BufferedSink:
    """Where one rank of an engine reports; what it has not counted yet is 0."""
    model = model_label(rank.config.model)
    sink = make_sink(model=model, engine=engine, role=role, rank=str(rank.comm.rank))
    if role != "aggregated":
        for name, labels in beginnings(OF_TRANSFERS, is_leader=rank.comm.rank == 0):
            sink.add(name, 0.0, **labels)
    return sink


def timed(comm: Comm) -> Comm:
    """The comm, watched where that tells anything: a GPU's collectives end on its stream, not on the host."""
    return TimedComm(comm) if comm.size > 1 and comm.name != "nccl" else comm


def make_meter(
    sink: BufferedSink, rank: EngineRank, leader: Leader | None, handover: TransferHandover | None
) -> StepMeter:
    """What tells of a rank's turns; `leader` and `handover` on rank 0."""
    device = torch.cuda.get_device_name(rank.device) if rank.device.type == "cuda" else "cpu"
    if handover is not None:
        sink.on_flush(lambda: report_requests(sink, handover))
        offloading = handover.offloading
        if offloading is not None:
            sink.on_flush(lambda: report_offload(sink, offloading))
    comm = rank.comm if isinstance(rank.comm, TimedComm) else None
    costs, dtype = StepCosts(rank), rank.config.dtype
    if leader is not None:
        sink.on_flush(lambda: report_leader(sink, leader))
    return StepMeter(sink, is_leader=leader is not None, costs=costs, comm=comm, device=device, dtype=dtype)

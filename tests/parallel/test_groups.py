"""Which ranks meet in which comm of an engine."""

from __future__ import annotations

import pytest
import torch

from rayk.parallel.comm import Comm
from rayk.parallel.groups import divide
from rayk.parallel.shard import EngineShape
from rayk.parallel.threads import ThreadComm
from tests.parallel.test_comm import on_threads

Met = list[int] | None


def ranks_in(comm: Comm | None, rank: int) -> Met:
    """The engine's ranks in a comm, in its order."""
    return None if comm is None else [int(t) for t in comm.all_gather(torch.tensor(rank))]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dcp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_who_meets_whom(tp: int, dcp: int, pp: int) -> None:
    if dcp > tp:
        dcp = 1
    shape = EngineShape(tp, dcp, stages=() if pp == 1 else (1,) * pp)

    def body(comm: ThreadComm) -> tuple[Met, ...]:
        comms = divide(comm, shape)
        assert comms.engine is comm
        share = shape.share(comm.rank)
        assert (comms.tp.rank, comms.dcp.rank) == (share.tp_rank, share.dcp_rank)
        # Links in the order of stages, as a pipeline uses them.
        tp_ranks, dcp_ranks = ranks_in(comms.tp, comm.rank), ranks_in(comms.dcp, comm.rank)
        links = [ranks_in(comms.before, comm.rank), ranks_in(comms.after, comm.rank)]
        return tp_ranks, dcp_ranks, *links

    met = on_threads(ThreadComm.make_group(tp * pp, 60), body)
    for rank in range(tp * pp):
        # The last stage has the first ranks.
        first, tp_rank = rank - rank % tp, rank % tp
        run = first + tp_rank - tp_rank % dcp
        before = [rank + tp, rank] if rank + tp < tp * pp else None
        after = [rank, rank - tp] if rank >= tp else None
        expected = list(range(first, first + tp)), list(range(run, run + dcp)), before, after
        assert met[rank] == expected, (rank, met[rank])

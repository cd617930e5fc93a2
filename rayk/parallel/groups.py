"""The groups of ranks in which an engine's collectives run."""

from __future__ import annotations

from dataclasses import dataclass

from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm
from rayk.parallel.shard import EngineShape


@dataclass(frozen=True, slots=True)
class RankComms:
    """One rank's comms. Those of parts end with `engine`."""

    engine: Comm
    """All ranks: turns of the loop, answers."""
    tp: Comm
    """The ranks of this stage: sums of partial products, vocabularies. Its rank is the tp_rank."""
    dcp: Comm
    """Ranks of this stage that hold the same heads and deal the tokens. Its rank is the dcp_rank."""
    before: Comm | None
    """[the same tp_rank of the stage before, this rank]: rank 0 sends. None on the first stage."""
    after: Comm | None
    """[this rank, the same tp_rank of the stage after]. None on the last stage."""


def divide(comm: Comm, shape: EngineShape) -> RankComms:
    """Divide an engine's comm as its shape says. A collective, unless the shape has neither stages nor token
    shards."""
    assert comm.size == shape.num_ranks, (comm.size, shape)
    share = shape.share(comm.rank)
    stage = [shape.rank_of(share.stage, tp_rank) for tp_rank in range(shape.tp)]
    tp = comm if shape.pp == 1 else comm.subgroup(stage)
    first = share.tp_rank - share.dcp_rank
    dcp: Comm = LocalComm()
    if shape.dcp > 1:
        dcp = tp if shape.dcp == shape.tp else tp.subgroup(range(first, first + shape.dcp))
    # Stages (0, 1), (2, 3), .. link up, then (1, 2), (3, 4), ..; who has no partner is a part of its own.
    links: dict[tuple[int, int], Comm] = {}
    for first_stage in (0, 1) if shape.pp > 1 else ():
        start = share.stage - (share.stage - first_stage) % 2
        pair = [s for s in (start, start + 1) if 0 <= s < shape.pp]
        link = comm.subgroup([shape.rank_of(s, share.tp_rank) for s in pair])
        if len(pair) == 2:
            links[pair[0], pair[1]] = link
    before = links.get((share.stage - 1, share.stage))
    return RankComms(comm, tp, dcp, before, links.get((share.stage, share.stage + 1)))

"""Steps on their way through an engine's pipeline stages.

A turn of the loop is one tick: the ranks of stage s compute the batch that came s turns ago, so that stages
work on as many steps at once. What a stage made of a step crosses to the next one at the start of the tick
after: a rank receives, then sends. So in a tick it waits for rank 0's header and for the stage before, and
nobody waits for a later tick: sends that block until they are received can lock nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rayk.types.batch import ScheduledBatch

if TYPE_CHECKING:
    from rayk.engine.rank import EngineRank


@dataclass(frozen=True, slots=True)
class Due:
    """A step for a rank to compute in this tick."""

    batch: ScheduledBatch
    commands: tuple[object, ...]
    """What is to be executed just before."""


class Pipeline:
    """One rank's place in it. With one stage a step is due at once, and nothing is exchanged."""

    def __init__(self, rank: EngineRank) -> None:
        self._rank = rank
        self._coming: deque[Due | None] = deque([None] * rank.stage)

    def tick(self, batch: ScheduledBatch | None, commands: tuple[object, ...] = ()) -> Due | None:
        """Take the turn's batch, exchange with the stages beside this one, and return the step that is due,
        whose input the rank then has."""
        self._coming.append(None if batch is None else Due(batch, commands))
        due = self._coming.popleft()
        if self._rank.comms.before is not None or self._rank.comms.after is not None:
            self._exchange(due)
        return due

    @torch.inference_mode()
    def _exchange(self, due: Due | None) -> None:
        rank, comms = self._rank, self._rank.comms
        # Both sides know the shapes from the batch. Nothing crosses of a step that has no token left.
        if due is not None and comms.before is not None:
            rank.incoming = rank.empty_incoming(due.batch)
            for x in rank.incoming:
                if x.numel():
                    comms.before.broadcast(x)
        if comms.after is not None:
            for x in rank.outgoing:
                if x.numel():
                    comms.after.broadcast(x.contiguous())
            rank.outgoing = ()

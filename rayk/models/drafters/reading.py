"""Reads a drafter's tensors: finite ones only, and which of the model's tokens a head can propose."""

from __future__ import annotations

import torch

from rayk.models.pieces import Pieces
from rayk.models.weights import WeightReader
from rayk.types.errors import CheckpointError

_MEND = "the head's checkpoint is damaged: download or write it again"


class FiniteReader(WeightReader):
    """Refuses NaN and infinities. A model with them says so in every answer; a drafter's would only propose
    nothing that is accepted."""

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
    ) -> torch.Tensor:
        piece = super().read(name, shape, rows, columns)
        if not bool(piece.isfinite().all()):
            raise CheckpointError(
                f"tensor {name} holds NaN or infinities", where=str(self.folder), mend=_MEND
            )
        return piece


def read_target_ids(pieces: Pieces, draft_size: int, size: int) -> torch.Tensor | None:
    """Read the model's ids of a head's tokens, int64 [draft_size], ids of the model being under `size`. None
    if a head of the model's whole vocabulary stores none.

    `d2t` holds the distance from each to its id of the model, `t2d`, if there, which of these a head can
    propose. Raises CheckpointError if they are missing, name no such token, or one twice, or contradict each
    other.
    """
    reader, names = pieces.reader, pieces.names.around
    name, flags = names["target_offsets"], names["targets"]
    if reader.shape_of(name) is None and draft_size == size:
        return None
    reader.require_stored(name, (draft_size,), ("I64", "I32"))
    ids = reader.take(name).to(torch.int64) + torch.arange(draft_size)
    where = str(reader.folder)
    wrong = (ids < 0) | (ids >= size)
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise CheckpointError(
            f"tensor {name}: token {at} of the head would be token {int(ids[at])} of a vocabulary of {size}",
            where=where,
            mend=_MEND,
        )
    known = torch.zeros(size, dtype=torch.bool)
    known[ids] = True
    if int(known.sum()) != draft_size:
        raise CheckpointError(
            f"tensor {name}: two tokens of the head are one of the model's", where=where, mend=_MEND
        )
    if reader.shape_of(flags) is not None:
        reader.require_stored(flags, (size,), ("BOOL",))
        if not torch.equal(reader.take(flags), known):
            raise CheckpointError(f"tensors {name} and {flags} name unlike tokens", where=where, mend=_MEND)
    return ids.to(pieces.device)

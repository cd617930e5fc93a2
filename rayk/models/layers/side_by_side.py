"""Several mixers in one layer that see the same input, their outputs added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rayk.models.decoder import Mixer
    from rayk.models.layers.places import Places
    from rayk.parallel.comm import Comm


class SideBySide:
    """The sum of the mixers' outputs. Their partial sums are added over the ranks in one go."""

    def __init__(self, mixers: Mapping[str, Mixer], comm: Comm, *, reduce: bool = True) -> None:
        """`mixers`, by the part of the cache that each owns, leave their sums partial. `reduce` as in
        RowParallelLinear."""
        self.mixers = dict(mixers)
        self._comm = comm
        self._reduce = reduce and comm.size > 1

    def forward(self, x: torch.Tensor, places: Places, metadata: Mapping[str, Any]) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; `metadata` by part."""
        outs = [mixer.forward(x, places, metadata[part]) for part, mixer in self.mixers.items()]
        out = sum(outs[1:], start=outs[0])
        return self._comm.all_reduce(out) if self._reduce else out

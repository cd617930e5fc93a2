"""The group of one rank: every collective is the identity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rayk.parallel.comm import Comm
from rayk.parallel.parts import index_in


class LocalComm:
    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.name = "local"
        self.timeout_s = math.inf

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns a copy, as other comms do."""
        return [tensor.clone()]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        assert payload is not None, "rank 0 must pass the payload"
        return payload

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        return [payload]

    def subgroup(self, ranks: Sequence[int]) -> Comm:
        index_in(ranks, self.rank, self.size)
        return LocalComm()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

"""The group of one rank: every collective is the identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class LocalComm:
    """Comm of size 1."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.name = "local"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """A copy, as from any other comm, in a list."""
        return [tensor.clone()]

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """The payload itself."""
        assert payload is not None, "rank 0 must pass the payload"
        return payload

    def gather_bytes(self, payload: bytes) -> list[bytes] | None:
        """The payload itself, in a list."""
        return [payload]

    def close(self) -> None:
        """Nothing to release."""

"""Copies of small tensors to a device that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def uploaded(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make [n] on `device`, by one copy."""
    return sent(torch.tensor(values, dtype=dtype), device)


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to `device`; on a GPU the copy is queued on the current stream. On a CPU it
    is there already."""
    return pinned(host).to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def pinned(host: torch.Tensor) -> torch.Tensor:
    """Copy into memory that a GPU reads by itself. torch keeps it for the next such copy, and hands it out
    when this one has run."""
    return host.pin_memory()

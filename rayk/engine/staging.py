"""A step's inputs on their way to the device, packed into one buffer of the host and copied at once, and its
tokens on their way back.

A copy from pinned memory does not wait for the device, which may still compute the step before. So two
buffers take turns, and one is filled again only when its last copy has run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

ALIGNMENT = 64  # bytes: kernels are compiled for pointers to whole vectors

# makes a function that returns when all that is queued by now has run; see StepFence.mark
Mark = Callable[[], Callable[[], None]]


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate zeroed bytes for copies to or from a device: pinned where it is a GPU."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


@dataclass(frozen=True, slots=True)
class _TensorPlace:
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """Where named tensors lie in a buffer, in the order in which they are added."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._fields: dict[Hashable, _TensorPlace] = {}

    def add(self, name: Hashable, dtype: torch.dtype, *shape: int) -> None:
        field = self._fields[name] = _TensorPlace(self.num_bytes, dtype, shape)
        self.num_bytes += -(-field.num_bytes // ALIGNMENT) * ALIGNMENT

    def views(self, buffer: torch.Tensor) -> dict[Hashable, torch.Tensor]:
        """View the tensors in a buffer of bytes."""
        return {
            name: buffer[f.offset : f.offset + f.num_bytes].view(f.dtype).view(f.shape)
            for name, f in self._fields.items()
        }

    def arrays(self, buffer: torch.Tensor) -> dict[Hashable, np.ndarray]:
        """The same in a buffer of the host."""
        whole = buffer.numpy()
        return {
            name: whole[f.offset : f.offset + f.num_bytes].view(_numpy_dtype(f.dtype)).reshape(f.shape)
            for name, f in self._fields.items()
        }


class HostBuffers:
    """The host's two buffers, and what is copied from them."""

    def __init__(self, device: torch.device, mark: Mark, num_bytes: int = 0) -> None:
        """`num_bytes`: what they hold at first."""
        self._device = device
        self._mark = mark
        self.buffers = [host_buffer(num_bytes, device) for _ in range(2)]
        self._waits: list[Callable[[], None]] = [lambda: None] * 2
        self._turn = 0

    def next(self, num_bytes: int) -> int:
        """Return the index of the buffer whose turn it is, once it may be filled; it is replaced if it is
        too small."""
        self._turn = 1 - self._turn
        self._waits[self._turn]()
        if len(self.buffers[self._turn]) < num_bytes:
            self.buffers[self._turn] = host_buffer(2 * num_bytes, self._device)
        return self._turn

    def send(self, buffer: torch.Tensor) -> None:
        """Queue the one copy into the device's `buffer` from the front of the one whose turn it is."""
        buffer.copy_(self.buffers[self._turn][: len(buffer)], non_blocking=True)
        self._waits[self._turn] = self._mark()

    def upload(self, items: Sequence[Any]) -> list[Any]:
        """Move dataclasses to the device: views of one buffer replace the tensors in their fields. The same
        item or tensor stays the same one. On a CPU they are there already."""
        if self._device.type == "cpu":
            return list(items)
        tensors = {id(t): t for item in items for t in _tensors_of(item).values()}
        layout = Layout()
        for key, tensor in tensors.items():
            layout.add(key, tensor.dtype, *tensor.shape)
        turn = self.next(layout.num_bytes)
        for array, tensor in zip(layout.arrays(self.buffers[turn]).values(), tensors.values(), strict=True):
            array[...] = tensor.numpy()
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=self._device)
        self.send(buffer)
        there = layout.views(buffer)
        moved = {
            id(item): replace(item, **{name: there[id(t)] for name, t in _tensors_of(item).items()})
            for item in items
        }
        return [moved[id(item)] for item in items]


class Fetching:
    """The host's two buffers for what comes from the device, a step's tokens."""

    def __init__(self, device: torch.device, mark: Mark, num_tokens: int) -> None:
        self._device = device
        self._mark = mark
        self._buffers = [host_buffer(8 * num_tokens, device) for _ in range(2)]
        self._turn = 0

    def begin(self, tokens: torch.Tensor) -> Callable[[], list[int]]:
        """Queue the copy of int64 [some]; returns what waits for it. At most two are awaited at a time."""
        if self._device.type == "cpu":
            return tokens.tolist
        self._turn = 1 - self._turn
        here = self._buffers[self._turn]
        here[: 8 * len(tokens)].view(torch.int64).copy_(tokens, non_blocking=True)
        wait = self._mark()

        def fetch() -> list[int]:
            wait()
            found: list[int] = here.numpy().view(np.int64)[: len(tokens)].tolist()
            return found

        return fetch


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(str(dtype).removeprefix("torch."))


def _tensors_of(item: Any) -> dict[str, torch.Tensor]:
    values = ((field.name, getattr(item, field.name)) for field in fields(item))
    return {name: value for name, value in values if isinstance(value, torch.Tensor)}

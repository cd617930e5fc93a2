"""A kernel's memory: that of its arguments, and the shared one, where races are found."""

# Shapes: N threads, B bytes that each touches.

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tests.ptx.text import PtxError
from tests.ptx.values import Array

SHARED_BASE = 1024
"""Where dynamic shared memory begins: descriptors need it aligned to the longest swizzle."""


class GlobalMemory:
    """The memory of the arguments."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        found = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes():
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                found[storage.data_ptr()] = whole.numpy()
        self._bases = np.array(sorted(found), dtype=np.int64)
        self._bytes = [found[int(base)] for base in self._bases]

    def _places(self, addresses: Array, size: int, text: str) -> list[tuple[Array, Array, Array]]:
        """Find (memory, which threads, byte places [those, B]) for each argument touched."""
        addresses = addresses.view(np.int64)
        if (addresses % size).any():
            raise PtxError(f"out of alignment: {text}")
        at = np.searchsorted(self._bases, addresses, side="right") - 1
        places = []
        for i in np.unique(at):
            which = np.flatnonzero(at == i)
            offset = addresses[which] - self._bases[i]
            if i < 0 or (offset + size > len(self._bytes[i])).any():
                raise PtxError(f"outside every argument: {text}, {len(which)} threads")
            places.append((self._bytes[i], which, offset[:, None] + np.arange(size)))
        return places

    def load(self, addresses: Array, size: int, text: str) -> Array:
        """Load `size` bytes at each address: [N, B]."""
        result = np.zeros((len(addresses), size), np.uint8)
        for memory, which, places in self._places(addresses, size, text):
            result[which] = memory[places]
        return result

    def store(self, addresses: Array, values: Array, text: str) -> None:
        """Store values [N, B]."""
        for memory, which, places in self._places(addresses, values.shape[1], text):
            memory[places] = values[which]


class SharedMemory:
    """Shared memory, and who touched it since the last barrier."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xA5, np.uint8)
        self._writer = np.full(size, -1)
        """The warp that changed a byte since the last barrier; -1: none."""
        self._reader = np.full(size, -1)
        """The warp that read it; -2: several."""
        self._arriving = np.zeros(size, np.int32)
        """Copies under way to it."""
        self._multiplied = np.zeros(size, np.int32)
        """Products under way that read it."""
        self._unfenced = np.zeros(size, bool)

    def barrier(self) -> None:
        self._writer[:] = -1
        self._reader[:] = -1

    def fence(self) -> None:
        self._unfenced[:] = False

    def _at(self, addresses: Array, size: int, text: str) -> Array:
        offset = addresses.astype(np.int64) - SHARED_BASE
        if (offset % size).any():
            raise PtxError(f"out of alignment: {text}")
        if (offset < 0).any() or (offset + size > len(self.bytes)).any():
            raise PtxError(f"outside of shared memory: {text}")
        return offset[:, None] + np.arange(size)

    def load(self, addresses: Array, size: int, warps: Array, text: str) -> Array:
        places = self._at(addresses, size, text)
        self._read(places, np.broadcast_to(warps[:, None], places.shape), text)
        return self.bytes[places]

    def _read(self, places: Array, warps: Array, text: str) -> None:
        if self._arriving[places].any():
            raise PtxError(f"reads what a copy has not brought yet: {text}")
        writer = self._writer[places]
        if ((writer >= 0) & (writer != warps)).any():
            raise PtxError(f"race: reads what another warp wrote before the same barrier: {text}")
        before = self._reader[places]
        after = np.where((before == -1) | (before == warps), warps, -2)
        self._reader[places] = after
        self._reader[places[self._reader[places] != after]] = -2

    def check_write(self, places: Array, warps: Array, changed: Array, text: str) -> None:
        if self._arriving[places].any():
            raise PtxError(f"writes where a copy is under way: {text}")
        if self._multiplied[places].any():
            raise PtxError(f"race: writes what a product under way reads: {text}")
        writer, reader = self._writer[places], self._reader[places]
        others = ((writer >= 0) & (writer != warps)) | ((reader != -1) & (reader != warps))
        if (others & changed).any():
            raise PtxError(f"race: writes what another warp touched before the same barrier: {text}")

    def store(self, addresses: Array, values: Array, warps: Array, text: str) -> None:
        places = self._at(addresses, values.shape[1], text)
        every = np.broadcast_to(warps[:, None], places.shape)
        changed = self.bytes[places] != values
        self.check_write(places, every, changed, text)
        self._put(places, values, every, changed, text)
        self._unfenced[places] = True

    def _put(self, places: Array, values: Array, warps: Array, changed: Array, text: str) -> None:
        self.bytes[places] = values
        if (self.bytes[places] != values).any():
            raise PtxError(f"race: threads write different values to one place: {text}")
        self._writer[places[changed]] = warps[changed]

    def start_copy(self, addresses: Array, values: Array, warps: Array, text: str) -> Callable[[], None]:
        """Begin to bring values; what is returned lands them."""
        places = self._at(addresses, values.shape[1], text)
        every = np.broadcast_to(warps[:, None], places.shape)
        self.check_write(places, every, np.ones(places.shape, bool), text)
        self._arriving[places] += 1

        def land() -> None:
            self._arriving[places] -= 1
            self._put(places, values, every, np.ones(places.shape, bool), text)
            # Triton puts a fence behind stores alone, never behind copies.
            self._unfenced[places] = False

        return land

    def start_product(
        self, places: Array, warps: Sequence[int], text: str
    ) -> tuple[Array, Callable[[], None]]:
        """Read an operand for wgmma, [...] byte places; what is returned too ends the reading."""
        if (places < 0).any() or (places >= len(self.bytes)).any():
            raise PtxError(f"outside of shared memory: {text}")
        if self._unfenced[places].any():
            raise PtxError(f"no fence between a store and the product that reads it: {text}")
        for warp in warps:
            self._read(places, np.full(places.shape, warp), text)
        unique = np.unique(places)
        self._multiplied[unique] += 1

        def end() -> None:
            self._multiplied[unique] -= 1

        return self.bytes[places], end

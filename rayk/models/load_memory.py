"""What loading a rank's weights takes of memory: counted by its tensors and reader, and measured of the
process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from rayk.models.formats import Quantisation
from rayk.models.layers.linear import STRETCH_BYTES
from rayk.models.weights import OpenWeights, WeightReader

LOOK_S = 0.002
"""Between two looks at the memory: far less than copying a tensor takes that would matter."""
PAGE_BYTES = 4096
Loaded = TypeVar("Loaded")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadMemory:
    """Bytes, of one rank."""

    weight_bytes: int
    """What all tensors take that the decoder holds; those that share memory count once."""
    max_read_bytes: int
    """What the largest piece took that was read at once: as stored, and dequantised."""
    load_peak_bytes: int | None
    """By how much the process's own memory rose at most, pages of the files aside. None where the system does
    not tell."""
    load_device_peak_bytes: int | None
    """Likewise the GPU's memory; None on a CPU."""


class MemoryWatch:
    """Looks at this process's memory, and a GPU's, until its block ends."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="memory watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        _give_back()
        self._first = self._most = own_bytes()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._first_on_device = torch.cuda.memory_allocated(self._device)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    @property
    def peak_bytes(self) -> int | None:
        return None if self._first is None or self._most is None else self._most - self._first

    @property
    def device_peak_bytes(self) -> int | None:
        if self._device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self._device) - self._first_on_device

    def _look_on(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        now = own_bytes()
        if now is not None and self._most is not None:
            self._most = max(self._most, now)


def _give_back() -> None:
    """Return to the system what was freed before: to take it again would not be seen."""
    with suppress(AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


def own_bytes() -> int | None:
    """Return what this process holds of memory, without pages of files, which the system may take back; None
    where it does not tell."""
    try:
        resident, shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3]
    except OSError:
        return None
    return (int(resident) - int(shared)) * PAGE_BYTES


def measured(
    load: Callable[[OpenWeights], Loaded], open_weights: OpenWeights, device: torch.device
) -> tuple[Loaded, LoadMemory]:
    """Load a decoder, or a drafter, and tell what that took. `load` opens its weights by what it is given."""
    readers: list[WeightReader] = []

    def opened(folder: Path, plain: Callable[[str], str], quantisation: Quantisation | None) -> WeightReader:
        readers.append(open_weights(folder, plain, quantisation))
        return readers[-1]

    with MemoryWatch(device) as watch:
        loaded = load(opened)
    return loaded, LoadMemory(
        weight_bytes=held_bytes(loaded),
        max_read_bytes=max((reader.max_read_bytes for reader in readers), default=0),
        load_peak_bytes=watch.peak_bytes,
        load_device_peak_bytes=watch.device_peak_bytes,
    )


def one_after_the_other(first: LoadMemory, second: LoadMemory, *, weight_bytes: int) -> LoadMemory:
    """Say what two loads took of which the first one's weights stay. `weight_bytes`: of both."""

    def peak(before: int | None, after: int | None) -> int | None:
        return None if before is None or after is None else max(before, first.weight_bytes + after)

    return LoadMemory(
        weight_bytes=weight_bytes,
        max_read_bytes=max(first.max_read_bytes, second.max_read_bytes),
        load_peak_bytes=peak(first.load_peak_bytes, second.load_peak_bytes),
        load_device_peak_bytes=peak(first.load_device_peak_bytes, second.load_device_peak_bytes),
    )


def held_bytes(*loaded: object) -> int:
    """Count what decoders and drafters hold, what they share once: whole storages; of a stretch of huge
    pages, whose other pages nobody touched, the tensors' own bytes."""
    found = {}
    for tensor in tensors_of(*loaded):
        storage = tensor.untyped_storage()
        is_stretch = storage.nbytes() == STRETCH_BYTES
        key = tensor.data_ptr() if is_stretch else storage.data_ptr()
        found[key] = tensor.nbytes if is_stretch else storage.nbytes()
    return sum(found.values())


def tensors_of(*loaded: object) -> list[torch.Tensor]:
    """List every tensor that decoders and drafters hold, once."""
    found: list[torch.Tensor] = []
    pending: list[object] = list(loaded)
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, tuple | list):
            pending += item
        elif type(item).__module__.startswith(("rayk.models", "rayk.kernels")):
            slots = [getattr(item, name) for name in getattr(type(item), "__slots__", ())]
            pending += [*getattr(item, "__dict__", {}).values(), *slots]
    return found

"""Sums through memory that every GPU of a group has mapped: torch's symmetric memory (torch.ops.symm_mem).

A decode step adds up small tensors twice a layer, and NCCL mostly waits there. These kernels read the peers'
memory themselves:

| way | what a rank does | taken for |
|---|---|---|
| one shot | reads the whole tensor of every rank and adds | up to ONE_SHOT_BYTES |
| two shots | adds up its own part of all ranks', then reads the others' sums | up to MOST_BYTES |
| switch | has the NVLink switch add up its part and store it to all | the same, in groups of SWITCH_SIZES |

Larger tensors, other dtypes and what is not aligned go by NCCL. By every way all ranks get the same bits: one
shot adds in the order of ranks on each, by the others one rank computes an element for all. Shots round
sums of bfloat16 after each addition, as NCCL does.

A kernel waits for its peers on the device, without a limit: where one dies in a sum, the others' devices stay
busy until their processes end. Rank 0's turns notice that, and the engine's processes are killed.

Sources: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu (what each kernel takes),
intra_node_comm.cu there (its two limits), vllm/distributed/device_communicators/symm_mem.py (the switch).
"""

from __future__ import annotations

import enum
import os
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed

dist: Any = torch.distributed
_Found = TypeVar("_Found")

SIZES = (2, 4, 8)
"""Ranks of a group. The kernel of two shots is built for these alone."""
ONE_SHOT_BYTES = 256 << 10
MOST_BYTES = 10 << 20
DTYPES = (torch.float32, torch.bfloat16)
ALIGNMENT = 16
"""Bytes of a vector: of a tensor's address, of its offset in its storage, and of its size."""
SWITCH_SIZES: Mapping[tuple[int, int], tuple[int, ...]] = {(9, 0): (4, 8), (10, 0): (8,), (10, 3): (8,)}
"""Compute capability -> sizes of groups where the switch adds up faster than two shots do."""
BACKENDS = {"cpu": dist.ProcessGroup.BackendType.GLOO, "cuda": dist.ProcessGroup.BackendType.NCCL}
OPERATIONS = ("one_shot_all_reduce_copy_out", "two_shot_all_reduce_out", "multimem_all_reduce_")
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class Way(enum.Enum):
    """How a sum is computed."""

    ONE_SHOT = "one shot"
    TWO_SHOTS = "two shots"
    SWITCH = "switch"


class MappedMemory(Protocol):
    """Memory of this rank's device that its peers can map."""

    def why_not(self, size: int) -> str | None:
        """Say why a group of `size` ranks has none; None where it may have."""
        ...

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory [num_bytes] uint8 of the device. Raises RuntimeError."""
        ...

    def map(self, memory: torch.Tensor, group: str, size: int) -> bool:
        """Map every rank's memory into all `size` ranks, at once; `group` is the registered group's name.

        Returns whether the switch should add up. Raises RuntimeError.
        """
        ...


class CudaMemory:
    """The memory of one GPU. Peers on this host map it, each with a GPU of its own."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)

    def why_not(self, size: int) -> str | None:
        if size not in SIZES:
            return f"its kernels are for groups of {', '.join(map(str, SIZES))}, not of {size}"
        lacking = [name for name in OPERATIONS if not hasattr(torch.ops.symm_mem, name)]
        if lacking:
            return f"torch {torch.__version__} has no {', '.join(lacking)}"
        if torch.cuda.get_device_capability(self._device) < (8, 0):
            return "its kernels need compute capability 8.0"
        return None

    def allocate(self, num_bytes: int) -> torch.Tensor:
        # Ray shows each process its own GPU alone: all are number 0, and torch takes them for one.
        os.environ.setdefault(OVERLAPPING, "1")
        shared = _torch_module()._SymmetricMemory
        made: torch.Tensor = shared.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self._device)
        return made

    def map(self, memory: torch.Tensor, group: str, size: int) -> bool:
        handle = _torch_module().rendezvous(memory, group)
        capability = torch.cuda.get_device_capability(self._device)
        return bool(handle.multicast_ptr) and size in SWITCH_SIZES.get(capability, ())


def _torch_module() -> Any:
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


class SymmetricSums:
    """The sums of one group. Every method is called by all ranks in the same order, on one stream."""

    def __init__(self, memory: torch.Tensor, group: Any, *, by_switch: bool) -> None:
        """Sum through `memory` [MOST_BYTES] uint8, which the ranks of ProcessGroup `group` have mapped."""
        self._memory = memory
        self._registered = group  # torch's registry keeps no group alive
        self._group: str = group.group_name
        self._by_switch = by_switch

    @property
    def num_bytes(self) -> int:
        """The largest tensor has so many."""
        return len(self._memory)

    @property
    def ways(self) -> tuple[Way, ...]:
        """Those that this group's devices can take."""
        return tuple(Way) if self._by_switch else (Way.ONE_SHOT, Way.TWO_SHOTS)

    def way_of(self, tensor: torch.Tensor) -> Way | None:
        """Choose for a tensor; None for NCCL. All ranks choose alike: tensors are equal but for what they
        hold."""
        num_bytes = tensor.numel() * tensor.itemsize
        if not 0 < num_bytes <= self.num_bytes or tensor.dtype not in DTYPES or not is_aligned(tensor):
            return None
        if num_bytes <= ONE_SHOT_BYTES:
            return Way.ONE_SHOT
        return Way.SWITCH if self._by_switch else Way.TWO_SHOTS

    def add(self, tensor: torch.Tensor) -> bool:
        """Sum a tensor over the ranks, in place; False, with nothing done, where NCCL should."""
        way = self.way_of(tensor)
        if way is not None:
            self.add_by(way, tensor)
        return way is not None

    def add_by(self, way: Way, tensor: torch.Tensor) -> None:
        """Sum a tensor that `way_of` takes by one of the ways."""
        flat, operations = tensor.view(-1), torch.ops.symm_mem
        shared = self._memory.view(tensor.dtype)[: len(flat)]
        if way is Way.ONE_SHOT:
            # Each thread reads the elements that it will write: the sum may replace what was added.
            operations.one_shot_all_reduce_copy_out(shared, flat, "sum", self._group, flat)
            return
        shared.copy_(flat)
        if way is Way.TWO_SHOTS:
            operations.two_shot_all_reduce_out(shared, "sum", self._group, flat)
        else:
            operations.multimem_all_reduce_(shared, "sum", self._group)
            flat.copy_(shared)

    def close(self) -> None:
        """Forget the group. Its memory stays until the process ends: to free it waits for the device, which
        may wait for a peer that died."""
        _KEPT.append(self._memory)
        dist.distributed_c10d._unregister_process_group(self._group)


_KEPT: list[torch.Tensor] = []


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the kernels can read and write a tensor in whole vectors."""
    sizes = tensor.data_ptr(), tensor.storage_offset() * tensor.itemsize, tensor.numel() * tensor.itemsize
    return tensor.is_contiguous() and not any(size % ALIGNMENT for size in sizes)


def open_sums(
    memory: MappedMemory,
    rank: int,
    size: int,
    store: Any,
    backends: Mapping[str, Any],
    timeout_s: float,
) -> tuple[SymmetricSums | None, str | None]:
    """Map the memory of all ranks, which call it at about the same time; or say why not, alike on all.

    store: of the group, for this alone.
    backends: the group's own, gloo for "cpu" and NCCL for "cuda". A ProcessGroup has no name without.
    """
    told = _Agreement(store, rank, size, timeout_s)
    if reason := told.reasons(memory.why_not(size)):
        return None, reason
    if rank == 0:
        store.set("name", f"rayk-{uuid.uuid4().hex}")
    name = store.get("name").decode()
    shared, reason = _tried(lambda: memory.allocate(MOST_BYTES))
    if reason := told.reasons(reason):
        return None, reason
    assert shared is not None
    group = dist.ProcessGroup(store, rank, size)
    for kind, backend in backends.items():
        group._register_backend(torch.device(kind), BACKENDS[kind], backend)
    group._set_group_name(name)
    group._set_group_desc("sums of rayk")
    dist.distributed_c10d._register_process_group(name, group)
    by_switch, reason = _tried(lambda: memory.map(shared, name, size))
    sums = SymmetricSums(shared, group, by_switch=bool(by_switch))
    if reason := told.reasons(reason):
        sums.close()
        return None, reason
    return sums, None


class _Agreement:
    """What ranks tell each other, step by step: all go on, or none."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        # A peer may first have to wait in vain for a third.
        self._wait = timedelta(seconds=3 * timeout_s)
        self._step = 0

    def reasons(self, own: str | None) -> str | None:
        """Return what keeps ranks from going on, each reason once; None: nothing."""
        self._step += 1
        keys = [f"{self._step}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], own or "")
        self._store.wait(keys, self._wait)
        told = dict.fromkeys(self._store.get(key).decode() for key in keys)
        return "; ".join(filter(None, told)) or None


def _tried(call: Callable[[], _Found]) -> tuple[_Found | None, str | None]:
    """What a call gives, or the first line of its error."""
    try:
        return call(), None
    except RuntimeError as error:
        return None, str(error).split("\n", 1)[0] or type(error).__name__

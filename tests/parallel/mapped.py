"""Memory that processes map from files, and torch's operators on symmetric memory for the CPU.

The operators keep torch's own schemas; they check and compute what its kernels do (CUDASymmetricMemoryOps.cu
and CUDASymmetricMemory-inl.cuh): which vectors fit, who adds what in which order, which memory is written.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed
CALLS: Counter[str] = Counter()
"""How often each operator ran in this process."""
_MAPPED: dict[str, list[torch.Tensor]] = {}
_BARRIERS: Counter[str] = Counter()
_LIBRARY: list[torch.library.Library] = []
POISON = 255


class FileMemory:
    """Memory in a folder's files; it refuses, or fails, in the step that is named."""

    def __init__(
        self, folder: str, *, by_switch: bool = False, fails_in: str = "", reason: str = "it cannot"
    ) -> None:
        install()
        self._folder = Path(folder)
        self._by_switch = by_switch
        self._fails_in = fails_in
        self._reason = reason

    def why_not(self, size: int) -> str | None:
        return self._reason if self._fails_in == "why_not" else None

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._fail("allocate")
        self._file = uuid.uuid4().hex
        made = _map(self._folder / self._file, num_bytes)
        made[: 1 << 20] = POISON  # as far as the tests go
        return made

    def map(self, memory: torch.Tensor, group: str, size: int) -> bool:
        self._fail("map")
        found = dist.distributed_c10d._resolve_process_group(group)
        assert found.size() == size
        store = found.get_group_store()
        store.set(f"file {found.rank()}", self._file)
        files = [store.get(f"file {rank}").decode() for rank in range(size)]
        _MAPPED[group] = [_map(self._folder / file, len(memory)) for file in files]
        _MAPPED[group][found.rank()] = memory
        return self._by_switch

    def _fail(self, step: str) -> None:
        if self._fails_in == step:
            raise RuntimeError(f"{self._reason}\nand more of it")


def _map(path: Path, num_bytes: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def install() -> None:
    """Give the operators CPU kernels, once in a process."""
    if _LIBRARY:
        return
    _LIBRARY.append(torch.library.Library("symm_mem", "IMPL"))
    _LIBRARY[0].impl("one_shot_all_reduce_copy_out", _one_shot, "CPU")
    _LIBRARY[0].impl("two_shot_all_reduce_out", _two_shots, "CPU")
    _LIBRARY[0].impl("multimem_all_reduce_", _multimem, "CPU")


def _one_shot(
    symm_buffer: torch.Tensor, local_input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor
) -> torch.Tensor:
    group, peers = _begin("one shot", symm_buffer, reduce_op, group_name)
    assert out.is_contiguous()
    assert local_input.is_contiguous()
    assert out.shape == symm_buffer.shape
    assert local_input.numel() <= symm_buffer.numel()
    assert _alignment(symm_buffer) == _alignment(local_input)
    symm_buffer.copy_(local_input)
    _barrier(group)
    total = peers[0].clone()
    for peer in peers[1:]:
        total += peer
    _barrier(group)
    return out.copy_(total)


def _two_shots(
    input: torch.Tensor,  # noqa: A002 - the operator's own name
    reduce_op: str,
    group_name: str,
    output: torch.Tensor,
) -> torch.Tensor:
    group, peers = _begin("two shots", input, reduce_op, group_name)
    assert group.size() in (2, 4, 8), "not built for others"
    assert output.is_contiguous()
    assert output.shape == input.shape
    assert _alignment(input) <= _alignment(output)
    each = _part(input.numel(), _alignment(input) // input.itemsize, group.size())
    _barrier(group)
    own = slice(group.rank() * each, (group.rank() + 1) * each)
    total = peers[0][own].clone()
    for peer in peers[1:]:
        total += peer[own]
    input[own] = total
    _barrier(group)
    for rank, peer in enumerate(peers):
        output[rank * each : (rank + 1) * each] = peer[rank * each : (rank + 1) * each]
    _barrier(group)
    return output


def _multimem(
    input: torch.Tensor,  # noqa: A002 - the operator's own name
    reduce_op: str,
    group_name: str,
) -> torch.Tensor:
    group, peers = _begin("switch", input, reduce_op, group_name)
    each = _part(input.numel(), _alignment(input), group.size())
    own = slice(group.rank() * each, (group.rank() + 1) * each)
    _barrier(group)
    total = torch.stack([peer[own].double() for peer in peers]).sum(0)
    for peer in peers:
        peer[own] = total.to(input.dtype)
    _barrier(group)
    return input


def _begin(way: str, shared: torch.Tensor, reduce_op: str, group_name: str) -> tuple[Any, list[torch.Tensor]]:
    """The group, and every rank's memory where this rank's `shared` lies in its own."""
    assert reduce_op == "sum"
    assert shared.is_contiguous()
    assert shared.dtype in (torch.float32, torch.bfloat16)
    group, maps = dist.distributed_c10d._resolve_process_group(group_name), _MAPPED[group_name]
    own = maps[group.rank()]
    assert shared.untyped_storage().data_ptr() == own.untyped_storage().data_ptr(), "no symmetric memory"
    CALLS[way] += 1
    start = shared.storage_offset()
    return group, [memory.view(shared.dtype)[start : start + shared.numel()] for memory in maps]


def _alignment(tensor: torch.Tensor) -> int:
    """Bytes of the vectors that a tensor is read in."""
    least = max(4, tensor.itemsize)
    sizes = tensor.storage_offset() * tensor.itemsize, tensor.numel() * tensor.itemsize
    found = min(next(n for n in (16, 8, 4, 2, 1) if size % n == 0) for size in sizes)
    assert found >= least, f"{found} bytes a vector"
    return found


def _part(numel: int, step: int, size: int) -> int:
    return -(-numel // (step * size)) * step


def _barrier(group: Any) -> None:
    store, name = group.get_group_store(), group.group_name
    _BARRIERS[name] += 1
    key = f"barrier {_BARRIERS[name]}"
    store.add(key, 1)
    until = time.monotonic() + 60
    while store.add(key, 0) < group.size():
        assert time.monotonic() < until, "a rank did not come"
        time.sleep(0)

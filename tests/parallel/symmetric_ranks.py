"""What a rank does in the tests of sums through mapped memory: run in a crew's processes."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch

from rayk.parallel.factory import make_comm
from rayk.parallel.symmetric import ONE_SHOT_BYTES, SymmetricSums
from rayk.parallel.torch_group import TorchComm
from tests.parallel import ranks
from tests.parallel.mapped import CALLS, FileMemory

TIMEOUT_S = 60.0
REFUSED_S = 6.0
"""How long a rank waits for the memory of one that cannot."""


def battery(
    rank: int, size: int, address: str, folder: str, by_switch: bool
) -> tuple[str, str, Counter[str]]:
    """(digest of sums, the comm's name, calls of each operator)."""
    CALLS.clear()
    comm = TorchComm("gloo", rank, size, address, TIMEOUT_S, memory=FileMemory(folder, by_switch=by_switch))
    try:
        digest = ranks.check_all(comm) + large_sums(comm, "cpu")
        return digest, comm.name, Counter(CALLS)
    finally:
        comm.close()


def large_sums(comm: TorchComm, device: str) -> str:
    """Digest of sums on both sides of each limit, of which those of whole numbers are checked."""
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        limit = ONE_SHOT_BYTES // dtype.itemsize
        for numel in (8, 1000, 1001, limit, limit + 8, 2 * limit + 24):
            whole = [(torch.arange(numel) % 7 + r).to(dtype) for r in range(comm.size)]
            tensor = comm.all_reduce(whole[comm.rank].to(device, copy=True))
            assert torch.equal(tensor.cpu(), sum(whole[1:], whole[0])), (dtype, numel)
            drawn = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank)).to(dtype)
            total = comm.all_reduce(drawn.to(device))
            digest.update(total.cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def ordered_sums(rank: int, size: int, address: str, folder: str) -> bool:
    comm = TorchComm("gloo", rank, size, address, TIMEOUT_S, memory=FileMemory(folder))
    try:
        for seed in range(3):
            inputs = [
                torch.randn(40, 24, generator=torch.Generator().manual_seed(10 * seed + r)).bfloat16()
                for r in range(size)
            ]
            expected = inputs[0]
            for tensor in inputs[1:]:
                expected = expected + tensor  # rounds
            assert torch.equal(comm.all_reduce(inputs[rank].clone()), expected)
        return True
    finally:
        comm.close()


def refused(rank: int, size: int, address: str, folder: str, step: str) -> tuple[str, str | None, float]:
    """(the comm's name, why it maps nothing, a sum): rank 1 fails in a step."""
    own = step if rank == 1 else ""
    memory = FileMemory(folder, fails_in=own, reason=f"rank {rank} cannot")
    comm = TorchComm("gloo", rank, size, address, REFUSED_S, memory=memory)
    try:
        total = comm.all_reduce(torch.full((8,), rank + 1.0))
        return comm.name, comm.why_no_sums, float(total[0])
    finally:
        comm.close()


def two_groups(rank: int, size: int, first: str, second: str, folder: str) -> list[float]:
    """A sum of one group after the other in the same processes."""
    found = []
    for address in (first, second):
        comm = TorchComm("gloo", rank, size, address, TIMEOUT_S, memory=FileMemory(folder))
        found.append(float(comm.all_reduce(torch.full((8,), rank + 1.0))[0]))
        comm.close()
        comm.close()
    return found


def sums_on_gpus(rank: int, size: int, address: str) -> tuple[str, str, str | None]:
    """(digest of sums, the comm's name, why it is not the first choice)."""
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    comm, reason = make_comm("auto", rank, size, address, device, TIMEOUT_S)
    assert isinstance(comm, TorchComm)
    try:
        assert comm.sums is not None, reason
        digest = large_sums(comm, device)
        for way in comm.sums.ways:
            _replay(comm, comm.sums, way, device)
        return digest, comm.name, reason
    finally:
        comm.close()


def _replay(comm: TorchComm, sums: SymmetricSums, way: object, device: str) -> None:
    """Two sums in a row, recorded once and replayed with other numbers; by the way under test."""
    tensor = torch.zeros(4096, dtype=torch.bfloat16, device=device)
    sums.add_by(way, tensor)  # type: ignore[arg-type]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums.add_by(way, tensor)  # type: ignore[arg-type]
        sums.add_by(way, tensor)  # type: ignore[arg-type]
    for value in (1.0, 3.0):
        tensor.fill_(value * (comm.rank + 1))
        graph.replay()
        expected = value * comm.size * sum(r + 1 for r in range(comm.size))
        assert (tensor == expected).all(), (way, value, tensor.unique())

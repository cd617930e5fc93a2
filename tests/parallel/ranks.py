"""What a rank does in the comm tests: run in a crew's processes and, for ThreadComm, in threads."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rayk.parallel import shm_link
from rayk.parallel.comm import Comm, patient
from rayk.parallel.factory import make_comm
from rayk.parallel.shm import ShmComm
from rayk.parallel.torch_group import TorchComm
from rayk.types.errors import CommError

SLOT_BYTES = 4096
"""Small, so that test tensors take several rounds."""


def open_comm(kind: str, rank: int, size: int, address: str, timeout_s: float = 60) -> Comm:
    if kind == "shm":
        return ShmComm(rank, size, address, timeout_s, slot_bytes=SLOT_BYTES)
    return TorchComm(kind, rank, size, address, timeout_s)


def battery(rank: int, size: int, kind: str, address: str) -> str:
    comm = open_comm(kind, rank, size, address)
    try:
        return check_all(comm)
    finally:
        comm.close()


def check_all(comm: Comm) -> str:
    """Every collective against what the ranks' inputs, all known here, must give.

    Returns a digest of sums of random floats, whose bits must be equal on all ranks.
    """
    check_sums_of_integers(comm)
    check_gathers(comm)
    check_broadcasts(comm)
    check_bytes(comm)
    check_mixture(comm)
    check_parts(comm)
    return random_sums(comm)


def check_sums_of_integers(comm: Comm) -> None:
    # Values whose sums every dtype holds exactly, so that equality is exact whatever the order.
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int32,
        torch.int64,
    ):
        for shape in ((1,), (3, 5), (0,), (1024,), (7, 911)):
            inputs = [(torch.arange(_numel(shape)) % 7 + r).view(shape) for r in range(comm.size)]
            tensor = inputs[comm.rank].to(dtype, copy=True)
            result = comm.all_reduce(tensor)
            assert result is tensor, "all_reduce works in place"
            assert torch.equal(tensor, sum(inputs[1:], inputs[0]).to(dtype)), (dtype, shape)


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def check_gathers(comm: Comm) -> None:
    for shape in ((2,), (3, 1000), (0, 4)):
        inputs = [torch.randn(shape, generator=_generator(r)) for r in range(comm.size)]
        mine = inputs[comm.rank].clone()
        gathered = comm.all_gather(mine)
        assert [torch.equal(a, b) for a, b in zip(gathered, inputs, strict=True)] == [True] * comm.size
        mine.fill_(-1)
        comm.all_reduce(torch.zeros(3))
        assert torch.equal(gathered[comm.rank], inputs[comm.rank]), "the result aliases the input"


def check_broadcasts(comm: Comm) -> None:
    for dtype, shape in ((torch.float32, (3, 5)), (torch.bfloat16, (7, 911)), (torch.int64, (0, 4))):
        inputs = [torch.arange(_numel(shape)).add(r).view(shape).to(dtype) for r in range(comm.size)]
        tensor = inputs[comm.rank].clone()
        assert comm.broadcast(tensor) is tensor
        assert torch.equal(tensor, inputs[0])
        tensor.fill_(-1)  # Peers may still read what rank 0 sent.


def check_parts(comm: Comm) -> None:
    """Two divisions at once, of parts of unlike sizes, with ranks in another order."""
    everyone = range(comm.size)
    halves = [[r for r in everyone if r % 2], [r for r in everyone if r % 2 == 0]]
    ends = [[r for r in reversed(everyone) if r != 1], [r for r in everyone if r == 1]]
    mine = [next(part for part in parts if comm.rank in part) for parts in (halves, ends)]
    made = [comm.subgroup(part) for part in mine]
    for step in range(3):
        for part, sub in zip(mine, made, strict=True):
            assert (sub.rank, sub.size) == (part.index(comm.rank), len(part))
            gathered = sub.all_gather(torch.tensor([comm.rank, step]))
            assert [g.tolist() for g in gathered] == [[r, step] for r in part]
            assert sub.broadcast(torch.tensor([comm.rank])).item() == part[0]
            assert sub.all_reduce(torch.tensor([2.0**comm.rank])).item() == sum(2.0**r for r in part)
            assert sub.broadcast_bytes(b"%d" % step if sub.rank == 0 else None) == b"%d" % step
    with patient(comm, 300):
        assert [sub.timeout_s for sub in made if sub.size > 1] == [300] * sum(s.size > 1 for s in made)


def check_bytes(comm: Comm) -> None:
    for length in (0, 1, 100, SLOT_BYTES - 8, SLOT_BYTES - 7, SLOT_BYTES, 3 * SLOT_BYTES + 5):
        payload = _payload(length, 0)
        assert comm.broadcast_bytes(payload if comm.rank == 0 else None) == payload
        own = _payload(length * comm.rank // 2, comm.rank)
        gathered = comm.gather_bytes(own)
        expected = [_payload(length * r // 2, r) for r in range(comm.size)]
        assert gathered == (expected if comm.rank == 0 else None)


def _payload(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


def check_mixture(comm: Comm) -> None:
    """Many short collectives in one random order, with ranks falling behind at random."""
    order, own = random.Random(1), random.Random(comm.rank + 2)
    for step in range(150):
        if own.random() < 0.05:
            time.sleep(own.random() * 0.003)
        choice = order.randrange(3)
        if choice == 0:
            payload = str(step).encode() * order.randrange(1, 2000)
            assert comm.broadcast_bytes(payload if comm.rank == 0 else None) == payload
        elif choice == 1:
            total = comm.all_reduce(torch.full((order.randrange(1, 3000),), float(comm.rank + step)))
            expected = sum(range(comm.size)) + comm.size * step
            assert (total == expected).all(), (step, total.unique(), expected)
        else:
            gathered = comm.all_gather(torch.tensor([comm.rank, step]))
            assert [g.tolist() for g in gathered] == [[r, step] for r in range(comm.size)]


def random_sums(comm: Comm) -> str:
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = [torch.randn(5000, generator=_generator(r)).to(dtype) for r in range(comm.size)]
        total = comm.all_reduce(inputs[comm.rank].clone())
        digest.update(total.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


_FORMED: list[Comm] = []
FORMED_TIMEOUT_S = 120


def form(rank: int, size: int, kind: str, address: str) -> list[str]:
    """Form a group for `wait_in_vain`; returns what of /dev/shm the process has mapped."""
    comm = open_comm(kind, rank, size, address, FORMED_TIMEOUT_S)
    comm.all_reduce(torch.ones(3))
    _FORMED.append(comm)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in maps if "/dev/shm" in line]


def wait_in_vain(rank: int, size: int) -> tuple[str, float]:
    """(error text, seconds waited) of an all-reduce to which a peer does not come."""
    start = time.monotonic()
    try:
        _FORMED[0].all_reduce(torch.ones(3))
    except CommError as error:
        _FORMED.pop().close()
        return str(error), time.monotonic() - start
    return "no error", 0.0


class CountedFlags:
    """Flags of a ShmComm that count how often they are read."""

    def __init__(self, flags: memoryview) -> None:
        self._flags = flags
        self.num_reads = 0

    def __getitem__(self, index: int) -> int:
        self.num_reads += 1
        return int(self._flags[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._flags[index] = value

    def release(self) -> None:
        self._flags.release()


def idle(rank: int, size: int, address: str, seconds: float) -> tuple[int, float]:
    """Rank 0 keeps its peers waiting; how often a peer looked meanwhile, and the seconds it waited."""
    comm = ShmComm(rank, size, address, 60)
    comm.all_reduce(torch.ones(3))
    counted = CountedFlags(comm._flags)
    comm._flags = counted  # type: ignore[assignment]
    start = time.monotonic()
    if rank == 0:
        time.sleep(seconds)
    comm.broadcast_bytes(b"done" if rank == 0 else None)
    waited_s = time.monotonic() - start
    comm.close()
    return counted.num_reads, waited_s


def naps_of_all_reduces(rank: int, size: int, address: str, num_bytes: int) -> list[int]:
    """How often a rank slept in each of many all-reduces."""
    comm = ShmComm(rank, size, address, 60)
    tensor, naps = torch.zeros(num_bytes // 4), [0]
    look = comm._link._look_for_gone  # type: ignore[union-attr]

    def counted(call: Callable[[Any], None]) -> Callable[[Any], None]:
        def nap(duration: Any) -> None:
            naps[-1] += 1
            call(duration)

        return nap

    comm._link._look_for_gone = counted(look)  # type: ignore[method-assign, union-attr]
    shm_link.time = SimpleNamespace(  # type: ignore[assignment]
        monotonic=time.monotonic, sleep=counted(time.sleep)
    )
    try:
        for _ in range(600):
            comm.all_reduce(tensor)
            naps.append(0)
    finally:
        shm_link.time = time
    comm.close()
    return naps[:-1]


def made_by_factory(rank: int, size: int, kind: str, address: str) -> tuple[str, str | None]:
    made = make_comm(kind, rank, size, address, "cpu", 60)
    total = made.comm.all_reduce(torch.ones(2))
    assert total.tolist() == [size, size]
    made.comm.close()
    return made.comm.name, made.fallback


def disagree(rank: int, size: int, kind: str, address: str) -> str:
    """Ranks that are in different collectives."""
    comm = open_comm(kind, rank, size, address, 60)
    try:
        comm.all_reduce(torch.ones(2)) if rank == 0 else comm.all_gather(torch.ones(2))
    except CommError as error:
        return str(error)
    finally:
        comm.close()
    return "no error"

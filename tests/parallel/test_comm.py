"""The comms, as real processes and as threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from rayk.parallel.comm import patient
from rayk.parallel.factory import make_comm
from rayk.parallel.local import LocalComm
from rayk.parallel.reduce import sum_in_rank_order
from rayk.parallel.shm import ShmComm
from rayk.parallel.threads import ThreadComm
from rayk.parallel.timed import TimedComm
from rayk.parallel.torch_group import TorchComm
from rayk.types.errors import CommError, DeviceError, UserError
from tests.markers import one_per, sweep, thorough
from tests.parallel import ranks
from tests.parallel.crew import Crew, free_address

RANKS = "tests.parallel.ranks"


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew(4)
    yield made
    made.close()


def on_threads(comms: list[ThreadComm], body) -> list[object]:
    results: list[object] = [None] * len(comms)

    def target(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = body(comm)
        except Exception as error:  # noqa: BLE001 - handed to the test
            results[comm.rank] = error
        finally:
            comm.close()

    threads = [threading.Thread(target=target, args=(c,), daemon=True) for c in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return results


@one_per("kind")
@pytest.mark.parametrize(("kind", "size"), [("shm", 2), ("shm", 4), ("gloo", 2), ("gloo", 3)])
def test_every_collective_between_processes(crew: Crew, kind: str, size: int) -> None:
    digests = crew.run(RANKS, "battery", size, kind, free_address())
    assert len(set(digests)) == 1, "ranks hold different bits of one sum"


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_collective_between_threads(size: int) -> None:
    digests = on_threads(ThreadComm.make_group(size, 60), ranks.check_all)
    assert all(isinstance(d, str) for d in digests), digests
    assert len(set(digests)) == 1, digests


def test_eight_shm_ranks_on_few_cores() -> None:
    """More ranks than cores, in one process: waiting must let the others run."""
    address = free_address()
    comms: list[ShmComm | None] = [None] * 8

    def body(comm: ThreadComm) -> str:
        mine = ShmComm(comm.rank, 8, address, 60, slot_bytes=ranks.SLOT_BYTES)
        comms[comm.rank] = mine
        return ranks.check_all(mine)

    digests = on_threads(ThreadComm.make_group(8, 60), body)
    assert all(isinstance(d, str) for d in digests), digests
    assert len(set(digests)) == 1
    for comm in comms:
        assert comm is not None
        comm.close()
        comm.close()


def test_local() -> None:
    assert len(ranks.check_all(LocalComm())) == 64


def test_threads_and_shm_give_the_same_bits(crew: Crew) -> None:
    (one, *_) = crew.run(RANKS, "battery", 4, "shm", free_address())
    (two, *_) = on_threads(ThreadComm.make_group(4, 60), ranks.check_all)
    assert one == two


@sweep(3)
@one_per()
@pytest.mark.parametrize(
    ("kind", "size", "victim"), [("shm", 2, 1), ("shm", 3, 2), ("shm", 3, 0), ("gloo", 2, 1)]
)
def test_killed_peer_is_a_comm_error_and_leaves_nothing(
    crew: Crew, kind: str, size: int, victim: int
) -> None:
    mapped = crew.run(RANKS, "form", size, kind, free_address())
    assert mapped == [[]] * size, "a name in /dev/shm would outlive a killed process"
    survivors = [rank for rank in range(size) if rank != victim]
    for rank in survivors:
        crew.pipes[rank].send((RANKS, "wait_in_vain", (rank, size)))
    time.sleep(0.3)
    crew.kill(victim)
    try:
        for rank in survivors:
            text, waited_s = crew.result(rank)
            assert "all_reduce" in text
            assert kind != "shm" or "is gone" in text
            assert waited_s < ranks.FORMED_TIMEOUT_S - 20, "the death was noticed by the timeout only"
    finally:
        crew.replace(victim)


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_peer_that_does_not_come_to_a_collective_times_out(kind: str) -> None:
    address = free_address()
    timeout_s = 0.5

    def body(comm: ThreadComm) -> float:
        mine = ranks.open_comm(kind, comm.rank, 2, address, 60)
        with patient(mine, 300):
            assert mine.timeout_s == 300
        assert mine.timeout_s == 60
        mine.timeout_s = timeout_s
        start = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(CommError, match="all_reduce"):
                mine.all_reduce(torch.ones(2))
        comm.broadcast_bytes(b"" if comm.rank == 0 else None)
        waited_s = time.monotonic() - start
        mine.close()
        return waited_s

    waited = on_threads(ThreadComm.make_group(2, 60), body)
    assert isinstance(waited[0], float), waited
    assert waited[0] > 0.9 * timeout_s


def test_thread_peer_that_leaves_or_stalls() -> None:
    one, two = ThreadComm.make_group(2, 0.2)
    with pytest.raises(CommError, match="waited 0.2 s for rank 1"):
        one.all_reduce(torch.ones(1))
    two.close()
    with pytest.raises(CommError, match="rank 1 has left the group"):
        one.all_gather(torch.ones(1))
    with pytest.raises(CommError, match="closed"):
        two.all_reduce(torch.ones(1))


def test_a_group_that_closes_takes_its_parts_along() -> None:
    group = ThreadComm.make_group(3, 60)
    left: list[object] = [None] * 3

    def body(comm: ThreadComm) -> None:
        part = comm.subgroup(range(3))
        if comm.rank == 0:
            comm.close()
        try:
            part.all_reduce(torch.ones(1))
        except CommError as error:
            left[comm.rank] = str(error)

    on_threads(group, body)
    assert "closed" in str(left[0])
    assert all("rank 0 has left the group" in str(text) for text in left[1:]), left


def test_time_in_parts_counts_as_the_whole_comms() -> None:
    def body(comm: ThreadComm) -> tuple[int, int, int]:
        whole = TimedComm(comm)
        part = whole.subgroup([0, 1])
        assert isinstance(part, TimedComm)
        part.all_reduce(torch.ones(3))
        inner, before = part.collective_ns, whole.collective_ns
        whole.all_gather(torch.ones(3))
        return inner, before, whole.collective_ns

    for inner, before, after in on_threads(ThreadComm.make_group(2, 60), body):
        assert 0 < inner == before < after


@thorough
@pytest.mark.parametrize("open_one", [ShmComm, lambda *a: TorchComm("gloo", *a)])
@pytest.mark.parametrize("rank", [0, 1])
def test_missing_rank_at_the_start_times_out(open_one, rank: int) -> None:
    with pytest.raises(CommError, match="connect"):
        open_one(rank, 2, free_address(), 0.5)


def test_ranks_in_different_collectives_are_told() -> None:
    address = free_address()
    texts = on_threads(ThreadComm.make_group(2, 60), lambda c: ranks.disagree(c.rank, 2, "shm", address))
    assert any("rank 1 is in all_gather with 8 bytes" in str(t) for t in texts), texts


def test_idle_shm_peer_costs_little(crew: Crew) -> None:
    (_, (num_looks, waited_s)) = crew.run(RANKS, "idle", 2, free_address(), 0.5)
    # It spins and yields for half a millisecond, then looks once a millisecond and less. Spinning throughout
    # would be more than a hundred thousand looks, and a slow machine looks less often.
    assert num_looks < 5000 + 1000 * waited_s, f"{num_looks} looks in {waited_s:.2f} s"


def test_nobody_sleeps_in_a_small_all_reduce(crew: Crew) -> None:
    """A rank that slept would take ten times as long as one that looks again."""
    by_rank = crew.run(RANKS, "naps_of_all_reduces", 2, free_address(), 4096)
    without = sum(not any(naps) for naps in zip(*by_rank, strict=True))
    # Whatever else the machine does, both ranks are awake in some: undisturbed, in nearly all.
    assert without > 6, by_rank


@pytest.mark.parametrize(("kind", "name"), [("auto", "shm"), ("shm", "shm"), ("gloo", "gloo")])
def test_factory_between_processes(crew: Crew, kind: str, name: str) -> None:
    for made in crew.run(RANKS, "made_by_factory", 2, kind, free_address()):
        assert made == (name, None)


def test_factory_falls_back_to_gloo_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayk.parallel.factory.why_no_shm", lambda: "no flags on this machine")
    address = free_address()

    def body(comm: ThreadComm) -> object:
        return ranks.made_by_factory(comm.rank, 2, "auto", address)

    made = on_threads(ThreadComm.make_group(2, 60), body)
    assert made == [("gloo", "no flags on this machine")] * 2


def test_factory_refuses() -> None:
    with pytest.raises(UserError, match="unknown comm 'mpi'"):
        make_comm("mpi", 0, 2, "", "cpu")
    with pytest.raises(UserError, match="one rank, not 2"):
        make_comm("local", 0, 2, "", "cpu")
    with pytest.raises(DeviceError, match="CPU tensors only"):
        make_comm("shm", 0, 2, "", "cuda:0")
    with pytest.raises(DeviceError, match="CUDA device"):
        make_comm("nccl", 0, 2, "", "cpu")
    assert make_comm("auto", 0, 1, "", "cpu").comm.name == "local"


@one_per()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_are_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(500, generator=generator).to(dtype) for _ in range(6)]
    exact = torch.stack(parts).double().sum(0)
    total = sum_in_rank_order(parts, torch.empty(500, dtype=dtype))
    assert torch.equal(total, exact.to(dtype))
    assert not torch.equal(sum(parts[1:], parts[0]), total), "the inputs do not tell the difference"

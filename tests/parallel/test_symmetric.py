"""Sums through symmetric memory: by a stand-in of torch's operators on files, and on GPUs by its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rayk.parallel import factory
from rayk.parallel.symmetric import (
    MOST_BYTES,
    ONE_SHOT_BYTES,
    OPERATIONS,
    CudaMemory,
    SymmetricSums,
    Way,
)
from tests.markers import gpu, sweep, thorough
from tests.parallel.crew import Crew, free_address

RANKS = "tests.parallel.symmetric_ranks"


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew(4)
    yield made
    made.close()


@sweep(2)
@pytest.mark.parametrize(
    ("size", "by_switch"), [(2, False), pytest.param(4, False, marks=thorough), (4, True)]
)
def test_every_collective_where_sums_go_through_mapped_memory(
    crew: Crew, tmp_path: Path, size: int, by_switch: bool
) -> None:
    """Those of other comms, and larger sums; each way was taken, and what is not aligned went by the ring."""
    found = crew.run(RANKS, "battery", size, free_address(), str(tmp_path), by_switch)
    digests, names, ways = zip(*found, strict=True)
    assert len(set(digests)) == 1, "ranks hold different bits of one sum"
    assert set(names) == {"gloo+symmetric"}
    large = "switch" if by_switch else "two shots"
    for taken in ways:
        assert set(taken) == {"one shot", large}
        assert min(taken.values()) >= 4


@pytest.mark.parametrize("size", [2, 4])
def test_one_shot_adds_in_the_order_of_ranks(crew: Crew, tmp_path: Path, size: int) -> None:
    """Also in the memory that the sum before has used; rounded after each addition."""
    assert crew.run(RANKS, "ordered_sums", size, free_address(), str(tmp_path)) == [True] * size


@pytest.mark.parametrize("step", ["why_not", "allocate", "map"])
def test_where_one_rank_cannot_all_go_by_the_ring_and_say_the_same(
    crew: Crew, tmp_path: Path, step: str
) -> None:
    """Where one fails while its peers map its memory, they wait in vain, and say so as well."""
    found = crew.run(RANKS, "refused", 2, free_address(), str(tmp_path), step)
    assert len(set(found)) == 1
    name, reason, total = found[0]
    assert (name, total) == ("gloo", 3.0)
    assert reason.endswith("rank 1 cannot")
    assert reason == "rank 1 cannot" or step == "map"


def test_a_group_that_ends_makes_room_for_the_next(crew: Crew, tmp_path: Path) -> None:
    assert crew.run(RANKS, "two_groups", 2, free_address(), free_address(), str(tmp_path)) == [[3.0, 3.0]] * 2


KIB = 1 << 10


@pytest.mark.parametrize(
    ("dtype", "num_bytes", "by_switch", "expected"),
    [
        (torch.bfloat16, 16, False, Way.ONE_SHOT),
        (torch.bfloat16, ONE_SHOT_BYTES, True, Way.ONE_SHOT),
        (torch.float32, ONE_SHOT_BYTES + 16, False, Way.TWO_SHOTS),
        (torch.bfloat16, ONE_SHOT_BYTES + 16, True, Way.SWITCH),
        (torch.bfloat16, MOST_BYTES, False, Way.TWO_SHOTS),
        (torch.bfloat16, MOST_BYTES + 16, False, None),
        (torch.float16, 64 * KIB, False, None),  # torch's kernels add float32 and bfloat16 alone
        (torch.int32, 64 * KIB, False, None),
        (torch.bfloat16, 64 * KIB + 8, False, None),
        (torch.bfloat16, 0, False, None),
    ],
)
def test_ways_are_chosen_by_size_and_dtype(
    dtype: torch.dtype, num_bytes: int, by_switch: bool, expected: Way | None
) -> None:
    sums = SymmetricSums(torch.empty(MOST_BYTES, dtype=torch.uint8), _Named(), by_switch=by_switch)
    assert sums.way_of(torch.empty(num_bytes // dtype.itemsize, dtype=dtype)) is expected


class _Named:
    group_name = "a group"


def test_what_no_vector_fits_goes_by_nccl() -> None:
    sums = SymmetricSums(torch.empty(MOST_BYTES, dtype=torch.uint8), _Named(), by_switch=False)
    whole = torch.empty(64, 64, dtype=torch.bfloat16)
    assert sums.way_of(whole[1:]) is Way.ONE_SHOT
    assert sums.way_of(whole.view(-1)[4:68]) is None, "8 bytes into its storage"
    assert sums.way_of(whole[:, :32]) is None, "with gaps"
    assert sums.way_of(whole.T) is None


def test_torch_has_the_operators() -> None:
    assert [name for name in OPERATIONS if not hasattr(torch.ops.symm_mem, name)] == []


def test_a_group_of_three_is_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = CudaMemory(torch.device("cuda:0"))
    assert memory.why_not(3) == "its kernels are for groups of 2, 4, 8, not of 3"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability" in str(memory.why_not(2))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert memory.why_not(2) is None


def test_ranks_of_two_hosts_map_nothing() -> None:
    here = {"host": "a", "gpu": "1", "no_shm": None}
    assert factory._why_no_sums([here, here | {"gpu": "2"}]) is None
    assert "not on one host" in str(factory._why_no_sums([here, here | {"host": "b"}]))
    assert "not on one host" in str(factory._why_no_sums([here, {"host": "", "gpu": "2", "no_shm": "none"}]))


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires 2 GPUs")
@pytest.mark.parametrize("size", [2, 4])
def test_gpus_add_by_every_way(crew: Crew, size: int) -> None:
    """Eagerly and from a graph that is replayed; `make_comm` says that it took them."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"requires {size} GPUs")
    found = crew.run(RANKS, "sums_on_gpus", size, free_address())
    assert len({digest for digest, *_ in found}) == 1, "ranks hold different bits of one sum"
    for _, name, reason in found:
        assert (name, reason) == ("nccl+symmetric", None)

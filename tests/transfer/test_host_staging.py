"""What a GPU reads from a host's memory goes through pinned memory and a stream of its own. There need be no
GPU: memory of this machine stands for both, and what is queued there runs late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rayk.transfer import staging
from rayk.transfer.staging import StagingBuffer, StagingSettings
from tests.transfer.cluster import Shape, local_pair
from tests.transfer.test_staging import assert_nothing_is_left

SHAPE = Shape(tp=(2, 1), layouts=("BLNHC", "BHLNC"), units=4)


class Marked:
    """A copy on the device that has run when it was asked for the third time."""

    def __init__(self) -> None:
        self.num_asked = 0

    def query(self) -> bool:
        self.num_asked += 1
        return self.num_asked >= 3


class Device:
    """Stands for a GPU, and notes what is done there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_streams = 0
        self.is_current = False
        self.marks: list[Marked] = []
        self.pinned: list[StagingBuffer] = []
        monkeypatch.setattr(staging, "is_by_host", lambda device, peer_device: True)
        monkeypatch.setattr(staging, "own_stream", self.own_stream)
        monkeypatch.setattr(staging, "mark", self.mark)
        copy_runs, take = staging.copy_runs, StagingBuffer.take

        def copy(source: torch.Tensor, *rest: object) -> None:
            assert self.is_current, "copies are queued on a stream of their own"
            copy_runs(source, *rest)  # type: ignore[arg-type]

        def take_noted(buffer: StagingBuffer, *what: object) -> object:
            self.pinned.append(buffer)
            return take(buffer, *what)  # type: ignore[arg-type]

        monkeypatch.setattr(staging, "copy_runs", copy)
        monkeypatch.setattr(StagingBuffer, "take", take_noted)

    def own_stream(self, device: torch.device) -> object:
        self.num_streams += 1

        @contextmanager
        def stream() -> Iterator[None]:
            self.is_current = True
            yield
            self.is_current = False

        return stream

    def mark(self, device: torch.device) -> Marked:
        assert self.is_current
        self.marks.append(Marked())
        return self.marks[-1]


def test_all_arrives_in_host_memory_and_is_kept_until_it_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    asked: list[bool] = []
    empty_bytes = staging.empty_bytes

    def allocate(num_bytes: int, of: torch.device, *, pinned: bool = False) -> torch.Tensor:
        asked.append(pinned)
        return empty_bytes(num_bytes, of)

    monkeypatch.setattr(staging, "empty_bytes", allocate)
    pair = local_pair(SHAPE, 1, staging=StagingSettings("auto", 2048))
    values = SHAPE.values(37)
    outcomes, tables = pair.transfer(values)
    assert [o.error for o in outcomes.values()] == [None]
    pair.consumer.check_all(values, tables)
    assert_nothing_is_left(pair)
    rank = pair.consumer.ranks[0]
    host = rank._staging.buffer_for("cpu")
    assert host is not rank._staging.buffer
    assert {id(buffer) for buffer in device.pinned} == {id(host)}
    assert (host.num_lent, host.num_waiting) == (0, 0)
    assert asked.count(True) == 1
    assert all(row.staged for o in outcomes.values() for row in o.rows), "whatever it costs"
    assert device.num_streams == 1
    assert len(device.marks) > 2, "more than the buffer holds at once"
    assert all(m.num_asked == 3 for m in device.marks)


def test_never_means_never(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    pair = local_pair(SHAPE, 1, staging=StagingSettings("never"))
    values = SHAPE.values(37)
    outcomes, tables = pair.transfer(values)
    pair.consumer.check_all(values, tables)
    assert not any(row.staged for o in outcomes.values() for row in o.rows)
    assert not device.pinned


@pytest.mark.parametrize(
    ("device", "peer", "is_by_host"),
    [("cuda:1", "cpu", True), ("cuda", "cuda:0", False), ("cpu", "cpu", False), ("cpu", "cuda:0", False)],
)
def test_only_a_gpu_reads_a_host_so(device: str, peer: str, is_by_host: bool) -> None:
    assert staging.is_by_host(torch.device(device), peer) == is_by_host

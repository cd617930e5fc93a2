"""Copies between the host and a device that runs late: buffers are filled and read once they have run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rayk.engine.staging import Fetching, HostBuffers

DEVICE = torch.device("meta")
"""Any but the host's own; nothing is allocated there."""


class LateDevice:
    """Stands for a device: it copies what is queued only when somebody waits for it."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], object]] = []
        self.num_copied = self.num_waits = 0

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        self._queue.append(lambda: destination.copy_(source))

    def mark(self) -> Callable[[], None]:
        num_queued = len(self._queue)

        def wait() -> None:
            self.num_waits += 1
            while self.num_copied < num_queued:
                self._queue[self.num_copied]()
                self.num_copied += 1

        return wait


class There:
    """A tensor on the device, which `here` shows once it is copied."""

    def __init__(self, device: LateDevice, here: torch.Tensor) -> None:
        self._device, self.here = device, here

    def __len__(self) -> int:
        return len(self.here)

    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self._device.copy(source, self.here)


def test_a_buffer_is_filled_again_once_its_copy_has_run() -> None:
    device = LateDevice()
    buffers = HostBuffers(DEVICE, device.mark, 64)
    arrived = [There(device, torch.zeros(64, dtype=torch.uint8)) for _ in range(6)]
    for step, there in enumerate(arrived):
        turn = buffers.next(64)
        assert device.num_copied == max(0, step - 1), "a step waits for the last but one, not for the last"
        buffers.buffers[turn].fill_(step + 1)
        buffers.send(there)  # type: ignore[arg-type]
    device.mark()()
    assert [set(there.here.tolist()) for there in arrived] == [{step + 1} for step in range(6)]


def test_a_buffer_that_is_too_small_is_replaced_and_what_is_under_way_arrives() -> None:
    device = LateDevice()
    buffers = HostBuffers(DEVICE, device.mark, 8)
    arrived = [There(device, torch.zeros(size, dtype=torch.uint8)) for size in (8, 8, 200, 100)]
    for step, there in enumerate(arrived):
        buffers.buffers[buffers.next(len(there))].fill_(step + 1)
        buffers.send(there)  # type: ignore[arg-type]
    device.mark()()
    assert [set(there.here.tolist()) for there in arrived] == [{1}, {2}, {3}, {4}]


def test_two_steps_tokens_are_fetched_apart() -> None:
    device = LateDevice()
    fetching = Fetching(DEVICE, device.mark, 4)
    first = fetching.begin(torch.tensor([5, 6, 7]))
    second = fetching.begin(torch.tensor([8, 9]))
    assert device.num_waits == 0
    assert (first(), second()) == ([5, 6, 7], [8, 9])
    assert device.num_waits == 2
    third = fetching.begin(torch.tensor([1, 2, 3, 4]))
    assert third() == [1, 2, 3, 4]

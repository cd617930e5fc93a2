"""When a step's kernels have really run: what stands between a GPU's stream and KV transfers.

A kernel launch returns before the kernel has run, and NIXL does not know CUDA streams. So a step ends with
an event on the stream that its kernels were queued on, and whoever lets another process read this rank's
pages, or lets pages be overwritten, waits for that event first:

- P before a ticket leaves (its readers would else copy pages that are still being written), and before it
  pushes a layer: that waits for a mark behind the layer's kernels only, while later ones run;
- D before it posts reads into blocks (queued kernels may still read what their last owner kept there).

Nothing more is needed before D's first step: a read is reported done only when its bytes are in memory, and
a kernel launched after that sees them, on any stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch


class StepFence(Protocol):
    """Follows one rank's steps on its device. Single-threaded."""

    def begin(self) -> None:
        """A step's kernels are queued from here on."""

    def end(self) -> None:
        """All of the step's kernels are queued."""

    def wait(self) -> None:
        """Return when every step so far has run. At once where nothing was queued since the last wait."""

    def mark(self) -> Callable[[], None]:
        """Make a function that returns, on any thread, when all that is queued by now has run."""

    def step_ns(self) -> int:
        """Measure the last step on the device, `begin` to `end`; waits for it."""


class HostFence:
    """Fits a CPU, which computes before it returns."""

    def __init__(self) -> None:
        self._begun_ns = 0
        self._step_ns = 0

    def begin(self) -> None:
        self._begun_ns = time.monotonic_ns()

    def end(self) -> None:
        self._step_ns = time.monotonic_ns() - self._begun_ns

    def wait(self) -> None: ...

    def mark(self) -> Callable[[], None]:
        return self.wait

    def step_ns(self) -> int:
        return self._step_ns


class CudaFence:
    """Records events on the stream that is current where `begin` and `end` are called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._num_steps = 0
        self._pending = False

    def begin(self) -> None:
        self._begun.record(torch.cuda.current_stream(self._device))

    def end(self) -> None:
        self._ended.record(torch.cuda.current_stream(self._device))
        self._num_steps += 1
        self._pending = True

    def wait(self) -> None:
        if self._pending:
            # Steps share a stream, so the last one's event covers all before it.
            self._ended.synchronize()
            self._pending = False

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def step_ns(self) -> int:
        if self._num_steps == 0:
            return 0
        self.wait()
        return int(self._begun.elapsed_time(self._ended) * 1e6)


def make_fence(device: torch.device) -> StepFence:
    return CudaFence(device) if device.type == "cuda" else HostFence()

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
from typing import Any, Protocol

import torch


class StepFence(Protocol):
    """Follows one rank's steps on its device. Single-threaded."""

    def begin(self) -> None:
        """A step's kernels are queued from here on."""

    def end(self) -> Callable[[], int]:
        """All of the step's kernels are queued. Returns what measures the step on the device in nanoseconds,
        from `begin` on, and waits for it."""

    def wait(self) -> None:
        """Return when every step so far has run. At once where nothing was queued since the last wait."""

    def mark(self) -> Callable[[], None]:
        """Make a function that returns, on any thread, when all that is queued by now has run."""

    def step_ns(self) -> int:
        """Return what the step took that was measured last; 0 before."""


class HostFence:
    """Fits a CPU, which computes before it returns."""

    def __init__(self) -> None:
        self._begun_ns = 0
        self._step_ns = 0

    def begin(self) -> None:
        self._begun_ns = time.monotonic_ns()

    def end(self) -> Callable[[], int]:
        step_ns = self._step_ns = time.monotonic_ns() - self._begun_ns
        return lambda: step_ns

    def wait(self) -> None: ...

    def mark(self) -> Callable[[], None]:
        return self.wait

    def step_ns(self) -> int:
        return self._step_ns


class CudaFence:
    """Records events on the stream that is current where `begin` and `end` are called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = self._ended = self._event()
        self._pending = False
        self._step_ns = 0

    def begin(self) -> None:
        self._begun = self._event()
        self._begun.record(torch.cuda.current_stream(self._device))

    def end(self) -> Callable[[], int]:
        begun, ended = self._begun, self._event()
        ended.record(torch.cuda.current_stream(self._device))
        self._ended, self._pending = ended, True

        def measure() -> int:
            ended.synchronize()
            self._step_ns = int(begun.elapsed_time(ended) * 1e6)
            return self._step_ns

        return measure

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
        return self._step_ns

    def _event(self) -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_fence(device: torch.device) -> StepFence:
    return CudaFence(device) if device.type == "cuda" else HostFence()

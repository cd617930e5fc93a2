"""Decode steps on a CPU recorded as calls of its kernels, which take none of Python's time when replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rayk.engine.graphs import Replay
from rayk.kernels.replay import Pool, Recording

MAX_ROWS = 16  # with more rows a step's products take so long that Python's time beside them is little


class CallRecorder:
    """Records calls on a CPU; its recordings share one pool of memory. Implements graphs.Recorder."""

    def __init__(self) -> None:
        self._pool = Pool()

    def record(self, work: Callable[[], torch.Tensor]) -> Replay:
        """Record `work`. Raises CannotReplay where it looks at values on the host."""
        work()  # what is made once and kept is made outside the recording
        with Recording(self._pool) as recording:
            result = work()

        def replay() -> torch.Tensor:
            recording.replay()
            return result

        return replay

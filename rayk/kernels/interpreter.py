"""Whether Triton runs in its CPU interpreter, and what that requires.

The interpreter computes in numpy, which has no bfloat16: bf16 arithmetic gives garbage and narrowing to bf16
truncates. Kernels therefore take a flag to widen what they load, and launchers pass float32 outputs. Its
launches patch Triton's language module and are not thread-safe.
"""

from __future__ import annotations

import contextlib
import threading

import triton

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Fixed when Triton is first imported (TRITON_INTERPRET=1 in the environment)."""

_LOCK = threading.Lock()


def launching() -> contextlib.AbstractContextManager[object]:
    """Return a context to hold around a kernel launch."""
    return _LOCK if INTERPRETED else contextlib.nullcontext()

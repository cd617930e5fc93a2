"""Tell bugs, which nobody raises on purpose, from failures of the machine."""

from __future__ import annotations

import logging
import traceback

from rayk.types.errors import InternalError

LOG = logging.getLogger("rayk")
# in a RuntimeError: torch uses it for a failing device and for wrong shapes alike
MACHINE_WORDS = (
    "CUDA error",
    "HIP error",
    "cuDNN",
    "NCCL",
    "out of memory",
    "allocate memory",
    "start new thread",
)
# the device blames a wrong kernel
KERNEL_WORDS = ("device-side assert", "illegal memory access", "misaligned address")


def may_be_the_machine(error: BaseException) -> bool:
    """Tell whether a computation may have failed because of memory, disk, network or device, not of a bug."""
    if isinstance(error, OSError | MemoryError | EOFError):
        return True
    text = str(error)
    says_so = isinstance(error, RuntimeError) and any(word in text for word in MACHINE_WORDS)
    return says_so and not any(word in text for word in KERNEL_WORDS)


def bug(where: str, error: BaseException, trace: str = "") -> InternalError:
    """Log an error met `where` and wrap it for others. `trace` is its traceback in another process."""
    if isinstance(error, InternalError):
        return error
    trace = trace or "".join(traceback.format_exception(error))
    LOG.error("a bug in %s\n%s", where, trace)
    return InternalError(where, f"{type(error).__name__}: {error}", trace)

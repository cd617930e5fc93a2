"""Bugs: errors that nobody raises on purpose."""

from __future__ import annotations

import logging
import traceback

from rayk.types.errors import InternalError

LOG = logging.getLogger("rayk")
MACHINE_WORDS = (
    *("CUDA error", "HIP error", "cuDNN", "NCCL", "out of memory", "allocate memory", "start new thread"),
)
"""In a RuntimeError: torch tells of a device that fails by the class that it has for wrong shapes, too."""
KERNEL_WORDS = ("device-side assert", "illegal memory access", "misaligned address")
"""In what a device says of a kernel that is wrong."""


def may_be_the_machine(error: BaseException) -> bool:
    """Whether a computation may have failed because of its memory, disk, network or device, not of a bug."""
    if isinstance(error, OSError | MemoryError | EOFError):
        return True
    text = str(error)
    says_so = isinstance(error, RuntimeError) and any(word in text for word in MACHINE_WORDS)
    return says_so and not any(word in text for word in KERNEL_WORDS)


def bug(where: str, error: BaseException, trace: str = "") -> InternalError:
    """What others are told of an error that was met `where`; logged here and now. `trace`: its traceback in
    another process."""
    if isinstance(error, InternalError):
        return error
    trace = trace or "".join(traceback.format_exception(error))
    LOG.error("a bug in %s\n%s", where, trace)
    return InternalError(where, f"{type(error).__name__}: {error}", trace)

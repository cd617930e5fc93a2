"""Bugs: errors that nobody raises on purpose."""

from __future__ import annotations

import logging
import traceback

from rayk.types.errors import InternalError

LOG = logging.getLogger("rayk")
MACHINE_WORDS = ("CUDA", "cuDNN", "allocate memory", "start new thread")
"""In a RuntimeError: torch tells of a device that fails by the class that it has for wrong shapes, too."""


def may_be_the_machine(error: BaseException) -> bool:
    """Whether a computation may have failed because of its memory, disk, network or device, not of a bug."""
    says_so = isinstance(error, RuntimeError) and any(word in str(error) for word in MACHINE_WORDS)
    return says_so or isinstance(error, OSError | MemoryError)


def bug(where: str, error: BaseException, trace: str = "") -> InternalError:
    """What others are told of an error that was met `where`; logged here and now. `trace`: its traceback in
    another process."""
    if isinstance(error, InternalError):
        return error
    trace = trace or "".join(traceback.format_exception(error))
    LOG.error("a bug in %s\n%s", where, trace)
    return InternalError(where, f"{type(error).__name__}: {error}", trace)

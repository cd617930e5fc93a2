"""Bugs: errors that nobody raises on purpose."""

from __future__ import annotations

import logging
import traceback

from rayk.types.errors import InternalError

LOG = logging.getLogger("rayk")


def bug(where: str, error: BaseException, trace: str = "") -> InternalError:
    """What others are told of an error that was met `where`; logged here and now. `trace`: its traceback in
    another process."""
    if isinstance(error, InternalError):
        return error
    trace = trace or "".join(traceback.format_exception(error))
    LOG.error("a bug in %s\n%s", where, trace)
    return InternalError(where, f"{type(error).__name__}: {error}", trace)

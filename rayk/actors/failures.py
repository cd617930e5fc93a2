"""What Ray says of a call that failed, in rayk's errors. Free of torch."""

from __future__ import annotations

import json
from dataclasses import replace

from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from rayk.types.bugs import bug
from rayk.types.errors import DeadlineExceeded, EngineDied, LayoutVetoed, RaykError

BUGS = (
    ArithmeticError, AssertionError, AttributeError, LookupError,
    NameError, NotImplementedError, TypeError, ValueError,
)  # fmt: skip
"""What no machine, disk or network does to a process: to do the same again ends the same."""
HALVES = (json.JSONDecodeError, UnicodeDecodeError)
"""What somebody else's half-written file does, of those errors."""


def translate(error: Exception, engine: str, rank: int | None = None, *, node: str = "") -> RaykError:
    """Translate a Ray failure into what it means: the worker's own RaykError, or the engine's death."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, LayoutVetoed):
        return replace(cause, engine=engine)
    if isinstance(cause, RaykError):
        return cause
    if isinstance(error, RaykError):  # RayTaskError made an instance of both
        return error
    if isinstance(error, GetTimeoutError):
        return DeadlineExceeded(f"a call to {engine}", 0.0)
    if isinstance(error, RayActorError):
        what = "cannot be reached" if isinstance(error, ActorUnavailableError) else "ended"
        where = f" on node {node}" if node else ""
        return EngineDied(engine=engine, cause=f"the worker process{where} {what}", rank=rank)
    if isinstance(cause, BUGS) and not isinstance(cause, HALVES):
        return bug(engine if rank is None else f"{engine} rank {rank}", cause, str(error))
    text = str(cause or error).strip().splitlines()
    return EngineDied(engine=engine, cause=text[-1] if text else type(error).__name__, rank=rank)

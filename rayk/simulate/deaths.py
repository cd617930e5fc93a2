"""Say which simulated engines die, and when they come back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeath:
    at_s: float
    engine: str  # its name, e.g. prefill0
    back_s: float | None = None
    """How long until it serves again; None: as the cost table says."""
    returns: bool = True
    """Whether it is formed again. A cell does that once for each engine, a server always."""

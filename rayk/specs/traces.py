"""How a spec names recorded traffic."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayk.specs.grammar import StrictModel
from rayk.traces import BLOCK_TOKENS, TraceFormat
from rayk.types.bounds import MAX_REQUESTS


class TraceSpec(StrictModel):
    """A file of rayk.traces, and how it is replayed: the same as `rayk bench --trace` and its options."""

    file: str
    format: TraceFormat | None = None
    """None: told by the file's first line."""
    speed: Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)] = 1.0
    """2 sends it twice as fast, delays within sessions included."""
    block_tokens: Annotated[int, Field(ge=1, le=1 << 16)] = BLOCK_TOKENS
    """What a block of 512 tokens becomes; all lengths shrink alike."""
    limit: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = None
    """Requests, the first ones; None: all."""

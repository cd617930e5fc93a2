"""Bound how much may be asked for at once, in a spec, a load or an option: far beyond use, far below harm."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 1 << 24  # of a prompt or an answer, and of all prompts together
MAX_REQUESTS = 1_000_000
MAX_BLOCKS = 1 << 22
MAX_ENGINES = 1 << 12  # and ranks of one
MAX_SECONDS = 1e8
MAX_DRAFTS = 32  # tokens that a drafter proposes at once
MAX_PACE = 1000  # times slower than a cost table says
MIN_RATE, MAX_RATE = 1e-6, 1e9  # per second


@dataclass(frozen=True, slots=True)
class Between:
    """Bounds a number, ends included."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class OneOf:
    """Names that a text field may have."""

    names: tuple[str, ...]

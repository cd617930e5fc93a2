"""What a planted bug is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """One textual change; `old` stands exactly once in `file`."""

    name: str
    file: str
    old: str
    new: str
    test: str
    """pytest node id of the test that must fail."""

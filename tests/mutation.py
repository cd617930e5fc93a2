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
    needs_fixtures: bool = False
    """Whether that test uses fixtures of tests/conftest.py."""

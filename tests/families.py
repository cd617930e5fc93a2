"""The families by what their layers keep."""

from __future__ import annotations

from rayk.oracle.hybrids import FAMILIES as HYBRIDS
from rayk.oracle.tiny import FAMILIES

ATTENTION = tuple(sorted(FAMILIES.keys() - HYBRIDS.keys()))
"""Families all of whose layers attend."""

GROUPED = ("gemma3n", "llama4")
"""Those of them with chunked layers, or layers that share: tests/test_groups_end_to_end.py runs them."""

HYBRID = tuple(sorted(HYBRIDS))
"""Families with recurrent states or latents."""

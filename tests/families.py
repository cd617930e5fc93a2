"""The families by what their layers keep."""

from __future__ import annotations

from rayk.oracle.hybrids import FAMILIES as HYBRIDS
from rayk.oracle.tiny import FAMILIES

ATTENTION = tuple(sorted(FAMILIES.keys() - HYBRIDS.keys()))
"""Families that keep keys and values of every layer and nothing else."""

HYBRID = tuple(sorted(HYBRIDS))
"""Families with recurrent states or latents."""

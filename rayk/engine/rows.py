"""A recorded step's tokens as rows, each of which attention sees as a request of one token.

Legend: R requests of a step, T their rows, S rows of a recorded step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayk.types.batch import ScheduledRequest


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows, in the order of its tokens."""

    rows: np.ndarray
    """[T]: each one's row of the block tables."""
    positions: np.ndarray
    """[T]"""
    starts: np.ndarray | None = None
    """[R + 1]: where each request's rows start; None if each request has one."""


def rows_of(requests: Sequence[ScheduledRequest], *, has_drafts: bool) -> StepRows:
    """List the tokens of requests that compute their last known token, and their drafts if any has some."""
    rows = np.array([r.row for r in requests])
    positions = np.array([r.num_computed_tokens for r in requests])
    if not has_drafts:
        return StepRows(rows, positions)
    counts = np.array([len(r.token_ids) for r in requests])
    starts = np.zeros(len(requests) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    return StepRows(np.repeat(rows, counts), np.repeat(positions, counts) + offsets, starts)


def padded_starts(starts: np.ndarray, num_rows: int) -> np.ndarray:
    """Make `starts` [S + 1] of S `num_rows` with as many requests: padding rows are one request each, and
    requests that are left over have no rows."""
    padding = np.arange(1, num_rows + 2 - len(starts)) + starts[-1]
    return np.concatenate([starts, np.minimum(padding, num_rows)])

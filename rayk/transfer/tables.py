"""Block tables, of which one side's are a peer's, before a plan picks blocks out of them. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rayk.kv.geometry import RankGeometry
from rayk.types.errors import TransferError

Ints = npt.NDArray[np.int64]


def checked_tables(side: str, tables: Sequence[Sequence[int]], rank: RankGeometry) -> list[Ints]:
    """Return one side's block tables as int64 arrays, by group. Raises TransferError where the rank has
    another number of groups, or where a table holds no block ids."""
    if len(tables) != len(rank.groups):
        raise TransferError(
            "", f"{len(tables)} block tables of the {side}, which has {len(rank.groups)} groups"
        )
    found = []
    for index, table in enumerate(tables):
        try:
            ids = np.asarray(table, dtype=None if len(table) else np.int64)
        except (ValueError, TypeError) as error:
            raise TransferError("", f"the {side}'s block table of group {index} is none") from error
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TransferError("", f"the {side}'s block table of group {index} holds no block ids")
        found.append(ids if ids.dtype == np.int64 else ids.astype(np.int64))
    return found


def real_blocks(side: str, table: Ints, positions: Ints | slice, count: int) -> Ints:
    """Return the blocks at these `count` positions. Raises TransferError where the table is too short, or one
    of them is null."""
    blocks: Ints = (
        table[positions] if isinstance(positions, slice) else table[positions[positions < len(table)]]
    )
    if len(blocks) < count:
        raise TransferError("", f"a live row lies behind the last block of the {side}'s table")
    # The null block is 0.
    if int(np.count_nonzero(blocks)) < count:
        raise TransferError("", f"a live row lies in a null block of the {side}")
    return blocks

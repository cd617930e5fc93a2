"""What the GPU's kernel is told of a rank's views: a table of lanes, made once, all digested by one launch.

A lane is one field of one unit of one view. Lanes whose rows lie at the same places and are equally long are
a section: programs are dealt to sections, and within one evenly to its lanes, so that layers of any kinds go
together. Only words of unlike size need a launch each: nearly all that a model keeps has words of 8 bytes,
scales beside codes and heads of odd sizes have not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.uploads import sent

Ints = npt.NDArray[np.int64]

TILE_WORDS = 1024
"""Words per program: 8 a thread with 4 warps, enough to hide a load behind the mixing of another."""
SECTION_COLUMNS = 8
_NARROW = (16, 4)
_SECTIONS = 16
_NEVER = 1 << 62
"""First program of the sections that fill up the table."""


@dataclass(frozen=True, eq=False)
class LaneTable:
    """The lanes of one launch, in order of sections. Alike for every request."""

    lanes: torch.Tensor
    """int64 [7, lanes] on the device: where the field in row 0 of block 0 lies, bytes per block and per row,
    words, key, and the two `not_finite_bits`. Where: bytes from the beginning of this table, because Triton
    knows what divides a pointer that it is given, and not what divides a number that it makes one of."""
    entry: Ints
    """[lanes]: index among the entries."""
    sections: Ints
    """[S, 3]: index of its places, words of each of its lanes, how many lanes."""
    word: int
    """Bytes of a word."""
    alignment: int
    """The largest power of two, up to 16, that divides every address and stride, and the bytes of every
    row."""
    tile_words: int
    """Words of a row that a program takes where there are many rows."""

    @property
    def num_padded_sections(self) -> int:
        """It is part of the kernel's form, and one number where there are few."""
        return max(_SECTIONS, 1 << (len(self.sections) - 1).bit_length())

    def for_request(self, num_rows: Ints, first_group: Ints, rows_at: Ints) -> tuple[Ints, int]:
        """Return what the kernel reads of each section, [padded, 8], and how many programs there are. Of each
        place: rows, first row group, and where its block ids, slots and rows begin.

        Columns: first program, first lane, programs of a lane, rows, first row group, where they begin,
        whether a program takes words of one row only, 0.
        """
        place, words, lanes = self.sections.T
        rows = num_rows[place]
        tile_rows = TILE_WORDS // self.tile_words
        many = -(-rows // tile_rows) * -(-words // self.tile_words)
        single = rows * -(-words // TILE_WORDS)
        each = np.minimum(many, single)
        made = np.zeros((self.num_padded_sections, SECTION_COLUMNS), dtype=np.int64)
        made[:, 0] = _NEVER
        programs = np.cumsum(each * lanes)
        columns = (programs - each * lanes, np.cumsum(lanes) - lanes, each, rows, first_group[place])
        made[: len(place), :7] = np.stack([*columns, rows_at[place], single < many], axis=1)
        return made, int(programs[-1])


def make_lane_tables(bundles: Ints, entries: Ints, device: torch.device) -> tuple[LaneTable, ...]:
    """Make one table for each size of words that there is, none for fields of no bytes. Bundles [.., 6] and
    entries [.., 5] are those of `AddressTable`."""
    bundles = bundles[np.argsort(bundles[:, 3])]  # they have all entries, one after the other
    base, stride_b, stride_n, _, _, place = np.repeat(bundles, bundles[:, 4] - bundles[:, 3], axis=0).T
    address, num_bytes = base + entries[:, 0], entries[:, 1]
    sizes = np.where(num_bytes % 8 == 0, 8, num_bytes & -num_bytes)
    columns = np.stack([address, stride_b, stride_n, num_bytes // sizes, *entries[:, 2:].T])
    made = []
    for size in np.unique(sizes[num_bytes > 0]).tolist():
        chosen = np.flatnonzero((sizes == size) & (num_bytes > 0))
        words = columns[3, chosen]
        order = np.lexsort((chosen, words, place[chosen]))
        entry = chosen[order]
        kinds, counts = np.unique(np.stack([place[entry], words[order]]), axis=1, return_counts=True)
        own = np.ascontiguousarray(columns[:, entry])
        made.append(
            LaneTable(
                _from_itself(own, device),
                entry,
                np.concatenate([kinds, counts[None]]).T,
                size,
                _divisor(np.concatenate([own[:3], size * own[3:4]])),
                # What is read beside a row's end is read in vain.
                min(_NARROW, key=lambda width: int((-(-words // width) * width).sum())),
            )
        )
    return tuple(made)


def _from_itself(columns: Ints, device: torch.device) -> torch.Tensor:
    """Move columns to the device, with addresses counted from where they then lie."""
    there = torch.empty(columns.shape, dtype=torch.int64, device=device)
    columns[0] -= there.data_ptr()
    return there.copy_(torch.from_numpy(columns))


def _divisor(values: Ints) -> int:
    """Return the largest power of two, up to 16, that divides all."""
    bits = int(np.bitwise_or.reduce(values, axis=None)) | 16
    return bits & -bits


def concatenated(parts: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """Move arrays to the device in one copy, which is queued; each comes back flat."""
    whole = sent(torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts])), device)
    return list(torch.split(whole, [part.size for part in parts]))

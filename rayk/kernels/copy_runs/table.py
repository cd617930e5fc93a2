"""Byte runs in the form that kernels take: made once per pattern, used for every copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]

MAX_WORD_BYTES = 16
"""The widest load of a GPU and of plain x86."""
ALIGNMENTS = (MAX_WORD_BYTES, 8, 4, 1)
"""Those that the GPU's kernel is compiled for."""
TILE_WIDTHS = (1024, 64, 8)
"""Words of a run that one of its programs takes: these alone, so that all forms can be compiled early."""


@dataclass(frozen=True, eq=False)
class RunTable:
    """Runs between two buffers, made by `make_run_table`."""

    rows: torch.Tensor
    """int64 [5, runs] on the device: from, to, length, from_stride, to_stride; bytes."""
    host: Ints
    """The same in host memory, for checks."""
    alignment: int
    """The largest power of two, up to 16, that divides every number of the table."""
    max_length: int

    @property
    def num_runs(self) -> int:
        return int(self.host.shape[1])

    @property
    def num_bytes(self) -> int:
        return int(self.host[2].sum())

    def check(self, source_bytes: int, destination_bytes: int, source_blocks: Ints, to_blocks: Ints) -> None:
        """AssertionError if a run of one of these blocks leaves its buffer."""
        starts, to_starts, lengths, strides, to_strides = self.host
        for offset, stride, blocks, size, side in (
            (starts, strides, source_blocks, source_bytes, "source"),
            (to_starts, to_strides, to_blocks, destination_bytes, "destination"),
        ):
            low = int((offset + int(blocks.min()) * stride).min())
            high = int((offset + int(blocks.max()) * stride + lengths).max())
            assert 0 <= low <= high <= size, f"runs [{low}, {high}) leave the {side} of {size} bytes"


def make_run_table(
    source: Ints,
    destination: Ints,
    lengths: Ints,
    source_strides: Ints,
    destination_strides: Ints,
    device: torch.device,
) -> RunTable:
    """Make a table of runs: offsets of block 0, lengths, and strides from block to block, each int64
    [runs]."""
    host = np.stack([source, destination, lengths, source_strides, destination_strides]).astype(np.int64)
    assert np.all(host[2] > 0), "a run of no bytes"
    assert np.all(host[3:] >= 0), "strides of runs go forward"
    # A power of two divides all of them if it divides the bits that any of them has.
    bits = int(np.bitwise_or.reduce(host, axis=None))
    alignment = next(word for word in (MAX_WORD_BYTES, 8, 4, 2, 1) if bits % word == 0)
    longest = int(host[2].max()) if host.size else 0
    return RunTable(torch.from_numpy(host).to(device), host, alignment, longest)


def tile_width(num_words: int) -> int:
    """Choose for runs of so many words: the widest that they nearly fill."""
    padded = ((width, -(-num_words // width) * width) for width in TILE_WIDTHS)
    return next((width for width, words in padded if words <= 1.25 * num_words), TILE_WIDTHS[-1])


def every_form(device: torch.device) -> Iterator[RunTable]:
    """Yield a table of one run for each form of the GPU's kernel. Both buffers are to have `max_length` and
    MAX_WORD_BYTES more."""
    for alignment in ALIGNMENTS:
        for width in TILE_WIDTHS:
            length = np.array([width * min(alignment, 8)])
            at = np.array([alignment])
            yield make_run_table(at, at, length, length, length, device)

"""copy_runs: the right bytes and no other, against a loop over bytes, for every alignment of everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayk.kernels.copy_runs import copy_runs, make_run_table, native_copy_runs
from tests.each import each
from tests.markers import interpreted

POISON = 0x5A
IMPLS = (
    "reference",
    pytest.param("native", marks=pytest.mark.skipif(native_copy_runs() is None, reason="no C++ compiler")),
    pytest.param("triton", marks=interpreted),
)


def brute(source, destination, runs, here, there):
    """Byte by byte."""
    for a, b in zip(here, there, strict=True):
        for start, to, length, stride, to_stride in runs:
            for i in range(length):
                destination[to + b * to_stride + i] = source[start + a * stride + i]


def scattered_runs(rng, unit, lengths, num_blocks):
    """Runs in random order on both sides, with gaps, of several strides: [runs, 5], and the bytes needed."""
    columns = []
    for _ in range(2):
        size = sum(lengths) + unit * (len(lengths) + 2)
        gaps = unit * rng.integers(0, 2, len(lengths))
        order = rng.permutation(len(lengths))
        offsets = np.zeros(len(lengths), dtype=np.int64)
        at = unit
        for i in order:
            at += int(gaps[i])
            offsets[i] = at
            at += lengths[i]
        columns.append((offsets, np.full(len(lengths), size // unit * unit + unit)))
    (start, stride), (to, to_stride) = columns
    need = [int((o + s * (num_blocks - 1) + lengths).max()) for o, s in columns]
    return np.stack([start, to, np.asarray(lengths), stride, to_stride], axis=1), need


def check(impl, source, destination, runs, here, there):
    """Poison everywhere but where the brute force writes."""
    columns = np.ascontiguousarray(runs.T)
    right = destination.numpy().copy()
    brute(source.numpy(), right, runs.tolist(), here.tolist(), there.tolist())
    table = make_run_table(*columns, torch.device("cpu"))
    copy_runs(source, destination, table, here, there, impl=impl)
    assert np.array_equal(destination.numpy(), right)
    return table


def buffers(need, shift=(0, 0)):
    """Random bytes and poison, each starting some bytes behind a multiple of 64."""
    made = []
    for i, size in enumerate(need):
        space = torch.full((size + 256,), POISON, dtype=torch.int8)
        first = -space.data_ptr() % 64 + shift[i]
        made.append(space[first : first + size + 3])
    made[0].copy_(torch.randint(-128, 128, made[0].shape, generator=torch.Generator().manual_seed(3)))
    return made


@pytest.mark.parametrize("impl", IMPLS)
@each("unit", [1, 2, 4, 8, 16, 64])
@each("is_alike", [True, False])
def test_every_alignment(impl, unit, is_alike):
    rng = np.random.default_rng(unit)
    lengths = [unit * 3] * 5 if is_alike else [unit * int(n) for n in rng.integers(1, 40, 7)]
    runs, need = scattered_runs(rng, unit, lengths, num_blocks=6)
    here, there = rng.integers(0, 6, 4), rng.permutation(6)[:4]
    table = check(impl, *buffers(need), runs, here, there)
    assert table.alignment == min(unit, 16)
    assert table.num_bytes == sum(lengths)


@pytest.mark.parametrize("impl", IMPLS)
@each("shift", [(0, 8), (4, 0), (2, 2), (1, 16), (8, 24), (0, 1)])
def test_buffers_that_start_anywhere(impl, shift):
    """The runs are multiples of 16, the buffers' first bytes are not."""
    rng = np.random.default_rng(0)
    runs, need = scattered_runs(rng, 16, [48, 16, 160], num_blocks=3)
    check(impl, *buffers(need, shift), runs, np.array([2, 0]), np.array([0, 1]))


@pytest.mark.parametrize("impl", IMPLS)
@each("length", [8, 16, 32, 64, 128, 256, 512, 24, 1 << 14, 8200])
def test_every_length(impl, length):
    """Those that are compiled apart, and longer ones than a tile."""
    runs, need = scattered_runs(np.random.default_rng(1), 8, [length, length], num_blocks=2)
    check(impl, *buffers(need), runs, np.array([1]), np.array([1]))


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_copy(impl):
    source, destination = torch.zeros(64, dtype=torch.int8), torch.full((64,), POISON, dtype=torch.int8)
    nothing, one = np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for runs, blocks in (((nothing,) * 5, one), ((one, one, one + 8, one, one), nothing)):
        copy_runs(source, destination, make_run_table(*runs, torch.device("cpu")), blocks, blocks, impl=impl)
    assert bool((destination == POISON).all())


@pytest.mark.parametrize(("start", "to", "block"), [(57, 0, 0), (0, 57, 0), (0, 0, 4), (0, 0, -1)])
def test_runs_that_leave_a_buffer(start, to, block):
    source, destination = torch.zeros(64, dtype=torch.int8), torch.zeros(64, dtype=torch.int8)
    columns = [np.array([n], dtype=np.int64) for n in (start, to, 8, 16, 16)]
    table = make_run_table(*columns, torch.device("cpu"))
    with pytest.raises(AssertionError, match="leave the"):
        copy_runs(source, destination, table, np.array([block]), np.array([block]))

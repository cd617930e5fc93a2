"""Copies the same byte runs for many blocks from one buffer into another, e.g. staged bytes into pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.copy_runs.native import copy_runs_native, native_copy_runs
from rayk.kernels.copy_runs.reference import copy_runs_reference
from rayk.kernels.copy_runs.table import RunTable, every_form, make_run_table
from rayk.kernels.dispatch import default_impl
from rayk.kernels.uploads import sent

__all__ = ["RunTable", "copy_runs", "every_form", "make_run_table", "native_copy_runs"]

Ints = npt.NDArray[np.int64]


def copy_runs(
    source: torch.Tensor,
    destination: torch.Tensor,
    runs: RunTable,
    source_blocks: Ints,
    destination_blocks: Ints,
    *,
    impl: str | None = None,
) -> None:
    """Copy every run r of source block source_blocks[i] to destination_blocks[i].

         destination[to[r] + destination_blocks[i] * to_stride[r] :][: length[r]] =
             source[from[r] + source_blocks[i] * from_stride[r] :][: length[r]]

    source, destination: dense int8 [bytes] on the table's device, which may not overlap; nor may written
    runs. Blocks: int64 [n]. On CUDA the copy is queued on the current stream.

    `impl`: reference, native or triton; None takes triton on CUDA, native where it can be built, else
    reference. AssertionError for runs that leave a buffer.
    """
    assert source.dtype == destination.dtype == torch.int8
    assert source.is_contiguous()
    assert destination.is_contiguous()
    assert source.device == destination.device == runs.rows.device
    assert len(source_blocks) == len(destination_blocks)
    if len(source_blocks) == 0 or runs.num_runs == 0:
        return
    runs.check(len(source), len(destination), source_blocks, destination_blocks)
    if impl is None:
        on_cpu = "native" if native_copy_runs() is not None else "reference"
        impl = "triton" if default_impl(source.is_cuda) == "triton" else on_cpu
    both = np.stack([source_blocks, destination_blocks]).astype(np.int64, copy=False)
    blocks = sent(torch.from_numpy(both), source.device)
    if impl == "triton":
        from rayk.kernels.copy_runs.triton import copy_runs_triton

        copy_runs_triton(source, destination, runs, blocks)
    elif impl == "native":
        copy_runs_native(source, destination, runs, blocks)
    else:
        assert impl == "reference", f"unknown copy_runs implementation {impl!r}"
        copy_runs_reference(source, destination, runs, blocks)

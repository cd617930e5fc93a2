"""Which errors may be the machine's doing, so that a request is tried again elsewhere."""

from __future__ import annotations

import pytest

from rayk.types.bugs import may_be_the_machine


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(12, "Cannot allocate memory"), True),
        (ConnectionResetError("gone"), True),
        (EOFError(), True),
        (MemoryError(), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("HIP out of memory"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("NCCL communicator was aborted on rank 1"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (NotImplementedError("Could not run 'aten::x' with arguments from the 'CUDA' backend"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("layer"), False),
    ],
    ids=str,
)
def test_what_the_machine_does_is_told_from_bugs(error: Exception, expected: bool) -> None:
    assert may_be_the_machine(error) is expected

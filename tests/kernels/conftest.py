"""What tests of several kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

TF32_BITS = np.uint32(0xFFFFE000)


@dataclass
class TensorCores:
    """Products in Triton's interpreter, done as tensor cores do them."""

    precisions: set[Any]
    """At which float32 operands are cut."""
    products: int = 0
    """With operands that were cut."""
    lost: int = 0
    """Operands of those that were no tf32 before: cutting them made them smaller."""

    def cut(self, operand: Any) -> Any:
        """Drop the 13 last bits."""
        from triton.runtime.interpreter import TensorHandle

        assert operand.data.dtype == np.float32
        kept = (operand.data.view(np.uint32) & TF32_BITS).view(np.float32)
        self.lost += not np.array_equal(kept, operand.data, equal_nan=True)
        return TensorHandle(kept, operand.dtype)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> TensorCores:
    """Products at tf32 drop the 13 last bits of float32 operands, which Triton's interpreter does not; so do
    others whose precisions are added."""
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder

    found = TensorCores({ir.INPUT_PRECISION.TF32})
    create_dot = InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if precision in found.precisions and a.data.dtype == np.float32:
            a, b = found.cut(a), found.cut(b)
            found.products += 1
        return create_dot(self, a, b, d, precision, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    return found

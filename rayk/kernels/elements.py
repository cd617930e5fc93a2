"""Functions of single elements that several Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rounded(values, TYPE: tl.constexpr):
    """Return float32 values as they are once they were stored as TYPE."""
    return values.to(TYPE).to(tl.float32)


@triton.jit
def sigmoid(x):
    # Only of what is not positive: no overflow.
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def softplus(b_x):
    """log(1 + exp(x)) in float32, exact also where exp(x) is tiny.

    log(1 + e) = 2 atanh(e / (2 + e)); its argument is at most 1/3 here, so that 9 terms are enough.
    """
    b_e = tl.exp(-tl.abs(b_x))
    b_s = b_e / (2.0 + b_e)
    b_square = b_s * b_s
    b_sum = b_square * 0.0 + 1.0 / 17
    for i in tl.static_range(8):
        b_sum = b_sum * b_square + 1.0 / (15 - 2 * i)
    return tl.maximum(b_x, 0.0) + 2.0 * b_s * b_sum


@triton.jit
def tanh(x):
    """Compute tanh, right to two ulp also near 0, unlike 1 - 2 / (exp(2 x) + 1) (Cephes' tanhf)."""
    x_squared = tl.minimum(x * x, 1.0)  # where the polynomial is not used, it must not overflow either
    small = -5.70498872745e-3 * x_squared + 2.06390887954e-2
    small = small * x_squared - 5.37397155531e-2
    small = small * x_squared + 1.33314422036e-1
    small = small * x_squared - 3.33332819422e-1
    small = small * x_squared * x + x
    # exp2 of a negative number: nothing overflows.
    shrunk = tl.exp2(tl.abs(x) * -2.8853900817779268)
    large = 1.0 - 2.0 * shrunk / (1.0 + shrunk)  # not (1 - e) / (1 + e), which rounds twice more
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0, -large, large))

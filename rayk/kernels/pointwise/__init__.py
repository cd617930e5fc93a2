"""Pointwise steps between a layer's matrix products: norms, rotations, gated activations.

`impl` of each: reference (torch, any device), native (C++, see native.is_native) or triton; None takes triton
on CUDA and native elsewhere, where they can. T tokens, H heads, D elements of a head or of a hidden state.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from rayk.kernels.dispatch import default_impl
from rayk.kernels.pointwise.native import (
    ACTIVATIONS,
    add_native,
    gated_native,
    gated_norm_native,
    is_native,
    rms_norm_native,
    rotate_native,
)
from rayk.kernels.pointwise.reference import (
    GateThreshold,
    activate,
    gate_sums_reference,
    gated_norm_reference,
    gated_reference,
    layer_norm_reference,
    rms_norm_reference,
    rotate_pairs_reference,
    rotate_reference,
)

__all__ = [
    "GateThreshold",
    "activate",
    "add",
    "add_rms_norm",
    "gate_sums",
    "gated",
    "gated_norm",
    "layer_norm",
    "norm_rotate_halves",
    "rms_norm",
    "rotate_halves",
    "rotate_pairs",
]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, *, eps: float, wide: bool, impl: str | None = None
) -> torch.Tensor:
    """x / rms(x) over the last axis of [.., D], times `weight` [D] or, by head, [H, D]. Dense, in x's dtype.

    wide: the weight is float32, and the product is rounded; otherwise the weight has x's dtype, and x is
    rounded before the product (llama/modeling_llama.py, LlamaRMSNorm).
    """
    fits = _weight_fits(x, weight, wide)
    impl = _choose(impl, x, native=fits and is_native(x), triton=fits)
    if impl == "native":
        return rms_norm_native(x, weight, eps=eps, wide=wide)
    if impl == "triton":
        out: torch.Tensor = _triton().norm_triton(x, weight, eps=eps, wide=wide)[1]
        return out
    return rms_norm_reference(x, weight, eps=eps, wide=wide)


def add(x: torch.Tensor, y: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Return x + y of [T, D]: torch's sum, or where that is a native kernel, the same bits by it."""
    alike = x.shape == y.shape and x.dtype == y.dtype and x.dim() == 2 and y.stride(1) == 1
    impl = _choose(impl, x, native=alike and is_native(x), triton=False)
    return add_native(x, y) if impl == "native" else x + y


def add_rms_norm(
    x: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float,
    wide: bool,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + `added` [T, D], rounded, and its rms_norm."""
    alike = x.shape == added.shape and x.dtype == added.dtype and x.dim() == 2 and added.stride(1) == 1
    fits = alike and _weight_fits(x, weight, wide)
    impl = _choose(impl, x, native=fits and is_native(x), triton=fits)
    if impl == "native":
        total = torch.empty(x.shape, dtype=x.dtype)
        return total, rms_norm_native(x, weight, eps=eps, wide=wide, added=added, total=total)
    if impl == "triton":
        both: tuple[torch.Tensor, torch.Tensor] = _triton().norm_triton(
            x, weight, eps=eps, wide=wide, added=added
        )
        return both
    total = x + added
    return total, rms_norm_reference(total, weight, eps=eps, wide=wide)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, *, eps: float, impl: str | None = None
) -> torch.Tensor:
    """Compute the rms_norm of x minus its mean, with a float32 weight; rounded once."""
    fits = _weight_fits(x, weight, True)
    impl = _choose(impl, x, native=fits and is_native(x), triton=fits)
    if impl == "native":
        return rms_norm_native(x, weight, eps=eps, wide=True, centred=True)
    if impl == "triton":
        out: torch.Tensor = _triton().norm_triton(x, weight, eps=eps, wide=True, centred=True)[1]
        return out
    return layer_norm_reference(x, weight, eps=eps)


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    group_size: int,
    eps: float,
    order: str,
    wide: bool,
    impl: str | None = None,
) -> torch.Tensor:
    """Norm groups of x [T, D] and multiply by silu(gate) [T, D], in the `order` gate_norm, norm_gate or plain
    (nothing is normed); `weight` is [D], or [group_size] for all groups. In x's dtype.

    wide: float32 inside, rounded once; otherwise rounded before and after the weight, as by rms_norm.
    """
    fits = x.dim() == gate.dim() == 2 and gate.stride(1) == 1 and x.dtype == gate.dtype
    fits = fits and _weight_fits(x, weight, wide)
    impl = _choose(impl, x, native=fits and is_native(x), triton=fits)
    run = {"native": gated_norm_native, "reference": gated_norm_reference}.get(impl)
    if run is None:
        run = _triton().gated_norm_triton
    out: torch.Tensor = run(x, gate, weight, group_size=group_size, eps=eps, order=order, wide=wide)
    return out


def rotate_halves(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Rotate dimensions i and i + half of x [T, H, D] by the angles of cos and sin [T, 1, half]; dimensions
    from 2 * half on pass through. Each product is rounded to x's dtype, as in transformers. The result is
    dense, or goes to `out`, of x's shape and dtype with dense rows."""
    fits = x.dim() == 3 and x.dtype == cos.dtype
    impl = _choose(impl, x, native=fits and is_native(x), triton=fits)
    if impl == "native":
        return rotate_native(x, cos, sin, out=out)
    if impl == "triton":
        turned: torch.Tensor = _triton().rotate_triton(x, cos, sin, out=out)
        return turned
    return _into(out, rotate_reference(x, cos, sin))


def norm_rotate_halves(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    eps: float,
    wide: bool,
    impl: str | None = None,
) -> torch.Tensor:
    """Rotate as rotate_halves does what rms_norm makes of each head of x [T, H, D]."""
    fits = x.dim() == 3 and x.dtype == cos.dtype and _weight_fits(x, weight, wide)
    impl = _choose(impl, x, native=fits and is_native(x), triton=fits)
    if impl == "native":
        normed = rms_norm_native(x, weight, eps=eps, wide=wide)
        return rotate_native(normed, cos, sin, out=normed)
    if impl == "triton":
        out: torch.Tensor = _triton().rotate_triton(x, cos, sin, norm=(weight, eps, wide))
        return out
    return rotate_reference(rms_norm_reference(x, weight, eps=eps, wide=wide), cos, sin)


def rotate_pairs(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    into_halves: bool = False,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Rotate dimensions 2i and 2i + 1 of x [T, H, D] by the angles of cos and sin [T, 1, half]; dimensions
    from 2 * half on pass through. In float32, rounded once (cohere2/modeling_cohere2.py:155). The result is
    dense, or goes to `out`, as in rotate_halves.

    into_halves: pairs come out as i and i + half, and each product is rounded (deepseek_v3,
    modeling_deepseek_v3.py:339).
    """
    fits = x.dim() == 3 and (x.dtype == cos.dtype or not into_halves)
    alike = cos.dtype in (x.dtype, torch.float32)
    impl = _choose(impl, x, native=fits and alike and is_native(x), triton=fits)
    if impl == "native":
        return rotate_native(x, cos, sin, pairing="into_halves" if into_halves else "pairs", out=out)
    if impl == "triton":
        turned: torch.Tensor = _triton().rotate_triton(
            x, cos, sin, pairs=True, into_halves=into_halves, out=out
        )
        return turned
    return _into(out, rotate_pairs_reference(x, cos, sin, into_halves=into_halves))


def gated(
    gate_up: torch.Tensor, activation: str, *, cut: GateThreshold | None = None, impl: str | None = None
) -> torch.Tensor:
    """Compute activation(gate) * up of gate_up [T, 2 * D], gates first: [T, D], as `activate` does; gates are
    `cut` before, each step of which is rounded."""
    fits = activation in ACTIVATIONS and gate_up.dim() == 2
    impl = _choose(impl, gate_up, native=fits and cut is None and is_native(gate_up), triton=fits)
    if impl == "native":
        return gated_native(gate_up, activation)
    if impl == "triton":
        out: torch.Tensor = _triton().gated_triton(gate_up, activation, cut)
        return out
    return gated_reference(gate_up, activation, cut)


def gate_sums(gate: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """Add up the gates [T, D] of each token, and their squares: [T, 2] float64."""
    impl = _choose(impl, gate, native=False, triton=gate.dim() == 2)
    if impl == "triton":
        sums: torch.Tensor = _triton().gate_sums_triton(gate)
        return sums
    return gate_sums_reference(gate)


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)


def _weight_fits(x: torch.Tensor, weight: torch.Tensor | None, wide: bool) -> bool:
    return weight is None or weight.dtype == (torch.float32 if wide else x.dtype)


def _choose(impl: str | None, x: torch.Tensor, *, native: bool, triton: bool) -> str:
    """Return `impl`, checked, or the one that runs if it is None."""
    assert impl in (None, "native", "reference", "triton"), f"unknown implementation {impl!r}"
    assert native or impl != "native", "the native kernel does not take this"
    if impl is not None:
        return impl
    if default_impl(x.is_cuda) == "triton":
        return "triton" if triton and _triton().is_taken(x) else "reference"
    return "native" if native else "reference"


@functools.cache
def _triton() -> ModuleType:
    """Import Triton, which takes a second, on first use."""
    import rayk.kernels.pointwise.triton as kernels

    return kernels

"""Attention backends by name. A new one is a file here and a row in `BACKENDS`."""

from __future__ import annotations

from rayk.attention.backends.paged import PagedBackend
from rayk.kernels.paged_attention import why_no_native
from rayk.types.errors import UserError

__all__ = ["BACKENDS", "get_backend"]

BACKENDS = ("cpu", "cpu-torch", "reference", "triton")
"""Names that `get_backend` knows besides "auto"."""


def get_backend(name: str, device: str) -> PagedBackend:
    """Return the backend called `name` for a device ("cpu", "cuda", "cuda:1").

    "auto" takes triton on CUDA and cpu elsewhere. Raises UserError for an unknown name, and for a backend
    that cannot run on the device.
    """
    on_cuda = device.split(":")[0] == "cuda"
    if name == "auto":
        name = "triton" if on_cuda else "cpu"
    if name not in BACKENDS:
        raise UserError(f"unknown attention backend {name!r}", mend=f"one of auto, {', '.join(BACKENDS)}")
    if name.startswith("cpu") and on_cuda:
        raise UserError(f"attention backend {name!r} cannot run on {device}", mend="auto or triton")
    if name == "cpu":
        return _cpu_backend(why_no_native())
    if name == "cpu-torch":
        return PagedBackend(name, "cpu-torch", store="reference", attend="torch")
    if name == "triton" and not on_cuda:
        _require_interpreter(device)
        return PagedBackend(name, "triton (interpreter)", store=name, attend=name)
    return PagedBackend(name, name, store=name, attend=name)


def _require_interpreter(device: str) -> None:
    try:
        # Triton is an optional package on machines without a GPU.
        from rayk.kernels.interpreter import INTERPRETED
    except ImportError as error:
        raise UserError("attention backend 'triton' needs the triton package", mend="cpu") from error
    if not INTERPRETED:
        raise UserError(
            f"attention backend 'triton' cannot run on {device}",
            mend="cpu, or TRITON_INTERPRET=1 for Triton's (very slow) interpreter",
        )


def _cpu_backend(why_not: str | None) -> PagedBackend:
    """Return the C++ kernel, or torch if it cannot be built; the results then say why."""
    if why_not is None:
        return PagedBackend("cpu", "cpu-native", store=None, attend="native")
    return PagedBackend("cpu", f"cpu-torch ({why_not})", store="reference", attend="torch")

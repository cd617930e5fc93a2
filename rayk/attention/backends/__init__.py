"""The attention backends, by name. A new one is a file here and a row in `BACKENDS`."""

from __future__ import annotations

from rayk.attention.backend import AttentionBackend
from rayk.attention.backends.paged import PagedBackend
from rayk.types.errors import UserError

__all__ = ["BACKENDS", "get_backend"]

BACKENDS = ("cpu", "reference", "triton")
"""Names that `get_backend` knows, beside "auto"."""


def get_backend(name: str, device: str) -> AttentionBackend:
    """The backend called `name` for a device ("cpu", "cuda", "cuda:1").

    "auto" takes triton on CUDA and cpu elsewhere. Raises UserError for an unknown name, and for a backend
    that cannot run on the device.
    """
    on_cuda = device.split(":")[0] == "cuda"
    if name == "auto":
        name = "triton" if on_cuda else "cpu"
    if name not in BACKENDS:
        raise UserError(f"unknown attention backend {name!r}", mend=f"one of auto, {', '.join(BACKENDS)}")
    if name == "cpu":
        if on_cuda:
            raise UserError(f"attention backend 'cpu' cannot run on {device}", mend="auto or triton")
        return PagedBackend("cpu", "cpu-torch", store="reference", attend="torch")
    if name == "triton":
        return PagedBackend("triton", "triton", store="triton", attend="triton")
    return PagedBackend("reference", "reference", store="reference", attend="reference")

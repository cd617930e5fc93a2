"""Chooses the implementation of an operation, by name or by where its tensors are."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable

import torch

_MODULES = {"reference": ("reference",), "torch": ("torch_cpu",), "triton": ("launch", "triton")}
"""Where `<operation>_<impl>` stands in the operation's folder: the first of these that there is."""


def default_impl(is_cuda: bool) -> str:
    """Return what runs unless the caller names an implementation."""
    return "triton" if is_cuda else "torch"


@functools.cache
def implementation(operation: str, impl: str) -> Callable[..., torch.Tensor]:
    """Return the function `<operation>_<impl>` of the operation's folder.

    It is imported on first use: importing Triton takes a second, which CPU ranks would wait for.
    """
    assert impl in _MODULES, f"unknown {operation} implementation {impl!r}"
    names = (f"rayk.kernels.{operation}.{module}" for module in _MODULES[impl])
    module = importlib.import_module(next(filter(importlib.util.find_spec, names)))
    function: Callable[..., torch.Tensor] = getattr(module, f"{operation}_{impl}")
    return function

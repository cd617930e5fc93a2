"""Runs what Triton compiles for a GPU on the machine, from real call sites, with CPU tensors as arguments.

    with on_machine(TARGETS["sm_90"]):
        ssd_scan_triton(...)

It needs a process of its own, without TRITON_INTERPRET, as rayk.kernels.ahead does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from triton.runtime.jit import JITFunction

from rayk.kernels.ahead import compiling
from rayk.kernels.target import Target
from tests.ptx.machine import run_ptx


@contextlib.contextmanager
def on_machine(target: Target, edit: Callable[[str], str] = lambda ptx: ptx) -> Iterator[list[str]]:
    """Run every kernel launched inside, its PTX changed by `edit`; yields the names of those that ran."""
    ran: list[str] = []
    with compiling(target):
        compile_only = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            compiled = compile_only(kernel, *args, grid=grid, warmup=True, **kwargs)
            named = {p.name: p.default for p in kernel.params if p.has_default}
            named |= dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            kinds = compiled.src.signature.items()
            run_ptx(
                edit(compiled.asm["ptx"]),
                grid(named) if callable(grid) else grid,
                [named[name] for name, kind in kinds if kind != "constexpr"],
                num_warps=compiled.metadata.num_warps,
                shared_bytes=compiled.metadata.shared,
            )
            ran.append(kernel.__name__)
            return compiled

        JITFunction.run = run
        yield ran

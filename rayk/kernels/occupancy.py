"""How many programs of a kernel a multiprocessor holds at once, from what compiling it took."""

from __future__ import annotations

from typing import Any

from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rayk.kernels.interpreter import INTERPRETED
from rayk.kernels.target import current_target, has_device

NOT_COMPILED = 2
"""What is assumed where nothing is compiled for a device that is there."""

_OPTIONS = ("num_warps", "num_stages", "maxnreg")
_known: dict[tuple[Any, ...], int] = {}


def programs_at_once(kernel: JITFunction[Any], arguments: dict[str, Any]) -> int:
    """Compile `kernel` for these arguments, if it is not, and count its programs on a multiprocessor. A
    MockTensor may stand for a tensor."""
    if INTERPRETED or not has_device():
        return NOT_COMPILED
    compiled_for = [value for name, value in arguments.items() if name.isupper() or name in _OPTIONS]
    dtypes = [value.dtype for value in arguments.values() if hasattr(value, "data_ptr")]
    key = (kernel, driver.active.get_current_device(), *compiled_for, *dtypes)
    if key not in _known:
        compiled = kernel.warmup(grid=(1,), **arguments)
        compiled._init_handles()  # the driver tells registers of what it has loaded
        _known[key] = current_target().programs_at_once(
            registers=compiled.n_regs,
            shared_bytes=compiled.metadata.shared,
            num_warps=compiled.metadata.num_warps,
        )
    return max(1, _known[key])

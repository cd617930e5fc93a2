"""What work on fixed buffers comes to on a CPU: calls of kernels in C++, and operators of torch.

Work is recorded while it runs. Kernels in C++ are noted with their arguments, pointers included; an operator
of torch, with the tensors that it took and the one that it made, into which its result is put again. Views
need nothing. Memory that the work gave back is used again by what it allocates later, and by later
recordings in the same pool: they must not run at the same time.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayk.kernels.native import NativeCall, NativeKernels, record_calls

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_KERNELS = NativeKernels(
    Path(__file__).with_name("native.cpp"), {"rayk_replay": (_POINTER, _LONG)}, ctypes.c_int64
)
why_no_native = _KERNELS.why_not
"""Why this machine cannot replay, or None if it can."""

_FROM_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_CONVERSIONS = (torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default)


class CannotReplay(Exception):
    """The work cannot be recorded: it looks at values on the host, and may go another way next time."""


class _CallInTable(ctypes.Structure):
    """native.cpp's struct Call."""

    _fields_ = (("kernel", _POINTER), ("arguments", _POINTER))


class Pool:
    """Memory of recordings: a storage is given out again once no tensor but the pool's own has it."""

    def __init__(self) -> None:
        self._storages: list[torch.UntypedStorage] = []

    def __len__(self) -> int:
        """Count storages."""
        return len(self._storages)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = max(1, math.prod(shape)) * dtype.itemsize
        free = [s for s in self._storages if torch._C._storage_Use_Count(s._cdata) <= 1]
        fitting = [s for s in free if s.nbytes() >= num_bytes]
        if fitting:
            storage = min(fitting, key=torch.UntypedStorage.nbytes)
        else:
            storage = torch.UntypedStorage(num_bytes)  # type: ignore[no-untyped-call]
            self._storages.append(storage)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), strides)


class Recording(TorchDispatchMode):
    """Notes what is done while it is entered, on this thread; then `replay` does it again."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch that nothing here is compiled. Else it imports its compiler, which takes a second, to
        have it leave the first call alone."""
        return False

    def __init__(self, pool: Pool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool
        self._done: list[NativeCall | Callable[[], object]] = []
        self._kept: list[object] = []
        self._parts: list[Callable[[], object]] = []

    def __enter__(self) -> Recording:
        self._recorded = record_calls(self._done.append)
        self._recorded.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._recorded.__exit__(kind, error, trace)
        if error is None:
            self._parts = list(self._joined())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            return self._pool.empty(args[0], dtype)
        if any(tag in func.tags for tag in _FROM_HOST) or func is torch.ops.aten.resolve_conj.default:
            raise CannotReplay(f"{func} reads values on the host")
        out = func(*args, **kwargs)
        if not isinstance(out, torch.Tensor):
            raise CannotReplay(f"{func} makes more than one tensor")
        returned = func._schema.returns[0].alias_info
        if returned is not None and returned.is_write:
            if torch.Tag.inplace_view not in func.tags:
                self._done.append(lambda: func(*args, **kwargs))
        elif not _is_view(out, (*args, *kwargs.values())):
            self._done.append(_again(func, args, kwargs, out))
        return out

    def replay(self) -> None:
        """Do it again. AssertionError where a kernel reports that it cannot."""
        for part in self._parts:
            part()

    def _joined(self) -> list[Callable[[], object]]:
        """Make one call of all neighbouring calls of kernels."""
        parts: list[Callable[[], object]] = []
        calls: list[NativeCall] = []
        for done in (*self._done, None):
            if isinstance(done, NativeCall):
                calls.append(done)
                continue
            if calls:
                parts.append(_batch(calls))
                calls = []
            if done is not None:
                parts.append(done)
        return parts


def _again(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor
) -> Callable[[], object]:
    """Return what computes `out` anew, without a tensor in between where the operator can do that."""
    if func in _CONVERSIONS:
        return lambda: out.copy_(args[0])
    into = _with_out(func)
    if into is None:
        return lambda: out.copy_(func(*args, **kwargs))
    return lambda: into(*args, **kwargs, out=out)


@functools.cache
def _with_out(func: Any) -> Any:
    """Find the overload that takes the same arguments and, as the last, the tensor for the result."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        *inputs, last = overload._schema.arguments
        if last.name == "out" and last.is_out and [(a.name, str(a.type)) for a in inputs] == wanted:
            return overload
    return None


def _is_view(out: torch.Tensor, inputs: Sequence[object]) -> bool:
    own = out.untyped_storage()._cdata
    return any(isinstance(x, torch.Tensor) and x.untyped_storage()._cdata == own for x in inputs)


def _batch(calls: Sequence[NativeCall]) -> Callable[[], object]:
    words = [b"".join(map(_slot, call.arguments)) for call in calls]
    arguments = [ctypes.create_string_buffer(w, len(w)) for w in words]
    table = (_CallInTable * len(calls))(
        *(_CallInTable(call.in_slots, ctypes.addressof(w)) for call, w in zip(calls, arguments, strict=True))
    )
    names = [call.name for call in calls]
    run, num_calls = _KERNELS.library.rayk_replay, len(calls)

    def batch() -> None:
        failed = run(table, num_calls)
        assert not failed, f"{names[failed - 1]} failed, called with {arguments[failed - 1].raw.hex()}"

    return batch


def _slot(argument: object) -> bytes:
    if isinstance(argument, float):
        return struct.pack("<d", argument)
    assert argument is None or isinstance(argument, int), argument
    return struct.pack("<q", argument or 0)

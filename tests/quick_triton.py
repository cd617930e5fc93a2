"""Triton's interpreter without what it does in vain, which is half of its time in small kernels.

Each call of a jitted function from another looks through all of triton.language for what the launch has
replaced already; each sum of integers is made again in int64 for an assertion that is made only with the
option `debug`; and each dtype is looked up in a table that is built for the purpose.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

_patched = pytest.MonkeyPatch()
_INTERPRETER = "triton.runtime.interpreter"


def quicken() -> None:
    """Have the interpreter, if it was imported, skip these. More calls change nothing."""
    interpreter = sys.modules.get(_INTERPRETER)
    if interpreter is None or "triton" not in sys.modules or hasattr(interpreter, "is_quick"):
        return
    if not sys.modules["triton"].knobs.runtime.interpret:
        return
    semantic = interpreter.interpreter_semantic
    _patched.setattr(interpreter, "is_quick", True, raising=False)
    _patched.setattr(interpreter, "_patch_lang", _patch_once(interpreter))
    _patched.setattr(interpreter, "_get_np_dtype", _numpy_dtypes(interpreter))
    overflow = semantic.binary_op_sanitize_overflow_impl
    _patched.setattr(
        semantic,
        "binary_op_sanitize_overflow_impl",
        lambda *arguments: overflow(*arguments) if semantic.builder.options.debug else None,
    )


def as_it_comes() -> None:
    """Undo `quicken`."""
    _patched.undo()


def _patch_once(interpreter: Any) -> Callable[[Any], Any]:
    tl, original = interpreter.tl, interpreter._patch_lang
    seen: dict[Any, list[Any]] = {}

    def patch(fn: Any) -> Any:
        if fn not in seen:
            seen[fn] = [tl, *(m for m in fn.__globals__.values() if m is tl.core)]
        # What a launch has replaced is no builtin any more until its end.
        if any(tl.core.is_builtin(module.load) for module in seen[fn]):
            return original(fn)
        return interpreter._LangPatchScope()

    return patch


def _numpy_dtypes(interpreter: Any) -> Callable[[Any], Any]:
    tl, original = interpreter.tl, interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def look_up(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in known:
            known[name] = original(dtype)
        return known[name]

    return look_up

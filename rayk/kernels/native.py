"""Builds C++ kernels on first use and loads them through ctypes; without torch headers a build takes seconds.

A library is cached in the user's cache directory per (source with includes, flags, compiler version, CPU
model), since -march=native code must not run on another CPU. Processes that start together wait for one
build.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayk.types.files import user_cache

_BUILD_TIMEOUT_S = 120
# No -ffast-math: linking a library with it makes older GCCs flush denormals in the whole process.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-Wno-psabi",
)


@dataclass(frozen=True)
class NativeLibrary:
    """A loaded kernel library, or the reason why there is none."""

    library: ctypes.CDLL | None
    reason: str
    """One line for the results; empty if the library is loaded."""


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A kernel's call, to be made again."""

    name: str
    in_slots: int
    """Address of the function that takes the arguments in an array; see slots.h."""
    arguments: tuple[object, ...]


class _CallListener(threading.local):
    note: Callable[[NativeCall], object] | None = None


_LISTENER = _CallListener()


@contextmanager
def record_calls(note: Callable[[NativeCall], object]) -> Iterator[None]:
    """Tell `note` of each call that this thread makes of a replayable kernel, once it is made."""
    assert _LISTENER.note is None, "this thread records already"
    _LISTENER.note = note
    try:
        yield
    finally:
        _LISTENER.note = None


class NativeKernels:
    """The functions of one C++ file, built on first use."""

    def __init__(
        self, source: Path, arguments: Mapping[str, tuple[type[Any], ...]], result: type[Any] | None = None
    ) -> None:
        """`arguments`: function name -> its ctypes argument types; all return a `result`."""
        self._source = source
        self._arguments = arguments
        self._result = result

    @property
    def library(self) -> Any:
        """AssertionError if there is none: ask `why_not` first."""
        loaded = self._loaded
        assert loaded.library is not None, loaded.reason
        return loaded.library if _LISTENER.note is None else _NotingLibrary(loaded.library, self._arguments)

    def why_not(self) -> str | None:
        """Say why this machine cannot run them, or None if it can."""
        return self._loaded.reason if self._loaded.library is None else None

    @functools.cached_property
    def _loaded(self) -> NativeLibrary:
        loaded = load_native(self._source)
        if loaded.library is not None:
            for name, arguments in self._arguments.items():
                function = getattr(loaded.library, name)
                function.argtypes, function.restype = arguments, self._result
        return loaded


class _NotingLibrary:
    """A library whose calls are noted. They are what `RAYK_REPLAYABLE` was said of: AttributeError else."""

    def __init__(self, library: ctypes.CDLL, arguments: Mapping[str, tuple[type[Any], ...]]) -> None:
        self._library = library
        self._arguments = arguments

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function, in_slots = getattr(self._library, name), getattr(self._library, f"{name}_slots")
        types = self._arguments[name]

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            assert _LISTENER.note is not None
            # An integer may be given where the kernel takes a float.
            noted = (
                float(a) if t in (ctypes.c_float, ctypes.c_double) else a
                for a, t in zip(arguments, types, strict=True)
            )
            address = ctypes.cast(in_slots, ctypes.c_void_p).value
            assert address is not None
            _LISTENER.note(NativeCall(name, address, tuple(noted)))
            return result

        return call


@functools.cache
def load_native(source: Path) -> NativeLibrary:
    """Build (or find) and load a C++ file, once per process. Failures become the reason, not an error."""
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        return NativeLibrary(None, "no C++ compiler")
    try:
        return NativeLibrary(ctypes.CDLL(str(build_native(source, compiler, cache_directory()))), "")
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or ["no message"]
        return NativeLibrary(None, f"{Path(compiler).name} failed: {lines[0]}")
    except subprocess.TimeoutExpired:
        return NativeLibrary(None, f"{Path(compiler).name} took longer than {_BUILD_TIMEOUT_S} s")
    except OSError as error:
        return NativeLibrary(None, f"cannot build or load: {error}")


def build_native(source: Path, compiler: str, directory: Path) -> Path:
    """Build the library of `source` in `directory` if it is absent; return its path. Raises
    CalledProcessError, TimeoutExpired or OSError."""
    target = directory / f"{source.parent.name}-{_fingerprint(source, compiler)}.so"
    if target.exists():
        return target
    with _locked(directory / f"{target.name}.lock"):
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}.tmp")
            command = [compiler, *_FLAGS, str(source), "-o", str(partial)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S)
                partial.replace(target)
            finally:
                partial.unlink(missing_ok=True)
    return target


def cache_directory() -> Path:
    """Return the user's cache, or a temporary folder of this process if that is not writable."""
    directory = user_cache("native")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="rayk-native-"))
    return directory if os.access(directory, os.W_OK) else Path(tempfile.mkdtemp(prefix="rayk-native-"))


def _fingerprint(source: Path, compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S
    ).stdout
    parts = (*_texts(source), " ".join(_FLAGS), version, _cpu_model())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _texts(source: Path) -> list[str]:
    """Read a file, and the files that it includes by relative path."""
    text = source.read_text()
    names = re.findall(r'^#include "(.+)"$', text, re.MULTILINE)
    return [text, *(part for name in names for part in _texts(source.parent / name))]


def _cpu_model() -> str:
    """Name and instruction sets of this CPU, which -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield

"""Building C++ kernels: cached per source and CPU, built once by many processes, reasons when it fails."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rayk.kernels import native
from rayk.kernels.native import NativeKernels, build_native, load_native

COMPILER = shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")
SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C++ file, and a cache of its own to build into."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "operation" / "native.cpp"
    path.parent.mkdir()
    path.write_text(SOURCE)
    load_native.cache_clear()
    yield path
    load_native.cache_clear()


def built(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/rayk/native").glob("*.so"))


@needs_compiler
def test_builds_once_and_again_when_the_source_changes(source: Path, tmp_path: Path) -> None:
    loaded = load_native(source)
    assert loaded.reason == ""
    assert loaded.library.answer() == 42
    (first,) = built(tmp_path)
    stamp = first.stat().st_mtime_ns
    load_native.cache_clear()
    assert load_native(source).library.answer() == 42
    assert first.stat().st_mtime_ns == stamp, "it was there and was built again"
    source.write_text(SOURCE.replace("42", "43"))
    load_native.cache_clear()
    assert load_native(source).library.answer() == 43
    assert len(built(tmp_path)) == 2


@needs_compiler
def test_another_cpu_has_another_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_native(source)
    monkeypatch.setattr(native, "_cpu_model", lambda: "model name: of another machine")
    load_native.cache_clear()
    load_native(source)
    assert len(built(tmp_path)) == 2


@needs_compiler
def test_processes_that_start_together_share_one_build(source: Path, tmp_path: Path) -> None:
    """A compiler that logs each call: three processes make one build and leave no partial file."""
    log = tmp_path / "calls"
    wrapper = tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\ncase "$1" in --version) ;; *) echo x >> {log}; sleep 0.3;; esac\nexec {COMPILER} "$@"\n'
    )
    wrapper.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from rayk.kernels.native import build_native\n"
        "print(build_native(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))"
    )
    target = tmp_path / "shared"
    target.mkdir()
    command = [sys.executable, "-c", code, str(source), str(wrapper), str(target)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(outputs) == 1
    assert log.read_text().split() == ["x"]
    assert not list(target.glob("*.tmp"))


@needs_compiler
def test_kernels_take_and_return_the_types_that_they_are_given(source: Path) -> None:
    source.write_text('extern "C" double half(double x) { return x / 2; }\n')
    kernels = NativeKernels(source, {"half": (ctypes.c_double,)}, ctypes.c_double)
    assert kernels.why_not() is None
    assert kernels.library.half(3) == 1.5


def test_kernels_that_cannot_be_built_say_why(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    kernels = NativeKernels(source, {"answer": ()})
    assert kernels.why_not() == "no C++ compiler"
    with pytest.raises(AssertionError, match="no C\\+\\+ compiler"):
        _ = kernels.library


def test_no_compiler_is_a_reason(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    loaded = load_native(source)
    assert loaded.library is None
    assert loaded.reason == "no C++ compiler"


@needs_compiler
def test_a_failed_build_is_a_reason_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("this is not C++")
    loaded = load_native(source)
    assert loaded.library is None
    assert "failed" in loaded.reason
    assert "error" in loaded.reason
    assert built(tmp_path) == []
    assert not list((tmp_path / "cache/rayk/native").glob("*.tmp"))


@needs_compiler
def test_a_slow_build_is_a_reason(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_BUILD_TIMEOUT_S", 0)
    assert "took longer" in load_native(source).reason


@needs_compiler
def test_an_unwritable_cache_is_replaced_by_a_private_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(native.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    assert native.cache_directory() == tmp_path
    assert load_native(source).library.answer() == 42


@needs_compiler
def test_building_needs_no_environment(source: Path, tmp_path: Path) -> None:
    path = build_native(source, COMPILER, tmp_path)
    assert path.parent == tmp_path
    assert os.access(path, os.R_OK)

"""Collect what a run ran on: versions, devices, commit. Nothing heavy is imported to find out."""

from __future__ import annotations

import ctypes
import datetime
import hashlib
import importlib.metadata
import mmap
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = (
    "rayk",
    "torch",
    "triton",
    "transformers",
    "ray",
    "nixl-cu13",
    "numpy",
    "pandas",
    "pyarrow",
    "safetensors",
)


def collect_environment(
    *, command: list[str] | None = None, seeds: Mapping[str, int] | None = None, **extra: Any
) -> dict[str, Any]:
    """Collect environment.json. `extra` (cluster, transports, ...) is added as it is."""
    return {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command or [],
        "git_commit": git_commit(),
        "seeds": dict(seeds or {}),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "devices": devices(),
        "load": machine_load(),
        **extra,
    }


def package_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def devices() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": gpu_names(),
    }


GOES = 9  # times that a probe is repeated: the best is the machine's, the median is what others leave of it
HASHED_BYTES = 2**21


def machine_load() -> dict[str, float]:
    """Measure how busy the machine is and how fast one core is (20 ms), for `load` in environment.json.
    average_1_min is the kernel's load. sha256_mb_per_s is the best of GOES; free_share is their median over
    the best, below 1 where others want the same core."""
    data = bytes(HASHED_BYTES)
    took_s = [_time_s(lambda: hashlib.sha256(data)) for _ in range(GOES)]
    return {
        "average_1_min": round(os.getloadavg()[0], 2),
        "sha256_mb_per_s": round(HASHED_BYTES / min(took_s) / 1e6, 1),
        "free_share": round(min(took_s) / statistics.median(took_s), 3),
    }


COPIED_BYTES = 64 * 2**20  # more than caches hold


def copy_ceiling() -> dict[str, Any]:
    """Measure how fast one core copies host memory (0.2 s), for `ceiling` in environment.json, in 10^9 bytes
    per second. KV lies in huge pages and NIXL moves it between processes of a host by process_vm_readv, so
    both that and memcpy are tried, and the faster counts."""
    source, target = _huge_pages(1), _huge_pages(0)
    rates = {"memcpy_gb_per_s": _rate(lambda: _copy(source, target))}
    with suppress(OSError, AttributeError):  # a sandbox, or a system, without the call
        rates["process_vm_readv_gb_per_s"] = _rate(lambda: _read_process(source, target))
    names = " or ".join(name.removesuffix("_gb_per_s") for name in rates)
    return {
        "what": f"64 MiB copied by one core, huge pages, best of {GOES}: {names}",
        "gb_per_s": max(rates.values()),
        **rates,
    }


def _huge_pages(fill: int) -> Any:
    """Map uint8 [COPIED_BYTES] as `kv.caches.empty_bytes` does, and touch each page."""
    import numpy as np

    memory = mmap.mmap(-1, COPIED_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    stretch = np.frombuffer(memory, np.uint8)
    stretch[:] = fill
    return stretch


def _rate(copy: Callable[[], None]) -> float:
    return round(COPIED_BYTES / min(_time_s(copy) for _ in range(GOES)) / 1e9, 2)


def _time_s(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _copy(source: Any, target: Any) -> None:
    target[:] = source


class _Stretch(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read_process(source: Any, target: Any) -> None:
    """Copy within our own memory as from another process. Raises OSError or AttributeError where it
    cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    there, here = (_Stretch(stretch.ctypes.data, COPIED_BYTES) for stretch in (source, target))
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    flags = ctypes.c_ulong(0)
    count = ctypes.c_ulong(1)
    read = libc.process_vm_readv(os.getpid(), ctypes.byref(here), count, ctypes.byref(there), count, flags)
    if read != COPIED_BYTES:
        raise OSError(ctypes.get_errno(), "process_vm_readv")


def copy_gb_per_s(environment: Mapping[str, Any]) -> float | None:
    """Read `copy_ceiling` back from an environment.json; None where it has none."""
    ceiling = environment.get("ceiling")
    rate = ceiling.get("gb_per_s") if isinstance(ceiling, Mapping) else None
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def gpu_names() -> list[str]:
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
        names.append(models[0] if models else "unknown")
    return names


PACKAGE = Path(__file__).resolve().parents[1]


def git_commit(package: Path = PACKAGE) -> str | None:
    """Find the commit of the work tree that rayk runs from, `+changes` if files differ; None where it is not
    tracked."""
    try:
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(package, "rev-parse", "HEAD")
        changed = _git(package, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changed else commit


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

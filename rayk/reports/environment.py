"""What a run ran on: versions, devices, commit. Nothing heavy is imported to find out."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Mapping
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
    """Facts for environment.json. `extra` (cluster, transports, ...) is added as it is."""
    return {
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command or [],
        "git_commit": git_commit(),
        "seeds": dict(seeds or {}),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "devices": devices(),
        **extra,
    }


def package_versions() -> dict[str, str | None]:
    """Installed versions by distribution name; None for what is not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def devices() -> dict[str, Any]:
    """CPU and GPUs of this machine."""
    return {
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gpus": gpu_names(),
    }


COPIED_BYTES = 64 * 2**20
"""More than caches hold."""


def copy_ceiling() -> dict[str, Any]:
    """What one core copies in a second, in 10^9 bytes: the best of five copies, some 0.1 s of work. Noted in
    environment.json as `ceiling`; reports hold the rates of transfers in host memory against it."""
    import numpy as np

    source, target = np.ones(COPIED_BYTES, np.uint8), np.zeros(COPIED_BYTES, np.uint8)
    took_s = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        took_s.append(time.perf_counter() - began)
    rate = COPIED_BYTES / min(took_s) / 1e9
    return {"what": "memcpy of 64 MiB by one core, best of 5", "gb_per_s": round(rate, 2)}


def copy_gb_per_s(environment: Mapping[str, Any]) -> float | None:
    """The rate of `copy_ceiling` that an environment.json holds; None where it holds none."""
    ceiling = environment.get("ceiling")
    rate = ceiling.get("gb_per_s") if isinstance(ceiling, Mapping) else None
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def gpu_names() -> list[str]:
    """Names of the GPUs the NVIDIA driver lists."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
        names.append(models[0] if models else "unknown")
    return names


PACKAGE = Path(__file__).resolve().parents[1]


def git_commit(package: Path = PACKAGE) -> str | None:
    """Commit of the work tree that rayk itself runs from, `+changes` where files differ from it; None where
    the package is not tracked by git, as when it is installed (`packages` then has its version)."""
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

"""Examine the machine for `rayk doctor`, one function per matter."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayk.cli.listening import LATE, OPEN, OTHER, Port, PortAnswer, answers, ray_ports
from rayk.oracle.cache import LIMIT_BYTES, AnswerStore, reference_folder
from rayk.reports.environment import devices, gpu_names, package_versions
from rayk.specs.devices import count_local_gpus

MIN_SHM_MIB = 512
RAY_SERVE_PROXY = "ray::ProxyActor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A line: `status` is ok, note (there is a fallback) or missing (experiments cannot run)."""

    what: str
    status: str
    found: str
    mend: str = ""


def examine(address: str | None = None) -> list[Finding]:
    """Check everything, in the order a reader wants it. torch and NIXL take a few seconds."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _cpu,
        _gpu,
        _shared_memory,
        _torch,
        _transformers,
        _ray,
        lambda: _cluster(address),
        _nixl,
        _triton,
        _compiler,
        _kept_answers,
    )
    return [*(check() for check in checks), *_listening()]


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding(
        what="Python",
        status="ok" if good else "missing",
        found=f"{platform.python_version()} on {platform.platform()}",
        mend="" if good else "Python 3.11 or newer",
    )


def _cpu() -> Finding:
    found = devices()
    return Finding(
        what="CPU",
        status="ok",
        found=f"{found['cpu']}, {found['num_cores']} cores, {found['memory_gib']} GiB",
    )


def _gpu() -> Finding:
    if count_local_gpus() == 0:
        return Finding(what="GPU", status="note", found="none", mend="not needed: engines run on CPU slots")
    return Finding(what="GPU", status="ok", found=", ".join(gpu_names()) or "present")


def _shared_memory() -> Finding:
    free_mib = shutil.disk_usage("/dev/shm").free // 2**20 if Path("/dev/shm").is_dir() else 0
    enough = free_mib >= MIN_SHM_MIB
    return Finding(
        what="shared memory",
        status="ok" if enough else "note",
        found=f"{free_mib:,} MiB free in /dev/shm",
        mend="" if enough else "docker run --shm-size=2g; Ray else uses /tmp, slower",
    )


def _torch() -> Finding:
    version = package_versions()["torch"]
    if version is None:
        return _not_installed("torch")
    import torch

    if torch.cuda.is_available():
        return Finding(
            what="torch", status="ok", found=f"{version}, {torch.cuda.device_count()} CUDA devices"
        )
    if count_local_gpus():
        mend = "a torch build for this driver's CUDA version, from pytorch.org"
        return Finding(what="torch", status="note", found=f"{version}, cannot use the GPU", mend=mend)
    return Finding(what="torch", status="ok", found=f"{version}, CPU")


def _transformers() -> Finding:
    version = package_versions()["transformers"]
    return (
        Finding(what="transformers", status="ok", found=version)
        if version
        else _not_installed("transformers")
    )


def _ray() -> Finding:
    version = package_versions()["ray"]
    return Finding(what="Ray", status="ok", found=version) if version else _not_installed("ray[default]")


def _cluster(address: str | None) -> Finding:
    """Find the Ray clusters of this machine, or whether the one at the address answers."""
    given = address or os.environ.get("RAY_ADDRESS") or "auto"
    if given == "auto":
        found = ", ".join(_running_clusters())
        mend = "" if found else "rayk run starts its own"
        return Finding(what="Ray cluster", status="ok", found=found or "none running here", mend=mend)
    host, _, port = given.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host or "127.0.0.1", int(port)), timeout=2):
            return Finding(what="Ray cluster", status="ok", found=f"{given} answers")
    except (OSError, ValueError) as error:
        mend = "ray start --head, or leave the address out"
        return Finding(what="Ray cluster", status="note", found=f"{given}: {error}", mend=mend)


def _kept_answers() -> Finding:
    """Tell how much of the disk the reference's answers take."""
    store = AnswerStore(reference_folder())
    count, size = store.size()
    found = f"{size / 2**20:,.1f} MiB of {LIMIT_BYTES / 2**30:g} GiB in {count:,} files, {store.folder}"
    return Finding(what="kept answers", status="ok", found=found)


def _listening() -> list[Finding]:
    """Say what the ports of Ray's and rayk's processes ask of whoever comes, alike ones in one line."""
    if package_versions()["ray"] is None:
        return []  # it brings what lists processes, and is itself a finding
    alike: dict[tuple[str, str, str], list[tuple[Port, PortAnswer]]] = {}
    for port, answer in answers(ray_ports()):
        alike.setdefault((port.program, port.host, answer.text), []).append((port, answer))
    return [_heard(program, host, text, found) for (program, host, text), found in sorted(alike.items())] or [
        Finding(what="listens", status="ok", found="no process of rayk's or Ray's runs here")
    ]


def _heard(program: str, host: str, text: str, found: list[tuple[Port, PortAnswer]]) -> Finding:
    port, answer = found[0]
    mend = ""
    if answer.status == OPEN:
        mend = "a token: RAY_AUTH_MODE=token for `ray start`; a key: rayk serve --api-key"
    elif answer.status == LATE:
        mend = "ask again when the machine is less busy"
    elif answer.status == OTHER and not port.is_loopback:
        mend = "a firewall: it is not on loopback alone"
    if program.startswith(RAY_SERVE_PROXY):
        text += "; bounds no slow heads and, where rayk did not start the cluster, no clients that never read"
        mend = mend or "--http uvicorn bounds both"
    return Finding(
        what=f"listens: {program}",
        status="note" if mend else "ok",
        found=f"{host} {', '.join(str(p.port) for p, _ in found)}: {text}",
        mend=mend,
    )


def _running_clusters() -> list[str]:
    if package_versions()["ray"] is None:
        return []
    from rayk.actors.ray_private import running_clusters

    return running_clusters()


def _nixl() -> Finding:
    """Measure a real READ between two agents of this process."""
    version = package_versions()["nixl-cu13"]
    mend = "pip install nixl-cu13 (Linux x86-64 or aarch64)"
    try:
        from rayk.transfer.nixl_agent import measure

        facts = measure()
    except Exception as error:  # noqa: BLE001 - whatever the library raises is the finding
        return Finding(
            what="NIXL", status="missing", found=f"{version or 'not installed'}: {error}", mend=mend
        )
    if "error" in facts:
        return Finding(what="NIXL", status="missing", found=f"{version}: {facts['error']}", mend=mend)
    return Finding(what="NIXL", status="ok", found=f"{version}, {_speed(facts)}")


def _speed(measured: Mapping[str, Any]) -> str:
    return (
        f"{measured['transport']} on {measured['device']}: {measured['gb_per_s']:.1f} GB/s, "
        f"{measured['latency_us']:.0f} us for one small read"
    )


def _triton() -> Finding:
    version = package_versions()["triton"]
    if version is None:
        return Finding(
            what="Triton", status="note", found="not installed", mend="pip install triton (GPU kernels)"
        )
    how = "compiled for the GPU" if count_local_gpus() else "interpreter only, in tests"
    return Finding(what="Triton", status="ok", found=f"{version}, {how}")


def _compiler() -> Finding:
    path = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if path is None:
        return Finding(
            what="C++ compiler",
            status="note",
            found="none",
            mend="apt-get install g++ (faster attention on CPU; without it torch's is used)",
        )
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=10)
    return Finding(what="C++ compiler", status="ok", found=(done.stdout.splitlines() or [path])[0])


def _not_installed(package: str) -> Finding:
    return Finding(what=package, status="missing", found="not installed", mend=f'pip install "{package}"')

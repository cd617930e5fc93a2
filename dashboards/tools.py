"""Prometheus' programs: those on PATH, else Debian's, unpacked beside the virtual environment's."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(sys.prefix) / "prometheus"
"""Where `fetch` unpacks them: `make clean` removes it."""
NETWORK = ("-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1")
"""Without a network this is to end soon."""
BY_HAND = (
    "install Prometheus (apt install prometheus; brew install prometheus; or an archive of "
    "https://prometheus.io/download) and put `prometheus` and `promtool` on PATH"
)


class NotAvailableError(Exception):
    """What is missing, and how to have it."""


def find(name: str) -> Path | None:
    """The program, `prometheus` or `promtool`, if it is here."""
    found = shutil.which(name)
    if found is not None:
        return Path(found)
    unpacked = FOLDER / "usr" / "bin" / name
    return unpacked if unpacked.is_file() else None


def fetch() -> None:
    """Unpack Debian's package; nothing is installed. Raises NotAvailableError."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise NotAvailableError(f"no Prometheus here, and no apt-get to fetch it with: {BY_HAND}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        _download()
        packages = sorted(FOLDER.glob("prometheus_*.deb"))
        if not packages:
            raise NotAvailableError(f"apt-get left no package of Prometheus: {BY_HAND}")
        _run(["dpkg-deb", "-x", packages[-1].name, "."])
    finally:
        for package in FOLDER.glob("prometheus_*.deb"):
            package.unlink()


def need(name: str) -> Path:
    """The program, fetched if it must be. Raises NotAvailableError."""
    found = find(name)
    if found is None:
        with _alone():
            found = find(name)  # another process may have fetched it meanwhile
            if found is None:
                fetch()
                found = find(name)
    if found is None:
        raise NotAvailableError(f"Debian's package of Prometheus has no {name}: {BY_HAND}")
    return found


@contextmanager
def _alone() -> Iterator[None]:
    """While another process fetches, wait for it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download() -> None:
    """With the machine's lists of packages, else with lists of our own, which needs no rights."""
    try:
        _run(["apt-get", "download", "prometheus"])
    except NotAvailableError:
        lists, cache = FOLDER / "lists", FOLDER / "cache"
        for folder in (lists, cache):
            (folder / "partial").mkdir(parents=True, exist_ok=True)
        own = (*NETWORK, "-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={cache}")
        try:
            _run(["apt-get", "update"], own)
            _run(["apt-get", "download", "prometheus"], own)
        finally:
            shutil.rmtree(lists)
            shutil.rmtree(cache)


def _run(command: list[str], options: tuple[str, ...] = ()) -> None:
    given = [command[0], *options, *command[1:]]
    done = subprocess.run(given, cwd=FOLDER, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        why = said[-1] if said else f"exit status {done.returncode}"
        raise NotAvailableError(f"no Prometheus here, and `{' '.join(command)}` failed: {why}; {BY_HAND}")

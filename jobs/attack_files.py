"""What jobs/attack.py tries with files and local sockets: as another user, where root runs it."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayk.models.headers import INDEX_FILE, stored_tensors
from rayk.parallel import shm_link
from rayk.types.errors import CheckpointError

NOBODY = 65534
NOT_TRIED = "not tried"
MEET_S = 30.0


@dataclass(frozen=True, slots=True)
class Try:
    attack: str
    reached: str
    """What was there to attack."""
    refused: str
    """How it was refused, or what it gave."""
    got_in: bool | None = False
    """None: not known, or not tried."""

    @property
    def is_tried(self) -> bool:
        """Whether there was something to attack, and somebody to do it."""
        return self.reached != NOT_TRIED

    def in_words(self) -> str:
        if not self.is_tried:
            return NOT_TRIED
        return "not known" if self.got_in is None else "GOT IN" if self.got_in else ""


def file_attacks(paths: Sequence[Path], pids: Sequence[int], hidden: Sequence[str]) -> Iterator[Try]:
    """On a server's session folder and token file, and on what its processes show. `hidden`: the key and the
    token; the first of `pids` has the token in its environment."""
    for path in paths:
        mode = path.stat().st_mode & 0o777
        yield Try("read what its owner alone may", str(path), f"mode {mode:o}", got_in=bool(mode & 0o077))
        yield as_nobody("read it as another user", "ls" if path.is_dir() else "cat", path)
    yield as_nobody("read the token as another user", "cat", Path(f"/proc/{pids[0]}/environ"))
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids if Path(f"/proc/{pid}").exists()]
    found = sum(any(word.encode() in command for word in hidden) for command in commands)
    shown = found > 0 if commands else None
    yield Try("find key or token with ps", f"{len(commands)} processes", f"{found} show it", shown)


def environment_of(pid: int) -> dict[str, str]:
    """A process's, as its own user sees it."""
    entries = Path(f"/proc/{pid}/environ").read_text(encoding="utf-8", errors="replace").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def as_nobody(attack: str, program: str, path: Path) -> Try:
    """A program that reads `path`, run by another user."""
    if os.geteuid() != 0:
        return Try(attack, NOT_TRIED, "only root can become another user", None)
    done = subprocess.run(
        [program, str(path)],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env=os.environ | {"LC_ALL": "C"},
        capture_output=True,
        check=False,
    )
    last = (done.stderr.decode().strip().splitlines() or ["it was read"])[-1]
    got_in = False if "Permission denied" in last else True if done.returncode == 0 else None
    return Try(attack, str(path), last, got_in)


def index_attack(folder: Path) -> Iterator[Try]:
    """Checkpoints whose index names files elsewhere."""
    folder.mkdir()
    weights = json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder.parent / "x.safetensors").write_bytes(struct.pack("<Q", len(weights)) + weights + bytes(16))
    (folder / "config.json").write_text("{}")
    (folder / "link.safetensors").symlink_to("/etc/passwd")
    index = folder / INDEX_FILE
    for name in ("../x.safetensors", str(folder.parent / "x.safetensors"), "/etc/passwd", "link.safetensors"):
        index.write_text(json.dumps({"weight_map": {"x": name}}))
        try:
            stored_tensors(folder)
        except CheckpointError as error:
            yield Try("read elsewhere by an index", name, error.problem, got_in=False)
        else:
            yield Try("read elsewhere by an index", name, "it was read", got_in=True)


def shm_attacks() -> Iterator[Try]:
    """On the socket at which ranks of one host meet: another user calls, and another user listens."""
    if os.geteuid() != 0:
        yield Try("join ranks over shared memory", NOT_TRIED, "only root can become another user", None)
        return
    address = f"attack-{os.getpid()}"
    name = hashlib.blake2b(f"{os.geteuid()} {address}".encode(), digest_size=16).hexdigest()
    host = threading.Thread(target=_host, args=(address,), daemon=True)
    host.start()
    status = _run_as_nobody(f"\0rayk-shm-{name}")
    shm_link.connect(1, 2, address, 4096, MEET_S).close()
    host.join(MEET_S)
    told = {0: "the memory was handed over", 1: "the connection was closed"}.get(status, f"status {status}")
    yield Try("join ranks over shared memory", "rank 0's socket", told, {0: True, 1: False}.get(status))


def _host(address: str) -> None:
    shm_link.connect(0, 2, address, 4096, MEET_S).close()


_CALL = """
import array, os, socket, struct, sys, time
os.setgid({nobody}); os.setuid({nobody})
sock = socket.socket(socket.AF_UNIX)
until = time.monotonic() + {limit}
while sock.connect_ex({name!r}):
    if time.monotonic() > until:
        sys.exit(2)
    time.sleep(0.01)
try:
    sock.sendall(struct.pack("<qqq", 1, 2, 4096))
    sock.settimeout({limit})
    told, fds, _, _ = socket.recv_fds(sock, 1, 1)
except OSError:
    fds = []
sys.exit(0 if fds else 1)
"""


def _run_as_nobody(name: str) -> int:
    """Call rank 0 as another user; 0 where it hands its memory over."""
    script = _CALL.format(nobody=NOBODY, name=name, limit=MEET_S)
    return subprocess.run([sys.executable, "-I", "-c", script], check=False).returncode

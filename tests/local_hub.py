"""A hub on loopback: what huggingface_hub asks of huggingface.co, answered from folders and noted.

Weights are stored as the hub stores large files (their etag is the SHA-256), the rest as git does.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c0ffee" + "0" * 34
NAME = "tiny-org/qwen3-tiny"
PINNED = f"{NAME}@{COMMIT}"
WEIGHTS = "model.safetensors"
UNWANTED = ("onnx/model.json", "pytorch_model.bin", "consolidated.safetensors", "README.md")


@dataclass
class LocalHub:
    """Serves `folders`, by their names. `tokens`: repository -> the only token that may read it."""

    url: str = ""
    folders: dict[str, Path] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    statuses: dict[str, int] = field(default_factory=dict)
    """Repository -> what every request for it is answered with."""
    cuts: dict[str, list[int]] = field(default_factory=dict)
    """File -> bytes after which its next answers break off, one each."""
    resets: bool = False
    """Whether a connection that is cut is reset, as by a machine between; else it is closed."""
    wrong: dict[str, bytes] = field(default_factory=dict)
    """File -> what is sent in its place."""
    before_sending: Callable[[str], object] = lambda file: None
    """Called before the content of a file is sent."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(method, path) in order, of models."""
    ranges: dict[str, list[str]] = field(default_factory=dict)
    """File -> the `Range` that each request for its content named; empty: all of it."""
    authorizations: set[str] = field(default_factory=set)
    """What callers said of themselves."""

    def fetched(self) -> list[str]:
        """List the files whose contents were sent, sorted."""
        return sorted(
            p.rpartition("/")[2] for method, p in self.requests if method == "GET" and "/resolve/" in p
        )


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """Run a hub until the block ends."""
    hub = LocalHub()

    class Handler(_Handler):
        served = hub

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def with_tiny_model(hub: LocalHub, checkpoint: Path, copy: Path) -> None:
    """Serve a copy of a checkpoint as NAME; other formats lie beside it."""
    shutil.copytree(checkpoint, copy)
    (copy / "onnx").mkdir()
    for name in UNWANTED:
        (copy / name).write_bytes(b"not wanted")
    hub.folders[NAME] = copy


def hub_environment(hub: LocalHub, home: Path, **more: str) -> dict[str, str]:
    """Return the variables that lead a process to `hub` alone, with `home` as its HF_HOME."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **more}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: LocalHub

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: what is asked is noted."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        hub = self.served
        if not path.startswith("/api/models/") and "/resolve/" not in path:
            return self._send(404, {})  # what huggingface_hub asks of no repository, unasked
        hub.requests.append((self.command, path))
        said = self.headers.get("Authorization", "")
        hub.authorizations.add(said)
        found = re.fullmatch(
            r"/(?:api/models/)?([\w.-]+/[\w.-]+)/(revision|tree|resolve)/([^/]+)(?:/(.*))?", path
        )
        if found is None:
            return self._send(404, {})
        repo, what, revision, name = found.groups()
        folder = hub.folders.get(repo)
        if repo in hub.statuses:
            return self._send(hub.statuses[repo], {})
        if folder is None or (repo in hub.tokens and not said):
            return self._send(401, {"X-Error-Code": "RepoNotFound"})
        if repo in hub.tokens and said != f"Bearer {hub.tokens[repo]}":
            return self._send(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if revision not in ("main", COMMIT):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        if what == "revision":
            return self._send_json({"id": repo, "sha": COMMIT, "siblings": []})
        if what == "tree":
            files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
            return self._send_json([_entry(folder, p) for p in files])
        if repo in hub.gated:
            return self._send(403, {"X-Error-Code": "GatedRepo"})
        file = folder / name
        if not file.is_file():
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        return self._send_file(file)

    def _send_file(self, file: Path) -> None:
        true = file.read_bytes()
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if file.suffix == ".safetensors":
            headers |= {"X-Linked-ETag": headers["ETag"], "X-Linked-Size": str(len(true))}
        content = true if self.command == "HEAD" else self.served.wrong.get(file.name, true)
        status, start = 200, 0
        wanted = self.headers.get("Range", "")
        if self.command == "GET":
            self.served.ranges.setdefault(file.name, []).append(wanted)
            self.served.before_sending(file.name)
        if first := re.fullmatch(r"bytes=(\d+)-", wanted):
            status, start = 206, int(first[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cuts = self.served.cuts.get(file.name) if self.command == "GET" else None
        self._send(status, headers, content[start:], cut=cuts.pop(0) if cuts else None)

    def _send_json(self, value: object) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"", cut: int | None = None) -> None:
        """`cut`: the connection ends after so many bytes of the body."""
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True
            if self.served.resets:
                at_once = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                os.close(self.connection.detach())


def _entry(folder: Path, file: Path) -> dict[str, Any]:
    """Describe a file as the hub lists it."""
    size = file.stat().st_size
    entry = {"type": "file", "path": str(file.relative_to(folder)), "size": size, "oid": _git_hash(file)}
    if file.suffix == ".safetensors":
        entry["lfs"] = {"oid": _etag(file), "size": size, "pointerSize": 130}
    return entry


def _etag(file: Path) -> str:
    is_large = file.suffix == ".safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest() if is_large else _git_hash(file)


def _git_hash(file: Path) -> str:
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()

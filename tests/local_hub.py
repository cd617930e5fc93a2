"""A hub on loopback: what huggingface_hub asks of huggingface.co, answered from folders and noted."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c0ffee" + "0" * 34


@dataclass
class LocalHub:
    """Serves `folders`, by their names. `tokens`: repository -> the only token that may read it."""

    url: str = ""
    folders: dict[str, Path] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    requests: list[tuple[str, str]] = field(default_factory=list)
    """(method, path) in order."""
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
        if folder is None or (repo in hub.tokens and said != f"Bearer {hub.tokens[repo]}"):
            return self._send(401, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self._send(404, {"X-Error-Code": "RevisionNotFound"})
        if what == "revision":
            return self._send_json({"id": repo, "sha": COMMIT, "siblings": []})
        if what == "tree":
            files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
            return self._send_json(
                [
                    {
                        "type": "file",
                        "path": str(p.relative_to(folder)),
                        "size": p.stat().st_size,
                        "oid": _etag(p.read_bytes()),
                    }
                    for p in files
                ]
            )
        if repo in hub.gated:
            return self._send(403, {"X-Error-Code": "GatedRepo"})
        file = folder / name
        if not file.is_file():
            return self._send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        return self._send_file(file.read_bytes())

    def _send_file(self, content: bytes) -> None:
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status, start = 200, 0
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            status, start = 206, int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(status, headers, content[start:])

    def _send_json(self, value: object) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()

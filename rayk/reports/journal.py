"""Keep journal.jsonl: what a run's drivers did, a line each, over all its sessions. It tells when each
session opened and which cells began and were committed. Readers pass over a torn last line, which a killed
driver may leave."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

from rayk.types.files import parse_json

FILE = "journal.jsonl"


class Journal:
    """Appends lines, each in one write, so that lines of one process never mix."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._handle).st_size
        if size and os.pread(self._handle, 1, size - 1) != b"\n":
            os.write(self._handle, b"\n")

    def note(self, event: str, **facts: Any) -> None:
        now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "pid": os.getpid(), "event": event, **facts})
        os.write(self._handle, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._handle)


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a run's journal, oldest first; none if there is no journal."""
    path = folder / FILE
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = parse_json(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines

"""A `rayk serve` process of a job: started, waited for, and stopped."""

from __future__ import annotations

import itertools
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rayk.types.errors import DeadlineExceeded, UserError

STOP_S = 150.0
KILL_S = 60.0


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    exit_status: int | None = None
    """When it has been stopped."""


@contextmanager
def serving(
    model: Path | str,
    options: Sequence[str],
    log: Path,
    start_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server of these options of `rayk serve`; it is stopped at the end. Raises UserError, or
    DeadlineExceeded, where it does not start."""
    command = [sys.executable, "-m", "rayk.cli.main", "serve", str(model), "--port", "0", *options]
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        server = Server(process, "")
        try:
            server.url = wait_ready(process, start_s, log)
            yield server
        finally:
            server.exit_status = stop(process)


def wait_ready(process: subprocess.Popen[str], deadline_s: float, log: Path) -> str:
    """The URL of the ready line. Raises UserError, or DeadlineExceeded."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    try:
        line = lines.get(timeout=deadline_s)
    except queue.Empty:
        raise DeadlineExceeded("the start of a server", deadline_s, {"log": str(log)}) from None
    if not line.startswith("rayk: ready "):
        raise UserError(problem=f"the server did not start{last_words(log)}", where=str(log))
    return line.split()[2]


def last_words(log: Path) -> str:
    """`: ` and the last thing that rayk says in a log, if there is one and it says any."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    said = [i for i, line in enumerate(lines) if line.startswith("rayk: ")]
    if not said:
        return ""
    found = [lines[said[-1]].removeprefix("rayk: ")]
    found += itertools.takewhile(lambda line: line.startswith("  "), lines[said[-1] + 1 :])
    return ": " + "\n".join(found)


def stop(process: subprocess.Popen[str]) -> int:
    """Interrupt it as Ctrl-C does; its exit status."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(KILL_S)
        return -signal.SIGKILL

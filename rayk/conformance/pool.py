"""Host processes seen from their parent: started on demand, called with a deadline, killed if hung."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from rayk.conformance.host import Raised

STARTING_S = 120.0
"""Time for a process to start and import the connector: torch alone may take long on a busy machine."""
_MAIN = "from rayk.conformance.host import main; main()"


class Hung(Exception):
    """A call did not come back in time; its process was killed."""


class Died(Exception):
    """The process ended during a call, or before it."""


class HostProcess:
    def __init__(self, folder: str, python: str = sys.executable) -> None:
        ours, theirs = socket.socketpair()
        self._log: IO[bytes] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by `end`
        with theirs:
            self._process = subprocess.Popen(
                [python, "-c", _MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={"OMP_NUM_THREADS": "1", "UCX_WARN_UNUSED_ENV_VARS": "n"}
                | dict(os.environ)
                | _path_of(python),
                # A separate session, so that whatever the connector starts can be killed with it.
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._is_waiting = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(self, method: str, *arguments: Any) -> None:
        """Begin a call; `finish` returns its answer."""
        assert not self._is_waiting, "one call at a time"
        try:
            self._connection.send_bytes(pickle.dumps((method, arguments)))
        except OSError as error:
            raise Died(self._epitaph(method)) from error
        self._is_waiting = True

    def finish(self, what: str, until: float) -> Any:
        """Await the answer to the last call begun. `until`: monotonic seconds.

        Raises Raised (the connector's error), Hung, Died, UserError.
        """
        self._is_waiting = False
        try:
            if not self._connection.poll(max(0.0, until - time.monotonic())):
                self.kill()
                raise Hung(f"{what} did not return in time; its process was killed")
            kind, answer = pickle.loads(self._connection.recv_bytes())  # noqa: S301 - our own child's
        except (EOFError, ConnectionError) as error:
            raise Died(self._epitaph(what)) from error
        if kind == "ok":
            return answer
        if kind == "raised":
            raise Raised(answer)
        if kind == "user":
            raise answer
        raise AssertionError(f"the kit itself failed in {what}:\n{answer}")

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        self.start(method, *arguments)
        return self.finish(method, time.monotonic() + timeout_s)

    def kill(self) -> None:
        """Kill it and what it started."""
        self._connection.close()
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Let it end by itself, or kill it after a while."""
        self._connection.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()
        self._log.close()

    def _epitaph(self, what: str) -> str:
        """Tell how it ended, with the last lines it printed."""
        try:
            code: int | None = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-3:]
        printed = f"; it printed: {' / '.join(last)}" if last else ""
        return f"the process died in {what} ({how}){printed}"


class HostPool:
    """Processes that have imported the connector, kept from check to check."""

    def __init__(self, target: str, path: Sequence[str] = (), python: str = sys.executable) -> None:
        """`python`: the interpreter of the processes, which may be of another environment."""
        self._target = target
        self._path = tuple(path)
        self._python = python
        self._folder = tempfile.TemporaryDirectory(prefix="rayk-conformance-")
        self._hosts: list[HostProcess] = []
        self.facts: Any = None
        """ConnectorFacts, once a process has been started."""

    def use(self, target: str) -> None:
        """Load another connector in the same processes. Raises UserError if it cannot be imported."""
        self._target = target
        self._drop_dead()
        until = time.monotonic() + STARTING_S
        for host in self._hosts:
            host.start("load", target, self._path)
            self.facts = host.finish(f"importing {target}", until)

    def take(self, count: int) -> list[HostProcess]:
        """Return the first `count` processes, all alive. Raises UserError if the connector cannot be
        imported."""
        self._drop_dead()
        new = [HostProcess(self._folder.name, self._python) for _ in range(count - len(self._hosts))]
        # From here on `close` ends them, even if one cannot import the connector.
        self._hosts += new
        until = time.monotonic() + STARTING_S
        for host in new:
            host.start("load", self._target, self._path)
        for host in new:
            self.facts = host.finish(f"importing {self._target}", until)
        return self._hosts[:count]

    def _drop_dead(self) -> None:
        for gone in [h for h in self._hosts if not h.is_alive]:
            gone.end()
            self._hosts.remove(gone)

    def new_folder(self) -> str:
        """Make an empty folder that lasts as long as the pool."""
        return tempfile.mkdtemp(dir=self._folder.name)

    def forget(self) -> None:
        """Have the first process forget its store, whatever became of it; it ends if it cannot."""
        for host in self._hosts[:1]:
            if host.is_alive:
                try:
                    host.call("forget", timeout_s=STARTING_S)
                except (Raised, Hung, Died, AssertionError):
                    host.kill()

    def end_all(self) -> None:
        """End every process; the next `take` starts new ones."""
        for host in self._hosts:
            host.end()
        self._hosts.clear()

    def close(self) -> None:
        self.end_all()
        self._folder.cleanup()


def _path_of(python: str) -> dict[str, str]:
    """Tell where another interpreter finds this rayk, unless rayk is installed among packages that are not
    its own."""
    root = Path(__file__).parents[2]
    if python == sys.executable or root.name == "site-packages":
        return {}
    found = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(root), *([found] if found else [])])}

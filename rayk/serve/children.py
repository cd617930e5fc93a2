"""What runs over what clients send, and nobody can bound, runs in processes that the kernel bounds.

A warm process, `python -m MODULE FD`, has imported what the work needs. It forks a child for each question,
which takes no more of the machine than CPU_S and MOST_BYTES. `Children` is the server's side, `answer_all`
that of the process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rayk.types.errors import DeadlineExceeded, EngineDied
from rayk.types.waiting import busy

CPU_S = 2
"""A question may take this much processor time; honest ones take milliseconds."""
MOST_BYTES = 512 << 20
"""A question may take this much memory beside the warm process' own."""
ANSWER_S = 120.0
"""A child that gets no processor for so long is given up."""
TOO_MUCH = f"more than {CPU_S} s of processor time or {MOST_BYTES >> 20} MiB of memory"


class Children:
    """Has a module's warm process answer questions, from any thread."""

    def __init__(self, module: str, what: str, given: str = "") -> None:
        """`what` it is, in words. `given`: what the module is told as it starts, as its standard input."""
        self._module, self._what, self._given = module, what, given
        self._lock = threading.Lock()
        self._warm: _Warm | None = None

    def start(self) -> int:
        """Start the warm process, unless it runs; returns its id."""
        with self._lock:
            if self._warm is None:
                self._warm = _Warm(self._module, self._given)
            return self._warm.process.pid

    def close(self) -> None:
        """End the warm process. Questions under way are still answered; a later one starts another."""
        with self._lock:
            warm, self._warm = self._warm, None
        if warm is not None:
            warm.end()

    def ask(self, question: bytes) -> bytes:
        """Ask a child; its answer is empty where it was stopped. Raises EngineDied where its processes end
        for another reason, DeadlineExceeded."""
        for _ in range(2):
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    warm = self._hand_over(theirs)
                answer = self._exchange(ours, question)
            if answer or warm.lives():
                return answer
        raise EngineDied(self._what, "it was ended twice with a question")

    def _hand_over(self, line: socket.socket) -> _Warm:
        """Give the warm process a question, or a new process where that has ended; returns the one that has
        it."""
        self.start()
        with self._lock:
            assert self._warm is not None
            try:
                self._warm.hand_over(line)
            except (BrokenPipeError, ConnectionResetError):
                self._warm = _Warm(self._module, self._given)
                self._warm.hand_over(line)
            return self._warm

    def _exchange(self, line: socket.socket, question: bytes) -> bytes:
        line.settimeout(ANSWER_S)
        try:
            line.sendall(question)
            line.shutdown(socket.SHUT_WR)
            return _read(line)
        except TimeoutError:
            raise DeadlineExceeded(f"a question to {self._what}", ANSWER_S, busy()) from None
        except (BrokenPipeError, ConnectionResetError):
            return b""


class _Warm:
    """Owns the warm process, which ends with this object at the latest."""

    def __init__(self, module: str, given: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as file:
            file.write(given.encode("utf-8", "surrogatepass"))
            file.seek(0)
            self.process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=file,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # an interrupt is for the server
            )
        self.end = weakref.finalize(self, _end, self._control, self.process)

    def hand_over(self, line: socket.socket) -> None:
        """Have a child answer on this line. Raises OSError where the process has ended."""
        socket.send_fds(self._control, [b"\0"], [line.fileno()])

    def lives(self) -> bool:
        """Tell whether the process holds its end. (To the kernel it may go on ending for some time.)"""
        try:
            return self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.kill()
    process.wait()


def _environment() -> dict[str, str]:
    """Leave the server's secrets out of the process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    return kept | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _read(line: socket.socket) -> bytes:
    return b"".join(iter(lambda: line.recv(1 << 16), b""))


# The other side.


def given() -> str:
    """Return what the server's side gave this process."""
    return sys.stdin.buffer.read().decode("utf-8", "surrogatepass")


def answer_all(answer: Callable[[bytes], bytes], prepare: Callable[[], None]) -> None:
    """Answer questions until the server has gone. `prepare` does what helps all children; it is left out
    where it takes more than a child may. An answer that is empty says that the child was stopped."""
    control = socket.socket(fileno=int(sys.argv[1]))
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MOST_BYTES)
    if _is_bounded(prepare):
        prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, lines, _, _ = socket.recv_fds(control, 1, 1)
        if not lines:
            return
        line = socket.socket(fileno=lines[0])
        if os.fork() == 0:
            control.close()
            _run_bounded(partial(_answer_one, answer, line))
        line.close()


def _answer_one(answer: Callable[[bytes], bytes], line: socket.socket) -> None:
    with line:
        try:
            answered = answer(_read(line))
        except MemoryError:
            return
        with contextlib.suppress(BrokenPipeError):
            line.sendall(answered)


def _is_bounded(work: Callable[[], None]) -> bool:
    """Tell whether this can be done within the bounds."""
    pid = os.fork()
    if pid == 0:
        _run_bounded(work)
    return os.waitpid(pid, 0)[1] == 0


def _run_bounded(work: Callable[[], None]) -> None:
    """Do this as a child, then end."""
    code = 1
    try:
        _limit(resource.RLIMIT_CPU, CPU_S)
        _limit(resource.RLIMIT_CORE, 0)
        work()
        code = 0
    finally:
        os._exit(code)


def _limit(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, most))

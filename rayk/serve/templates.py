"""Chat templates are programs over what clients send: they run in processes that the kernel bounds.

`python -m rayk.serve.templates FD` is the warm process of one template. It forks a child for each
conversation, so that neither what a template computes nor what Jinja works out while it compiles one takes
more of the machine than CPU_S and MOST_BYTES.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rayk.types.errors import DeadlineExceeded, EngineDied, UserError
from rayk.types.waiting import busy

CPU_S = 2
"""A conversation may take this much processor time; templates of real models take milliseconds."""
MOST_BYTES = 512 << 20
"""A conversation may take this much memory beside the warm process' own."""
MOST_CHARACTERS = 16 << 20
"""A template may write this much: twice the largest body."""
ANSWER_S = 120.0
"""A child that gets no processor for so long is given up."""
_SHOWN = 300
"""So many characters of a template's complaint are told."""
_WRITTEN = b"+"
"""Begins an answer that is the conversation; else it is the template's complaint."""
_JINJA = "transformers.utils.chat_template_utils"
_LOG = logging.getLogger(__name__)


class Templates:
    """Renders one chat template, from any thread."""

    def __init__(self, template: str) -> None:
        self.template = template
        self._lock = threading.Lock()
        self._warm: _Warm | None = None

    def start(self) -> int:
        """Start the warm process, unless it runs; returns its id."""
        with self._lock:
            if self._warm is None:
                self._warm = _Warm(self.template)
            return self._warm.process.pid

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
        """Write a conversation, up to where the answer begins. `arguments`: the template's variables. Raises
        UserError where the template refuses these, or takes more than its bounds; EngineDied where its
        processes end for another reason, DeadlineExceeded."""
        try:
            question = json.dumps([list(messages), dict(arguments)]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages are plain JSON, less than 1000 levels deep: {error}") from error
        answer = self._exchange(question)
        if not answer:
            problem = f"took more than {CPU_S} s of processor time or {MOST_BYTES >> 20} MiB of memory"
            _LOG.warning("a chat template was stopped: it %s", problem)
            raise UserError(f"the chat template {problem} over these messages")
        text = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] != _WRITTEN:
            raise UserError(f"the chat template refuses the messages: {text}")
        return text

    def _exchange(self, question: bytes) -> bytes:
        """Ask a child; its answer is empty where it was stopped."""
        for _ in range(2):
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    warm = self._hand_over(theirs)
                answer = _send_question(ours, question)
            if answer or warm.lives():
                return answer
        raise EngineDied("the chat template's process", "it was ended twice with a conversation")

    def _hand_over(self, line: socket.socket) -> _Warm:
        """Give the warm process a conversation, or a new process where that has ended; returns the one that
        has it."""
        self.start()
        with self._lock:
            assert self._warm is not None
            try:
                self._warm.hand_over(line)
            except (BrokenPipeError, ConnectionResetError):
                self._warm = _Warm(self.template)
                self._warm.hand_over(line)
            return self._warm


def _send_question(line: socket.socket, question: bytes) -> bytes:
    line.settimeout(ANSWER_S)
    try:
        line.sendall(question)
        line.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: line.recv(1 << 16), b""))
    except TimeoutError:
        raise DeadlineExceeded("a conversation in the chat template's process", ANSWER_S, busy()) from None
    except (BrokenPipeError, ConnectionResetError):
        return b""


class _Warm:
    """Owns the warm process, which ends with this object."""

    def __init__(self, template: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as file:
            file.write(template.encode("utf-8", "surrogatepass"))
            file.seek(0)
            self.process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=file,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # an interrupt is for the server
            )
        weakref.finalize(self, _end, self._control, self.process)

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
    """Leave the server's secrets out of a template's process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    return kept | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


# The other side.


def main() -> None:
    """Answer conversations until the server has gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    template = sys.stdin.buffer.read().decode("utf-8", "surrogatepass")
    importlib.import_module(_JINJA)  # no conversation pays for that, nor is to blame where it fails
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MOST_BYTES)
    if _compiles(template):
        _compile(template)  # for all children
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, lines, _, _ = socket.recv_fds(control, 1, 1)
        if not lines:
            return
        line = socket.socket(fileno=lines[0])
        if os.fork() == 0:
            control.close()
            _run_bounded(partial(_answer, template, line))
        line.close()


def _compiles(template: str) -> bool:
    """Tell whether the template compiles within the bounds: Jinja works constants out meanwhile."""
    pid = os.fork()
    if pid == 0:
        _run_bounded(partial(_compile, template))
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


def _compile(template: str) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(template)


def _answer(template: str, line: socket.socket) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    with line:
        messages, arguments = json.loads(b"".join(iter(lambda: line.recv(1 << 16), b"")))
        try:
            (text,), _ = render_jinja_template(
                [messages], chat_template=template, add_generation_prompt=True, **arguments
            )
            kind, answer = _WRITTEN, text
        except MemoryError:
            return
        except Exception as error:  # noqa: BLE001 - whatever a template's own code raises of what it is given
            kind, answer = b"-", f"{type(error).__name__}: {error}"[:_SHOWN]
        if len(answer) > MOST_CHARACTERS:
            kind, answer = b"-", f"it writes more than {MOST_CHARACTERS} characters"
        with contextlib.suppress(BrokenPipeError):
            line.sendall(kind + answer.encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    main()

"""`python -m rayk.vllm.keeper FD COMMAND...` runs a command, and ends all its processes with its owner.

The keeper waits until the command ends, or the other end of standard input is closed (its owner may be dead).
Then it kills all processes that came of the command, whatever group or session they moved to. It writes
`began PID` to the pipe FD at first, and `ended STATUS` once nothing is left. The keeper detaches itself from
its parent at once: Ray kills the children of its actors, but not the children of those.

The command leads a process group, but in its owner's session: Linux shares cores among sessions before
threads (sched_autogroup), and the threads of one that wait actively, as vLLM's and NIXL's do, were seen to
keep those of another from running for more than a minute (6.18, two cores).

vLLM's processes share memory by files in /dev/shm, which outlive them. Python's resource tracker, one of the
processes, removes them once the others are gone, so it is given TRACKER_S to end by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TRACKER_S, POLL_S = 5.0, 0.01


def main() -> None:
    if os.fork():
        os._exit(0)
    os.setpgid(0, 0)
    status = int(sys.argv[1])
    os.set_inheritable(status, False)
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    command = os.fork()
    if not command:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        for number in STOPPING:
            signal.signal(number, signal.SIG_DFL)
        try:
            os.execvp(sys.argv[2], sys.argv[2:])
        except OSError as error:
            os.write(2, f"{sys.argv[2]} cannot be run: {error.strerror}\n".encode())
            os._exit(127)
    _tell(status, f"began {command}")
    _wait(command)
    _tell(status, f"ended {_kill_all(command)}")


def _tell(status: int, text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(status, f"{text}\n".encode())


def _wait(command: int) -> None:
    """Wait until the command has ended, or its input is closed, of which nothing is read here."""
    poll = select.poll()
    poll.register(0, 0)
    poll.register(os.pidfd_open(command), select.POLLIN)
    poll.poll()


def _kill_all(command: int) -> int:
    """Return the exit status of the command, as subprocess has it: negative for a signal."""
    status, until = 0, time.monotonic() + TRACKER_S
    while True:
        for child in _children():
            is_spared = _is_tracker(child) and time.monotonic() < until
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGCONT if is_spared else signal.SIGKILL)
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == command:
            status = os.waitstatus_to_exitcode(found)
        if not pid:
            time.sleep(POLL_S)


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children() -> list[int]:
    """Return those of this process, to which orphans of its children come."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


if __name__ == "__main__":
    main()

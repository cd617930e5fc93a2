"""A crew of processes that run a function as the ranks of one group, reused between tests."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import traceback
from multiprocessing.connection import Connection
from typing import Any

_SPAWN = multiprocessing.get_context("spawn")


def free_address() -> str:
    """A loopback host:port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Crew:
    """`num_ranks` processes; close it when done."""

    def __init__(self, num_ranks: int) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for _ in range(num_ranks):
            pipe, process = _start()
            self.pipes.append(pipe)
            self.processes.append(process)

    def start(self, module: str, function: str, size: int, *args: Any) -> None:
        """Run function(rank, size, *args) on the first `size` processes."""
        for rank in range(size):
            self.pipes[rank].send((module, function, (rank, size, *args)))

    def result(self, rank: int, timeout_s: float = 120) -> Any:
        """What rank's function returned; what it raised is raised here."""
        assert self.pipes[rank].poll(timeout_s), f"rank {rank} gave no answer in {timeout_s} s"
        ok, value = self.pipes[rank].recv()
        if not ok:
            raise AssertionError(f"rank {rank} failed:\n{value}")
        return value

    def run(self, module: str, function: str, size: int, *args: Any) -> list[Any]:
        """start, then every result in rank order."""
        self.start(module, function, size, *args)
        return [self.result(rank) for rank in range(size)]

    def kill(self, rank: int) -> None:
        """SIGKILL, as the out-of-memory killer does it."""
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].join(60)

    def replace(self, rank: int) -> None:
        """A new process in the place of one that was killed."""
        self.pipes[rank].close()
        self.pipes[rank], self.processes[rank] = _start()

    def close(self) -> None:
        """End the processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)


def _start() -> tuple[Connection, Any]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            module, function, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = (True, getattr(importlib.import_module(module), function)(*args))
        except Exception:  # noqa: BLE001 - sent to the test
            answer = (False, traceback.format_exc())
        pipe.send(answer)

"""A peer that stands still: what is in flight with it counts as in flight until it has ended, whatever was
forgotten meanwhile. Over TCP, where a read or a write needs the other end to go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayk.transfer.agent import DescriptorList, Transfer, TransferState
from rayk.transfer.nixl_agent import NixlAgent

pytestmark = pytest.mark.nixl

ROOT = Path(__file__).resolve().parents[2]
NUM_BYTES = 32 << 20
"""More than sockets hold."""
DEADLINE_S = 120.0
PEER = f"""
import json, sys, time
import torch
from rayk.transfer.nixl_agent import NixlAgent
agent = NixlAgent(sys.argv[1])
memory = torch.full(({NUM_BYTES},), 7, dtype=torch.int8)
print(json.dumps([agent.register(memory), agent.metadata().hex()]), flush=True)
while True:
    agent.notifications()
    time.sleep(0.0005)
"""


class Hung:
    """An agent here, and one in a process that can be stopped."""

    def __init__(self, name: str) -> None:
        self.peer = f"hung-{name}-{os.getpid()}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, self.peer], stdout=subprocess.PIPE, cwd=ROOT
        )
        self.agent = NixlAgent(f"here-{self.peer}")
        self.memory = torch.zeros(NUM_BYTES, dtype=torch.int8)
        assert self.process.stdout is not None
        self.theirs, metadata = json.loads(self.process.stdout.readline())
        self.metadata = bytes.fromhex(metadata)
        self.ours = self.agent.register(self.memory)
        self.add()

    def add(self) -> None:
        self.agent.add_peer(self.peer, self.metadata)

    def begin(self, operation: str, num_bytes: int = NUM_BYTES) -> Transfer:
        size, index = np.array([num_bytes], dtype=np.int64), np.zeros(1, dtype=np.int32)
        lists = [
            DescriptorList(np.array([at], dtype=np.int64), size, size, 1) for at in (self.ours, self.theirs)
        ]
        return getattr(self.agent, operation)(self.agent.prepare(self.peer, *lists), index, index)

    def until(self, is_so: Callable[[], bool]) -> None:
        until = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < until, "too late"
            self.agent.notifications()

    def end(self, transfer: Transfer) -> TransferState:
        """How it ends."""
        self.until(lambda: self.agent.poll(transfer) is not TransferState.PENDING)
        state = self.agent.poll(transfer)
        self.agent.release(transfer)
        return state

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.agent.close()


@pytest.fixture
def hung(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hung]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    made = Hung(request.node.name)
    try:
        assert made.end(made.begin("read", 64)) is TransferState.DONE, "it is wired"
        made.memory.zero_()
        yield made
    finally:
        made.close()


def in_flight(hung: Hung, operation: str) -> Transfer:
    """A transfer whose other end stands still, after its peer was removed."""
    hung.signal(signal.SIGSTOP)
    transfer = hung.begin(operation)
    assert hung.agent.poll(transfer) is TransferState.PENDING
    hung.agent.remove_peer(hung.peer)
    return transfer


@pytest.mark.parametrize("operation", ["read", pytest.param("write", marks=pytest.mark.slow)])
def test_a_transfer_with_a_hung_peer_is_over_when_it_has_ended(hung: Hung, operation: str):
    transfer = in_flight(hung, operation)
    assert hung.agent.poll(transfer) is TransferState.PENDING
    assert not hung.agent.release(transfer), "somebody may still write here"
    hung.signal(signal.SIGCONT)
    hung.end(transfer)
    before = hung.memory.clone()
    hung.until(lambda: not hung.agent._leaving)
    assert torch.equal(hung.memory, before), "nothing was written after the end"


@pytest.mark.slow
def test_a_hung_peer_that_is_killed_is_forgotten(hung: Hung):
    transfer = in_flight(hung, "read")
    hung.signal(signal.SIGKILL)
    assert hung.end(transfer) is TransferState.FAILED
    hung.until(lambda: not hung.agent._leaving)


@pytest.mark.slow
def test_a_hung_peer_may_come_again_before_it_was_forgotten(hung: Hung):
    transfer: Any = in_flight(hung, "read")
    hung.add()
    hung.signal(signal.SIGCONT)
    assert hung.end(transfer) is TransferState.DONE
    hung.memory.zero_()
    assert hung.end(hung.begin("read")) is TransferState.DONE
    assert bool((hung.memory == 7).all())

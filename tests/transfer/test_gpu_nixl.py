"""NIXL between the device memory of two processes on one GPU, and the order of kernels and reads."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.markers import gpu, nixl

pytestmark = [gpu, nixl]

NUM_BLOCKS = 64
BLOCK_BYTES = 4096
SLEEP_CYCLES = 1 << 30
"""About half a second of a GPU's clock: kernels queued behind it have not run when the host goes on."""

PRODUCER = f"""
import json, sys
import torch
from rayk.engine.fence import make_fence
from rayk.transfer.nixl_agent import NixlAgent

device = torch.device("cuda:0")
agent = NixlAgent(sys.argv[1])
memory = torch.full(({NUM_BLOCKS * BLOCK_BYTES},), -1, dtype=torch.int8, device=device)
torch.cuda.synchronize()
print(json.dumps([agent.register(memory), agent.metadata().hex()]), flush=True)
fence = make_fence(device)
words = memory.view(torch.int32)
for line in sys.stdin:
    command, number = line.split()
    if command == "stop":
        break
    fence.begin()
    torch.cuda._sleep({SLEEP_CYCLES})
    torch.add(torch.arange(len(words), dtype=torch.int32, device=device), int(number), out=words)
    fence.end()
    if command == "fenced":
        fence.wait()
    print("ready", flush=True)
    # The reader's notification ends the turn; polling also lets UCX make progress at this end.
    while not agent.notifications():
        pass
    torch.cuda.synchronize()
"""


@contextmanager
def producer(name: str) -> Iterator[tuple[subprocess.Popen[str], int, bytes]]:
    """A process that owns pages on the GPU; its base address and metadata."""
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    )
    try:
        assert child.stdout is not None
        address, metadata = json.loads(child.stdout.readline())
        yield child, address, bytes.fromhex(metadata)
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


class Reader:
    """This process's end: pages on the same GPU, read block by block in reverse."""

    def __init__(self, peer: str, address: int, metadata: bytes) -> None:
        from rayk.transfer.agent import DescriptorList
        from rayk.transfer.nixl_agent import NixlAgent

        self.peer = peer
        self.agent = NixlAgent(f"reader-of-{peer}")
        self.landed = torch.zeros(NUM_BLOCKS * BLOCK_BYTES, dtype=torch.int8, device="cuda:0")
        torch.cuda.synchronize()
        here = self.agent.register(self.landed)
        self.agent.add_peer(peer, metadata)
        lists = [
            DescriptorList(np.array([a]), np.array([BLOCK_BYTES]), np.array([BLOCK_BYTES]), NUM_BLOCKS)
            for a in (here, address)
        ]
        self._handle = self.agent.prepare(peer, *lists, "cuda:0")

    def read(self) -> torch.Tensor:
        """All blocks as they are at the producer, int32 [blocks, words], read into wiped memory."""
        from rayk.transfer.agent import TransferState

        self.landed.fill_(0)
        torch.cuda.synchronize()
        order = np.arange(NUM_BLOCKS, dtype=np.int32)
        transfer = self.agent.read(self._handle, order, order[::-1].copy())
        until = time.monotonic() + 30
        while (state := self.agent.poll(transfer)) is TransferState.PENDING:
            assert time.monotonic() < until, "the read does not end"
            self.agent.notifications()
        assert state is TransferState.DONE
        assert self.agent.release(transfer)
        # No synchronisation here: what is done is visible to the next kernel, on any stream.
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            copied = self.landed.clone()
        side.synchronize()
        self.agent.notify(self.peer, b"read")
        return copied.cpu().view(torch.int32).view(NUM_BLOCKS, -1).flip(0)


def expected(number: int) -> torch.Tensor:
    return (torch.arange(NUM_BLOCKS * BLOCK_BYTES // 4, dtype=torch.int32) + number).view(NUM_BLOCKS, -1)


def ask(child: subprocess.Popen[str], command: str, number: int) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{command} {number}\n")
    child.stdin.flush()
    assert child.stdout.readline().strip() == "ready"


def test_pages_move_between_two_processes_on_one_gpu_after_the_fence() -> None:
    with producer("gpu-pages") as (child, address, metadata):
        reader = Reader("gpu-pages", address, metadata)
        try:
            for number in (1000, 2000, 3000):
                ask(child, "fenced", number)
                assert torch.equal(reader.read(), expected(number))
        finally:
            reader.agent.close()


def test_without_the_fence_a_reader_would_see_old_bytes() -> None:
    """What the fence is for: this is the error that the test above would show."""
    with producer("gpu-unfenced") as (child, address, metadata):
        reader = Reader("gpu-unfenced", address, metadata)
        try:
            ask(child, "fenced", 1000)
            assert torch.equal(reader.read(), expected(1000))
            ask(child, "unfenced", 2000)
            early = reader.read()
            assert not torch.equal(early, expected(2000))
        finally:
            reader.agent.close()


@pytest.mark.parametrize("steps", [1, 3])
def test_a_fence_waits_for_every_step_so_far(steps: int) -> None:
    from rayk.engine.fence import make_fence

    fence = make_fence(torch.device("cuda:0"))
    assert fence.step_ns() == 0
    counter = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    seen = torch.zeros(1, dtype=torch.int64).pin_memory()
    torch.cuda._sleep(1)
    seen.copy_(counter.add_(0), non_blocking=True)  # what runs for the first time takes the host a while
    torch.cuda.synchronize()
    for _ in range(steps):
        fence.begin()
        torch.cuda._sleep(SLEEP_CYCLES)
        counter += 1
        seen.copy_(counter, non_blocking=True)
        measure = fence.end()
    assert int(seen) < steps, "the host is ahead of the device"
    fence.wait()
    assert int(seen) == steps
    assert measure() == fence.step_ns() > 1_000_000

"""Writes with notifications: local agents, then NIXL into another process, which judges what it got."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from rayk.transfer.agent import DescriptorList, TransferAgent, TransferState
from rayk.transfer.faulty_agent import FaultyAgent
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.types.errors import TransferError
from tests.markers import nixl, one_per

NAMES = itertools.count()
NUM_BLOCKS, RUN_BYTES, STRIDE = 16, 40, 64


def lists(*bases: int) -> list[DescriptorList]:
    """Two runs per block, at bytes 0 and 20 of 40."""
    lengths, strides = np.array([12, 20]), np.array([STRIDE, STRIDE])
    return [DescriptorList(base + np.array([0, 20]), lengths, strides, NUM_BLOCKS) for base in bases]


def indices(blocks: list[int]) -> np.ndarray:
    return np.array([r * NUM_BLOCKS + b for r in range(2) for b in blocks], dtype=np.int32)


def expected(source: torch.Tensor, before: torch.Tensor, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """What lies at the other end afterwards, block by block."""
    found = before.clone()
    for ours, theirs in pairs:
        for start, length in ((0, 12), (20, 20)):
            a, b = ours * STRIDE + start, theirs * STRIDE + start
            found[b : b + length] = source[a : a + length]
    return found


@pytest.mark.parametrize("faulty", [False, True])
def test_a_write_lands_where_it_should_and_then_notifies(faulty: bool) -> None:
    network = LocalNetwork()
    source = torch.arange(NUM_BLOCKS * STRIDE, dtype=torch.int32).to(torch.int8)
    target = torch.full_like(source, -1)
    writer: TransferAgent = LocalAgent("w", network, delay_polls=2)
    writer = FaultyAgent(writer) if faulty else writer
    peer = LocalAgent("t", network)
    here, there = writer.register(source), peer.register(target)
    writer.add_peer("t", peer.metadata())
    handle = writer.prepare("t", *lists(here, there))
    transfer = writer.write(handle, indices([3, 1]), indices([7, 2]), b"here")
    assert writer.poll(transfer) is TransferState.PENDING
    assert peer.notifications() == [], "nothing is there yet"
    assert bool((target == -1).all())
    while (state := writer.poll(transfer)) is TransferState.PENDING:
        pass
    assert state is TransferState.DONE
    assert peer.notifications() == [("w", b"here")]
    assert torch.equal(target, expected(source, torch.full_like(source, -1), [(3, 7), (1, 2)]))
    assert writer.release(transfer)


def test_a_cancelled_write_leaves_nothing_and_tells_nobody() -> None:
    network = LocalNetwork()
    source, target = torch.ones(NUM_BLOCKS * STRIDE, dtype=torch.int8), torch.zeros(1024, dtype=torch.int8)
    writer, peer = LocalAgent("w", network, delay_polls=1), LocalAgent("t", network)
    here, there = writer.register(source), peer.register(target)
    writer.add_peer("t", peer.metadata())
    handle = writer.prepare("t", *lists(here, there))
    transfer = writer.write(handle, indices([3]), indices([7]), b"here")
    assert writer.release(transfer)
    assert peer.notifications() == []
    assert not bool(target.any())
    peer.close()
    with pytest.raises(TransferError, match="gone"):
        writer.write(handle, indices([3]), indices([7]))


CHILD = f"""
import json, sys, time
import torch
from rayk.transfer.nixl_agent import NixlAgent
torch.set_num_threads(1)
agent = NixlAgent(sys.argv[1], error_handling=sys.argv[2])
memory = torch.full(({NUM_BLOCKS * STRIDE},), -1, dtype=torch.int8)
print(json.dumps([agent.register(memory), agent.metadata().hex()]), flush=True)
while True:
    for _, message in agent.notifications():
        # What lies here when the notification comes, not later.
        print(json.dumps([message.decode(), memory.tolist()]), flush=True)
    time.sleep(0.0005)
"""


@one_per()
@nixl
@pytest.mark.parametrize("error_handling", ["none", "peer"])
def test_nixl_notifies_when_the_bytes_are_there(error_handling: str) -> None:
    from rayk.transfer.nixl_agent import NixlAgent

    name = f"writes-{next(NAMES)}"
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", CHILD, name, error_handling]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root)
    agent = NixlAgent(f"into-{name}", error_handling=error_handling)
    try:
        assert child.stdout is not None
        there, metadata = json.loads(child.stdout.readline())
        source = torch.arange(NUM_BLOCKS * STRIDE, dtype=torch.int32).to(torch.int8)
        here = agent.register(source)
        agent.add_peer(name, bytes.fromhex(metadata))
        handle = agent.prepare(name, *lists(here, there))
        seen = torch.full_like(source, -1)
        for i, pairs in enumerate([[(3, 7), (1, 2)], [(0, 15), (5, 5), (9, 0)]]):
            ours, theirs = (indices([p[side] for p in pairs]) for side in (0, 1))
            transfer = agent.write(handle, ours, theirs, f"write {i}".encode())
            until = time.monotonic() + 30
            while agent.poll(transfer) is TransferState.PENDING:
                assert time.monotonic() < until, "the write does not end"
            assert agent.poll(transfer) is TransferState.DONE
            assert agent.release(transfer)
            message, memory = json.loads(child.stdout.readline())
            seen = expected(source, seen, pairs)
            assert message == f"write {i}"
            assert memory == seen.tolist()
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
        agent.close()

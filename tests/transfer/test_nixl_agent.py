"""The NIXL agent: two agents of one process, then a producer in a child process that is killed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayk.transfer import nixl_agent
from rayk.transfer.agent import DescriptorList, TransferState
from rayk.transfer.connectors import NixlConnector
from rayk.transfer.nixl_agent import NixlAgent, measure
from rayk.transfer.push_connectors import NixlPushConnector
from rayk.types.errors import DeviceError, TransferError
from tests.listeners import listened_at
from tests.transfer.cluster import Pair, Shape, make_engine
from tests.transfer.far_peer import connect, two_processes

pytestmark = pytest.mark.nixl

NAMES = itertools.count()


def nixl_pair(shape: Shape, error_handling: str = "none") -> Pair:
    run = next(NAMES)

    def make_agent(name: str) -> NixlAgent:
        return NixlAgent(f"{run}.{name}", error_handling=error_handling)

    pair = Pair(make_engine(shape, 0, make_agent), make_engine(shape, 1, make_agent))
    pair.connect()
    return pair


def close(pair: Pair) -> None:
    for rank in (*pair.consumer.ranks, *pair.producer.ranks):
        rank.close()


@pytest.mark.parametrize(
    ("tp", "layouts"),
    [
        ((1, 1), ("BHLNC", "BHLNC")),
        ((1, 2), ("BLNHC", "LBHNC")),
        ((2, 1), ("LHBNC", "BHLNC")),
        ((4, 2), ("BHLNC", "LBNHC")),
        ((2, 4), ("LBNHC", "BLHNC")),
    ],
    ids=str,
)
def test_kv_arrives_and_every_producer_rank_is_released(tp, layouts):
    shape = Shape(tp=tp, layouts=layouts)
    pair = nixl_pair(shape)
    try:
        for i, num_tokens in enumerate((5, 37)):
            values = shape.values(num_tokens, seed=i)
            outcomes, tables = pair.transfer(values, f"r{i}", seed=i)
            assert [o.error for o in outcomes.values()] == [None] * tp[1]
            pair.consumer.check(values, tables)
            assert pair.released() == [[f"lease-r{i}"]] * tp[0]
            assert {r.transport for o in outcomes.values() for r in o.rows} == {"nixl/UCX"}
    finally:
        close(pair)


def test_peer_mode_windows_and_unlike_blocks():
    shape = Shape(tp=(2, 1), block_sizes=(4, 6), window=7, num_layers=4, kernel_block_sizes=(2, None))
    pair = nixl_pair(shape, error_handling="peer")
    try:
        values = shape.values(29)
        outcomes, tables = pair.transfer(values)
        assert outcomes[0].error is None
        pair.consumer.check(values, tables)
        assert pair.released() == [["lease-r"]] * 2
    finally:
        close(pair)


def test_a_reused_block_is_named():
    shape = Shape()
    pair = nixl_pair(shape)
    try:
        tables = [[3, 7, 5]]
        pair.producer.write(shape.values(10), tables)
        ticket = pair.producer.ticket(10, tables)
        pair.producer.ranks[0].bump_generations([7])
        pair.start(ticket, [[1, 2, 3]])
        (outcome,) = pair.finish(ticket).values()
        assert "block 7 was reused while being read" in str(outcome.error)
    finally:
        close(pair)


def test_every_kind_of_cache_crosses_processes():
    """States, windows, latents and keys in one session; blocks and state blocks of unlike sizes."""
    shape = Shape(
        family="everything",
        tp=(3, 1),
        layouts=("BHLNC", "LBNHC"),
        block_sizes=(4, 6),
        state_block_sizes=(64, 16),
        num_blocks=(60, 70),
    )
    with two_processes(shape) as (producer, consumer):
        connect(producer, consumer)
        _, outcome = consumer("read", producer("ticket", 300, "r"))
        assert outcome.error is None
        assert {(row.producer_rank, row.group) for row in outcome.rows} >= {
            (r, g) for r in range(3) for g in (1, 2)
        }
        assert {row.group for row in outcome.rows} == set(range(7))
        assert {row.transport for row in outcome.rows} == {"nixl/UCX"}
        assert producer("released") == [["lease-r"]] * 3


@pytest.mark.parametrize("error_handling", ["none", "peer"])
def test_agents_of_one_node_listen_on_loopback_alone(error_handling: str):
    nixl_agent.nixl_api()  # which sets a variable as it is imported
    before, environment = listened_at(), dict(os.environ)
    agent = NixlAgent(f"alone-{next(NAMES)}", error_handling=error_handling, is_one_node=True)
    assert {host for host, *_ in listened_at() - before} == {"127.0.0.1"}
    assert os.environ == environment
    agent.close()


@pytest.mark.parametrize("connector", [NixlConnector, NixlPushConnector])
def test_connectors_of_one_host_listen_on_loopback_alone(connector: Any):
    before = listened_at()
    agent = connector("alone").make_agent(f"alone-{next(NAMES)}")
    assert {host for host, *_ in listened_at() - before} == {"127.0.0.1"}
    agent.close()


CHILD = """
import json, sys, time
import torch
from rayk.transfer.nixl_agent import NixlAgent
agent = NixlAgent(sys.argv[1])
memory = torch.arange(1 << 16, dtype=torch.int32).view(torch.int8)
print(json.dumps([agent.register(memory), agent.metadata().hex()]), flush=True)
while True:
    agent.notifications()
    time.sleep(0.001)
"""


def test_a_killed_producer_is_noticed():
    name = f"child-{next(NAMES)}"
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen([sys.executable, "-c", CHILD, name], stdout=subprocess.PIPE, cwd=root)
    agent = NixlAgent(f"parent-of-{name}")
    try:
        assert child.stdout is not None
        address, metadata = json.loads(child.stdout.readline())
        landed = torch.zeros(1 << 18, dtype=torch.int8)
        here = agent.register(landed)
        agent.add_peer(name, bytes.fromhex(metadata))
        size = np.array([4096])
        lists = [DescriptorList(np.array([a]), size, size, 64) for a in (here, address)]
        handle = agent.prepare(name, *lists)
        indices = np.arange(64, dtype=np.int32)
        transfer = agent.read(handle, indices, indices[::-1].copy())
        wait(agent, transfer)
        assert agent.poll(transfer) is TransferState.DONE
        wanted = torch.arange(1 << 16, dtype=torch.int32).view(64, 1024).flip(0).reshape(-1)
        assert torch.equal(landed.view(torch.int32), wanted)
        assert agent.release(transfer)
        child.kill()
        child.wait()
        assert read_fails(agent, handle, indices)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
        agent.close()


def wait(agent: NixlAgent, transfer) -> None:
    until = time.monotonic() + 60
    while agent.poll(transfer) is TransferState.PENDING and time.monotonic() < until:
        agent.notifications()


def read_fails(agent: NixlAgent, handle, indices) -> bool:
    try:
        transfer = agent.read(handle, indices, indices)
    except TransferError as error:
        return "could not start" in str(error)
    wait(agent, transfer)
    return agent.poll(transfer) is TransferState.FAILED


def test_measure_says_what_the_machine_does():
    facts = measure(4 << 20)
    assert facts["transport"] == "nixl/UCX"
    assert facts["gb_per_s"] > 0.01
    assert 0 < facts["latency_us"] < 1e6
    assert "error" not in facts


def test_measure_reports_a_backend_that_is_not_there(capfd):
    facts = measure(4096, backend="NOPE")
    assert "backend NOPE does not start" in facts["error"]
    capfd.readouterr()


def test_without_nixl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("no_such_nixl",))
    nixl_agent.nixl_api.cache_clear()
    try:
        with pytest.raises(DeviceError, match="pip install nixl-cu13"):
            NixlAgent("nobody")
    finally:
        nixl_agent.nixl_api.cache_clear()


@pytest.mark.parametrize(
    ("has_cuda", "before", "after"), [(True, None, "on"), (True, "off", "off"), (False, None, None)]
)
def test_reads_of_device_memory_go_as_writes_do(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, before: str | None, after: str | None
) -> None:
    """Unless the user says otherwise; UCX hears nothing of it where it would warn."""
    name = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    NixlAgent(f"{next(NAMES)}.device").close()
    assert os.environ.get(name) == after


class AnyMemory:
    """NIXL's agent, of a machine with a GPU."""

    def register_memory(self, *_: object) -> None: ...

    def deregister_memory(self, *_: object) -> None: ...


def device_agent(monkeypatch: pytest.MonkeyPatch) -> NixlAgent:
    """All its memory is device memory."""
    agent = NixlAgent(f"{next(NAMES)}.device")
    monkeypatch.setattr(agent, "_nixl", AnyMemory())
    monkeypatch.setattr(nixl_agent, "_memory", lambda device: ("VRAM", 0))
    return agent


@pytest.mark.parametrize("before", [None, "off"])
def test_reports_hear_what_ucx_was_told_of_device_memory(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """Also where the user said it; what both sides must agree on stays as it is."""
    for name in ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "UCX_TLS"):
        monkeypatch.setenv(name, before or "")
        monkeypatch.delenv(name)
    if before is not None:
        monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", before)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    agent = device_agent(monkeypatch)
    assert agent.transport_as_set == "nixl/UCX", "host memory is none of cuda_ipc's"
    agent.register(torch.zeros(64, dtype=torch.int8))
    assert agent.transport == "nixl/UCX"
    assert agent.transport_as_set == f"nixl/UCX, UCX_CUDA_IPC_ENABLE_GET_ZCOPY={before or 'on'}"
    agent.close()


@pytest.mark.parametrize(
    ("status", "value", "is_told"), [(0, 1, False), (0, 0, True), (1, 0, False)], ids=["yes", "no", "unknown"]
)
def test_device_memory_that_no_process_can_map_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int, value: int, is_told: bool
) -> None:
    asked = []

    class Driver:
        def cuPointerGetAttribute(self, found: Any, attribute: int, address: Any) -> int:  # noqa: N802
            found._obj.value = value
            asked.append((attribute, address.value))
            return status

    agent, memory = device_agent(monkeypatch), torch.zeros(64, dtype=torch.int8)
    monkeypatch.setattr(nixl_agent.ctypes, "CDLL", lambda name: Driver())
    agent.register(memory)
    assert asked == [(10, memory.data_ptr())]
    assert ("cuda_ipc cannot map" in agent.transport_as_set) is is_told
    assert ("expandable_segments:False" in caplog.text) is is_told
    agent.close()


def test_memory_that_cannot_be_registered_is_the_machines_doing() -> None:
    agent = NixlAgent(f"{next(NAMES)}.unpinned")
    error = next(e for e in nixl_agent.nixl_errors() if e.__name__ == "nixlBackendError")

    class Refusing:
        def register_memory(self, *_: object) -> None:
            raise error("cannot be pinned")

    nixl, agent._nixl = agent._nixl, Refusing()
    with pytest.raises(OSError, match="registering 64 bytes"):
        agent.register(torch.zeros(64, dtype=torch.int8))
    agent._nixl = nixl
    agent.close()

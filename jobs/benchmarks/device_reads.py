"""Time NIXL between the device memory of two processes on one GPU: pulls, pushes, and pulls to the host.

    python jobs/benchmarks/device_reads.py [--mib 256] [--repeats 7] [--record]
    python jobs/benchmarks/device_reads.py --device cpu --mib 16     # a dry run

With the setting of UCX for reads over cuda_ipc that rayk's agents choose, and with UCX's own. Beside them
the same bytes copied inside one process by torch, in one piece, and by rayk's kernel in runs; rates count
each byte once. The best of the repeats; every byte that was read is compared. Without a CUDA device nothing
is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention_gpu import environment

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks import harness
from rayk.kernels.copy_runs import copy_runs, make_run_table
from rayk.transfer.agent import DescriptorList, Handle, TransferState
from rayk.transfer.nixl_agent import NixlAgent

SETTING = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
COLUMNS = ("setting", "operation", "memory", "descriptors", "bytes each", "ms", "GB/s", "of copy")
BLOCKS = (None, 1 << 20, 64 << 10)
"""Bytes of a descriptor; None: all in one."""
RUNS = (256 << 10, 16 << 10, 2 << 10)
"""Bytes of a run that is copied inside one process."""
LIMIT_S = 2.0
"""For the repeats of one row."""


def produce(num_bytes: int, device: str) -> None:
    """A process that owns memory until its input ends; it polls, which lets UCX make progress here too."""
    agent = NixlAgent("device-reads-producer", is_one_node=True)
    memory = pattern(num_bytes, 1).to(device)
    synchronize(device)
    print(json.dumps([agent.register(memory), agent.metadata().hex()]), flush=True)
    os.set_blocking(sys.stdin.fileno(), False)
    while sys.stdin.buffer.raw.read(1) is None:  # type: ignore[attr-defined]
        agent.notifications()


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    return torch.randint(
        -128, 128, (num_bytes,), dtype=torch.int8, generator=torch.Generator().manual_seed(seed)
    )


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds(agent: NixlAgent, operation: str, handle: Handle, indices: np.ndarray) -> float:
    """What one transfer takes, from posting to its end."""
    began = time.perf_counter()
    transfer = getattr(agent, operation)(handle, indices, indices)
    while (state := agent.poll(transfer)) is TransferState.PENDING:
        agent.notifications()
    took = time.perf_counter() - began
    agent.release(transfer)
    assert state is TransferState.DONE, f"a {operation} failed"
    return took


def consume(address: int, metadata: bytes, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of this process' transfers with the producer."""
    size, device = options.mib << 20, options.device
    agent = NixlAgent("device-reads-consumer", is_one_node=True)
    places = {"device": torch.zeros(size, dtype=torch.int8, device=device)}
    if device != "cpu":
        places["pinned host"] = torch.zeros(size, dtype=torch.int8, pin_memory=True)
    synchronize(device)
    bases = {name: agent.register(memory) for name, memory in places.items()}
    agent.add_peer("device-reads-producer", metadata)
    expected = pattern(size, 1)
    for name, memory in places.items():
        for block in BLOCKS:
            each = block or size
            count = size // each
            ours, theirs = (
                DescriptorList(*(np.array([n], dtype=np.int64) for n in (base, each, each)), count)
                for base in (bases[name], address)
            )
            handle = agent.prepare("device-reads-producer", ours, theirs, device)
            order = np.random.default_rng(0).permutation(count).astype(np.int32)
            for operation in ("read", "write") if name == "device" else ("read",):
                memory.zero_() if operation == "read" else memory.copy_(expected)
                synchronize(device)
                best, until = seconds(agent, operation, handle, order), time.monotonic() + LIMIT_S
                if operation == "read":
                    assert torch.equal(memory.cpu(), expected), "other bytes arrived"
                for _ in range(options.repeats):
                    if time.monotonic() < until:
                        best = min(best, seconds(agent, operation, handle, order))
                yield {"operation": operation, "memory": name, "count": count, "each": each, "s": best}
            agent.forget(handle)
    agent.close()


def run(setting: str | None, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows under one value of UCX's setting, in two new processes."""
    own = {key: value for key, value in os.environ.items() if key != SETTING}
    environ = own | ({} if setting is None else {SETTING: setting, "UCX_WARN_UNUSED_ENV_VARS": "n"})
    script = [sys.executable, __file__, "side", options.device, str(options.mib), str(options.repeats)]
    pipe = {"stdout": subprocess.PIPE, "text": True, "env": environ}
    producer = subprocess.Popen(script, stdin=subprocess.PIPE, **pipe)  # type: ignore[call-overload]
    try:
        address, metadata = json.loads(producer.stdout.readline())
        consumer = subprocess.Popen([*script, str(address), metadata], **pipe)  # type: ignore[call-overload]
        for line in consumer.stdout:
            yield json.loads(line) | {"setting": setting or "rayk's"}
        assert consumer.wait() == 0, f"the consumer failed with {SETTING}={setting}"
    finally:
        producer.kill()
        producer.wait()


def copy_gbps(options: argparse.Namespace) -> float:
    """Inside one process: bytes of a copy on the device per second, read once."""
    source = torch.ones(options.mib << 20, dtype=torch.int8, device=options.device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(20):
        synchronize(options.device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(options.device)
        best = min(best, time.perf_counter() - began)
    return source.numel() / best / 1e9


def repack(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """rayk's own copies of scattered runs, as out of a staging buffer: those of 64 blocks."""
    size, device = options.mib << 20, torch.device(options.device)
    source, target = pattern(size, 2).to(device), torch.zeros(size, dtype=torch.int8, device=device)
    blocks = np.random.default_rng(0).permutation(64).astype(np.int64)
    for each in RUNS:
        starts = np.arange(0, size // 64, each, dtype=np.int64)
        wide = np.full(len(starts), size // 64, dtype=np.int64)
        table = make_run_table(starts, starts, np.full(len(starts), each, dtype=np.int64), wide, wide, device)
        times = []
        for _ in range(options.repeats + 1):
            synchronize(options.device)
            began = time.perf_counter()
            copy_runs(source, target, table, blocks, blocks)
            synchronize(options.device)
            times.append(time.perf_counter() - began)
        assert torch.equal(source, target), "other bytes arrived"
        count = 64 * len(starts)
        yield {"operation": "copy", "memory": "device", "count": count, "each": each, "s": min(times)}


def fill(options: argparse.Namespace, page: harness.Page) -> None:
    if options.device is None:
        page.say("No CUDA device: nothing is measured (--device cpu makes a dry run).")
        return
    copy = copy_gbps(options)
    page.say(*environment(options.device))
    page.say(f"- {options.mib} MiB, {SETTING} as told; copy inside a process {copy:.4g} GB/s", "")
    page.head(*COLUMNS)
    for setting in (None, "auto"):
        rows = run(setting, options)
        for row in rows if setting else itertools.chain(rows, repack(options)):
            rate = row["count"] * row["each"] / row["s"] / 1e9
            what = (row.get("setting", ""), row["operation"], row["memory"], row["count"], row["each"])
            page.row(*what, f"{row['s'] * 1e3:.3f}", f"{rate:.4g}", f"{rate / copy:.0%}")


def main() -> int:
    return harness.run(
        fill,
        __file__,
        title="NIXL between two processes on one GPU",
        device={"default": "cuda:0" if torch.cuda.is_available() else None},
        mib=256,
        repeats=7,
    )


def side(arguments: list[str]) -> None:
    """One of the two processes that `run` starts: the producer, or the consumer of its address."""
    device, mib, repeats, *peer = arguments
    if not peer:
        produce(int(mib) << 20, device)
        return
    options = argparse.Namespace(device=device, mib=int(mib), repeats=int(repeats))
    for row in consume(int(peer[0]), bytes.fromhex(peer[1]), options):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        side(sys.argv[2:])
    else:
        sys.exit(main())

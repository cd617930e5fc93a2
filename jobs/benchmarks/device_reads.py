"""Time NIXL between the device memory of two processes, beside cudaMemcpy: pulls, pushes, pulls to the host.

    python jobs/benchmarks/device_reads.py [--mib 256] [--repeats 7] [--peer cuda:1] [--record]
    python jobs/benchmarks/device_reads.py --device cpu --mib 16     # a dry run, between host memories

By bytes and number of descriptors, with the setting of UCX for reads over cuda_ipc that rayk's agents choose,
and with UCX's own. Beside each row are the same blocks copied by torch, one by one, out of the other process'
memory, mapped by its CUDA IPC handle: cudaMemcpyPeer where the other process has a GPU of its own (--peer;
the second GPU if there is one). Shares of copy are of one whole copy inside one process; runs that rayk's
kernel copies there are shown, too. Rates count each byte once. The best of the repeats; every byte that was
read is compared. Without a CUDA device, or without NIXL, nothing is measured.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from attention_gpu import environment

from jobs.benchmarks import harness
from jobs.benchmarks.transfer_costs import finished
from rayk.kernels.copy_runs import copy_runs, make_run_table
from rayk.transfer.agent import DescriptorList, Handle, TransferState
from rayk.transfer.measuring import START_BYTES, CostProbe, PeerMemory, start_costs
from rayk.transfer.nixl_agent import NixlAgent, nixl_api
from rayk.types.errors import DeviceError

SETTING = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
COLUMNS = ("setting", "operation", "memory", "descriptors", "bytes each", "ms", "GB/s", "of copy")
COPIED = ("cudaMemcpy, ms", "of cudaMemcpy")
BLOCKS = (4 << 10, 64 << 10, 1 << 20)
"""Bytes of a descriptor."""
COUNTS = (1, 16, 256, 4096)
PRODUCER = "device-reads-producer"
COSTS = "costs"
"""The operation of the row that has the constants of rayk's cost model, as an engine would measure them."""
RUNS = (256 << 10, 16 << 10, 2 << 10)
"""Bytes of a run that is copied inside one process."""
LIMIT_S = 2.0
"""For the repeats of one row."""


def shapes(num_bytes: int) -> list[tuple[int, int]]:
    """(descriptors, bytes of each) of all transfers that fit, and of one of everything."""
    found = [(n, each) for each, n in itertools.product(BLOCKS, COUNTS) if n * each < num_bytes]
    return [*found, (1, num_bytes)]


def produce(num_bytes: int, device: str, folder: Path) -> None:
    """A process that owns memory until its input ends; it polls, which lets UCX make progress here too."""
    agent = NixlAgent(PRODUCER, is_one_node=True)
    memory, handle = shared(pattern(num_bytes, 1), device, folder)
    synchronize(device)
    told = [agent.register(memory), agent.metadata().hex(), handle.hex()]
    print(json.dumps(told), flush=True)
    os.set_blocking(sys.stdin.fileno(), False)
    while sys.stdin.buffer.raw.read(1) is None:  # type: ignore[attr-defined]
        agent.notifications()


def shared(content: torch.Tensor, device: str, folder: Path) -> tuple[torch.Tensor, bytes]:
    """Content on a device, and what another process maps it by: its IPC handle, or on a CPU a file."""
    if device == "cpu":
        path = folder / "memory"
        memory = torch.from_file(str(path), shared=True, size=len(content), dtype=torch.int8)
        return memory.copy_(content), pickle.dumps((_map_file, (str(path), len(content))))
    from torch.multiprocessing.reductions import reduce_tensor

    memory = content.to(device)
    return memory, pickle.dumps(reduce_tensor(memory))  # type: ignore[no-untyped-call]


def _map_file(path: str, num_bytes: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.int8)


def mapped(handle: bytes) -> torch.Tensor:
    """The other process' memory."""
    rebuild, arguments = pickle.loads(handle)  # noqa: S301 - of the other process that we started
    made: torch.Tensor = rebuild(*arguments)
    return made


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


def copy_seconds(source: torch.Tensor, target: torch.Tensor, order: np.ndarray, each: int) -> float:
    """What the same blocks take, copied one by one out of the other process' memory."""
    size = len(order) * each
    ours, theirs = target[:size].split(each), source[:size].split(each)
    pairs = [(ours[n], theirs[n]) for n in order]
    device = next((str(m.device) for m in (target, source) if m.is_cuda), "cpu")
    synchronize(device)
    began = time.perf_counter()
    for here, there in pairs:
        here.copy_(there, non_blocking=True)
    synchronize(device)
    return time.perf_counter() - began


def least(call: Callable[[], float], repeats: int) -> float:
    """The best of the repeats and one more, as far as there is time."""
    best, until = call(), time.monotonic() + LIMIT_S
    for _ in range(repeats):
        if time.monotonic() < until:
            best = min(best, call())
    return best


def consume(told: list[Any], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of this process' transfers with the producer."""
    size, device = options.mib << 20, options.device
    agent = NixlAgent("device-reads-consumer", is_one_node=True)
    places = {"device": torch.zeros(size, dtype=torch.int8, device=device)}
    if device != "cpu":
        places["pinned host"] = torch.zeros(size, dtype=torch.int8, pin_memory=True)
    synchronize(device)
    bases = {name: agent.register(memory) for name, memory in places.items()}
    address, metadata, handle = told
    agent.add_peer(PRODUCER, bytes.fromhex(metadata))
    theirs, expected = mapped(bytes.fromhex(handle)), pattern(size, 1)
    for (name, memory), (count, each) in itertools.product(places.items(), shapes(size)):
        lists = [
            DescriptorList(*(np.array([n], dtype=np.int64) for n in (base, each, each)), count)
            for base in (bases[name], address)
        ]
        prepared = agent.prepare(PRODUCER, *lists, options.peer)
        order = np.random.default_rng(0).permutation(count).astype(np.int32)
        copy_s = least(functools.partial(copy_seconds, theirs, memory, order, each), options.repeats)
        for operation in ("read", "write") if name == "device" else ("read",):
            memory.zero_() if operation == "read" else memory.copy_(expected)
            synchronize(device)
            timed = functools.partial(seconds, agent, operation, prepared, order)
            timed()  # the first one wires
            if operation == "read":
                arrived = memory[: count * each].cpu()
                assert torch.equal(arrived, expected[: count * each]), "other bytes arrived"
            found = {"operation": operation, "memory": name, "count": count, "each": each}
            yield found | {"s": least(timed, options.repeats), "copy_s": copy_s}
        agent.forget(prepared)
    if size >= START_BYTES:
        peer = PeerMemory(agent_name=PRODUCER, address=address, num_bytes=size, device=options.peer)
        memory = places["device"][:START_BYTES]
        probe = CostProbe(agent, memory, peer, time.perf_counter_ns)
        yield {"operation": COSTS, "constants": asdict(finished(start_costs(probe)))}
        probe.close()
    agent.close()


def run(setting: str | None, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows under one value of UCX's setting, in two new processes."""
    own = {key: value for key, value in os.environ.items() if key != SETTING}
    environ = own | ({} if setting is None else {SETTING: setting, "UCX_WARN_UNUSED_ENV_VARS": "n"})
    sizes = [options.device, options.peer, str(options.mib), str(options.repeats)]
    pipe = {"stdout": subprocess.PIPE, "text": True, "env": environ}
    with tempfile.TemporaryDirectory(prefix="device-reads-") as folder:
        script = [sys.executable, __file__, "side", folder, *sizes]
        with _ended(subprocess.Popen(script, stdin=subprocess.PIPE, **pipe)) as producer:  # type: ignore[call-overload]
            told = producer.stdout.readline()
            assert told, f"the producer failed with {SETTING}={setting}"
            with _ended(subprocess.Popen([*script, told], **pipe)) as consumer:  # type: ignore[call-overload]
                for line in consumer.stdout:
                    yield json.loads(line) | {"setting": setting or "rayk's"}
                assert consumer.wait() == 0, f"the consumer failed with {SETTING}={setting}"


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[Any]:
    """A process that ends with the block."""
    with process:
        try:
            yield process
        finally:
            process.kill()


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


def peer_of(options: argparse.Namespace) -> str:
    """The device of the other process: the one asked for, a GPU of its own, or the same."""
    if options.peer is None and options.device != "cpu" and torch.cuda.device_count() > 1:
        return "cuda:1"
    return options.peer or str(options.device)


def fill(options: argparse.Namespace, page: harness.Page) -> None:
    if options.device is None:
        page.say("No CUDA device: nothing is measured (--device cpu makes a dry run).")
        return
    try:
        nixl_api()
    except DeviceError as error:
        page.say(f"Nothing is measured: {error}")
        return
    options.peer = peer_of(options)
    copy = copy_gbps(options)
    page.say(*environment(options.device))
    page.say(
        f"- {options.mib} MiB, {options.device} and {options.peer}, {SETTING} as told; copy inside a process "
        f"{copy:.4g} GB/s",
        "",
    )
    page.head(*COLUMNS, *COPIED)
    found: list[str] = []
    for setting in (None, "auto"):
        rows = run(setting, options)
        for row in rows if setting else itertools.chain(rows, repack(options)):
            if row["operation"] == COSTS:
                told = ", ".join(f"{name} {value:.4g}" for name, value in row["constants"].items())
                found.append(f"Costs as engines measure them, {row['setting']}: {told}.")
                continue
            rate = row["count"] * row["each"] / row["s"] / 1e9
            what = (row.get("setting", ""), row["operation"], row["memory"], row["count"], row["each"])
            copied = row.get("copy_s")
            beside = ("", "") if copied is None else (f"{copied * 1e3:.3f}", f"{copied / row['s']:.0%}")
            page.row(*what, f"{row['s'] * 1e3:.3f}", f"{rate:.4g}", f"{rate / copy:.0%}", *beside)
    page.say("", *found)


def main() -> int:
    return harness.run(
        fill,
        __file__,
        title="NIXL between the device memory of two processes",
        device={"default": "cuda:0" if torch.cuda.is_available() else None},
        peer={"default": None, "help": "device of the other process"},
        mib=256,
        repeats=7,
    )


def side(arguments: list[str]) -> None:
    """One of the two processes that `run` starts: the producer, or the consumer of what it told."""
    torch.set_num_threads(1)  # as UCX copies between host memories
    folder, device, peer, mib, repeats, *told = arguments
    if not told:
        produce(int(mib) << 20, peer, Path(folder))
        return
    options = argparse.Namespace(device=device, peer=peer, mib=int(mib), repeats=int(repeats))
    for row in consume(json.loads(told[0]), options):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        side(sys.argv[2:])
    else:
        sys.exit(main())

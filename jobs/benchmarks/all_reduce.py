"""Time the sum of a tensor over the GPUs of one host: NCCL, and through memory that all have mapped.

    python jobs/benchmarks/all_reduce.py [--ranks 2] [--repeats 20] [--record]
    python jobs/benchmarks/all_reduce.py --device cpu     # a dry run: gloo, between processes

Tensors of bfloat16, by size. Every way that rayk/parallel/symmetric.py knows takes each of them, also those
that it would not choose: the limits there are torch's and vLLM's, and these rows say what they should be. A
time is of the slowest rank, of one sum of CALLS in a graph, the median of the repeats. Every sum is checked
once. With fewer GPUs than ranks nothing is measured.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, option, run
from rayk.parallel.symmetric import CudaMemory
from rayk.parallel.torch_group import TorchComm

KIB = 1 << 10
SIZES = tuple(n * KIB for n in (8, 64, 256, 512, 1024, 4096, 10240, 65536))
"""Bytes. A layer of a model of 4,096 and a batch of 64 adds up 512 KiB."""
SMALL = (8 * KIB, 512 * KIB)
CALLS = 20
TIMEOUT_S = 60.0
RING = {"cpu": "gloo", "cuda": "NCCL"}


def measured(ranks: int, device: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Rows of `ranks` new processes, each with a device of its own: way, num_bytes, ms, and whether rayk
    chooses it; or why_not, where no memory is mapped."""
    addresses = [_free_address() for _ in range(2)]
    sides = [
        subprocess.Popen(
            [sys.executable, __file__, "side", str(rank), str(ranks), *addresses, device, str(repeats)],
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        assert sides[0].stdout is not None
        for line in sides[0].stdout:
            yield json.loads(line)
        failed = [rank for rank, side in enumerate(sides) if side.wait(TIMEOUT_S) != 0]
        assert not failed, f"ranks {failed} failed"
    finally:
        for side in sides:
            side.kill()
            side.wait()


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def side(arguments: list[str]) -> None:
    """One of the ranks; the first prints rows."""
    rank, size, first, second, kind, repeats = arguments
    torch.set_num_threads(1)
    device = torch.device("cpu" if kind == "cpu" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if kind == "cpu" else "nccl"
    alone = TorchComm(backend, int(rank), int(size), first, TIMEOUT_S)
    memory = CudaMemory(device) if device.type == "cuda" else None
    mapped = TorchComm(backend, int(rank), int(size), second, TIMEOUT_S, memory=memory)
    why_not = mapped.why_no_sums if memory is not None else "no CUDA device"
    if rank == "0" and why_not:
        print(json.dumps({"why_not": why_not}), flush=True)
    for num_bytes in SMALL if kind == "cpu" else SIZES:
        for row in _of_size(num_bytes, alone, mapped, device, int(repeats)):
            if rank == "0":
                print(json.dumps(row), flush=True)
    mapped.close()
    alone.close()


def _of_size(
    num_bytes: int, alone: TorchComm, mapped: TorchComm, device: torch.device, repeats: int
) -> Iterator[dict[str, Any]]:
    tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
    calls: dict[str, Callable[[], object]] = {RING[device.type]: lambda: alone.all_reduce(tensor)}
    chosen = None
    if (sums := mapped.sums) is not None:
        chosen = sums.way_of(tensor)
        fits = num_bytes <= sums.num_bytes
        calls |= {way.value: lambda way=way: sums.add_by(way, tensor) for way in sums.ways if fits}  # type: ignore[misc]
    for name, call in calls.items():
        tensor.copy_(torch.arange(len(tensor)) % 7 + alone.rank)
        call()
        expected = (torch.arange(len(tensor)) % 7) * alone.size + sum(range(alone.size))
        assert torch.equal(tensor.cpu(), expected.bfloat16()), f"{name}: another sum"
        tensor.zero_()  # which stays zero
        told = alone.gather_bytes(json.dumps(_milliseconds(call, alone, device, repeats)).encode())
        slowest = max(map(json.loads, told or [b"0"]))
        is_chosen = name == (chosen.value if chosen else RING[device.type])
        yield {"way": name, "num_bytes": num_bytes, "ms": slowest, "is_chosen": is_chosen}


def _milliseconds(call: Callable[[], object], comm: TorchComm, device: torch.device, repeats: int) -> float:
    """One sum of CALLS: on a GPU replayed from a graph, as a decode step does."""
    graph = None
    for _ in range(3):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
    times = []
    for _ in range(repeats):
        comm.gather_bytes(b"ready")
        began = time.perf_counter()
        if graph is None:
            for _ in range(CALLS):
                call()
        else:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
        took = (time.perf_counter() - began) * 1e3 if graph is None else start.elapsed_time(end)
        times.append(took / CALLS)
    return statistics.median(times)


def why_nothing(ranks: int, device: str) -> str | None:
    """What a measurement lacks."""
    if device != "cpu" and torch.cuda.device_count() < ranks:
        return f"{ranks} GPUs"
    return None


def fill(options: argparse.Namespace, page: Page) -> None:
    """Add a row for each size and way."""
    if lacking := why_nothing(options.ranks, options.device):
        page.say(f"Nothing is measured: no {lacking} (--device cpu makes a dry run).")
        return
    name = "a CPU, a dry run" if options.device == "cpu" else torch.cuda.get_device_name()
    page.say(
        f"- {options.ranks} ranks, {name}; bfloat16; {CALLS} sums a repeat, {options.repeats} repeats", ""
    )
    page.head("way", "KiB", "us", "chosen")
    for row in measured(options.ranks, options.device, options.repeats):
        if "why_not" in row:
            page.row("symmetric memory", "", "", row["why_not"])
        else:
            shown = f"{row['num_bytes'] / KIB:g}", f"{row['ms'] * 1e3:.1f}", "yes" if row["is_chosen"] else ""
            page.row(row["way"], *shown)


def main() -> int:
    device = option("cuda", "cuda, or cpu for a dry run", choices=("cuda", "cpu"))
    ranks = option(2, "processes, each with a device")
    return run(fill, __file__, title="Sums over GPUs", ranks=ranks, repeats=20, device=device)


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        side(sys.argv[2:])
    else:
        sys.exit(main())

"""The Ray actors of jobs/transfer_sweep.py: a producer's and a consumer's host, and Ray's own transport."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import sys
import time
import types
from typing import Any

import ray
import torch

from jobs.sweep_cells import SweepCell
from jobs.sweep_host import Host, Setup
from rayk.transfer.handshake import CacheDescription
from rayk.transfer.nixl_agent import nixl_api
from rayk.types.errors import RaykError

UCX = {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": "/tmp/rayk-ucx-%p.log"}
"""What makes UCX say which transport it chooses."""
RDT_NOTES = {
    "dense": "one tensor",
    "blocks": "a tensor per block",
}


class Hosts:
    """Both sides; every call has a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        actor = ray.remote(num_cpus=0.5)(Host)
        options: dict[str, Any] = {"runtime_env": {"env_vars": UCX}, "max_restarts": 0}
        self._producer = actor.options(name="sweep/producer", **options).remote("p")
        self._consumer = actor.options(name="sweep/consumer", **options).remote("d")
        self._numbers = itertools.count()

    def move(self, cell: SweepCell) -> dict[str, Any]:
        """One request from pages to pages. Raises the RaykError that it ends with."""
        lease = f"lease-{next(self._numbers)}"
        p, d = self._producer, self._consumer
        consumers = self._connect(cell)
        ticket = self._get(p.fill.remote(lease))
        found: dict[str, Any] = {"num_wrong_words": 0, "released": True}
        if cell.mode == "pull":
            found |= self._get(d.receive.remote(ticket))
            found["wrong"], found["released"] = self._get([d.check.remote(), p.released.remote(lease)])
        else:
            tables = self._get(d.tables.remote())
            found |= self._get(p.push.remote(ticket, tables, consumers))
            found["num_wrong_words"], found["wrong"] = self._get([d.verify.remote(ticket), d.check.remote()])
        return {k: v for k, v in found.items() if k not in ("memcpy_s", "raw_s", "of_raw")}

    def measure(self, cell: SweepCell, rounds: int) -> dict[str, Any]:
        """Times of one request, moved over and over; every byte checked after the last."""
        p, d = self._producer, self._consumer
        consumers = self._connect(cell)
        ticket = self._get(p.fill.remote("lease"))
        if cell.mode == "pull":
            found = self._get(d.measure.remote(ticket, rounds))
        else:
            tables = self._get(d.tables.remote())
            found = self._get(p.measure_push.remote(ticket, tables, consumers, rounds))
        wrong = sum(n for n, _ in self._get(d.check.remote()))
        if wrong:
            raise RuntimeError(f"{cell.cell_id}: {wrong} bytes are wrong")
        return found

    def _connect(self, cell: SweepCell) -> list[CacheDescription]:
        """Build both sides and have them meet; the consumer's ranks."""
        sides = self._producer, self._consumer
        described = self._get([side.build.remote(_setup(cell, i)) for i, side in enumerate(sides)])
        self._get([side.connect.remote(*described) for side in sides])
        consumers: list[CacheDescription] = described[1]
        return consumers

    def ucx_logs(self) -> dict[str, str]:
        """Mode -> what UCX of the side that posts said of its choices."""
        pull, push = self._get([self._consumer.ucx_log.remote(), self._producer.ucx_log.remote()])
        return {"pull": pull, "push": push}

    def baselines(self, cell: SweepCell, rounds: int) -> list[dict[str, Any]]:
        """Ray's own NIXL transport (RDT): tensors of as many bytes as the cell moves, whole and in blocks."""
        num_bytes = cell.num_tokens * (128 << 10)
        return [rdt_row(kind, num_bytes, rounds, self._timeout_s) for kind in RDT_NOTES]

    def close(self) -> None:
        """End the actors."""
        for actor in (self._producer, self._consumer):
            ray.kill(actor)

    def _get(self, refs: Any) -> Any:
        try:
            return ray.get(refs, timeout=self._timeout_s)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RaykError):
                raise error.cause from None
            raise


def _setup(cell: SweepCell, side: int) -> Setup:
    return Setup(
        shape=cell.shape,
        tp=cell.tp[side],
        layout=cell.layouts[side],
        block_size=cell.block_sizes[side],
        num_tokens=cell.num_tokens,
        scattered=cell.tables == "scattered",
        staging=cell.staging,
    )


@ray.remote(num_cpus=0.5, enable_tensor_transport=True)
class _Tensors:
    """One side of Ray's own transport."""

    def __init__(self, num_bytes: int, num_parts: int, fill: int) -> None:
        lend_nixl()
        self._whole = torch.full((num_bytes,), fill, dtype=torch.int8)
        self._parts = list(self._whole.split(num_bytes // num_parts))

    def put(self) -> list[ray.ObjectRef]:
        return [ray.put(self._parts, _tensor_transport="nixl")]

    def get(self, refs: list[ray.ObjectRef]) -> tuple[float, float, bool]:
        """(wall, CPU of this thread, whether the bytes are the producer's)."""
        from ray.experimental import set_target_for_ref

        began, cpu = time.perf_counter(), time.thread_time()
        set_target_for_ref(refs[0], self._parts)
        ray.get(refs[0])
        return time.perf_counter() - began, time.thread_time() - cpu, bool((self._whole == 1).all())


def lend_nixl() -> None:
    """Ray asks for the package `nixl`, which only hands on to the wheel of a CUDA version, which is there."""
    if importlib.util.find_spec("nixl") is None:
        package = types.ModuleType("nixl")
        package.__path__ = []
        sys.modules |= {"nixl": package, "nixl._api": nixl_api()}


def rdt_row(kind: str, num_bytes: int, rounds: int, timeout_s: float) -> dict[str, Any]:
    """One line of the ceiling's table."""
    num_parts = 1 if kind == "dense" else 256
    producer, consumer = _Tensors.remote(num_bytes, num_parts, 1), _Tensors.remote(num_bytes, num_parts, 2)
    times = []
    for _ in range(rounds + 1):  # the first makes agents and registers
        refs = ray.get(producer.put.remote(), timeout=timeout_s)
        wall, cpu, right = ray.get(consumer.get.remote(refs), timeout=timeout_s)
        if not right:
            raise RuntimeError("Ray's transport brought other bytes")
        times.append((wall, cpu))
    for actor in (producer, consumer):
        ray.kill(actor)
    wall, cpu = (statistics.median(t[i] for t in times[1:]) for i in (0, 1))
    return {
        "what": f"Ray RDT, {kind}",
        "mode": "pull",
        "tp": "1->1",
        "layouts": "",
        "block_sizes": "",
        "tables": "dense",
        "staging": "",
        "run_bytes": num_bytes // num_parts,
        "num_bytes": num_bytes,
        "num_descriptors": num_parts,
        "num_merged": None,
        "gb_per_s": num_bytes / wall / 1e9,
        "raw_gb_per_s": None,
        "memcpy_gb_per_s": None,
        "of_raw": None,
        "cpu_ms": cpu * 1e3,
        "post_ms": None,
        "wait_ms": None,
        "staged": False,
        "transport": "nixl through Ray",
        "loopback_percent": None,
        "note": RDT_NOTES[kind],
    }

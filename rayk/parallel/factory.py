"""Chooses how the ranks of an engine communicate."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm
from rayk.parallel.shm import ShmComm, why_no_shm
from rayk.parallel.symmetric import CudaMemory
from rayk.parallel.torch_group import TorchComm, open_store
from rayk.types.errors import DeviceError, UserError

KINDS = ("auto", "local", "shm", "gloo", "nccl")


class MadeComm(NamedTuple):
    """A comm, and why "auto" did not take its first choice, if so."""

    comm: Comm
    fallback: str | None


def make_comm(
    kind: str,
    rank: int,
    size: int,
    address: str,
    device: torch.device | str,
    timeout_s: float = 30.0,
    secret: bytes = b"",
) -> MadeComm:
    """Make the comm of rank `rank` of `size`. All ranks call it at about the same time, with equal kind.

     address: free host:port on rank 0's machine; a single rank needs none.
     secret: known only to the ranks, against strangers on sockets that any user may connect to.
     device: of the rank's tensors. A CUDA device must be the rank's own ("cuda:1").

    "auto" takes shm for CPU ranks of one host, NCCL for ranks with a GPU each, with small sums through memory
    that all have mapped where that is possible, else gloo; "nccl" is NCCL alone. Raises UserError and
    DeviceError for an impossible kind, CommError if the ranks do not meet.
    """
    device = torch.device(device)
    if kind not in KINDS:
        raise UserError(f"unknown comm {kind!r}", mend="one of " + ", ".join(KINDS))
    if size == 1:
        return MadeComm(LocalComm(), None)
    _refuse_misfits(kind, size, device)
    if kind == "auto":
        return _choose(rank, size, address, device, timeout_s, secret)
    if kind == "shm":
        return MadeComm(ShmComm(rank, size, address, timeout_s), None)
    return MadeComm(TorchComm(kind, rank, size, address, timeout_s, secret=secret), None)


def _refuse_misfits(kind: str, size: int, device: torch.device) -> None:
    if kind == "local":
        raise UserError(f"comm local has one rank, not {size}", mend="use comm: auto")
    if kind == "shm" and device.type != "cpu":
        raise DeviceError("comm shm moves CPU tensors only", mend="use comm: nccl or gloo")
    if kind == "nccl" and device.type != "cuda":
        raise DeviceError("comm nccl needs a CUDA device", mend="use comm: shm or gloo")


def _choose(
    rank: int, size: int, address: str, device: torch.device, timeout_s: float, secret: bytes
) -> MadeComm:
    store = open_store(address, rank, size, timeout_s)
    # Every rank reads all the answers, so all come to the same choice.
    store.set(f"rank{rank}", json.dumps(_where_am_i(device)))
    places = [json.loads(store.get(f"rank{r}")) for r in range(size)]
    first_choice = "shm" if device.type == "cpu" else "nccl"
    reason = _why_no_shm(places) if first_choice == "shm" else _why_no_nccl(places)
    if reason is None and first_choice == "shm":
        return MadeComm(ShmComm(rank, size, address, timeout_s), None)
    if reason is not None:
        return MadeComm(TorchComm("gloo", rank, size, address, timeout_s, store=store, secret=secret), reason)
    apart = _why_no_sums(places)
    memory = None if apart else CudaMemory(device)
    comm = TorchComm("nccl", rank, size, address, timeout_s, store=store, secret=secret, memory=memory)
    why_not = apart or comm.why_no_sums
    return MadeComm(comm, f"sums by NCCL alone, without symmetric memory: {why_not}" if why_not else None)


def _where_am_i(device: torch.device) -> dict[str, str | None]:
    """List facts that decide how this rank can be reached."""
    gpu = None
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    no_shm = why_no_shm()
    host = "" if no_shm else _host_identity()
    return {"host": host, "gpu": gpu, "no_shm": no_shm}


def _host_identity() -> str:
    """Name what processes share that have the same kernel, network namespace (local sockets) and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()} {os.getuid()}"


def _why_no_shm(places: list[dict[str, str | None]]) -> str | None:
    for place in places:
        if place["no_shm"] is not None:
            return place["no_shm"]
    if len({place["host"] for place in places}) > 1:
        return "the ranks are not on one host (or not in one container): gloo instead of shm"
    return None


def _why_no_sums(places: list[dict[str, str | None]]) -> str | None:
    if len({place["host"] for place in places}) > 1 or any(place["no_shm"] for place in places):
        return "the ranks are not on one host (or not in one container)"
    return None


def _why_no_nccl(places: list[dict[str, str | None]]) -> str | None:
    if not dist.is_nccl_available():
        return "this torch is built without NCCL: gloo instead"
    if len({place["gpu"] for place in places}) < len(places):
        return "ranks share one GPU, which NCCL refuses: gloo through the host instead"
    return None

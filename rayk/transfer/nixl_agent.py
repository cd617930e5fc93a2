"""The agent over NIXL (UCX). The only home of the nixl package.

Settings, all measured: no progress thread (it spins a whole core; instead both ends poll, also while the
first transfer wires them up); one registration per buffer; strided descriptor lists prepared once and
picked from by int32 indices, so that neighbouring blocks merge. On one CPU host UCX copies inside `read` and
`write`, which then block for the whole copy.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rayk.transfer.agent import (
    AgentFacts,
    DescriptorList,
    Handle,
    Ints32,
    Transfer,
    TransferState,
    base_address,
)
from rayk.types.errors import DeviceError, TransferError

_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
_NET_DEVICES = "UCX_NET_DEVICES"
_GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
_TRANSPORTS = "UCX_TLS"
_LEGACY_IPC_CAPABLE = 10
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE of cuda.h."""
_LOCAL_SIDE = "NIXL_INIT_AGENT"


@cache
def nixl_api() -> ModuleType:
    """nixl's Python API, from whichever wheel is there. Raises DeviceError when none is."""
    # An INFO line per agent and backend would drown what rayk has to say.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    problems = []
    for package in _PACKAGES:
        try:
            module = importlib.import_module(f"{package}._api")
        except ImportError as error:
            problems.append(f"{package}: {error}")
            continue
        logging.getLogger(module.__name__).setLevel(logging.WARNING)
        return module
    raise DeviceError(
        "NIXL cannot be loaded (" + "; ".join(problems) + ")",
        mend="pip install nixl-cu13 (or nixl-cu12 for CUDA 12), on Linux with glibc",
    )


@cache
def nixl_errors() -> tuple[type[Exception], ...]:
    """Everything the bindings raise; they share no base class."""
    bindings = nixl_api().nixlBind
    found = (getattr(bindings, name) for name in dir(bindings) if name.endswith("Error"))
    return tuple(e for e in found if isinstance(e, type) and issubclass(e, Exception))


@contextmanager
def _told(doing: str) -> Iterator[None]:
    """Within the block what NIXL raises is the machine's doing: memory it cannot pin, a lost network."""
    try:
        yield
    except nixl_errors() as error:
        raise OSError(f"NIXL, {doing}: {error!r}") from error


@dataclass(frozen=True, eq=False)
class _Prepared:
    peer: str
    local: Any
    remote: Any


@dataclass(frozen=True, eq=False)
class _PostedTransfer:
    peer: str
    what: str
    """read from or write to, for people."""
    handle: Any
    first_state: str
    """State that posting returned."""


class NixlAgent:
    """A TransferAgent over one NIXL backend.

    error_handling: "none" for engines of one host: small messages go through shared memory, wiring does not
    wait for the peer, and reads from a dead process still fail. "peer" across hosts, where only it notices
    dead peers; the first read then waits until the peer polls.
    is_one_node: all peers are on this machine; UCX then listens on loopback alone.
    Raises DeviceError when NIXL or its backend cannot be used.
    """

    def __init__(
        self, name: str, *, backend: str = "UCX", error_handling: str = "none", is_one_node: bool = False
    ) -> None:
        assert error_handling in ("none", "peer"), error_handling
        api = nixl_api()
        self._name = name
        self._backend = backend
        config = api.nixl_agent_config(backends=[], enable_prog_thread=False)
        options = {"ucx_error_handling_mode": error_handling} if backend == "UCX" else {}
        _let_cuda_ipc_read()
        try:
            self._nixl = api.nixl_agent(name, config)
            with _net_devices(is_one_node=is_one_node):
                self._nixl.create_backend(backend, options)
        except nixl_errors() as error:
            raise DeviceError(
                f"NIXL's backend {backend} does not start: {error!r}",
                mend="see `rayk doctor`; UCX_TLS, if set, must allow cma, or tcp",
            ) from error
        # UCX has read its settings: what changes from now on concerns other agents.
        self._settings = {name: os.environ[name] for name in (_GET_ZCOPY, _TRANSPORTS) if name in os.environ}
        self._is_out_of_reach = False
        """Some device memory is none that other processes may map."""
        self._regions: list[tuple[int, int, str, int, Any]] = []
        self._peers: set[str] = set()
        self._leaving: set[str] = set()
        """Peers that were removed while transfers with them were in flight."""
        self._handles: dict[Handle, _Prepared] = {}
        self._in_flight: dict[Transfer, _PostedTransfer] = {}
        self._ids = itertools.count()

    @property
    def name(self) -> str:
        return self._name

    @property
    def transport(self) -> str:
        """nixl/ and the backend."""
        return f"nixl/{self._backend}"

    @property
    def transport_as_set(self) -> str:
        """Add what UCX was told, once device memory is registered."""
        if all(memory != "VRAM" for _, _, memory, _, _ in self._regions):
            return self.transport
        told = [f"{name}={value}" for name, value in self._settings.items()]
        return ", ".join([self.transport, *told, *([_OUT_OF_REACH] if self._is_out_of_reach else [])])

    def register(self, tensor: torch.Tensor) -> int:
        address = base_address(tensor)
        memory, device = _memory(tensor.device)
        with _told(f"registering {tensor.numel()} bytes"):
            registered = self._nixl.register_memory([(address, tensor.numel(), device, "")], memory)
        self._regions.append((address, tensor.numel(), memory, device, registered))
        if memory == "VRAM" and not self._is_out_of_reach and not _is_mappable(address):
            self._is_out_of_reach = True
            logging.getLogger(__name__).warning("%s: %s; %s", self._name, _OUT_OF_REACH, _MEND)
        return address

    def deregister(self, address: int) -> None:
        for region in [r for r in self._regions if r[0] == address]:
            self._regions.remove(region)
            with _told("deregistering memory"):
                self._nixl.deregister_memory(region[-1])

    def metadata(self) -> bytes:
        with _told("describing its memory"):
            return bytes(self._nixl.get_agent_metadata())

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Raises TransferError when the peer cannot be reached."""
        if name in self._peers:
            return
        self._see_off()
        try:
            # One that is leaving may have registered more memory meanwhile.
            found = self._nixl.add_remote_agent(metadata)
        except nixl_errors() as error:
            raise TransferError("", f"peer {name} cannot be added: {error!r}") from error
        found = found.decode() if isinstance(found, bytes) else found
        if found != name:
            raise TransferError("", f"peer {name} cannot be added: its metadata are those of {found}")
        self._leaving.discard(name)
        self._peers.add(name)

    def remove_peer(self, name: str) -> None:
        """To forget a peer or a request ends no transfer: one whose other end stands still
        goes on when that comes to itself."""
        if name in self._peers:
            self._peers.discard(name)
            self._leaving.add(name)
            self._see_off()

    def _see_off(self) -> None:
        """Forget those that are leaving and have no transfer in flight any more."""
        for name in tuple(self._leaving):
            # Whoever holds one may never ask again; it is told FAILED if it does.
            for transfer in [t for t, r in self._in_flight.items() if r.peer == name]:
                self.release(transfer)
            if not any(r.peer == name for r in self._in_flight.values()):
                self._forget_peer(name)

    def _forget_peer(self, name: str) -> None:
        self._peers.discard(name)
        self._leaving.discard(name)
        for transfer in [t for t, r in self._in_flight.items() if r.peer == name]:
            self._drop(transfer)
        for handle in [h for h, p in self._handles.items() if p.peer == name]:
            self.forget(handle)
        try:
            self._nixl.remove_remote_agent(name)
        except nixl_errors() as error:
            logging.getLogger(__name__).debug("forgetting peer %s: %r", name, error)

    def prepare(
        self, peer: str, local: DescriptorList, remote: DescriptorList, remote_device: str = "cpu"
    ) -> Handle:
        """Raises TransferError when NIXL refuses the lists."""
        memory, device = self._memory_of(int(local.addresses[0]))
        remote_memory, remote_index = _memory(torch.device(remote_device))
        try:
            prepared = _Prepared(
                peer,
                self._nixl.prep_xfer_dlist(_LOCAL_SIDE, local.strided(device), memory),
                self._nixl.prep_xfer_dlist(peer, remote.strided(remote_index), remote_memory),
            )
        except nixl_errors() as error:
            raise TransferError("", f"transfers with {peer} cannot be prepared: {error!r}") from error
        handle = Handle(next(self._ids))
        self._handles[handle] = prepared
        return handle

    def forget(self, handle: Handle) -> None:
        prepared = self._handles.pop(handle, None)
        if prepared is not None:
            with _told("releasing descriptors"):
                self._nixl.release_dlist_handle(prepared.local)
                self._nixl.release_dlist_handle(prepared.remote)

    def read(self, handle: Handle, local_indices: Ints32, remote_indices: Ints32) -> Transfer:
        return self._post("READ", "read from", handle, (local_indices, remote_indices), b"")

    def write(
        self,
        handle: Handle,
        local_indices: Ints32,
        remote_indices: Ints32,
        notification: bytes | None = None,
    ) -> Transfer:
        return self._post("WRITE", "write to", handle, (local_indices, remote_indices), notification or b"")

    def _post(
        self, operation: str, what: str, handle: Handle, indices: tuple[Ints32, Ints32], notification: bytes
    ) -> Transfer:
        prepared = self._handles[handle]
        try:
            request = self._nixl.make_prepped_xfer(
                operation, prepared.local, indices[0], prepared.remote, indices[1], notification
            )
            state = self._nixl.transfer(request)
        except nixl_errors() as error:
            raise TransferError("", f"a {what} {prepared.peer} could not start: {error!r}") from error
        transfer = Transfer(next(self._ids))
        self._in_flight[transfer] = _PostedTransfer(prepared.peer, what, request, state)
        return transfer

    def poll(self, transfer: Transfer) -> TransferState:
        """One that failed counts as over: NIXL names the first error of many parts, and
        does not say whether others still move."""
        posted = self._in_flight.get(transfer)
        if posted is None:
            return TransferState.FAILED
        if posted.first_state == "DONE":
            return TransferState.DONE
        try:
            state = self._nixl.check_xfer_state(posted.handle)
        except nixl_errors() as error:
            logging.getLogger(__name__).warning("%s %s failed: %r", posted.what, posted.peer, error)
            return TransferState.FAILED
        if state == "PROC":
            return TransferState.PENDING
        return TransferState.DONE if state == "DONE" else TransferState.FAILED

    def release(self, transfer: Transfer) -> bool:
        """Return what is in flight is never cancelled: NIXL can drop its request, but does not
        say whether the transport still reads or writes."""
        if transfer in self._in_flight and self.poll(transfer) is TransferState.PENDING:
            return False
        self._drop(transfer)
        return True

    def _drop(self, transfer: Transfer) -> None:
        posted = self._in_flight.pop(transfer, None)
        if posted is None:
            return
        try:
            self._nixl.release_xfer_handle(posted.handle)
        except nixl_errors() as error:
            # Still active; the handle's finaliser queues it to be freed with the agent.
            logging.getLogger(__name__).debug("releasing a %s %s: %r", posted.what, posted.peer, error)

    def notify(self, peer: str, message: bytes) -> None:
        try:
            self._nixl.send_notif(peer, message)
        except nixl_errors() as error:
            raise TransferError("", f"peer {peer} cannot be notified: {error!r}") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        self._see_off()
        with _told("asking for notifications"):
            found: dict[str | bytes, list[bytes]] = self._nixl.get_new_notifs()
        return [
            (peer.decode() if isinstance(peer, bytes) else peer, message)
            for peer, messages in found.items()
            for message in messages
        ]

    def close(self) -> None:
        for peer in (*self._peers, *self._leaving):
            self._forget_peer(peer)
        for *_, registered in self._regions:
            self._nixl.deregister_memory(registered)
        self._regions.clear()

    def _memory_of(self, address: int) -> tuple[str, int]:
        for start, size, memory, device, _ in self._regions:
            if start <= address < start + size:
                return memory, device
        raise AssertionError(f"{address:#x} is not registered")


def _let_cuda_ipc_read() -> None:
    """Have UCX read the device memory of another process as it writes it. Where it sees no NVLink it reads in
    small pieces instead: 0.7 against 1,400 GB/s on one H100. What the user has set stays."""
    # Without CUDA no module of UCX's asks for it, and UCX warns of that.
    if torch.cuda.is_available():
        os.environ.setdefault(_GET_ZCOPY, "on")


_OUT_OF_REACH = "device memory that cuda_ipc cannot map: transfers on this host go through TCP"
_MEND = "start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"


def _is_mappable(address: int) -> bool:
    """Whether other processes may map this device memory, as cuda_ipc does. They may not map what torch
    allocates in expandable segments: UCX registers it without a word, and reads 0.3 instead of 200 GB/s
    (NIXL's issue 1754). True where the driver does not say."""
    found = ctypes.c_uint64(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    failed = driver.cuPointerGetAttribute(ctypes.byref(found), _LEGACY_IPC_CAPABLE, ctypes.c_uint64(address))
    return bool(failed or found.value)


@contextmanager
def _net_devices(*, is_one_node: bool) -> Iterator[None]:
    """For a backend that starts here: of the network's devices loopback and RDMA alone, for peers on this
    machine. What the user has set stays."""
    if not is_one_node or _NET_DEVICES in os.environ:
        yield
        return
    ports = Path("/sys/class/infiniband").glob("*/ports/*")
    os.environ[_NET_DEVICES] = ",".join(["lo", *sorted(f"{p.parent.parent.name}:{p.name}" for p in ports)])
    try:
        yield
    finally:
        del os.environ[_NET_DEVICES]


def measure(num_bytes: int = 32 << 20, *, device: str = "cpu", backend: str = "UCX") -> AgentFacts:
    """Return what NIXL does on this machine, by reading `num_bytes` between two agents of this process.

    Keys: transport, device, num_bytes, gb_per_s (10^9 bytes, best of 5), latency_us (64 bytes, median), or
    `error` with what went wrong. Every byte is compared.
    """
    facts: AgentFacts = {"transport": f"nixl/{backend}", "device": device, "num_bytes": num_bytes}
    try:
        errors: tuple[type[Exception], ...] = (TransferError, RuntimeError, *nixl_errors())
        producer = NixlAgent(f"rayk-measure-{os.getpid()}-p", backend=backend, is_one_node=True)
        consumer = NixlAgent(f"rayk-measure-{os.getpid()}-d", backend=backend, is_one_node=True)
    except DeviceError as error:
        return {**facts, "error": str(error)}
    try:
        facts.update(_measure(producer, consumer, num_bytes, torch.device(device)))
    except errors as error:
        facts["error"] = str(error)
    finally:
        consumer.close()
        producer.close()
    return facts


def _measure(producer: NixlAgent, consumer: NixlAgent, num_bytes: int, device: torch.device) -> AgentFacts:
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, device=device)
    landed = torch.zeros_like(source)
    remote, local = producer.register(source), consumer.register(landed)
    consumer.add_peer(producer.name, producer.metadata())
    facts: AgentFacts = {}
    for name, size, rounds in (("latency", 64, 21), ("rate", num_bytes, 5)):
        sizes = np.array([size], dtype=np.int64)
        ours, theirs = (
            DescriptorList(np.array([a], dtype=np.int64), sizes, sizes, 1) for a in (local, remote)
        )
        handle = consumer.prepare(producer.name, ours, theirs, str(device))
        times = sorted(_timed_read(producer, consumer, handle) for _ in range(rounds))
        if name == "latency":
            facts["latency_us"] = times[len(times) // 2] * 1e6
        else:
            facts["gb_per_s"] = num_bytes / times[0] / 1e9
    if not torch.equal(source, landed):
        raise TransferError("", "the bytes read are not the bytes written")
    return facts


def _timed_read(producer: NixlAgent, consumer: NixlAgent, handle: Handle, timeout_s: float = 20.0) -> float:
    index = np.zeros(1, dtype=np.int32)
    began = time.perf_counter()
    transfer = consumer.read(handle, index, index)
    while (state := consumer.poll(transfer)) is TransferState.PENDING:
        producer.notifications()
        if time.perf_counter() - began > timeout_s:
            raise TransferError("", f"a read was not over after {timeout_s:g} s")
    consumer.release(transfer)
    if state is not TransferState.DONE:
        raise TransferError("", "a read failed")
    return time.perf_counter() - began


def _memory(device: torch.device) -> tuple[str, int]:
    """NIXL's name of a device's memory, and its index."""
    return ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)

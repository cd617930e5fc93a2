"""What transfers with a peer cost, measured: reads of its memory, copies as a staged read makes them, and the
linear model of `transfer.costs` fitted to their times.

A measurement is a generator that yields between reads, and while one takes long: an engine that decodes
meanwhile goes on. It reads the peer's cache, whatever that holds, into memory of its own. The two must be two
processes: within one, UCX moves device memory in another way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rayk.kernels.copy_runs import copy_runs, make_run_table
from rayk.kv.caches import empty_bytes
from rayk.transfer.agent import DescriptorList, Handle, Transfer, TransferAgent, TransferState
from rayk.transfer.costs import CostTable, TransferCosts
from rayk.transfer.handshake import CacheDescription
from rayk.types.errors import TransferError

Times = npt.NDArray[np.float64]
"""Nanoseconds by case."""
Timed = Generator[None, None, int]
"""Takes a case once; returns its nanoseconds."""

STEP_NS = 20_000_000
"""A step waits no longer for a read."""
LIMIT_NS = 5_000_000_000
"""Nothing is known of a peer that takes longer."""
BUDGET_NS = 500_000_000
"""No round begins later."""
ROUNDS = 3
START_BYTES = 8 << 20
"""Bytes that are read from, and as many that are read into."""
LEAST_BYTE_NS = 1e-4
"""No memory is faster: a byte's share of the times may drown in that of a request."""
MAX_LISTED = 4096
"""Blocks of the peer's that a copy's list names."""


@dataclass(frozen=True)
class Move:
    """`count` descriptors of `length` bytes: neighbours that join, or none that do."""

    count: int
    length: int
    is_joined: bool = False

    @property
    def num_merged(self) -> int:
        """Count what is left when neighbours are joined."""
        return 1 if self.is_joined else self.count

    @property
    def stride(self) -> int:
        """Compute the bytes from one to the next: blocks twice as far apart as they are long never join."""
        return self.length if self.is_joined or self.count == 1 else 2 * self.length

    def terms(self) -> tuple[float, ...]:
        """List what request, descriptor, index and byte are multiplied by."""
        return (1, self.num_merged, self.count, self.count * self.length)


@dataclass(frozen=True)
class Copy:
    """`runs` runs of `length` bytes in each of `blocks` blocks, spread as heads are among tokens."""

    runs: int
    length: int
    blocks: int

    def terms(self) -> tuple[float, ...]:
        """List what chunk, run and byte are multiplied by."""
        count = self.runs * self.blocks
        return (1, count, count * self.length)


START_MOVES = (
    Move(1, 64),
    Move(1, 64 << 10),
    Move(1, 1 << 20),
    Move(1, START_BYTES),
    Move(64, 512),
    Move(64, 16 << 10),
    Move(512, 512),
    Move(512, 4096),
    Move(1024, 4096, is_joined=True),
    Move(4096, 64, is_joined=True),
)
"""17 MiB and 1,152 descriptors that do not join."""
START_COPIES = (Copy(16, 512, 1), Copy(256, 128, 16), Copy(1024, 64, 16), Copy(64, 4096, 16))


def fit(terms: Sequence[tuple[float, ...]], times: Times) -> Times:
    """Find the constants >= 0 that minimise the sum of squared relative errors: least squares, dropping the
    most negative constant until none is."""
    weighted = np.array(terms) / times[:, None]
    kept = list(range(weighted.shape[1]))
    while True:
        constants, *_ = np.linalg.lstsq(weighted[:, kept], np.ones(len(times)), rcond=None)
        if constants.min() >= 0:
            found = np.zeros(weighted.shape[1])
            found[kept] = constants
            return found
        del kept[int(constants.argmin())]


def fit_costs(moves: Sequence[Move], move_ns: Times, copies: Sequence[Copy], copy_ns: Times) -> TransferCosts:
    """Fit the model to the times of these cases."""
    request, descriptor, index, byte = map(float, fit([move.terms() for move in moves], move_ns))
    chunk, run, copied = map(float, fit([copy.terms() for copy in copies], copy_ns))
    return TransferCosts(request, descriptor, index, max(byte, LEAST_BYTE_NS), chunk, run, copied)


@dataclass(frozen=True, kw_only=True)
class PeerMemory:
    """Registered bytes of another agent."""

    agent_name: str
    address: int
    num_bytes: int
    device: str


@dataclass(eq=False)
class CostProbe:
    """Takes cases between registered memory of ours, int8 [bytes], and a peer's."""

    agent: TransferAgent
    memory: torch.Tensor
    peer: PeerMemory
    clock_ns: Callable[[], int]
    in_flight: Transfer | None = None
    """Bytes may still come of it."""
    _handles: list[Handle] = field(default_factory=list)

    def move(self, move: Move) -> Callable[[], Timed]:
        """Prepare a read."""
        handle = self.agent.prepare(
            self.peer.agent_name, *self.lists(move.length, move.stride, move.count), self.peer.device
        )
        self._handles.append(handle)
        order = np.arange(move.count, dtype=np.int32)
        random = np.random.default_rng(0)
        ours, theirs = (order, order) if move.is_joined else (random.permutation(order) for _ in range(2))
        return lambda: self.read(handle, ours, theirs)

    def read(self, handle: Handle, ours: npt.NDArray[np.int32], theirs: npt.NDArray[np.int32]) -> Timed:
        """Time a read. Raises TransferError where it fails or takes too long."""
        began = looked = self.clock_ns()
        self.in_flight = self.agent.read(handle, ours, theirs)
        while (state := self.agent.poll(self.in_flight)) is TransferState.PENDING:
            now = self.clock_ns()
            if now - began > LIMIT_NS:
                raise TransferError("", f"a read took over {LIMIT_NS / 1e9:g} s")
            if now - looked > STEP_NS:
                yield
                looked = self.clock_ns()
        took = self.clock_ns() - began
        self.agent.release(self.in_flight)
        self.in_flight = None
        if state is not TransferState.DONE:
            raise TransferError("", "a read failed")
        return took

    def copy(self, copy: Copy) -> Callable[[], Timed]:
        """Prepare a staged chunk without its read: its lists and its copies."""
        page = copy.runs * copy.length
        starts = np.arange(copy.runs, dtype=np.int64) * copy.length
        # Runs that are neighbours in the page come from far apart.
        order = np.random.default_rng(0).permutation(copy.runs)
        sizes, strides = np.full(copy.runs, copy.length), np.full(copy.runs, page)
        table = make_run_table(starts[order], starts, sizes, strides, strides, self.memory.device)
        half = len(self.memory) // 2
        source, destination = self.memory[:half], self.memory[half : 2 * half]
        blocks = np.arange(copy.blocks)
        num_listed = min(MAX_LISTED, min(len(self.memory), self.peer.num_bytes) // page)

        def timed() -> Timed:
            yield from ()
            self._synchronize()
            began = self.clock_ns()
            lists = self.lists(copy.length, page, num_listed)
            handle = self.agent.prepare(self.peer.agent_name, *lists, self.peer.device)
            copy_runs(source, destination, table, blocks, blocks)
            self.agent.forget(handle)
            self._synchronize()
            return self.clock_ns() - began

        return timed

    def lists(self, length: int, stride: int, num_blocks: int) -> tuple[DescriptorList, DescriptorList]:
        """Make ours and the peer's: one run over `num_blocks` blocks."""
        sizes, strides = np.array([length], dtype=np.int64), np.array([stride], dtype=np.int64)
        ours, theirs = (
            DescriptorList(np.array([address], dtype=np.int64), sizes, strides, num_blocks)
            for address in (self.memory.data_ptr(), self.peer.address)
        )
        return ours, theirs

    def close(self) -> bool:
        """Forget everything; False, and nothing done, while bytes may still come."""
        if self.in_flight is not None and not self.agent.release(self.in_flight):
            return False
        self.in_flight = None
        for handle in self._handles:
            self.agent.forget(handle)
        self._handles.clear()
        return True

    def _synchronize(self) -> None:
        if self.memory.is_cuda:
            torch.cuda.current_stream(self.memory.device).synchronize()


def least_ns(
    cases: Sequence[Callable[[], Timed]],
    rounds: int,
    clock_ns: Callable[[], int],
    *,
    budget_ns: float = np.inf,
    limit_ns: float = np.inf,
) -> Generator[None, None, Times]:
    """Take all cases in turns; return the least nanoseconds of each. One round more, the first, is not
    counted; after one that is, none begins later than the budget. Raises TransferError beyond the limit."""
    least = np.full(len(cases), np.inf)
    began = clock_ns()
    for number in range(rounds + 1):
        if number > 1 and clock_ns() - began > budget_ns:
            break
        for i, case in enumerate(cases):
            took = yield from case()
            if number:
                least[i] = min(least[i], max(took, 1))
            if clock_ns() - began > limit_ns:
                raise TransferError("", f"its reads took over {limit_ns / 1e9:g} s")
            yield
    return least


def start_costs(probe: CostProbe) -> Generator[None, None, TransferCosts]:
    """Measure what an engine does at its start. Raises TransferError where a read fails or takes too long."""
    moves, copies = [probe.move(m) for m in START_MOVES], [probe.copy(c) for c in START_COPIES]
    for case in copies:  # kernels may have to be compiled: that is not the peer's doing
        yield from case()
        yield
    cases, limits = [*moves, *copies], {"budget_ns": BUDGET_NS, "limit_ns": LIMIT_NS}
    times = yield from least_ns(cases, ROUNDS, probe.clock_ns, **limits)
    return fit_costs(START_MOVES, times[: len(moves)], START_COPIES, times[len(moves) :])


class Measurement:
    """Measures one peer for a table."""

    def __init__(
        self,
        agent: TransferAgent,
        device: torch.device,
        peer: CacheDescription,
        table: CostTable,
        clock_ns: Callable[[], int],
    ) -> None:
        self._key = agent.transport, str(device), peer.device
        self._agent = agent
        self._peer = peer
        self._table = table
        self._clock_ns = clock_ns
        self._memory = empty_bytes(START_BYTES, device).zero_()
        agent.register(self._memory)
        theirs = PeerMemory(
            agent_name=peer.agent_name,
            address=peer.base_address,
            num_bytes=peer.geometry.pages_bytes,
            device=peer.device,
        )
        self._probe = CostProbe(agent, self._memory, theirs, clock_ns)
        self._run = self._take()

    def step(self) -> bool:
        """Go on for a little while; whether it is over: the table then has a row."""
        until = self._clock_ns() + STEP_NS
        try:
            next(self._run)
            while self._probe.in_flight is None and self._clock_ns() < until:
                next(self._run)
        except StopIteration:
            return True
        except TransferError as error:
            self._give_up(error.reason)
            return True
        return False

    def close(self) -> bool:
        """Give the memory back; False, and nothing done, while bytes may still come."""
        self._run.close()
        if not self._probe.close():
            return False
        self._agent.deregister(self._memory.data_ptr())
        return True

    def _take(self) -> Generator[None, None, None]:
        began = self._clock_ns()
        if self._probe.peer.num_bytes < START_BYTES:
            self._give_up(f"{self._peer.engine} has only {self._probe.peer.num_bytes} bytes to read")
            return
        costs = yield from start_costs(self._probe)
        self._table.put(*self._key, costs)
        _log.info(
            "transfers with %s (%s, %s <- %s) cost %s: measured in %.0f ms",
            self._peer.engine,
            *self._key,
            costs,
            (self._clock_ns() - began) / 1e6,
        )

    def _give_up(self, why: str) -> None:
        self._table.put(*self._key, why)
        _log.warning("what transfers with %s cost could not be measured: %s", self._peer.engine, why)


class Measurements:
    """One rank's, by name of the engine that is measured."""

    def __init__(
        self, agent: TransferAgent, device: torch.device, table: CostTable, clock_ns: Callable[[], int]
    ) -> None:
        self._agent = agent
        self._device = device
        self._table = table
        self._clock_ns = clock_ns
        self._open: dict[str, Measurement] = {}
        self._late: list[Measurement] = []
        """Bytes may still come of these."""

    def __contains__(self, name: str) -> bool:
        """Tell whether one is under way."""
        return name in self._open

    def step(self, name: str, peer: CacheDescription) -> bool:
        """Begin, or go on; whether all is known that will be of a peer of this kind."""
        if name not in self._open:
            if not self._table.wants(self._agent.transport, str(self._device), peer.device):
                return True
            made = self._agent, self._device, peer, self._table, self._clock_ns
            self._open[name] = Measurement(*made)
        if not self._open[name].step():
            return False
        self.forget(name)
        return True

    def forget(self, name: str) -> None:
        """The engine is gone, or all is known of it."""
        measurement = self._open.pop(name, None)
        if measurement is not None:
            self._late.append(measurement)
            self.take_back()

    def take_back(self) -> None:
        """Give back memory that nothing comes into any more; costs nothing where there is none."""
        self._late = [measurement for measurement in self._late if not measurement.close()]


_log = logging.getLogger(__name__)

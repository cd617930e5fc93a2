"""What transfers cost, and the choices that follow: staging, and how many layers a push writes at once. Pure.

The model is linear: so much per request, per descriptor that the transport sees, per descriptor that is only
named before neighbours are joined, per byte; and for a staged read the same of its stretches, and of the
copies out of the staging buffer. The code's constants come of `jobs/benchmarks/transfer_costs.py`, which also
says how far these are off on the machine at hand; where device memory is involved, engines measure their own
when they are wired up (`transfer.measuring`) and put them into their `CostTable`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayk.types.errors import TransferError

MAX_DESCRIPTORS = 1 << 16
"""A request of more descriptors than these is staged wherever that takes fewer; no write has more, unless of
one block."""


@dataclass(frozen=True, slots=True)
class TransferCosts:
    """Nanoseconds, of one transport and kind of device."""

    request_ns: float
    """Per read or write, whatever it moves."""
    descriptor_ns: float
    """Per descriptor left after neighbours are joined."""
    index_ns: float
    """Per descriptor asked for."""
    byte_ns: float
    """Per byte moved."""
    prepare_ns: float
    """Per staged chunk: making its descriptor lists and its table of copies."""
    copy_run_ns: float
    """Per run copied out of the staging buffer."""
    copy_byte_ns: float
    """Per byte copied out of the staging buffer."""

    def move_ns(self, num_descriptors: int, num_merged: int, num_bytes: int, num_requests: int = 1) -> float:
        """A read or write; descriptors asked for, and left after neighbours are joined."""
        return (
            num_requests * self.request_ns
            + num_merged * self.descriptor_ns
            + num_descriptors * self.index_ns
            + num_bytes * self.byte_ns
        )

    def repack_ns(self, num_runs: int, num_bytes: int, num_chunks: int = 1) -> float:
        """Estimate the copies out of the staging buffer, and what staging prepares."""
        return num_chunks * self.prepare_ns + num_runs * self.copy_run_ns + num_bytes * self.copy_byte_ns

    @property
    def gap_bytes(self) -> int:
        """Bytes that are cheaper to read along than to leave out by one descriptor more."""
        return int((self.descriptor_ns + self.index_ns) / self.byte_ns)


# Between two processes of one host (CMA).
_NIXL_CPU = TransferCosts(
    request_ns=7_000,
    descriptor_ns=2_000,
    index_ns=5,
    byte_ns=0.14,
    prepare_ns=60_000,
    copy_run_ns=3,
    copy_byte_ns=0.09,
)
# Between two processes of one H100 (cuda_ipc): descriptors and bytes as measured by
# jobs/benchmarks/device_reads.py, the rest estimated. Engines use it only until they have measured.
_NIXL_CUDA = TransferCosts(
    request_ns=15_000,
    descriptor_ns=5_300,
    index_ns=5,
    byte_ns=0.0007,
    prepare_ns=100_000,
    copy_run_ns=1,
    copy_byte_ns=0.0014,
)
_KNOWN: dict[tuple[str, str], TransferCosts] = {
    ("nixl/UCX", "cpu"): _NIXL_CPU,
    ("nixl/UCX", "cuda"): _NIXL_CUDA,
}
"""(transport, kind of device) -> what the code says of it."""


def transfer_costs(transport: str, device: str) -> TransferCosts:
    """Return what the code says of an agent's transport and a torch device; else of NIXL between CPU
    processes."""
    return _KNOWN.get((transport, device.split(":")[0]), _NIXL_CPU)


AS_CODED = "as coded"
MEASURED = "measured"


class CostTable:
    """What transfers cost, by transport and kinds of the two devices: what was measured here, else what the
    code says.

    The first peer that is measured stands for all of its kind of device: one measurement reads some 60 MB
    while the engines wait, and a decode engine may meet dozens of peers, nearly always of one host or one
    network. Threads may share a table.
    """

    def __init__(self, *, measures_everywhere: bool = False) -> None:
        """`measures_everywhere`: also between CPUs, of which the code knows enough."""
        self._measures_everywhere = measures_everywhere
        self._rows: dict[tuple[str, str, str], TransferCosts | str] = {}
        """What was measured, or why that was impossible."""

    def of(self, transport: str, device: str, peer_device: str) -> TransferCosts:
        """Return what is known, by torch devices of this side and of the peer."""
        row = self._rows.get(_row(transport, device, peer_device))
        return row if isinstance(row, TransferCosts) else transfer_costs(transport, device)

    def told(self, transport: str, device: str, peer_device: str) -> str:
        """Tell reports where `of` has it from: measured; as coded; or `as coded: ` and why."""
        row = self._rows.get(_row(transport, device, peer_device), "")
        if isinstance(row, TransferCosts):
            return MEASURED
        return f"{AS_CODED}: {row}" if row else AS_CODED

    def wants(self, transport: str, device: str, peer_device: str) -> bool:
        """Tell whether to measure it: nobody has tried, and a device is involved."""
        key = _row(transport, device, peer_device)
        return key not in self._rows and (self._measures_everywhere or key[1:] != ("cpu", "cpu"))

    def put(self, transport: str, device: str, peer_device: str, found: TransferCosts | str) -> None:
        """Keep what was measured, or say why nothing was."""
        self._rows[_row(transport, device, peer_device)] = found


def _row(transport: str, device: str, peer_device: str) -> tuple[str, str, str]:
    return transport, device.split(":")[0], peer_device.split(":")[0]


@dataclass(frozen=True, slots=True)
class Option:
    """The two ways of one read."""

    direct_ns: float
    num_direct: int
    """Descriptors asked for."""
    staged_ns: float | None
    """None where it cannot be staged."""
    num_staged: int
    must_stage: bool = False
    """Staged where it can be, if anything is."""

    @property
    def num_saved(self) -> int:
        """Descriptors that staging spares."""
        return self.num_direct - self.num_staged if self.staged_ns is not None else 0


def choose_staged(staging: str, options: Sequence[Option]) -> list[bool]:
    """Tell which reads of a request go through the staging buffer. `staging`: auto, never or always.

    Above MAX_DESCRIPTORS those that spare most are staged whatever it costs. Raises TransferError where that
    is not allowed.
    """
    assert staging in ("auto", "never", "always"), staging
    total = sum(o.num_direct for o in options)
    if staging == "always":
        return [o.staged_ns is not None for o in options]
    if staging == "never":
        if total > MAX_DESCRIPTORS and any(o.num_saved > 0 for o in options):
            raise TransferError(
                "",
                f"{total} descriptors, over {MAX_DESCRIPTORS}, must be staged, and staging is `never` "
                "(transfer.staging: auto)",
            )
        return [False] * len(options)
    chosen = [o.staged_ns is not None and (o.must_stage or o.staged_ns < o.direct_ns) for o in options]
    total -= sum(o.num_saved for o, is_staged in zip(options, chosen, strict=True) if is_staged)
    for i in sorted(range(len(options)), key=lambda i: -options[i].num_saved):
        if total <= MAX_DESCRIPTORS or options[i].num_saved <= 0:
            break
        if not chosen[i]:
            chosen[i] = True
            total -= options[i].num_saved
    return chosen


def choose_push_layers(
    costs: TransferCosts,
    *,
    num_layers: int,
    num_bytes: int,
    num_descriptors: Callable[[int], int],
    layer_ns: float,
) -> int:
    """Choose the layers that one write of a push should bring, so that the least time passes after the last
    layer was computed until all has arrived.

    num_bytes: of all layers. num_descriptors(k): of the write of the first k layers, after neighbours are
    joined; one per block where the k layers of a block lie together, else one per layer and block.
    layer_ns: what computing a layer takes; 0 where writes do not overlap with it, so that one write is best.
    """
    sizes = [k for k in range(1, num_layers + 1) if k == num_layers or k & (k - 1) == 0]
    write_ns = [
        costs.move_ns(num_descriptors(k), num_descriptors(k), num_bytes * k // num_layers)
        for k in range(1, num_layers + 1)
    ]

    def exposed_ns(k: int) -> float:
        end = 0.0
        for first in range(0, num_layers, k):
            last = min(first + k, num_layers)
            end = max(end, last * layer_ns) + write_ns[last - first - 1]
        return end - num_layers * layer_ns

    # Of equals the one with fewer writes.
    return min(reversed(sizes), key=exposed_ns)

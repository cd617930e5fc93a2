"""One request's transfer on one consumer rank, as a pure state machine: events and clock in, actions out.

    READING --all data here--> FENCING --generations unchanged--> VERIFYING --digests equal--> OVER (ok)

Generations are read only after all data has arrived, because reads are not ordered: an unchanged
generation then proves that no block was reused while it was read. Any failure, the deadline or a
cancellation leads to OVER (failed). Reads still in flight then keep writing into this side's blocks, so
the session drains.

Where the producer pushes, arrivals take the place of reads, one per producer rank, and there are no fences:
the blocks are this side's own. Until the lease is released, it is renewed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rayk.transfer.draining import Drained, DrainingSession, Failed, Finish, Phase, Tick
from rayk.transfer.lease import Renewals
from rayk.types.errors import KVMismatch

# Events


@dataclass(frozen=True, slots=True)
class ReadDone:
    """All bytes of a data read are here."""

    read: int


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A data read failed or was cancelled: it writes nothing any more."""

    read: int
    reason: str


@dataclass(frozen=True, slots=True)
class FenceDone:
    """Generations of the blocks read from a producer rank, as they are now."""

    producer_rank: int
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FenceEnded:
    """A generation read failed or was cancelled."""

    producer_rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Verified:
    """Digests were compared; None when all are equal."""

    mismatch: KVMismatch | None


Event = ReadDone | ReadEnded | FenceDone | FenceEnded | Verified | Failed | Tick


# Actions


@dataclass(frozen=True, slots=True)
class PostReads:
    """Start these data reads."""

    reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PostFence:
    """Start reading the generations of the blocks read from this producer rank."""

    producer_rank: int


@dataclass(frozen=True, slots=True)
class ComputeDigests:
    """Compute and compare digests, then report `Verified`."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Try to cancel these; report ReadEnded and FenceEnded for what could be cancelled."""

    reads: tuple[int, ...]
    fences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Tell these producer ranks that the lease is needed no longer."""

    producer_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Renew:
    """Tell these producer ranks that the lease is still needed."""

    producer_ranks: tuple[int, ...]
    number: int
    """Counts the renewals of this session."""


Action = PostReads | PostFence | ComputeDigests | Cancel | Release | Renew | Finish | Drained


@dataclass(frozen=True, slots=True)
class Fence:
    """Blocks of a producer rank whose generations must not have changed."""

    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    describe: Callable[[int], str] | None = None
    """What a block (by its id) holds, for people; asked only when it was lost."""


class Session(DrainingSession[Event, Action]):
    """After `Finish` with a KVMismatch the lease is kept, so that the producer's bytes can be looked at;
    `release` gives it up (otherwise its deadline does)."""

    def __init__(
        self,
        request_id: str,
        *,
        num_reads: int,
        fences: Mapping[int, Fence],
        notify: Sequence[int],
        deadline_ns: int,
        renewals: Renewals | None = None,
    ) -> None:
        """Reads are numbered 0 .. num_reads - 1; `fences` by producer rank, none of which is looked at before
        the reads are over; `notify`: ranks to release.
        `renewals`: of its lease, begun when the ticket came; None: it needs none."""
        super().__init__(request_id, Phase.READING, deadline_ns)
        self._num_reads = num_reads
        self._fences = fences
        self._notify = tuple(notify)
        self._renewals = renewals or Renewals(None)
        self._reads_left: set[int] = set(range(num_reads))
        self._fences_left: set[int] = set()
        self._is_released = False

    @property
    def _num_in_flight(self) -> int:
        return len(self._reads_left) + len(self._fences_left)

    def start(self) -> list[Action]:
        """Return the first actions."""
        if self._reads_left:
            return [PostReads(tuple(range(self._num_reads)))]
        return self._after_reads()

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        """What to do about an event at this time."""
        actions = self._handle(event, now_ns)
        if not self._is_released and self._renewals.is_due(now_ns):
            actions.append(Renew(self._notify, self._renewals.num_sent))
        return actions

    def _handle(self, event: Event, now_ns: int) -> list[Action]:
        # What is known to be right counts also when it took long to know.
        is_known = isinstance(event, Verified) and self.phase is not Phase.OVER
        at_end = None if is_known else self._at_end(event, now_ns)
        if at_end is not None:
            return at_end
        match event:
            case Tick():  # by far the most frequent
                return []
            case ReadDone(read) if self.phase is Phase.READING and read in self._reads_left:
                self._reads_left.discard(read)
                return [] if self._reads_left else self._after_reads()
            case FenceDone(rank, generations) if rank in self._fences_left:
                return self._on_fence(rank, generations)
            case Verified(mismatch) if self.phase is Phase.VERIFYING:
                return self._on_verified(mismatch)
            case ReadEnded(read, reason) if read in self._reads_left:
                self._reads_left.discard(read)
                return self._fail(reason)
            case FenceEnded(rank, reason) if rank in self._fences_left:
                self._fences_left.discard(rank)
                return self._fail(reason)
            case Failed(reason):
                return self._fail(reason)
        return []

    def release(self) -> list[Action]:
        """Give up the lease kept after a mismatch. Nothing when it is given up already."""
        if self.phase is not Phase.OVER or self._is_released:
            return []
        self._is_released = True
        return [Release(self._notify)]

    def _after_reads(self) -> list[Action]:
        self._fences_left = set(self._fences)
        if not self._fences_left:
            return self._after_fences()
        self.phase = Phase.FENCING
        return [PostFence(rank) for rank in sorted(self._fences_left)]

    def _on_fence(self, rank: int, generations: tuple[int, ...]) -> list[Action]:
        self._fences_left.discard(rank)
        fence = self._fences[rank]
        assert len(generations) == len(fence.generations)
        if generations == fence.generations:
            return [] if self._fences_left else self._after_fences()
        each = zip(fence.blocks, fence.generations, generations, strict=True)
        block, expected, found = next(e for e in each if e[1] != e[2])
        lost = f": {fence.describe(block)} are lost" if fence.describe is not None else ""
        return self._fail(
            f"block {block} was reused while being read "
            f"(generation {expected} -> {found}) on producer rank {rank}{lost}"
        )

    def _after_fences(self) -> list[Action]:
        self.phase = Phase.VERIFYING
        return [ComputeDigests()]

    def _on_verified(self, mismatch: KVMismatch | None) -> list[Action]:
        self.phase = Phase.OVER
        if mismatch is not None:
            return [Finish(mismatch, is_draining=False)]
        return [*self.release(), Finish(None, is_draining=False)]

    def _fail(self, reason: str) -> list[Action]:
        error = self._error(reason)
        actions: list[Action] = []
        draining = not self.is_drained
        if draining:
            actions.append(Cancel(tuple(sorted(self._reads_left)), tuple(sorted(self._fences_left))))
        # The lease goes at once: late reads may see reused blocks, but nobody will use what they bring.
        return [*actions, *self.release(), Finish(error, is_draining=draining)]

    def _forget(self, event: Event) -> None:
        match event:
            case ReadDone(read) | ReadEnded(read, _):
                self._reads_left.discard(read)
            case FenceDone(rank, _) | FenceEnded(rank, _):
                self._fences_left.discard(rank)

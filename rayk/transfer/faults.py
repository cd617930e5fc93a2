"""Faults of transfers, planted in one agent: when each strikes, and what becomes of the read or write it hit.

The words are those of `fault_table`: kind and point. The agent counts what passes each point; a fault hits
the `step`-th, once. Nothing here runs unless asked for.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rayk.transfer.agent import Transfer, TransferState
from rayk.types.errors import TransferError
from rayk.types.fault_table import KINDS, RANK_KINDS

REORDER_S = 0.05
"""What is to be overtaken waits this long for something to overtake it."""
DEATH_S = 0.3
"""What a dying peer is needed for waits this long, so that it is dead by then."""
DELAY_S = 0.5
READ = "read"
"""The point that only reads of data pass, for the two kinds below."""
FLIP_BIT = "flip_bit"
"""A read brings one wrong bit, as over a bad link. Whoever plants it counts it."""
STALL = "stall"
"""Lets no read complete, from this one on, until the agent is healed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferFault:
    """One fault of a rank's reads, writes or messages."""

    kind: str
    """A kind of the fault table, or one of the two above."""
    point: str = READ
    step: int = 1
    """The how-manieth at this point, from 1."""
    delay_s: float | None = None
    remote: str | None = None
    """Engine whose rank strikes itself when told, where that rank is to die; None: this rank."""
    descriptor: int = 0
    """Descriptor of a read in which a bit is flipped."""
    byte: int = 0
    bit: int = 0

    @property
    def hold_s(self) -> float:
        """How long what it hits waits."""
        match self.kind:
            case "delay":
                return DELAY_S if self.delay_s is None else self.delay_s
            case "reorder":
                return REORDER_S
        return DEATH_S if self.is_of_rank else 0.0

    @property
    def is_of_rank(self) -> bool:
        """Whether it ends or stops a rank."""
        return self.kind in RANK_KINDS

    @property
    def flips_bit(self) -> bool:
        """Whether the bytes of a read change when they are here; those of a write are out of reach."""
        return self.kind == FLIP_BIT or (self.kind == "corrupt" and self.point != "post")


@dataclass(frozen=True, slots=True)
class StrikeMessage:
    """Asks an engine's ranks to commit the fault they were planted with. Only those that were take heed."""

    engine: str

    def encode(self) -> bytes:
        return json.dumps(["strike", self.engine]).encode()

    @staticmethod
    def decode(message: bytes) -> StrikeMessage | None:
        """Read a message to strike; return None for any other message."""
        if not message.startswith(b'["strike"'):
            return None
        return StrikeMessage(str(json.loads(message)[1]))


class PlantedFaults:
    """The faults of one agent that have yet to strike."""

    def __init__(self) -> None:
        self._left: list[TransferFault] = []
        self._counts: dict[str, int] = {}
        self.num_faults_hit: Counter[tuple[str, str]] = Counter()
        """(kind, point) of the fault table -> how many have hit."""

    def __bool__(self) -> bool:
        return bool(self._left)

    def plant(self, fault: TransferFault) -> None:
        """It hits from now on; what passes its point is counted from here."""
        self._counts.pop(fault.point, None)
        self._left.append(fault)

    def clear(self) -> None:
        """None of them will strike."""
        self._left.clear()

    def take(self, *points: str) -> TransferFault | None:
        """Return the fault that hits what passes these points; it is used up unless it lasts."""
        for point in points:
            self._counts[point] = self._counts.get(point, 0) + 1
        for fault in self._left:
            if fault.point not in points or fault.step > self._counts[fault.point]:
                continue
            if fault.kind == STALL:
                return fault
            if fault.step == self._counts[fault.point]:
                self._left.remove(fault)
                if fault.kind in KINDS:
                    self.num_faults_hit[fault.kind, fault.point] += 1
                return fault
        return None


@dataclass(eq=False)
class FaultyTransfer:
    """A read or write that a fault hit: it may never be posted, be posted late or twice, or tell of its end
    late. Implements what an agent does with a transfer."""

    fault: TransferFault
    post: Callable[[], Transfer]
    poll_agent: Callable[[Transfer], TransferState]
    release_agent: Callable[[Transfer], bool]
    clock: Callable[[], float] = time.monotonic
    is_overtaken: bool = False
    is_stalled: bool = False
    """It tells of no end, and cannot be recalled."""
    _is_refused: bool = False
    """It could not be posted."""
    _posted: list[Transfer] = field(default_factory=list)
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._since = self.clock()
        self.is_stalled = self.fault.kind == STALL
        if self.fault.point == "mid_transfer" or self.fault.kind in ("duplicate", STALL):
            self._post()

    def poll(self) -> TransferState:
        """Tell where it stands, as its user is told."""
        if self.is_stalled:
            return TransferState.PENDING
        states = [self.poll_agent(transfer) for transfer in self._posted]
        if self._is_refused or TransferState.FAILED in states:
            return TransferState.FAILED
        if self.fault.kind == "drop" or self._waits:
            return TransferState.PENDING
        if not self._posted:
            try:
                self._post()
            except TransferError:
                # The peer may be gone by now: whoever polls is told that it failed, as of any other read.
                self._is_refused = True
            return self.poll()
        return TransferState.PENDING if TransferState.PENDING in states else TransferState.DONE

    def release(self) -> bool:
        """Forget it; False while the agent still carries it out."""
        if self.is_stalled:
            return False
        self._posted = [transfer for transfer in self._posted if not self.release_agent(transfer)]
        return not self._posted

    @property
    def _waits(self) -> bool:
        return not self.is_overtaken and self.clock() - self._since < self.fault.hold_s

    def _post(self) -> None:
        times = 2 if self.fault.kind == "duplicate" else 1
        self._posted += [self.post() for _ in range(times)]

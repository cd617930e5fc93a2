"""One planted fault at a point of a transfer's life, struck at one agent's reads, writes or messages.

The words are those of `fault_table`: kind and point. The agent counts what passes each point; a strike hits
the `step`-th. A `StruckTransfer` may never be posted, be posted late or twice, or tell of its end late.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rayk.transfer.agent import Transfer, TransferState
from rayk.types.errors import TransferError
from rayk.types.fault_table import RANK_KINDS

REORDER_S = 0.05
"""What is to be overtaken waits this long for something to overtake it."""
STRIKE_S = 0.3
"""What a dying peer is needed for waits this long, so that it is dead by then."""
DELAY_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One fault of a rank."""

    kind: str
    point: str
    step: int = 1
    """The how-manieth at this point, from 1."""
    delay_s: float | None = None
    seed: int = 0
    remote: str | None = None
    """Of a rank that is to die: the engine that strikes itself when told; None: this rank."""

    @property
    def hold_s(self) -> float:
        """How long what is struck waits."""
        match self.kind:
            case "delay":
                return DELAY_S if self.delay_s is None else self.delay_s
            case "reorder":
                return REORDER_S
        return STRIKE_S if self.is_of_rank else 0.0

    @property
    def is_of_rank(self) -> bool:
        """Whether it ends or stops a rank."""
        return self.kind in RANK_KINDS


@dataclass(frozen=True, slots=True)
class StrikeMessage:
    """Asks an engine's ranks to commit the fault they were planted with. Only those that were take heed."""

    engine: str

    def encode(self) -> bytes:
        """As a notification."""
        return json.dumps(["strike", self.engine]).encode()

    @staticmethod
    def decode(message: bytes) -> StrikeMessage | None:
        """None for any other message."""
        if not message.startswith(b'["strike"'):
            return None
        return StrikeMessage(str(json.loads(message)[1]))


class Strikes:
    """The strikes of one agent: each hits once."""

    def __init__(self) -> None:
        self._left: list[Strike] = []
        self._counts: dict[str, int] = {}
        self.num_struck: Counter[tuple[str, str]] = Counter()
        """(kind, point) -> how many have hit."""

    def __bool__(self) -> bool:
        return bool(self._left)

    def plant(self, strike: Strike) -> None:
        """It hits from now on; what passes its point is counted from here."""
        self._counts.pop(strike.point, None)
        self._left.append(strike)

    def take(self, *points: str) -> Strike | None:
        """Something passes these points: the strike that hits it, used up."""
        for point in points:
            self._counts[point] = self._counts.get(point, 0) + 1
        for strike in self._left:
            if strike.point in points and strike.step == self._counts[strike.point]:
                self._left.remove(strike)
                self.num_struck[strike.kind, strike.point] += 1
                return strike
        return None


@dataclass(eq=False)
class StruckTransfer:
    """A read or write that a strike hit. Implements what an agent does with a transfer."""

    strike: Strike
    post: Callable[[], Transfer]
    poll_agent: Callable[[Transfer], TransferState]
    release_agent: Callable[[Transfer], bool]
    clock: Callable[[], float] = time.monotonic
    overtaken: bool = False
    _is_refused: bool = False
    """It could not be posted."""
    _posted: list[Transfer] = field(default_factory=list)
    _since: float = 0.0

    def __post_init__(self) -> None:
        self._since = self.clock()
        if self.strike.point == "mid_transfer" or self.strike.kind == "duplicate":
            self._post()

    def poll(self) -> TransferState:
        """Where it stands, as its user is told."""
        states = [self.poll_agent(transfer) for transfer in self._posted]
        if self._is_refused or TransferState.FAILED in states:
            return TransferState.FAILED
        if self.strike.kind == "drop" or self._waits:
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
        self._posted = [transfer for transfer in self._posted if not self.release_agent(transfer)]
        return not self._posted

    @property
    def _waits(self) -> bool:
        hold = self.strike.hold_s
        return not self.overtaken and self.clock() - self._since < hold

    def _post(self) -> None:
        times = 2 if self.strike.kind == "duplicate" else 1
        self._posted += [self.post() for _ in range(times)]

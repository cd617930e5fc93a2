"""Say when requests reach a simulated cell, and what each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rayk.specs.cells import Cell
from rayk.traces import Recorded, hastened, scaled
from rayk.traces.prompts import TracePrompts
from rayk.traces.replay import Replay
from rayk.types.draft_rates import DraftRates


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request as it comes."""

    at_ns: int  # after the start of the repeat
    index: int  # of its prompt
    prompt: tuple[int, ...]  # token ids; requests of one prompt may share it
    max_tokens: int
    num_output_tokens: int | None = None
    """Tokens after which it stops, which neither policies nor engines know before; None: `max_tokens`."""
    drafts: DraftRates | None = None
    """How often what is drafted for it is right; None: as of any request."""
    session: str | None = None
    priority: int = 0  # of those that wait for a place of a server; lower ones go first
    deadline_s: float | None = None  # it ends so long after its arrival; None: a server's own limit


class ArrivalSource(Protocol):
    """Gives requests one by one; some may come only once others have ended, as the turns of a session."""

    def next_due_ns(self) -> int | None:
        """Tell when the next request comes, as far as is known; None: none does until one ends."""

    def take(self) -> Arrival:
        """Return that request."""

    def ended(self, index: int, now_ns: int) -> None:
        """The request of this index is over."""


class InOrder:
    """Gives requests in the order in which they come, read one ahead. Implements ArrivalSource."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._rest = iter(arrivals)
        self._next = next(self._rest, None)

    def next_due_ns(self) -> int | None:
        return None if self._next is None else self._next.at_ns

    def take(self) -> Arrival:
        assert self._next is not None, "nobody comes"
        taken, self._next = self._next, next(self._rest, None)
        assert self._next is None or self._next.at_ns >= taken.at_ns, "requests are out of their order"
        return taken

    def ended(self, index: int, now_ns: int) -> None:
        """Do nothing: nobody waits for another's end."""


class TraceArrivals:
    """Gives the requests of a trace as `rayk bench` sends them, a session's turns each behind the answer
    before. Implements ArrivalSource."""

    def __init__(
        self,
        rows: Iterable[Recorded],
        *,
        block_tokens: int,
        token_ids: tuple[int, int],
        seed: int,
        speed: float,
    ) -> None:
        """Take rows in the order of read_trace or stream_trace. `block_tokens`, `token_ids`, `seed`: see
        TracePrompts. `speed`: how many times faster than recorded."""
        self._replay = Replay(hastened(row, speed) for row in rows)
        self._prompts = TracePrompts(block_tokens=block_tokens, token_ids=token_ids, seed=seed)
        self._block_tokens = block_tokens

    def next_due_ns(self) -> int | None:
        return self._replay.next_due_ns()

    def take(self) -> Arrival:
        due_ns, number, row = self._replay.take()
        return Arrival(
            at_ns=due_ns,
            index=number,
            prompt=tuple(self._prompts.tokens(row, number)),
            max_tokens=scaled(row.num_output_tokens, self._block_tokens),
            session=row.session,
        )

    def ended(self, index: int, now_ns: int) -> None:
        self._replay.ended(index, now_ns)


def cell_arrivals(
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    *,
    repeat: int = 0,
    num_output_tokens: Sequence[int] | None = None,
    due_ns: Sequence[int] | None = None,
    drafts: Sequence[DraftRates | None] | None = None,
) -> Iterator[Arrival]:
    """Yield a cell's requests as `CellRun` sends them. `num_output_tokens`, `due_ns`, `drafts`: those of a
    measured run, per prompt, in place of `max_tokens`, of the times that the cell draws, and of the rates of
    any request."""
    due = cell.due_ns(len(prompts), repeat) if due_ns is None else due_ns
    for index in sorted(range(len(prompts)), key=lambda i: (due[i], i)):
        yield Arrival(
            at_ns=due[index],
            index=index,
            prompt=tuple(prompts[index]),
            max_tokens=cell.sampling.max_tokens,
            num_output_tokens=None if num_output_tokens is None else num_output_tokens[index],
            drafts=None if drafts is None else drafts[index],
            session=cell.session_of(index),
        )

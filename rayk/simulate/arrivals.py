"""Say when requests reach a simulated cell, and what each of them is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rayk.specs.cells import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request as it comes."""

    at_ns: int  # after the start of the repeat
    index: int  # of its prompt
    prompt: tuple[int, ...]  # token ids; requests of one prompt may share it
    max_tokens: int
    num_output_tokens: int | None = None
    """Tokens after which it stops, which neither policies nor engines know before; None: `max_tokens`."""
    session: str | None = None


def cell_arrivals(
    cell: Cell,
    prompts: Sequence[Sequence[int]],
    *,
    repeat: int = 0,
    num_output_tokens: Sequence[int] | None = None,
    due_ns: Sequence[int] | None = None,
) -> Iterator[Arrival]:
    """Yield a cell's requests as `CellRun` sends them. `num_output_tokens`, `due_ns`: those of a measured
    run, per prompt, in place of `max_tokens` and of the times that the cell draws."""
    due = cell.due_ns(len(prompts), repeat) if due_ns is None else due_ns
    for index in sorted(range(len(prompts)), key=lambda i: (due[i], i)):
        yield Arrival(
            at_ns=due[index],
            index=index,
            prompt=tuple(prompts[index]),
            max_tokens=cell.sampling.max_tokens,
            num_output_tokens=None if num_output_tokens is None else num_output_tokens[index],
            session=cell.session_of(index),
        )

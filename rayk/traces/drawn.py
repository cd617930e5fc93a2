"""Draw traffic that nobody recorded: lengths, and prompts of random tokens that may begin alike.

`rayk bench` sends what is drawn here and `rayk plan` predicts it: one seed gives both the same requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rayk.types.bounds import MAX_TOKENS
from rayk.types.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Numbers of tokens: `values` in turn, or uniform between two ends."""

    values: tuple[int, ...] = ()
    uniform: tuple[int, int] | None = None

    def __str__(self) -> str:
        return ",".join(map(str, self.values)) if self.uniform is None else "-".join(map(str, self.uniform))

    @property
    def most(self) -> int:
        """The largest number that may be drawn."""
        return max(self.values) if self.uniform is None else self.uniform[1]

    def draw(self, count: int, seed: Sequence[int]) -> list[int]:
        if self.uniform is None:
            return [self.values[i % len(self.values)] for i in range(count)]
        low, high = self.uniform
        drawn: list[int] = np.random.default_rng(seed).integers(low, high + 1, count).tolist()
        return drawn


def parse_lengths(text: str, *, where: str) -> Lengths:
    """Parse `128`, `5,37,300` (in turn) or `64-256` (uniform, both ends included). Raises UserError."""
    match = re.fullmatch(r"(\d{1,8})-(\d{1,8})", text.strip())
    if match and 0 < int(match[1]) <= int(match[2]) <= MAX_TOKENS:
        return Lengths(uniform=(int(match[1]), int(match[2])))
    parts = [part.strip() for part in text.split(",")]
    if match or not all(re.fullmatch(r"\d{1,8}", p) and 0 < int(p) <= MAX_TOKENS for p in parts):
        raise UserError(
            problem=f"not a number of tokens: {text!r}", where=where, mend="128, 5,37,300 (in turn) or 64-256"
        )
    return Lengths(values=tuple(map(int, parts)))


def input_lengths(lengths: Lengths, count: int, seed: int) -> list[int]:
    """Draw how long the prompts of a load are."""
    return lengths.draw(count, [seed, 6])


def output_lengths(lengths: Lengths, count: int, seed: int) -> list[int]:
    """Draw how long its answers are."""
    return lengths.draw(count, [seed, 5])


def draw_prompts(
    lengths: Sequence[int], token_ids: tuple[int, int], *, prefix_tokens: int, num_prefixes: int, seed: int
) -> Iterator[list[int]]:
    """Draw prompts of these lengths, one by one, of uniform ids between the two of `token_ids`; each begins
    with one of `num_prefixes` shared stretches, in turn."""
    low, high = token_ids
    draw = np.random.default_rng([seed, 4])
    prefixes = draw.integers(low, high + 1, (num_prefixes, prefix_tokens)).tolist()
    for i, length in enumerate(lengths):
        shared: list[int] = prefixes[i % num_prefixes][:length]
        yield [*shared, *draw.integers(low, high + 1, length - len(shared)).tolist()]

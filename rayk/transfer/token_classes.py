"""Tokens by who holds them, where a side deals the tokens of a sequence over ranks. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from rayk.parallel.shard import EngineShape, Ints, Stripe, TokenShard


@dataclass(frozen=True)
class TokenClasses:
    """Tokens by who holds them on every side: two are of one class if each deal gives both to the same shard.

    So all of a class lie in one token shard of either side, and a rank's digest of them is compared with one
    other rank's. Without deals there is one class.
    """

    deals: tuple[tuple[TokenShard, ...], ...] = ()
    """The shards of each distinct way in which some engine divides tokens over more than one."""

    @cached_property
    def period(self) -> int:
        """Positions after which classes repeat."""
        return math.lcm(*(shard.period for deal in self.deals for shard in deal))

    @property
    def num(self) -> int:
        """At most the product of the deals' sizes, whatever the interleaves."""
        return int(self._table.max()) + 1

    def of(self, positions: Ints) -> Ints:
        """Return the class of each position."""
        return self._table[positions % self.period]

    def held(self, tokens: TokenShard) -> tuple[int, ...]:
        """List the classes that a shard holds tokens of, ascending."""
        return _held(self, tokens)

    @cached_property
    def _table(self) -> Ints:
        """[period]: the class of each position, numbered in the order of their owners."""
        positions = np.arange(self.period, dtype=np.int64)
        owners = np.zeros((len(positions), len(self.deals)), dtype=np.int64)
        for i, deal in enumerate(self.deals):
            holders = np.stack([shard.holds(positions) for shard in deal])
            assert (holders.sum(axis=0) == 1).all(), f"{deal} deals a token to none or to several"
            owners[:, i] = holders.argmax(axis=0)
        return np.unique(owners, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


ONE_CLASS = TokenClasses()
"""No side deals tokens."""


def common_classes(shapes: Iterable[EngineShape]) -> TokenClasses:
    """Return the classes of all sides of a deployment; equal however they are listed."""
    deals = sorted({(shape.dcp, shape.dcp_interleave) for shape in shapes if shape.dcp > 1})
    return TokenClasses(
        tuple(tuple(Stripe(num, index, interleave) for index in range(num)) for num, interleave in deals)
    )


@lru_cache(maxsize=1024)
def _held(classes: TokenClasses, tokens: TokenShard) -> tuple[int, ...]:
    positions = np.arange(math.lcm(classes.period, tokens.period), dtype=np.int64)
    return tuple(np.unique(classes.of(positions[tokens.holds(positions)])).tolist())

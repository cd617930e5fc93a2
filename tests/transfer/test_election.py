"""Shards of tokens that meet, and tokens that none or several hold, against a look at every position of the
common period of all."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np

from rayk.parallel.shard import Ranges, Stripe, TokenShard
from rayk.transfer.election import _first_held, _meet


def random_shard(rng: random.Random) -> TokenShard:
    if rng.random() < 0.6:
        num = rng.randint(1, 4)
        return Stripe(num, rng.randrange(num), rng.randint(1, 5))
    period = rng.randint(1, 12)
    ends = sorted(rng.sample(range(period + 1), 2 * rng.randint(1, (period + 1) // 2)))
    return Ranges(period, tuple(zip(ends[::2], ends[1::2], strict=True)))


def shards() -> Iterator[tuple[tuple[TokenShard, ...], TokenShard]]:
    rng = random.Random(5)
    for _ in range(500):
        yield tuple(random_shard(rng) for _ in range(rng.randint(1, 3))), random_shard(rng)


def held(shard: TokenShard, num_tokens: int) -> set[int]:
    return set(np.flatnonzero(shard.holds(np.arange(num_tokens))).tolist())


def test_what_meets_and_who_holds_it_are_those_of_every_position() -> None:
    found = {True: 0, False: 0}
    for parts, wanted in shards():
        length = math.lcm(wanted.period, *(part.period for part in parts))
        ours, theirs = held(wanted, length), [held(part, length) for part in parts]
        for part, tokens in zip(parts, theirs, strict=True):
            assert _meet(part, wanted) == bool(tokens & ours)
        counts = {token: sum(token in tokens for tokens in theirs) for token in ours}
        for times, wrong in (
            (0, {token for token, count in counts.items() if count == 0}),
            (2, {token for token, count in counts.items() if count > 1}),
        ):
            first = _first_held(parts, wanted, times)
            assert (first in wrong) if wrong else first is None, (parts, wanted, times)
            found[bool(wrong)] += 1
    assert min(found.values()) > 100, "both were met"


def test_long_turns_cost_no_more_than_their_sum() -> None:
    """Their common period is of 2 ** 40 tokens."""
    one, other = Stripe(2**10, 3, 2**10), Stripe(2**10 - 1, 5, 2**10 + 1)
    assert _meet(one, other)
    assert _first_held((one,), other, 0) is not None

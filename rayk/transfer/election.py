"""Which of a producer engine's ranks each unit of a consumer rank is read from. Pure; free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from rayk.kv.fields import PageField
from rayk.kv.geometry import GroupGeometry, RankGeometry
from rayk.parallel.shard import WHOLE, Bools, Ints, TokenShard
from rayk.types.errors import HandshakeMismatch

Units = dict[str, tuple[int, ...]]
"""Field -> units."""


def elect(
    sides: Mapping[int, GroupGeometry], group: GroupGeometry, consumer: RankGeometry, turn: int
) -> dict[int, Units]:
    """Producer rank -> the units that are read from it, of layers of a consumer's group. `sides`: the
    producer ranks that have these layers, with the group they lie in there.

    Holders of a unit are apart by the tokens that they have. Of each such part that has any of this rank's
    tokens one replica is elected; readers are spread evenly over replicas. Raises HandshakeMismatch unless
    each token then comes from one rank."""
    elected: dict[int, dict[str, list[int]]] = {}
    for position, geometry in enumerate(group.fields):
        field = geometry.field
        names = {
            s.fields[position].field.name if position < len(s.fields) else "absent" for s in sides.values()
        }
        if names != {field.name}:
            raise HandshakeMismatch(((f"field {position}", ", ".join(sorted(names)), field.name),))
        units_by_rank = {rank: {*side.fields[position].units} for rank, side in sides.items()}
        for unit in geometry.units:
            parts: dict[TokenShard, list[int]] = {}
            for rank, units in units_by_rank.items():
                if unit in units and _meet(sides[rank].tokens, group.tokens):
                    parts.setdefault(sides[rank].tokens, []).append(rank)
            _check_tokens(f"{field.unit_name} {unit} of {field.name}", tuple(parts), group.tokens, consumer)
            for tokens, holders in parts.items():
                readers = _readers(field, unit, tokens, group, consumer)
                first = readers.index(consumer.rank) * len(holders) // len(readers)
                rank = holders[(first + turn) % len(holders)]
                elected.setdefault(rank, {}).setdefault(field.name, []).append(unit)
    return {rank: {name: tuple(units) for name, units in found.items()} for rank, found in elected.items()}


def _readers(
    field: PageField, unit: int, tokens: TokenShard, group: GroupGeometry, consumer: RankGeometry
) -> Sequence[int]:
    """List the ranks of the consumer's stage that have a unit and some of these tokens, ascending."""
    shares = map(consumer.shape.share, range(consumer.num_ranks))
    return [
        share.rank
        for share in shares
        if share.stage == consumer.share.stage
        and unit in field.shard(consumer.tp_size, share.tp_rank)
        and _meet(tokens, WHOLE if group.tokens == WHOLE else share.tokens)
    ]


def _check_tokens(
    what: str, parts: tuple[TokenShard, ...], wanted: TokenShard, consumer: RankGeometry
) -> None:
    if not parts:
        raise HandshakeMismatch(((what, "held by no rank", f"wanted by rank {consumer.rank}"),))
    times = _times_held(parts, wanted)
    for wrong, how in ((times == 0, "held by no rank"), (times > 1, "held by unlike ranks")):
        if wrong.any():
            token = int(np.flatnonzero(wrong)[0])
            raise HandshakeMismatch(((f"token {token} of {what}", how, f"wanted by rank {consumer.rank}"),))


@lru_cache(maxsize=1024)
def _times_held(parts: tuple[TokenShard, ...], wanted: TokenShard) -> Ints:
    """Count the parts that hold each position, up to where all begin anew; 1 of those not wanted."""
    positions = np.arange(math.lcm(wanted.period, *(part.period for part in parts)), dtype=np.int64)
    times = sum((part.holds(positions).astype(np.int64) for part in parts), np.zeros_like(positions))
    return np.where(wanted.holds(positions), times, 1)


@lru_cache(maxsize=1024)
def _meet(one: TokenShard, other: TokenShard) -> bool:
    """Tell whether two shards have a token in common."""
    positions = np.arange(math.lcm(one.period, other.period), dtype=np.int64)
    both: Bools = one.holds(positions) & other.holds(positions)
    return bool(both.any())

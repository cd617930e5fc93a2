"""Which of a producer engine's ranks each unit of a consumer rank is read from. Pure; free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from rayk.kv.fields import PageField
from rayk.kv.geometry import GroupGeometry, RankGeometry
from rayk.parallel.shard import WHOLE, Ints, TokenShard
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
    shape, is_draft = consumer.shape, group.group.rides is not None
    shares = map(shape.share, range(consumer.num_ranks))
    return [
        share.rank
        for share in shares
        if share.stage == consumer.share.stage
        and unit in field.shard(*shape.unit_share(share.tp_rank, is_draft=is_draft))
        and _meet(tokens, WHOLE if group.tokens == WHOLE else share.tokens)
    ]


def _check_tokens(
    what: str, parts: tuple[TokenShard, ...], wanted: TokenShard, consumer: RankGeometry
) -> None:
    if not parts:
        raise HandshakeMismatch(((what, "held by no rank", f"wanted by rank {consumer.rank}"),))
    for times, how in ((0, "held by no rank"), (2, "held by unlike ranks")):
        token = _first_held(parts, wanted, times)
        if token is not None:
            raise HandshakeMismatch(((f"token {token} of {what}", how, f"wanted by rank {consumer.rank}"),))


@lru_cache(maxsize=1024)
def _first_held(parts: tuple[TokenShard, ...], wanted: TokenShard, times: int) -> int | None:
    """Return a wanted token that so many of the parts hold: none, or two and more. None where there is none.
    Blocks hold whole turns of all parts, which are therefore short; those of the other side's have a length
    of their own, and only what both turns have in common tells which places of them meet."""
    period = math.lcm(*(part.period for part in parts))
    rows = np.arange(period, dtype=np.int64)
    found = sum((part.holds(rows).astype(np.int64) for part in parts), np.zeros_like(rows))
    chosen = rows[found == 0] if times == 0 else rows[found >= times]
    common = math.gcd(period, wanted.period)
    met = chosen[np.isin(chosen % common, _residues(wanted, common))]
    if not len(met):
        return None
    turns: Ints = met[0] + period * np.arange(wanted.period // common, dtype=np.int64)
    return int(turns[wanted.holds(turns)][0])


@lru_cache(maxsize=1024)
def _meet(one: TokenShard, other: TokenShard) -> bool:
    """Tell whether two shards have a token in common: places of turns of two lengths meet somewhere if they
    are alike in the greatest common measure of both."""
    common = math.gcd(one.period, other.period)
    return bool(np.isin(_residues(one, common), _residues(other, common)).any())


def _residues(tokens: TokenShard, common: int) -> Ints:
    rows = np.arange(tokens.period, dtype=np.int64)
    return np.unique(rows[tokens.holds(rows)] % common)

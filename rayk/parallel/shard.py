"""Which units a tensor-parallel rank holds. A shard is a tuple of global unit ids, not a range.

Units are anything that is divided: KV heads, query heads, weight rows. Cutting weights, laying out pages and
planning transfers all use these functions.
"""

from __future__ import annotations

from functools import lru_cache

from rayk.types.errors import Unsupported


def shard_units(num_units: int, tp_size: int, tp_rank: int) -> tuple[int, ...]:
    """List the units of one rank if each rank needs an equal share.

    Contiguous shares if `tp_size` divides `num_units`; replicas (rank r holds unit r * num_units // tp_size)
    if `num_units` divides `tp_size`; otherwise raises Unsupported.
    """
    assert 0 <= tp_rank < tp_size, (tp_rank, tp_size)
    if num_units % tp_size == 0:
        share = num_units // tp_size
        return tuple(range(tp_rank * share, (tp_rank + 1) * share))
    if tp_size % num_units == 0:
        return (tp_rank * num_units // tp_size,)
    raise Unsupported(f"{num_units} units cannot be shared by TP {tp_size}: neither divides the other")


def shard_range(size: int, tp_size: int, tp_rank: int) -> range:
    """Return a rank's contiguous share of `size` rows; shares differ by at most one (MLP, vocabulary)."""
    assert 0 <= tp_rank < tp_size, (tp_rank, tp_size)
    return range(size * tp_rank // tp_size, size * (tp_rank + 1) // tp_size)


def query_heads(
    num_query_heads: int, tp_size: int, tp_rank: int, what: str = "query heads"
) -> tuple[int, ...]:
    """List the query heads of one rank. Raises Unsupported unless `tp_size` divides them."""
    if num_query_heads % tp_size:
        raise Unsupported(f"TP {tp_size} does not divide the model's {num_query_heads} {what}")
    return shard_units(num_query_heads, tp_size, tp_rank)


@lru_cache(maxsize=4096)
def kv_heads(
    num_query_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int, what: str = "query heads"
) -> tuple[int, ...]:
    """KV heads that one rank's query heads attend to, ascending (replicated if ranks share one).

    It also divides the heads of a recurrent state and the groups of B and C, or the key heads, that they
    share; `what` names the former.
    """
    assert num_query_heads % num_kv_heads == 0, (num_query_heads, num_kv_heads)
    groups = num_query_heads // num_kv_heads
    return tuple(sorted({q // groups for q in query_heads(num_query_heads, tp_size, tp_rank, what)}))


def kv_index(num_query_heads: int, num_kv_heads: int, tp_size: int, tp_rank: int) -> tuple[int, ...]:
    """Find for each query head of the rank the slot of its KV head among the rank's KV heads."""
    groups = num_query_heads // num_kv_heads
    slots = {h: i for i, h in enumerate(kv_heads(num_query_heads, num_kv_heads, tp_size, tp_rank))}
    return tuple(slots[q // groups] for q in query_heads(num_query_heads, tp_size, tp_rank))

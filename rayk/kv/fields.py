"""PageField: what the bytes of a page mean, in global (before tensor parallelism) units."""

from __future__ import annotations

from dataclasses import dataclass

from rayk.parallel.shard import kv_heads

ITEMSIZE: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
}
"""Bytes per element of every dtype a cache may hold."""


@dataclass(frozen=True, slots=True)
class PageField:
    """One kind of content of a page: `units` x `rows` x `row_bytes`.

    For attention, units are KV heads and rows are the token slots of a block. `readers` are what tensor
    parallelism divides evenly (query heads); reader r reads unit r // (readers // units), so a rank
    holds the units its readers need: replicas and uneven overlaps follow from that alone.
    """

    name: str
    units: int
    rows: int
    row_bytes: int
    dtype: str
    readers: int

    def shard(self, tp_size: int, tp_rank: int) -> tuple[int, ...]:
        """Global unit ids one rank holds, ascending. Raises Unsupported if TP does not divide `readers`."""
        return kv_heads(self.readers, self.units, tp_size, tp_rank)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit in one block of one layer."""
        return self.rows * self.row_bytes

    @property
    def canonical_bytes(self) -> int:
        """Bytes of the whole field in one block of one layer, before tensor parallelism."""
        return self.units * self.unit_bytes

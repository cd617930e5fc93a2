"""PageField: what the bytes of a page mean, in global (before tensor parallelism) units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from rayk.parallel.shard import kv_heads

ITEMSIZE: dict[str, int] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "uint8": 1,
}
"""Bytes per element of every dtype that a cache may hold."""

FIELD_IDS: Mapping[str, int] = MappingProxyType(
    {
        "k": 0,
        "v": 1,
        "latent": 2,
        "rope": 3,
        "conv_x": 4,
        "conv_b": 5,
        "conv_c": 6,
        "ssm": 7,
        "conv_q": 8,
        "conv_k": 9,
        "conv_v": 10,
        "delta": 11,
        "k_scale": 12,
        "v_scale": 13,
        "latent_scale": 14,
        "rope_scale": 15,
    }
)
"""Every field name -> the number that stands for it in digests. Only append."""


@dataclass(frozen=True, slots=True)
class PageField:
    """One kind of content of a page: `units` x `rows` x `row_bytes`.

    For attention, units are KV heads and rows are the token slots of a block; a recurrent state has one row
    per block. `readers` are what tensor parallelism divides evenly (query heads, state heads); reader r
    reads unit r // (readers // units), so a rank holds the units its readers need: replicas and uneven
    overlaps follow from that alone.
    """

    name: str
    """A key of FIELD_IDS."""
    units: int
    rows: int
    row_bytes: int
    dtype: str
    readers: int
    bundle: str = "kv"
    """Fields of one bundle have the same units and rows, lie side by side in each (unit, row) and are bound
    as one view (of bytes if their dtypes differ). Another bundle is a separate stretch of memory."""
    reader_name: str = "query heads"
    """What the readers are, in messages."""
    unit_name: str = "head"
    """What a unit is, in messages."""
    taps: int = 0
    """Convolution fields are [channels, taps] per unit, oldest tap first; 0 for other fields."""

    def shard(self, tp_size: int, tp_rank: int) -> tuple[int, ...]:
        """Global unit ids one rank holds, ascending. Raises Unsupported if TP does not divide `readers`."""
        return kv_heads(self.readers, self.units, tp_size, tp_rank, self.reader_name)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit in one block of one layer."""
        return self.rows * self.row_bytes

    @property
    def canonical_bytes(self) -> int:
        """Bytes of the whole field in one block of one layer, before tensor parallelism."""
        return self.units * self.unit_bytes


def twin_taps(fields: Sequence[PageField]) -> tuple[PageField, PageField] | None:
    """Return the first two convolution fields that differ only by name (B and C of Mamba2, q and k of a gated
    delta net): exchanging them keeps every shape. None if there are none."""
    for i, first in enumerate(fields):
        for second in fields[i + 1 :]:
            if first.taps and replace(second, name=first.name, bundle=first.bundle) == first:
                return first, second
    return None

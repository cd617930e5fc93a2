"""What one layer keeps for its tokens; each spec lowers itself to PageFields.

No other file asks what kind of spec it has: it reads fields, live rows, and whether there is a row per token.
`part` is half of a cache's key and `kind` a display name; neither is compared with one of its values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd
from typing import Any, ClassVar, Protocol, cast

from rayk.kv.fields import ITEMSIZE, PageField
from rayk.kv.formats import FORMATS, LATENT_SIDES, StoredField

CHANNELS_PER_UNIT = 16
"""Channels of a Mamba1 layer that stay together, so that a slice starts at a multiple of 16 bytes."""


class KVCacheSpec(Protocol):
    """What a layer keeps per block. Hashable: layers with equal specs may share a KV group."""

    def __hash__(self) -> int: ...

    @property
    def kind(self) -> str:
        """Display name, e.g. sliding or mamba2."""
        ...

    @property
    def part(self) -> str:
        """attention or state; a layer may have one cache of each."""
        ...

    @property
    def has_token_rows(self) -> bool:
        """Whether each token of a block has a row, so that blocks and kernel blocks may have any size and
        attention backends compute with them. Otherwise a block has one row, that of its last token, and
        kernels get Segments (kernels.segments).

        `rows_per_block` cannot tell: a block of one token has one row in both cases.
        """
        ...

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def dtype(self) -> str:
        """Element type of the first field, or the name of a format (kv.formats)."""
        ...

    def fields(self) -> tuple[PageField, ...]:
        """Return the page's fields in memory order. All have the same `rows`."""
        ...

    def live_rows(self, num_tokens: int) -> range:
        """Token positions that a later token may still read once `num_tokens` are computed."""
        ...

    def dead_at(self, row: int) -> int | None:
        """Return the least number of computed tokens at which no token before `row`, above 0, is live any
        more; None: they stay."""
        ...

    @property
    def live_step(self) -> int:
        """Live rows begin at a multiple of this many positions; 0: always at the first."""
        ...

    def fullest_at(self, max_tokens: int) -> int:
        """Return the last number of computed tokens, up to `max_tokens`, at which a sequence has most live
        rows."""
        ...


class _TokensSpec:
    """What layers share that keep something of every token."""

    __slots__ = ()

    part: ClassVar[str] = "attention"
    has_token_rows: ClassVar[bool] = True

    def live_rows(self, num_tokens: int) -> range:
        return range(num_tokens)

    def dead_at(self, row: int) -> int | None:
        return None

    @property
    def live_step(self) -> int:
        return 0

    def fullest_at(self, max_tokens: int) -> int:
        return max_tokens


def _token_fields(
    spec: FullAttentionSpec | MlaSpec,
    units: int,
    sizes: tuple[int, int],
    sides: tuple[str, str] = ("k", "v"),
    unit_name: str = "head",
) -> tuple[PageField, ...]:
    """Make the `sides` of `sizes` elements per (unit, token), in the spec's format or as plain elements."""
    if spec.dtype in FORMATS:
        stored = FORMATS[spec.dtype].fields(*sizes, sides)
    else:
        itemsize = ITEMSIZE[spec.dtype]
        pairs = zip(sides, sizes, strict=True)
        stored = tuple(StoredField(name, spec.dtype, n * itemsize, "kv") for name, n in pairs)
    readers = spec.num_query_heads
    return tuple(
        PageField(
            f.name, units, spec.block_size, f.row_bytes, f.dtype, readers, f.bundle, unit_name=unit_name
        )
        for f in stored
    )


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(_TokensSpec):
    """Keys and values of every token. `dtype` is a format of kv.formats, or a plain element type."""

    block_size: int
    num_kv_heads: int
    head_size_k: int
    head_size_v: int
    dtype: str
    num_query_heads: int

    kind: ClassVar[str] = "full"

    def fields(self) -> tuple[PageField, ...]:
        """K then V, packed in the content axis of each (head, token); with scales where the format has them.

        Raises Unsupported for heads that the format cannot hold.
        """
        return _token_fields(self, self.num_kv_heads, (self.head_size_k, self.head_size_v))


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(FullAttentionSpec):
    """Keys and values of the last `window` tokens, the current one included."""

    window: int

    kind: ClassVar[str] = "sliding"

    def live_rows(self, num_tokens: int) -> range:
        """The next token, at position num_tokens, sees keys > num_tokens - window."""
        return range(max(0, num_tokens + 1 - self.window), num_tokens)

    def dead_at(self, row: int) -> int | None:
        return row + self.window - 1

    @property
    def live_step(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec(FullAttentionSpec):
    """Keys and values of the current chunk: positions `chunk` * n to `chunk` * (n + 1) - 1, of which a token
    sees those up to its own."""

    chunk: int

    kind: ClassVar[str] = "chunked"

    def live_rows(self, num_tokens: int) -> range:
        """The next token, at position num_tokens, sees its chunk's keys: none where it begins a chunk."""
        return range(num_tokens - num_tokens % self.chunk, num_tokens)

    def dead_at(self, row: int) -> int | None:
        """When the first chunk begins at the row or behind it."""
        return -(-row // self.chunk) * self.chunk

    @property
    def live_step(self) -> int:
        return self.chunk

    def fullest_at(self, max_tokens: int) -> int:
        """When all but one token of a chunk are computed: its last token frees it."""
        last = (max_tokens + 1) // self.chunk * self.chunk - 1
        return last if last >= 0 else max_tokens


@dataclass(frozen=True, slots=True)
class MlaSpec(_TokensSpec):
    """Multi-head latent attention: per token one latent vector and one rotated key that all heads share.

    It is one unit, which every rank holds (deepseek_v3/modeling_deepseek_v3.py:457).
    """

    block_size: int
    latent_size: int
    rope_size: int
    dtype: str
    num_query_heads: int

    kind: ClassVar[str] = "mla"

    def fields(self) -> tuple[PageField, ...]:
        """Return the latent, then the rotated key, packed in the content axis of each token; with scales
        where the format has them.

        Raises Unsupported for sizes that the format cannot hold.
        """
        sizes = (self.latent_size, self.rope_size)
        return _token_fields(self, 1, sizes, LATENT_SIDES, unit_name="latent")


@dataclass(frozen=True, slots=True)
class _StateSpec:
    """Base of recurrent layers: a block holds the state after the last of its computed tokens.

    With a block size of the longest sequence, a request has one block, updated in place.
    """

    block_size: int
    dtype: str
    """Dtype of the convolution's taps; the recurrent state is float32."""
    conv_width: int
    """Width of the causal convolution; the last `conv_width - 1` inputs are kept."""

    part: ClassVar[str] = "state"
    has_token_rows: ClassVar[bool] = False

    def live_rows(self, num_tokens: int) -> range:
        """Return the position of the last token: its state covers everything before."""
        return range(max(0, num_tokens - 1), num_tokens)

    def dead_at(self, row: int) -> int | None:
        return row + 1

    @property
    def live_step(self) -> int:
        return 1

    def fullest_at(self, max_tokens: int) -> int:
        return max_tokens

    def _conv(
        self, name: str, units: int, channels: int, readers: int, what: str, unit: str = "head"
    ) -> PageField:
        """Make the field of a convolution's taps: [channels, conv_width - 1] per unit."""
        taps = self.conv_width - 1
        row_bytes = channels * taps * ITEMSIZE[self.dtype]
        return PageField(name, units, 1, row_bytes, self.dtype, readers, name, what, unit, taps)

    def _state(
        self,
        name: str,
        units: int,
        elements: int,
        readers: int,
        what: str,
        unit: str = "head",
        dtype: str = "float32",
    ) -> PageField:
        """Make the field of a state of `elements` per unit."""
        return PageField(name, units, 1, elements * ITEMSIZE[dtype], dtype, readers, name, what, unit)


@dataclass(frozen=True, slots=True)
class Mamba1Spec(_StateSpec):
    """Mamba1 keeps, per channel, the taps of x and a state [state_size] (jamba/modeling_jamba.py:444).

    Units are runs of channels, since each channel has a state of its own.
    """

    num_channels: int
    state_size: int

    kind: ClassVar[str] = "mamba1"

    def fields(self) -> tuple[PageField, ...]:
        per_unit = channels_per_unit(self.num_channels)
        units = self.num_channels // per_unit
        what = f"runs of {per_unit} channels"
        return (
            self._conv("conv_x", units, per_unit, units, what, "channel run"),
            self._state("ssm", units, per_unit * self.state_size, units, what, "channel run"),
        )


@dataclass(frozen=True, slots=True)
class Mamba2Spec(_StateSpec):
    """Mamba2 keeps taps of x per head, of B and C per group, and a state [head_size, state_size] per head.

    Head h reads group h // (num_heads / num_groups) (mamba2/modeling_mamba2.py:257).
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    state_dtype: str = field(default="float32", kw_only=True)
    """Dtype of the recurrent state. rayk's kernels keep float32; vLLM may keep the model's own."""

    kind: ClassVar[str] = "mamba2"

    def fields(self) -> tuple[PageField, ...]:
        heads, what = self.num_heads, "Mamba heads"
        return (
            self._conv("conv_x", heads, self.head_size, heads, what),
            self._conv("conv_b", self.num_groups, self.state_size, heads, what, "group"),
            self._conv("conv_c", self.num_groups, self.state_size, heads, what, "group"),
            self._state("ssm", heads, self.head_size * self.state_size, heads, what, dtype=self.state_dtype),
        )


@dataclass(frozen=True, slots=True)
class GatedDeltaNetSpec(_StateSpec):
    """A gated delta net keeps taps of q and k per key head, of v per value head, and a state
    [key_head_size, value_head_size] per value head.

    Value head h reads key head h // (num_value_heads / num_key_heads)
    (qwen3_next/modeling_qwen3_next.py:582).
    """

    num_key_heads: int
    key_head_size: int
    num_value_heads: int
    value_head_size: int

    kind: ClassVar[str] = "gdn"

    def fields(self) -> tuple[PageField, ...]:
        heads, what = self.num_value_heads, "value heads"
        return (
            self._conv("conv_q", self.num_key_heads, self.key_head_size, heads, what, "key head"),
            self._conv("conv_k", self.num_key_heads, self.key_head_size, heads, what, "key head"),
            self._conv("conv_v", heads, self.value_head_size, heads, what, "value head"),
            self._state("delta", heads, self.key_head_size * self.value_head_size, heads, what, "value head"),
        )


def channels_per_unit(num_channels: int) -> int:
    return gcd(num_channels, CHANNELS_PER_UNIT)


@lru_cache(maxsize=1024)
def rows_per_block(spec: KVCacheSpec) -> int:
    """Count the rows of a block: one per token, or one in all."""
    rows = {field.rows for field in spec.fields()}
    assert len(rows) == 1, "all fields of a spec have the same rows"
    return rows.pop()


def with_block_size(spec: KVCacheSpec, block_size: int) -> KVCacheSpec:
    return cast(KVCacheSpec, replace(cast(Any, spec), block_size=block_size))


def with_dtype(spec: KVCacheSpec, dtype: str) -> KVCacheSpec:
    """Return a spec that keeps the same in another format."""
    return cast(KVCacheSpec, replace(cast(Any, spec), dtype=dtype))


def page_bytes(spec: KVCacheSpec) -> int:
    """Count the canonical bytes of one layer for one block: all units, no padding."""
    return sum(f.canonical_bytes for f in spec.fields())


def num_kept_blocks(spec: KVCacheSpec, num_tokens: int) -> int:
    """Count the blocks that a sequence keeps once `num_tokens` are computed; those before its first live row
    are freed.

    If nothing is live but the next row lies inside a block (as where a chunk ends), that block is kept for
    it.
    """
    return -(-num_tokens // spec.block_size) - spec.live_rows(num_tokens).start // spec.block_size


def max_live_blocks(spec: KVCacheSpec, max_tokens: int, num_new_tokens: int = 0) -> int:
    """Most `num_kept_blocks` of a sequence of up to `max_tokens` while `num_new_tokens` rows are written."""
    whole = -(-max_tokens // spec.block_size)
    rows = len(spec.live_rows(spec.fullest_at(max_tokens))) + num_new_tokens
    # The largest offset in a block at which live rows may begin.
    offset = spec.block_size - gcd(spec.block_size, spec.live_step)
    return min(whole, -(-(offset + rows) // spec.block_size))

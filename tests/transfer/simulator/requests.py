"""What is right in a simulated world: the rows and tokens of a request."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from rayk.kv.groups import KVCacheGroup, group_layers
from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, Mamba1Spec, SlidingWindowSpec

BLOCK_SIZE = 4
HEADS = (0, 1)
LAYERS = (0, 1)
"""0: full attention. 1: something of which only what is live at the end is kept."""
MAX_POSITIONS = 24
MAX_OUTPUT = 4
"""Output tokens of a request, the first of which is sampled where its prompt is computed."""
WINDOW = 4

_HEADS = {"num_kv_heads": len(HEADS), "num_query_heads": len(HEADS), "head_size_k": 8, "head_size_v": 8}
_FULL = FullAttentionSpec(block_size=BLOCK_SIZE, dtype="float32", **_HEADS)
_WINDOW = SlidingWindowSpec(block_size=BLOCK_SIZE, dtype="float32", window=WINDOW, **_HEADS)
_STATE = Mamba1Spec(block_size=1 << 10, dtype="float32", conv_width=2, num_channels=32, state_size=2)
_SPECS: dict[str, KVCacheSpec] = {"full": _FULL, "window": _WINDOW, "state": _STATE}


@dataclass(frozen=True, slots=True)
class Model:
    """Two layers: one of full attention, and one that is another such, or keeps a window or a state."""

    late: str
    """What the second keeps: full, window or state."""

    @property
    def is_hybrid(self) -> bool:
        """Whether the second layer is recurrent."""
        return self.late == "state"

    @property
    def late_layers(self) -> tuple[int, ...]:
        """Layers of which only what lives at the end is kept."""
        return () if self.late == "full" else (1,)

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """One per kind of layer."""
        return _groups(self.late)

    def group(self, layer: int) -> int:
        """Whose block table a layer has."""
        return 0 if layer == 0 or self.late == "full" else 1

    def num_units(self, layer: int) -> int:
        """Into how many units a layer's fields are cut: its heads, or runs of channels."""
        return (_SPECS[self.late] if layer else _FULL).fields()[0].units

    def live_rows(self, layer: int, num_tokens: int) -> range:
        """Positions whose rows are needed to go on after so many tokens."""
        return (_SPECS[self.late] if layer else _FULL).live_rows(num_tokens)

    def place(self, layer: int, position: int) -> tuple[int, int]:
        """(index into the block table, row of the block) of a position."""
        return (0, 0) if layer == 1 and self.is_hybrid else divmod(position, BLOCK_SIZE)

    def pieces(self, layer: int, positions: range) -> tuple[tuple[int, int, int, int], ...]:
        """Positions block by block: (index into the block table, first row, position of the first, and of the
        one after the last)."""
        return _pieces(self, layer, positions)

    def counts(self, num_tokens: int, num_more: int) -> list[tuple[int, int]]:
        """Per group, (blocks in which nothing lives, blocks) of `num_tokens` tokens and `num_more` more."""
        counts = []
        for layer in LAYERS[: len(self.groups)]:
            if layer and self.is_hybrid:
                counts.append((0, 1))
            else:
                first = self.live_rows(layer, num_tokens).start // BLOCK_SIZE
                counts.append((first, -(-(num_tokens + num_more) // BLOCK_SIZE)))
        return counts


@functools.cache
def _groups(late: str) -> tuple[KVCacheGroup, ...]:
    part = _SPECS[late].part
    return tuple(group_layers({(0, "attention"): _FULL, (1, part): _SPECS[late]}))


@functools.cache
def _pieces(model: Model, layer: int, positions: range) -> tuple[tuple[int, int, int, int], ...]:
    found: dict[int, list[int]] = {}
    for position in positions:
        index, row = model.place(layer, position)
        found.setdefault(index, [row, position, position])[2] = position
    if layer == 1 and model.is_hybrid:  # of all positions, the state after the last one is kept
        return tuple((index, 0, last, last + 1) for index, (_, _, last) in found.items())
    return tuple((index, first, at, last + 1) for index, (first, at, last) in found.items())


@functools.cache
def right_rows(prompt: int, layer: int, head: int) -> np.ndarray:
    """What each element of the row of each position must be."""
    name = ((prompt + 1) * 10 + layer) * 10 + head
    return np.arange(MAX_POSITIONS, dtype=np.float32) + name * 100


def right_token(prompt: int, index: int) -> int:
    """Output token `index` of a prompt."""
    return prompt * 100 + index


WRONG_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt of a request."""

    job_id: str
    prompt: int
    num_tokens: int
    attempt: int

"""A reference that takes over what an engine stored, where correct arithmetic may have stored it.

Float32 sums in another order differ by about 2^-20. If a value lies that near to the border between two
quantisation steps, either step is correct, and everything computed from it depends on the choice. So that
such a flip neither counts as an error nor hides one, the reference takes the engine's own rows of the prompt
wherever rounding a slightly perturbed value can give them. Otherwise the engine is wrong: the row is refused
and the reference continues with its own. Values near a border whose choice is unknown (a row outside the
window, an output token's) make everything from their token on unsettled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rayk.oracle.quantised import KVRounding, by_blocks, round_blocks, scale_blocks

NEAR = 2.0**-17
"""Error of a correct engine's values relative to the largest of their head and token; nothing flips beyond
it. Measured on tiny checkpoints of six families, over their prompts: at most 2^-17.1, median 2^-20."""
LEGAL = 2.0**-12
"""Perturbation within which a stored row is accepted: generous, because a refused row is an error."""
FUZZ = 2.0**-16
"""Relative difference of stored values of one step, since their scales are rounded too."""


class StoredRows(NamedTuple):
    """The dequantised rows that an engine holds of one side (k or v) of a layer."""

    first: int
    """Token of the first row."""
    values: torch.Tensor
    """[heads, tokens, elements] float32."""


StoredKV = Mapping[int, Mapping[str, StoredRows]]
"""Layer -> k and v -> the prompt's rows."""


class WrongStoredRow(NamedTuple):
    """A stored row that no rounding of the right values gives."""

    layer: int
    side: str
    head: int
    token: int


@dataclass
class Following:
    """Stands in for a KVRounding while one text is fed."""

    rounding: KVRounding
    stored: StoredKV
    first_unsettled: int | None = None
    """The first token whose keys and values may be rounded either way; None if there is none."""
    num_followed: int = 0
    """Rows taken from the engine that differ from the reference's own."""
    refused: list[WrongStoredRow] = field(default_factory=list)
    _num_fed: dict[int, int] = field(default_factory=dict)

    @property
    def then(self) -> KVRounding | None:
        """The format that the cache is converted to."""
        return self.rounding.then

    def attach(self, cache: Any) -> None:
        """Make a transformers cache store what the engine keeps."""
        update = cache.update

        def following(keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kw: Any) -> Any:
            first = self._num_fed.get(layer_idx, 0)
            self._num_fed[layer_idx] = first + keys.shape[-2]
            kept = [
                self._keep(side[0], layer_idx, name, first).unsqueeze(0)
                for side, name in zip((keys, values), ("k", "v"), strict=True)
            ]
            return update(*kept, layer_idx, *args, **kw)

        cache.update = following

    def convert(self, cache: Any) -> None:
        """Convert the cache to the next format. For rows taken from the engine this is exact."""
        self.rounding.convert(cache)
        assert self.rounding.then is not None
        self.rounding = self.rounding.then
        del cache.update
        self.attach(cache)

    def _keep(self, values: torch.Tensor, layer: int, side: str, first: int) -> torch.Tensor:
        """values [heads, tokens, elements] of tokens from `first` on, as they are cached."""
        scale = self.rounding.layer_scales.get(layer, (1.0, 1.0))[side == "v"]
        kept = self.rounding.round(values, scale, seed=0)
        unsettled = _may_flip(self.rounding, values, scale)
        stored = self.stored.get(layer, {}).get(side)
        if stored is not None:
            here = slice(
                max(first, stored.first), min(first + values.shape[1], stored.first + stored.values.shape[1])
            )
            if here.start < here.stop:
                mine = slice(here.start - first, here.stop - first)
                theirs = stored.values[:, here.start - stored.first : here.stop - stored.first]
                legal = _is_legal(self.rounding, values[:, mine], scale, theirs)
                self._refuse(layer, side, here.start, legal)
                self.num_followed += int(((theirs != kept[:, mine]).any(-1) & legal).sum())
                kept[:, mine] = torch.where(legal.unsqueeze(-1), theirs.to(kept.dtype), kept[:, mine])
                unsettled[:, mine] &= ~legal
        tokens = unsettled.any(0).nonzero()
        if len(tokens):
            found = first + int(tokens[0])
            self.first_unsettled = min(found, found if self.first_unsettled is None else self.first_unsettled)
        return kept

    def _refuse(self, layer: int, side: str, first: int, legal: torch.Tensor) -> None:
        """Record refused rows; rows from the first unsettled token on are not judged."""
        if self.first_unsettled is not None:
            legal = legal[:, : max(0, self.first_unsettled - first)]
        self.refused += [WrongStoredRow(layer, side, h, first + t) for h, t in (~legal).nonzero().tolist()]


def _may_flip(rounding: KVRounding, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Tell which rows [heads, tokens] may be stored in more than one way."""
    if rounding.kv_dtype == "auto":
        return torch.zeros(values.shape[:-1], dtype=torch.bool)
    lows, highs = zip(*_ranges(rounding, values, scale, NEAR), strict=True)
    low, high = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    return (high - low > FUZZ * high.abs()).any(-1)


def _is_legal(rounding: KVRounding, values: torch.Tensor, scale: float, stored: torch.Tensor) -> torch.Tensor:
    """Tell which rows [heads, tokens] of `stored` are a rounding of slightly perturbed values."""
    fits = torch.zeros(values.shape, dtype=torch.bool)
    slack = FUZZ * stored.abs()
    for low, high in _ranges(rounding, values, scale, LEGAL):
        fits |= (low - slack <= stored) & (stored <= high + slack)
    return fits.all(-1)


def _ranges(
    rounding: KVRounding, values: torch.Tensor, scale: float, off: float
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Lowest and highest rounding of values perturbed by `off` times their row's largest, for each choice of
    the scales that nvfp4 blocks may get."""
    wide = values.float()
    delta = off * wide.abs().amax(-1, keepdim=True)
    ends = wide - delta, wide + delta
    if rounding.kv_dtype == "auto":
        return [ends]
    if rounding.kv_dtype == "nvfp4":
        largest = by_blocks(wide).abs().amax(-1, keepdim=True)
        apart = delta.unsqueeze(-1)
        return [
            (round_blocks(ends[0], scales), round_blocks(ends[1], scales))
            for scales in (scale_blocks(largest - apart, scale), scale_blocks(largest + apart, scale))
        ]
    return [(rounding.round_e4m3(ends[0], wide, scale), rounding.round_e4m3(ends[1], wide, scale))]

"""Rounding of keys and values before the reference model caches them, as a quantised cache does.

Written apart from rayk's kernels, from the formats' definitions: e4m3 with one scale per layer and side, or
one per (head, token); nvfp4 with an e4m3 scale per 16 elements below one per layer and side. A step's
attention sees its own keys and values rounded, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

E4M3_LARGEST = 448.0
E2M1_LARGEST = 6.0
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16


@dataclass(frozen=True)
class KVRounding:
    kv_dtype: str
    """fp8_e4m3, nvfp4, or auto for an engine that does not quantise."""
    kv_scales: str = "tensor"
    """tensor or token_head, for fp8_e4m3."""
    layer_scales: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Layer -> (k, v); 1 for absent layers."""
    jitter: float = 0.0
    """Relative perturbation of values before rounding, like another order of sums: some then fall to the
    other side of a step."""
    then: KVRounding | None = None
    """The format to which the cache is converted after the prompt, and in which later tokens are stored: an
    engine that converts what it received."""

    @property
    def identity(self) -> list[Any]:
        """Distinguishes its answers in the cache."""
        own = [self.kv_dtype, self.kv_scales, sorted(self.layer_scales.items()), self.jitter]
        return [*own, self.then.identity if self.then is not None else None]

    def scaled(self, layer_scales: Mapping[int, tuple[float, float]]) -> KVRounding:
        return replace(self, layer_scales=layer_scales, then=self.then and self.then.scaled(layer_scales))

    def jittered(self, amount: float) -> KVRounding:
        return replace(self, jitter=amount, then=self.then and self.then.jittered(amount))

    def round(self, values: torch.Tensor, scale: float, seed: int) -> torch.Tensor:
        """values [..., D] as they read back after storing, in their own dtype."""
        wide = values.float()
        if self.jitter:
            generator = torch.Generator().manual_seed(seed)
            wide = wide * (1 + self.jitter * torch.randn(wide.shape, generator=generator))
        if self.kv_dtype == "auto":
            return values
        if self.kv_dtype == "nvfp4":
            largest = by_blocks(wide).abs().amax(-1, keepdim=True)
            rounded = round_blocks(wide, scale_blocks(largest, scale))
        else:
            rounded = self.round_e4m3(wide, wide, scale)
        return rounded.to(values.dtype)

    def round_e4m3(self, values: torch.Tensor, row: torch.Tensor, scale: float) -> torch.Tensor:
        """values [..., D] float32 in fp8; a per-token scale is taken from `row` [..., D]."""
        if self.kv_scales != "token_head":
            return _e4m3(values / scale) * scale
        own = row.abs().amax(-1, keepdim=True) / E4M3_LARGEST
        own = torch.where(own == 0, 1.0, own)
        return _e4m3(values / own) * own

    def attach(self, cache: Any) -> None:
        """Make a transformers cache round what it stores."""
        update = cache.update

        def rounding(keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kw: Any) -> Any:
            return update(*self._round_both(keys, values, layer_idx), layer_idx, *args, **kw)

        cache.update = rounding

    def convert(self, cache: Any) -> None:
        """Round a cache's contents to the next format, and later tokens too."""
        assert self.then is not None, "nothing comes next"
        for index, layer in enumerate(cache.layers):
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = self.then._round_both(layer.keys, layer.values, index)
        del cache.update  # the class's own again
        self.then.attach(cache)

    def _round_both(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = self.layer_scales.get(layer, (1.0, 1.0))
        seed = 2 * (layer + 1000 * keys.shape[-2])
        return self.round(keys, k_scale, seed), self.round(values, v_scale, seed + 1)


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float()


def by_blocks(values: torch.Tensor) -> torch.Tensor:
    """View [..., D] as [..., blocks, BLOCK]."""
    return values.reshape(*values.shape[:-1], -1, BLOCK)


def scale_blocks(largest: torch.Tensor, scale: float) -> torch.Tensor:
    """Scale nvfp4 blocks by their largest elements [..., blocks, 1]; `scale` is the layer's."""
    return _e4m3(largest / E2M1_LARGEST / scale) * scale


def round_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Round values [..., D] to e2m1 with scales [..., blocks, 1]."""
    blocks = by_blocks(values)
    quotients = torch.where(scales == 0, 0.0, blocks / scales)
    levels = torch.tensor(E2M1_LEVELS)
    size = quotients.abs().clamp(max=E2M1_LARGEST).double()
    # The nearest level; of two equally near ones, the one with an even index.
    distance = (size.unsqueeze(-1) - levels.double()).abs()
    nearest = distance.amin(-1, keepdim=True)
    index = torch.arange(len(E2M1_LEVELS))
    order = torch.where(distance == nearest, index % 2 * len(E2M1_LEVELS) + index, 4 * len(E2M1_LEVELS))
    chosen = levels[order.argmin(-1)]
    return (torch.copysign(chosen, quotients) * scales).flatten(-2)

"""Makes transformers' models share keys and values between layers, through their cache.

A model whose family has no sharing computes keys and values in every layer and hands them to its cache, which
returns what the layer attends to. This cache drops those of a sharing layer and returns what its target was
given in the same pass, so that everything else is transformers' own. config.json names the sharing layers
under `num_kv_shared_layers` or `kv_sharing_targets`, as in rayk.models.families.sharing; transformers ignores
both keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

Sources = tuple[int | None, ...]
"""Per layer the layer whose keys and values it attends to; None for its own."""


def kv_sources(config: Any) -> Sources | None:
    """From transformers' config object; None if no layer shares, or the model itself implements sharing.
    Raises ValueError for impossible values."""
    config = config.get_text_config()
    if hasattr(config, "kv_sharing_modes"):
        return None
    count = getattr(config, "num_kv_shared_layers", None) or 0
    targets = getattr(config, "kv_sharing_targets", None)
    num_layers = config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    if not count and targets is None:
        return None
    if count and targets is not None:
        raise ValueError("num_kv_shared_layers and kv_sharing_targets both say which layers share")
    if targets is None:
        own = types[: max(0, num_layers - count)]
        last = {kind: layer for layer, kind in enumerate(own)}
        lonely = set(types) - set(last)
        if lonely:
            raise ValueError(f"num_kv_shared_layers {count} leaves no {min(lonely)} layer to share with")
        targets = [None] * len(own) + [last[kind] for kind in types[len(own) :]]
    _check(targets, types)
    return tuple(targets)


def _check(targets: Sequence[int | None], types: Sequence[str]) -> None:
    if len(targets) != len(types):
        raise ValueError(f"kv_sharing_targets has {len(targets)} entries for {len(types)} layers")
    for layer, target in enumerate(targets):
        if target is None:
            continue
        if not 0 <= target < layer or targets[target] is not None or types[target] != types[layer]:
            raise ValueError(
                f"layer {layer} cannot share the keys and values of layer {target}, "
                "which must come before, be of the same type and have its own"
            )


class SharingCache(DynamicCache):  # type: ignore[misc]
    """The cache of one text. Sharing layers store nothing."""

    def __init__(self, sources: Sources) -> None:
        super().__init__()
        assert self.layer_class_to_replicate is not None, "a cache without a config makes layers of one class"
        self.layers = [self.layer_class_to_replicate() for _ in sources]
        self._sources = sources
        self._in_use: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_new = 0
        """Tokens of this pass, which targets already have when a sharing layer is computed."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """List keys and values [1, H, T, D] that the layer attends to, up to this pass's last token."""
        source = self._sources[layer_idx]
        if source is None:
            self._num_new = key_states.shape[-2]
            in_use = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            self._in_use[layer_idx] = in_use
            source = layer_idx
        # Targets come earlier, so theirs are already of this pass.
        return self._in_use[source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this pass, for a layer that asks before its `update` (llama4, for positions)."""
        source = self._sources[layer_idx]
        if source is None:
            return int(super().get_seq_length(layer_idx))
        return int(super().get_seq_length(source)) - self._num_new

"""A text fed to a transformers model piece by piece, with the model's cache of it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from rayk.oracle.following import Following
from rayk.oracle.quantised import KVRounding
from rayk.oracle.quiet import no_kernel_advice

RECURRENT_TYPES = frozenset({"linear_attention", "hybrid"})
"""transformers' names of layers with a state; hybrid ones also have keys and values."""


class FedText:
    """The text fed so far; hides how families differ in being called."""

    def __init__(self, model: Any, rounding: KVRounding | Following | None = None) -> None:
        """`rounding` is applied to cached keys and values."""
        self._model = model
        self._num_tokens = 0
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in accepted else "past_key_values"
        self._takes_positions = "position_ids" in accepted
        self.cache = _new_cache(model.config)
        self._rounding = rounding
        if rounding is not None:
            rounding.attach(self.cache)

    def feed_both(
        self, prompt: Sequence[int], output: Sequence[int], *, logits_to_keep: int = 0
    ) -> torch.Tensor:
        """Feed a prompt and its output, together unless the cache is converted in between."""
        if self._rounding is None or self._rounding.then is None or not output:
            return self.feed([*prompt, *output], logits_to_keep=logits_to_keep)
        first = self.feed(prompt)
        self._rounding.convert(self.cache)
        return torch.cat([first, self.feed(output)])[-logits_to_keep:]

    def feed(self, token_ids: Sequence[int], *, logits_to_keep: int = 0) -> torch.Tensor:
        """Logits [kept tokens, vocabulary] after more tokens, in the model's dtype; 0 keeps all."""
        count = len(token_ids)
        arguments = {self._cache_name: self.cache}
        if self._takes_positions:
            # Left to itself, bamba counts every piece from 0.
            positions = torch.arange(self._num_tokens, self._num_tokens + count, device=self._model.device)
            arguments["position_ids"] = positions[None]
        with torch.inference_mode(), no_kernel_advice():
            step = self._model(
                torch.tensor([list(token_ids)], device=self._model.device),
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **arguments,
            )
        self._num_tokens += count
        logits: torch.Tensor = step.logits[0]
        return logits


def _new_cache(config: Any) -> Any:
    from transformers import DynamicCache

    from rayk.oracle.sharing import SharingCache, kv_sources

    sources = kv_sources(config)
    if sources is not None:
        return SharingCache(sources)
    types = getattr(config, "layer_types", None) or ()
    # Only where states make it necessary: without a config the cache keeps every token of sliding layers
    # too, which the mask hides.
    return DynamicCache(config=config) if RECURRENT_TYPES & set(types) else DynamicCache()

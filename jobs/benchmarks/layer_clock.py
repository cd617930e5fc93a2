"""Times of groups of layers, taken from outside the engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayk.models.decoder import Decoder


class LayerClock:
    """Times groups of consecutive layers from outside, and counts the tokens that each layer is given."""

    def __init__(self, decoder: Decoder, groups: Sequence[range], device: torch.device) -> None:
        self._group_of = {layer: number for number, group in enumerate(groups) for layer in group}
        self._last = {group[-1]: number for number, group in enumerate(groups) if group}
        self._mark: Callable[[], Any] = _cuda_mark if device.type == "cuda" else time.perf_counter_ns
        self._marks: list[tuple[int | None, Any]] = []
        self._token_layers = [0] * len(groups)
        decoder.layers = tuple(  # type: ignore[assignment]
            _Watched(layer, index, self) for index, layer in enumerate(decoder.layers)
        )

    def enter(self, layer: int, num_tokens: int) -> None:
        """A layer is about to compute so many tokens."""
        self._token_layers[self._group_of[layer]] += num_tokens
        if layer == 0:
            self._marks.append((None, self._mark()))

    def leave(self, layer: int) -> None:
        """It has; on a GPU: its kernels are queued."""
        if layer in self._last:
            self._marks.append((self._last[layer], self._mark()))

    def take(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Milliseconds and token-layers of each group since the last call; waits for a GPU."""
        times = [0.0] * len(self._token_layers)
        if self._marks and isinstance(self._marks[-1][1], torch.cuda.Event):
            self._marks[-1][1].synchronize()
        for (_, before), (group, now) in itertools.pairwise(self._marks):
            if group is not None:
                times[group] += _elapsed_ms(before, now)
        counted = tuple(self._token_layers)
        self._marks.clear()
        self._token_layers = [0] * len(counted)
        return tuple(times), counted


class _Watched:
    """A layer that tells a clock when it runs."""

    def __init__(self, layer: Any, index: int, clock: LayerClock) -> None:
        self._layer = layer
        self._index = index
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The layer's own; x [T, hidden], or AltUp's streams of it."""
        self._clock.enter(self._index, getattr(x, "streams", x).shape[-2])
        out = self._layer.forward(x, *args, **kwargs)
        self._clock.leave(self._index)
        return out


def _cuda_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(before: Any, now: Any) -> float:
    return float(before.elapsed_time(now)) if isinstance(now, torch.cuda.Event) else (now - before) / 1e6

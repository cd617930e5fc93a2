"""The state cache of recurrent mixers: taps of a convolution, and a state per unit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rayk.kv.caches import FieldView
from rayk.models.layers.causal_conv import CausalConv


class StateMixer:
    """Base of recurrent mixers. The engine binds the state cache before the first step.

    Shapes: B state slots, U units of the rank, C content of a unit.
    """

    def __init__(
        self, *, layer: int, conv: CausalConv, field: str, units: tuple[int, ...], shape: tuple[int, int]
    ) -> None:
        """`field`: name of the states, float32 of `shape` per unit. `units`: global ids of the rank."""
        self.layer = layer
        self._conv = conv
        self._field = field
        self._units = units
        self._shape = shape
        self._state: torch.Tensor | None = None

    def bind_kv_cache(self, view: Mapping[str, torch.Tensor]) -> None:
        """Use the bundles [B, U, 1, C] of the convolution's parts and of the states from now on."""
        bundle = view[self._field]
        assert bundle.shape[1:] == (len(self._units), 1, self._shape[0] * self._shape[1]), bundle.shape
        assert bundle.dtype == torch.float32, bundle.dtype
        self._conv.bind(view)
        self._state = bundle.view(*bundle.shape[:2], *self._shape)

    def unbind_kv_cache(self) -> None:
        self._conv.unbind()
        self._state = None

    def field_views(self) -> tuple[FieldView, ...]:
        """View taps and states [B, U, 1, C] of the bound cache."""
        state = self._bound()
        states = FieldView(self._field, state.view(*state.shape[:2], 1, -1), self._units)
        return (*self._conv.field_views(), states)

    def _bound(self) -> torch.Tensor:
        assert self._state is not None, f"layer {self.layer}: no state cache is bound"
        return self._state

"""What the builders of one rank's layers share: where weights come from, and how they are cut.

A builder stands beside its layer in `layers`. It cuts the layer's weights by the rank's units and says which
units those are; nothing else decides what a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rayk.attention.backend import AttentionBackend
from rayk.models.config import DecoderConfig, NormConfig
from rayk.models.kv_scales import read_kv_scales
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.norm import Norm
from rayk.models.pieces import Pieces, Rows, head_rows
from rayk.parallel.comm import Comm


@dataclass(frozen=True, kw_only=True)
class Build:
    pieces: Pieces
    config: DecoderConfig
    comm: Comm
    backend_for: Callable[[int], AttentionBackend]
    """Layer index -> the backend of its attention."""
    reduce: bool = True
    """Whether mixers and MLPs add their partial sums over the ranks. False (dataclasses.replace) if they
    stand side by side and share one sum."""
    stage: range | None = None
    """Layers of the rank's pipeline stage; None: all."""
    attention_input_size: int | None = None
    """Elements of what queries, keys and values are projected from; None: those of a hidden state."""

    @property
    def layers(self) -> range:
        return range(self.config.num_layers) if self.stage is None else self.stage

    @property
    def is_first(self) -> bool:
        """Whether the stage makes the residual stream, from token ids."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage turns the residual stream into logits."""
        return self.layers.stop == self.config.num_layers

    @property
    def tp(self) -> tuple[int, int]:
        """(size, rank): the last arguments of parallel.shard's functions."""
        return self.comm.size, self.comm.rank

    def name(self, index: int, parameter: str) -> str:
        return self.pieces.names.in_layer(index, parameter)

    def linear(
        self, index: int, parts: tuple[Rows, ...], *, bias: bool, num_inputs: int | None = None
    ) -> Linear:
        """Return one matrix of the parts' rows, stacked; its inputs are hidden states by default."""
        num_inputs = num_inputs or self.config.hidden_size
        weight = self.pieces.kept_rows(index, parts, num_inputs)
        return Linear(
            self.pieces.stacked(index, parts, "weight", (num_inputs,)) if weight is None else weight,
            self.pieces.stacked(index, parts, "bias", ()) if bias else None,
        )

    def row_parallel(
        self,
        index: int,
        part: Rows,
        *,
        bias: bool,
        num_outputs: int | None = None,
        reduce: bool | None = None,
    ) -> RowParallelLinear:
        """Return the rank's columns `part` of a matrix, and the whole bias; outputs are hidden states by
        default. `reduce` overrides `Build.reduce` for a matrix within a mixer."""
        num_outputs = num_outputs or self.config.hidden_size
        wanted = self.name(index, f"{part.parameter}.weight"), (num_outputs, part.size), part.rows
        kept = self.pieces.kept_columns(*wanted)
        weight = self.pieces.columns(*wanted) if kept is None else kept
        whole = self.pieces.whole(self.name(index, f"{part.parameter}.bias"), num_outputs) if bias else None
        return RowParallelLinear(weight, whole, self.comm, reduce=self.reduce if reduce is None else reduce)

    def per_head(self, index: int, parameter: str, num_heads: int, own_heads: Sequence[int]) -> torch.Tensor:
        """Return the elements of heads `own_heads` of a vector with one per head, rounded to the model's
        dtype like other weights, in float32 for the kernels."""
        (rows,) = head_rows(own_heads, 1)
        return self.pieces.rows(self.name(index, parameter), (num_heads,), rows).float()

    def kv_scales(self, index: int) -> tuple[float, float]:
        """Scales (k, v) of the quantised cache that the layer uses, its own or a shared one."""
        source = self.config.layers[index].kv_source
        return read_kv_scales(self.pieces.reader, self.pieces.names, index if source is None else source)

    def layer_norm(self, index: int, parameter: str) -> Norm:
        return self.norm(self.name(index, f"{parameter}.weight"))

    def norm(self, name: str, size: int | None = None, config: NormConfig | None = None) -> Norm:
        """Return the norm with this name on disk; by default of hidden states, configured like the model's
        norms."""
        weight = self.pieces.whole(name, size or self.config.hidden_size)
        return Norm(weight, config or self.config.norm)

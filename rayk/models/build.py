"""What all builders of one rank's layers take: where weights come from, and how they are cut.

A builder stands beside its layer in `layers`. It cuts the layer's weights by the rank's units and says which
units those are; nothing else decides what a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayk.models.kv_scales import read_kv_scales
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.norm import Norm
from rayk.models.pieces import head_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rayk.attention.backend import AttentionBackend
    from rayk.models.config import DecoderConfig, NormConfig
    from rayk.models.pieces import Pieces, Rows
    from rayk.parallel.comm import Comm


@dataclass(frozen=True, kw_only=True)
class Build:
    """One rank of one model."""

    pieces: Pieces
    config: DecoderConfig
    comm: Comm
    backend_for: Callable[[int], AttentionBackend]
    """Layer -> what computes its attention."""
    reduce: bool = True
    """Halves add up their own partial sums over the ranks. Else they leave them partial, since they stand
    side by side and share one sum (dataclasses.replace(build, reduce=False))."""

    @property
    def tp(self) -> tuple[int, int]:
        """(size, rank): the last arguments of parallel.shard's functions."""
        return self.comm.size, self.comm.rank

    def name(self, index: int, parameter: str) -> str:
        """Name on disk of a layer's parameter."""
        return self.pieces.names.in_layer(index, parameter)

    def linear(
        self, index: int, parts: tuple[Rows, ...], *, bias: bool, num_inputs: int | None = None
    ) -> Linear:
        """One matrix of the parts' rows, one under the other; inputs are hidden states unless said."""
        num_inputs = num_inputs or self.config.hidden_size
        return Linear(
            self.pieces.stacked(index, parts, "weight", (num_inputs,)),
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
        """The rank's columns `part` of a matrix, and the whole bias; outputs are hidden states unless said.

        `reduce`: as `Build.reduce`, for a matrix within a mixer.
        """
        num_outputs = num_outputs or self.config.hidden_size
        weight = self.pieces.columns(
            self.name(index, f"{part.parameter}.weight"), (num_outputs, part.size), part.rows
        )
        whole = self.pieces.whole(self.name(index, f"{part.parameter}.bias"), num_outputs) if bias else None
        return RowParallelLinear(weight, whole, self.comm, reduce=self.reduce if reduce is None else reduce)

    def per_head(self, index: int, parameter: str, num_heads: int, held: Sequence[int]) -> torch.Tensor:
        """The elements of heads `held` of a vector with one per head, rounded to the model's dtype as its
        other weights are; float32 for the kernels."""
        (rows,) = head_rows(held, 1)
        return self.pieces.rows(self.name(index, parameter), (num_heads,), rows).float()

    def kv_scales(self, index: int) -> tuple[float, float]:
        """Scales of a quantised cache (k, v) that the layer writes, or reads if it shares another's."""
        source = self.config.layers[index].kv_source
        return read_kv_scales(self.pieces.reader, self.pieces.names, index if source is None else source)

    def layer_norm(self, index: int, parameter: str) -> Norm:
        """A norm of hidden states that belongs to a layer."""
        return self.norm(self.name(index, f"{parameter}.weight"))

    def norm(self, name: str, size: int | None = None, config: NormConfig | None = None) -> Norm:
        """A norm by its name on disk, of hidden states and as the model's norms are unless said."""
        weight = self.pieces.whole(name, size or self.config.hidden_size)
        return Norm(weight, config or self.config.norm)

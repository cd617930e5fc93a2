"""Normalisation. Statistics are float32 in every kind; kinds differ in when the result is rounded."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from rayk.kernels.pointwise import add_rms_norm, gated_norm, layer_norm, norm_rotate_halves, rms_norm
from rayk.models.config import NormConfig
from rayk.models.layers.rope import Rotation, rotate
from rayk.parallel.comm import Comm


class Norm:
    """Normalises the last axis as `config` says.

    `weight` is [D], or [heads, D] if each head of x [T, heads, D] has its own.
    """

    def __init__(self, weight: torch.Tensor | None, config: NormConfig) -> None:
        """`weight` is in the model's dtype, as stored."""
        # In float32 this sum equals the one that transformers computes in each forward.
        self.weight = weight.float() + config.offset if weight is not None and config.wide else weight
        self.eps = config.eps
        self._wide = config.wide
        self._centred = config.kind == "layer"
        assert config.kind in ("rms", "layer"), config
        assert config.wide or not (config.offset or self._centred), config

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Keep shape and dtype."""
        if self._centred:
            return layer_norm(x, self.weight, eps=self.eps)
        return rms_norm(x, self.weight, eps=self.eps, wide=self._wide)

    def add(self, x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + out [T, D] and its norm."""
        if self._centred:
            total = x + out
            return total, self.forward(total)
        return add_rms_norm(x, out, self.weight, eps=self.eps, wide=self._wide)

    def gated(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Norm each head of x [T, heads, D], multiply by silu(gate) [T, heads * D]; [T, heads * D]."""
        assert not self._centred
        return gated_norm(
            x.flatten(1),
            gate,
            self.weight,
            group_size=x.shape[2],
            eps=self.eps,
            order="norm_gate",
            wide=self._wide,
        )

    def rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Norm each head of x [T, heads, D], and rotate it."""
        if self._centred or rotation.interleaved:
            return rotate(self.forward(x), rotation)
        angles = rotation.cos, rotation.sin
        return norm_rotate_halves(x, self.weight, *angles, eps=self.eps, wide=self._wide)


class GatedNorm:
    """The step after a Mamba2 scan: RMSNorm over groups of channels, and the gate.

    A rank holds some heads, and a group is the channels of several heads. If groups span ranks, the sums of
    squares of all groups are added over the ranks; nothing else crosses them. Shapes: T packed tokens, H
    heads of the rank of P channels, G groups of the whole model.
    """

    def __init__(
        self,
        weight: torch.Tensor | None,
        *,
        kind: str,
        eps: float,
        head_groups: torch.Tensor,
        num_groups: int,
        group_size: int,
        comm: Comm,
        is_whole: bool,
    ) -> None:
        """weight [H * P]; None if nothing is normed. `kind` as in Mamba2Config.gate.

        `head_groups` [H] int64: each head's group. `group_size` in channels. `is_whole`: no group spans
        ranks.
        """
        assert kind in ("gate_norm", "norm_gate", "plain"), kind
        assert (weight is None) == (kind == "plain"), kind
        self._weight = None if weight is None else weight.float()
        self._kind = kind
        self._eps = eps
        self._head_groups = head_groups
        # A matrix product sums heads in a fixed order, unlike index_add on a GPU.
        self._members = F.one_hot(head_groups, num_groups).float()
        self._group_size = group_size
        self._comm = comm
        self._sums_over_ranks = not is_whole and comm.size > 1

    def forward(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Norm y [T, H, P] with gate [T, H * P] to [T, H * P] in y's dtype; float32 inside."""
        if not self._sums_over_ranks:
            return gated_norm(
                y.flatten(1),
                gate,
                self._weight,
                group_size=self._group_size,
                eps=self._eps,
                order=self._kind,
                wide=True,
            )
        gates = F.silu(gate.float()).view_as(y)
        wide = y.float()
        if self._kind != "norm_gate":
            wide = wide * gates
        if self._weight is not None:
            wide = self._normed(wide)
        if self._kind == "norm_gate":
            wide = wide * gates
        return wide.to(y.dtype).flatten(1)

    def _normed(self, wide: torch.Tensor) -> torch.Tensor:
        assert self._weight is not None
        sums = self._comm.all_reduce(wide.square().sum(-1) @ self._members)
        scale = torch.rsqrt(sums / self._group_size + self._eps)[:, self._head_groups]
        return wide * scale[:, :, None] * self._weight.view(wide.shape[1:])

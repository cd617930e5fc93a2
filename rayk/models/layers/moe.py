"""Feed-forward halves of which each token uses a few experts; whole experts lie on ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rayk.models.config import ExpertsConfig
    from rayk.models.layers.linear import Linear
    from rayk.parallel.comm import Comm

MAX_DENSE_TOKENS = 64
"""On an accelerator, steps of up to so many tokens run every expert of the rank on every token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The rank's E experts (none is allowed), of inner size I: x @ weight + bias, twice."""

    gate_up: torch.Tensor
    """[E, hidden, 2 I]: gate columns, then up columns."""
    gate_up_bias: torch.Tensor
    """[E, 2 I]"""
    down: torch.Tensor
    """[E, I, hidden]"""
    down_bias: torch.Tensor
    """[E, hidden]"""

    @classmethod
    def from_interleaved(
        cls,
        *,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor,
        down: torch.Tensor,
        down_bias: torch.Tensor,
    ) -> Experts:
        """As stored: gate and up columns take turns (gpt_oss/modeling_gpt_oss.py:81)."""
        return cls(
            gate_up=torch.cat([gate_up[..., ::2], gate_up[..., 1::2]], dim=-1),
            gate_up_bias=torch.cat([gate_up_bias[..., ::2], gate_up_bias[..., 1::2]], dim=-1),
            down=down,
            down_bias=down_bias,
        )

    @property
    def count(self) -> int:
        """E."""
        return self.down.shape[0]


class Moe:
    """sum over a token's chosen experts of softmax(chosen logits) * expert(x).

    Two ways, which differ in rounding only. `_grouped` runs each expert on its own tokens and asks the
    device how many they are, so it waits for it once a layer. `_dense` runs all local experts on all
    tokens: no such wait and fixed shapes, so that a CUDA graph can hold it; few tokens read most
    experts' weights anyway, which is what a small step costs.
    """

    def __init__(
        self,
        *,
        router: Linear,
        experts: Experts,
        first_expert: int,
        config: ExpertsConfig,
        comm: Comm,
        reduce: bool = True,
    ) -> None:
        """`first_expert`: global index of the rank's first one. `reduce` as in RowParallelLinear."""
        self.router = router
        self.experts = experts
        self._first = first_expert
        self._config = config
        self._comm = comm
        self._reduce = reduce and comm.size > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank, or the rank's partial sums."""
        # The same bits of x on every rank: all ranks choose alike.
        chosen = self.router.forward(x).topk(self._config.num_chosen, dim=-1)
        shares = chosen.values.softmax(dim=-1)
        way = self._dense if _runs_dense(x) else self._grouped
        out = way(x, chosen.indices, shares)
        return self._comm.all_reduce(out) if self._reduce else out

    def _grouped(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """chosen, shares [T, K]: global expert ids and their weights."""
        out = torch.zeros_like(x)
        local = chosen.flatten() - self._first
        order = local.argsort(stable=True)
        # Ids below and above the rank's own fall to the ends of the order.
        bounds = torch.arange(self.experts.count + 1, device=x.device)
        ends = torch.searchsorted(local[order], bounds).tolist()
        for expert, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
            if start == stop:
                continue
            places = order[start:stop]
            tokens = places // chosen.shape[1]
            w = self.experts
            inner = self._activate(torch.addmm(w.gate_up_bias[expert], x[tokens], w.gate_up[expert]))
            result = torch.addmm(w.down_bias[expert], inner, w.down[expert])
            out.index_add_(0, tokens, result * shares.flatten()[places, None])
        return out

    def _dense(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """As `_grouped`."""
        w = self.experts
        weights = x.new_zeros(x.shape[0], self._config.num_experts).scatter_(1, chosen, shares)
        local = weights[:, self._first : self._first + w.count]
        every = x.expand(w.count, *x.shape)
        inner = self._activate(torch.baddbmm(w.gate_up_bias[:, None], every, w.gate_up))
        results = torch.baddbmm(w.down_bias[:, None], inner, w.down)
        return torch.einsum("eth,te->th", results, local)

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(up + 1) * gate * sigmoid(alpha * gate), both cut off at the limit."""
        gate, up = gate_up.chunk(2, dim=-1)
        limit = self._config.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self._config.alpha))


def _runs_dense(x: torch.Tensor) -> bool:
    """Whether waiting for the device would cost more than running every expert, or is forbidden."""
    if x.device.type == "cpu":
        return False
    return x.shape[0] <= MAX_DENSE_TOKENS or torch.cuda.is_current_stream_capturing()

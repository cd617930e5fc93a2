"""Feed-forward halves of which each token uses a few experts.

Whole experts go to ranks, as evenly as possible; the router is on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rayk.kernels.expert_rows import combine_rows, gather_rows
from rayk.kernels.grouped_matmul import grouped_matmul
from rayk.kernels.pointwise import activate, gated
from rayk.models.build import Build
from rayk.models.config import ExpertsConfig
from rayk.models.layers.experts import Experts, build_experts
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.mlp import GatedMlp, PlainMlp, build_mlp
from rayk.models.layers.router import ExpertRouter, build_router
from rayk.models.pieces import Rows
from rayk.parallel import shard
from rayk.parallel.comm import Comm


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """A smaller space in which experts work."""

    down: Linear
    """hidden -> latent, whole on every rank."""
    up: RowParallelLinear
    """latent -> hidden, whole on every rank. It maps partial sums; one rank adds its bias."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpert:
    """An additional expert that every token goes to."""

    mlp: GatedMlp | PlainMlp
    """It leaves its sums partial."""
    gate: Linear | None
    """hidden -> 1, whole on every rank: its sigmoid multiplies the output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> the rank's partial sums."""
        out = self.mlp.forward(x)
        return out if self.gate is None else torch.sigmoid(self.gate.forward(x)) * out


class Moe:
    """The sum over a token's chosen experts of weight * expert(x), or of expert(weight * x) with
    `weighs_inputs`; plus a shared expert if there is one.

    Tokens are sorted by expert, a copy for each chosen one, and each expert runs on its own. Shapes do not
    depend on the choice, so that nothing waits for it and a CUDA graph can hold it.
    """

    def __init__(
        self,
        *,
        router: ExpertRouter,
        experts: Experts,
        first_expert: int,
        config: ExpertsConfig,
        comm: Comm,
        latent: Latent | None = None,
        shared: SharedExpert | None = None,
        reduce: bool = True,
    ) -> None:
        """`first_expert` is the global index of the rank's first one; `reduce` is as in RowParallelLinear."""
        self.router = router
        self.experts = experts
        self.latent = latent
        self.shared = shared
        self._first = first_expert
        self._ids = torch.arange(experts.count, device=experts.down.device)
        self._config = config
        self._comm = comm
        self._reduce = reduce and comm.size > 1
        assert not config.weighs_inputs or (experts.gate_up_bias is None and experts.down_bias is None)

    @property
    def num_chosen(self) -> tuple[int, int]:
        """Experts that a token goes to, and experts in all."""
        return self._config.num_chosen, self._config.num_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden], the same on every rank, or the rank's partial sums."""
        # x has the same bits on every rank, so all ranks choose alike.
        routes = self.router.forward(x)
        if self.latent is None:
            out = self._run_experts(x, *routes)
        else:
            out = self.latent.up.forward(self._run_experts(self.latent.down.forward(x), *routes))
        if self.shared is not None:
            out = out + self.shared.forward(x)
        return self._comm.all_reduce(out) if self._reduce else out

    def _run_experts(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """x [T, width]; chosen, shares [T, K]: global expert ids and their weights."""
        w = self.experts
        if not w.count:
            return torch.zeros_like(x)
        local = chosen.flatten() - self._first if self._first else chosen.flatten()
        has_others = w.count < self._config.num_experts
        if has_others:
            # They come last, where no expert runs.
            local = local.masked_fill((local < 0) | (local >= w.count), w.count)
        by_expert, order = local.sort(stable=True)
        ends = torch.searchsorted(by_expert, self._ids, right=True, out_int32=True)
        before, after = (shares, None) if self._config.weighs_inputs else (None, shares)
        num_copies = chosen.shape[1]
        inputs, places = gather_rows(x, order, num_copies, before)
        inner = self._activate(grouped_matmul(inputs, w.gate_up, ends, w.gate_up_bias))
        results = grouped_matmul(inner, w.down, ends, w.down_bias)
        return combine_rows(results, places, after, num_copies, num_rows=ends[-1:] if has_others else None)

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._config.kind == "relu2":
            return activate(gate_up, "relu2")
        if self._config.kind == "swiglu":
            return gated(gate_up, "silu")
        assert self._config.kind == "clamped", self._config
        gate, up = gate_up.chunk(2, dim=-1)
        limit = self._config.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self._config.alpha))


def build_moe(build: Build, index: int, mlp: ExpertsConfig) -> Moe:
    own_experts = shard.shard_range(mlp.num_experts, *build.tp)
    return Moe(
        router=build_router(build, index, mlp),
        experts=build_experts(build, index, mlp, own_experts),
        first_expert=own_experts.start,
        config=mlp,
        comm=build.comm,
        latent=None if mlp.latent_size is None else _latent(build, index, mlp, mlp.latent_size),
        shared=_shared(build, index, mlp),
        reduce=build.reduce,
    )


def _latent(build: Build, index: int, mlp: ExpertsConfig, size: int) -> Latent:
    return Latent(
        down=build.linear(index, (Rows.whole("latent_down", size),), bias=mlp.latent_bias),
        up=build.row_parallel(index, Rows.whole("latent_up", size), bias=mlp.latent_bias, reduce=False),
    )


def _shared(build: Build, index: int, mlp: ExpertsConfig) -> SharedExpert | None:
    if mlp.shared is None:
        return None
    gate = None
    if mlp.shared_gate:
        gate = build.linear(index, (Rows.whole("shared_sigmoid", 1),), bias=False)
    return SharedExpert(mlp=build_mlp(replace(build, reduce=False), index, mlp.shared, "shared_"), gate=gate)

"""Feed-forward halves of which each token uses a few experts.

Whole experts go to ranks, as evenly as possible; the router is on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812

from rayk.kernels.pointwise import activate
from rayk.models.build import Build
from rayk.models.config import ExpertsConfig
from rayk.models.layers.experts import Experts, build_experts
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.mlp import GatedMlp, PlainMlp, build_mlp
from rayk.models.layers.router import ExpertRouter, build_router
from rayk.models.pieces import Rows
from rayk.parallel import shard
from rayk.parallel.comm import Comm

MAX_DENSE_TOKENS = 64
"""On an accelerator, steps of up to this many tokens run every expert of the rank on every token."""


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

    Two implementations differ in rounding only. `_grouped` runs each expert on its own tokens, and waits for
    the device once per layer to know their number. `_dense` runs all local experts on all tokens: it has
    fixed shapes and never waits, so that a CUDA graph can hold it; few tokens read most experts' weights
    anyway.
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
        run_experts = self._dense if _runs_dense(x) else self._grouped
        if self.latent is None:
            out = run_experts(x, *routes)
        else:
            out = self.latent.up.forward(run_experts(self.latent.down.forward(x), *routes))
        if self.shared is not None:
            out = out + self.shared.forward(x)
        return self._comm.all_reduce(out) if self._reduce else out

    def _grouped(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """x [T, width]; chosen, shares [T, K]: global expert ids and their weights."""
        out = torch.zeros_like(x, dtype=shares.dtype)
        local = chosen.flatten() - self._first
        order = local.argsort(stable=True)
        # Ids of other ranks' experts sort to both ends.
        bounds = torch.arange(self.experts.count + 1, device=x.device)
        ends = torch.searchsorted(local[order], bounds).tolist()
        for expert, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
            if start == stop:
                continue
            places = order[start:stop]
            tokens = places // chosen.shape[1]
            w = self.experts
            share = shares.flatten()[places, None]
            inputs = self._weighed(x[tokens], share)
            inner = self._activate(_product(inputs, w.gate_up, w.gate_up_bias, expert))
            result = _product(inner, w.down, w.down_bias, expert)
            out.index_add_(0, tokens, result if self._config.weighs_inputs else result * share)
        return out.to(x.dtype)

    def _dense(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        w = self.experts
        weights = shares.new_zeros(x.shape[0], self._config.num_experts).scatter_(1, chosen, shares)
        local = weights[:, self._first : self._first + w.count]
        inputs = self._weighed(x.expand(w.count, *x.shape), local.mT[:, :, None])
        inner = self._activate(_products(inputs, w.gate_up, w.gate_up_bias))
        results = _products(inner, w.down, w.down_bias)
        # A weight of zero does not remove NaN or infinity.
        of_token = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, chosen, True)
        is_chosen = of_token[:, self._first : self._first + w.count]
        results = results.masked_fill(~is_chosen.mT[:, :, None], 0.0)
        if self._config.weighs_inputs:
            return results.to(shares.dtype).sum(0).to(x.dtype)
        return torch.einsum("eth,te->th", results.to(shares.dtype), local).to(x.dtype)

    def _weighed(self, inputs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Multiply inputs by shares in their dtype, where this model does so."""
        return (inputs * shares).to(inputs.dtype) if self._config.weighs_inputs else inputs

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._config.kind == "relu2":
            return activate(gate_up, "relu2")
        gate, up = gate_up.chunk(2, dim=-1)
        if self._config.kind == "swiglu":
            return F.silu(gate) * up
        assert self._config.kind == "clamped", self._config
        limit = self._config.limit
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self._config.alpha))


def _product(
    x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None, expert: int
) -> torch.Tensor:
    """Multiply x [tokens, in] by one expert's matrix."""
    if biases is None:
        return torch.mm(x, weights[expert])
    return torch.addmm(biases[expert], x, weights[expert])


def _products(x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [E, T, in] by every expert's matrix."""
    return torch.bmm(x, weights) if biases is None else torch.baddbmm(biases[:, None], x, weights)


def _runs_dense(x: torch.Tensor) -> bool:
    """Tell whether waiting for the device costs more than running every expert, or is forbidden."""
    if x.device.type == "cpu":
        return False
    return x.shape[0] <= MAX_DENSE_TOKENS or torch.cuda.is_current_stream_capturing()


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

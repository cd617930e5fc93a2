"""A layer: norms around a mixer, a feed-forward half, or both, which add to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rayk.kernels.pointwise import add
from rayk.kv.caches import OwnsCache
from rayk.models.build import Build
from rayk.models.config import ExpertsConfig
from rayk.models.layers.altup import AltUpLayer, build_altup_layer
from rayk.models.layers.mixers import Mixer, build_mixer
from rayk.models.layers.mlp import Mlp, build_mlp
from rayk.models.layers.moe import build_moe
from rayk.models.layers.norm import Norm
from rayk.models.layers.places import Places
from rayk.parallel.comm import Comm


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """x + mixer(norm(x)), then x + mlp(norm(x)); outputs are normed again if there are such norms.

    A layer may have only one half; the other's norms are then None too.
    """

    input_norm: Norm | None
    mixer: Mixer | None
    post_mixer_norm: Norm | None = None
    mlp_norm: Norm | None
    mlp: Mlp | None
    post_mlp_norm: Norm | None = None
    residual_multiplier: float = 1.0
    """Factor on what each half adds."""
    dtype: torch.dtype | None = None
    """Dtype that the halves compute in, if x is wider."""

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. `metadata` is the mixer's."""
        if self.mixer is None:
            assert self.mlp_norm is not None
            normed = self._normed(self.mlp_norm, x)
        else:
            assert self.input_norm is not None
            mixed = self.mixer.forward(self._normed(self.input_norm, x), places, metadata)
            mixed = self._changed(mixed, self.post_mixer_norm)
            if self.mlp_norm is None:
                return add(x, mixed)
            if self.dtype is None:
                x, normed = self.mlp_norm.add(x, mixed)
            else:
                x = x + mixed
                normed = self._normed(self.mlp_norm, x)
        assert self.mlp is not None
        return add(x, self._changed(self.mlp.forward(normed), self.post_mlp_norm))

    def _normed(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        return norm.forward(x if self.dtype is None else x.to(self.dtype))

    def _changed(self, out: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """Return what half of the layer adds."""
        if norm is not None:
            out = norm.forward(out)
        return out if self.residual_multiplier == 1.0 else out * self.residual_multiplier


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayer:
    """x + mixer(n) + mlp(n), where n = norm(x); one sum over the ranks adds both halves."""

    input_norm: Norm
    mixer: Mixer
    mlp: Mlp
    comm: Comm

    def forward(self, x: torch.Tensor, places: Places, metadata: Any) -> torch.Tensor:
        normed = self.input_norm.forward(x)
        out = self.mixer.forward(normed, places, metadata) + self.mlp.forward(normed)
        return x + (self.comm.all_reduce(out) if self.comm.size > 1 else out)


class OneStream:
    """The residual stream of most models: one tensor [T, hidden], which begins as the embeddings."""

    def begin(self, token_ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Make the first layer's input of token ids [T] and their embeddings [T, hidden]."""
        return embeddings

    def select(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Keep only `tokens` (int64 [M])."""
        return x.index_select(0, tokens)

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """Turn the last layer's output into [T, hidden]."""
        return x

    def pack(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """List the tensors that the next pipeline stage needs."""
        return (x,)

    def unpack(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Invert `pack`."""
        (x,) = tensors
        return x

    def packed_shapes(self, num_tokens: int, hidden_size: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of what `pack` lists for so many tokens."""
        return ((num_tokens, hidden_size),)


class BuiltLayer(NamedTuple):
    """A layer, and its mixers by the cache part they use: its own, or that of its `kv_source`."""

    layer: Layer | ParallelLayer | AltUpLayer
    users: Mapping[str, OwnsCache]


def build_layer(build: Build, index: int) -> BuiltLayer:
    config = build.config
    if config.block == "parallel":
        return _parallel(replace(build, reduce=False), index)
    assert config.block in ("sequential", "post_norms"), config.block
    mixer, users = build_mixer(build, index)
    mlp = _mlp(build, index)
    if config.altup is not None:
        assert mixer is not None, "a layer of several streams has both halves"
        assert mlp is not None, "a layer of several streams has both halves"
        return BuiltLayer(build_altup_layer(build, index, config.altup, mixer, mlp), users)
    has_mixer, has_mlp, post = mixer is not None, mlp is not None, config.block == "post_norms"
    layer = Layer(
        input_norm=build.layer_norm(index, "input_norm") if has_mixer else None,
        mixer=mixer,
        post_mixer_norm=build.layer_norm(index, "post_mixer_norm") if has_mixer and post else None,
        mlp_norm=build.layer_norm(index, "mlp_norm") if has_mlp else None,
        mlp=mlp,
        post_mlp_norm=build.layer_norm(index, "post_mlp_norm") if has_mlp and post else None,
        residual_multiplier=config.residual_multiplier,
        dtype=build.pieces.dtype if config.residual_wide else None,
    )
    return BuiltLayer(layer, users)


def _parallel(build: Build, index: int) -> BuiltLayer:
    assert build.config.residual_multiplier == 1.0, "not in parallel blocks"
    assert not build.config.residual_wide, "not in parallel blocks"
    mixer, users = build_mixer(build, index)
    mlp = _mlp(build, index)
    assert mixer is not None, "a parallel block has both halves"
    assert mlp is not None, "a parallel block has both halves"
    norm = build.layer_norm(index, "input_norm")
    return BuiltLayer(ParallelLayer(input_norm=norm, mixer=mixer, mlp=mlp, comm=build.comm), users)


def _mlp(build: Build, index: int) -> Mlp | None:
    config = build.config.layers[index].mlp
    if config is None:
        return None
    return (
        build_moe(build, index, config)
        if isinstance(config, ExpertsConfig)
        else build_mlp(build, index, config)
    )

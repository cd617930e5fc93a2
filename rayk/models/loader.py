"""Building one rank's decoder from a checkpoint folder, cutting each tensor while it is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rayk.attention.backend import AttentionParams
from rayk.models.config import ExpertsConfig
from rayk.models.decoder import Decoder, Layer, ParallelLayer
from rayk.models.families import FAMILIES
from rayk.models.layers.attention import Attention, AttentionWeights
from rayk.models.layers.embedding import LmHead, VocabEmbedding
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.mlp import GatedMlp
from rayk.models.layers.moe import Experts, Moe
from rayk.models.layers.norm import Norm
from rayk.models.layers.rope import Rotary
from rayk.models.pieces import Pieces, Rows, head_rows
from rayk.models.weights import WeightReader
from rayk.parallel import shard
from rayk.types.errors import CheckpointError, Unsupported

if TYPE_CHECKING:
    from rayk.attention.backend import AttentionBackend
    from rayk.models.config import DecoderConfig, LayerConfig, MlpConfig
    from rayk.models.decoder import Mlp
    from rayk.parallel.comm import Comm


def load_decoder(
    path: str | Path,
    config: DecoderConfig,
    *,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
) -> Decoder:
    """The decoder of rank `comm.rank`, its weights in `dtype` on `device`.

    Raises CheckpointError naming the tensor and file where the weights do not fit `config`, and
    Unsupported when the model cannot be split over `comm.size` ranks.
    """
    reason = shard.why_unsupported(config.num_query_heads, config.num_kv_heads, comm.size)
    if reason is not None:
        raise Unsupported(reason)
    names = FAMILIES[config.family].weights
    with WeightReader(path, names.plain) as reader:
        decoder = _Loader(Pieces(reader, names, dtype, device), config, comm, backend).decoder()
        _refuse_unread(reader, config, str(path))
    return decoder


def _refuse_unread(reader: WeightReader, config: DecoderConfig, where: str) -> None:
    """Raise CheckpointError for tensors that nothing read: the model would not be the one saved."""
    names = FAMILIES[config.family].weights
    unread = sorted(
        name
        for name in reader.unread
        if not name.endswith(names.ignored_suffixes)
        and not name.startswith(names.ignored_prefixes)
        # Tied weights are sometimes saved twice.
        and not (config.tie_embeddings and name == names.lm_head)
    )
    if unread:
        more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
        raise CheckpointError(
            f"tensors that config.json gives no use for: {', '.join(unread[:3])}{more}",
            where=where,
            mend="the weights do not belong to this config.json",
        )


class _Loader:
    """Builds the parts of one rank's decoder."""

    def __init__(self, pieces: Pieces, config: DecoderConfig, comm: Comm, backend: AttentionBackend) -> None:
        self.pieces = pieces
        self.names = pieces.names
        self.config = config
        self.comm = comm
        self.backend = backend
        # The halves of a parallel block share one sum over the ranks.
        self.reduce = config.block != "parallel"

    def decoder(self) -> Decoder:
        """Everything."""
        config, names = self.config, self.names
        vocab_rows = shard.shard_range(config.vocab_size, self.comm.size, self.comm.rank)
        vocab = (config.vocab_size, config.hidden_size)
        embedding = self.pieces.rows(names.embedding, vocab, vocab_rows)
        tied = config.tie_embeddings
        ropes = {layer.rope: None for layer in config.layers if layer.rope is not None}
        return Decoder(
            config=config,
            embedding=VocabEmbedding(embedding, vocab_rows, self.comm, scale=config.embedding_scale),
            layers=tuple(self._layer(i, layer) for i, layer in enumerate(config.layers)),
            final_norm=self._norm(names.final_norm),
            lm_head=LmHead(
                embedding if tied else self.pieces.rows(names.lm_head, vocab, vocab_rows),
                config.vocab_size,
                self.comm,
                tied=tied,
                scale=config.logit_scale,
                soft_cap=config.final_soft_cap,
            ),
            rotaries=tuple(
                Rotary(rope, dtype=self.pieces.dtype, device=self.pieces.device) for rope in ropes
            ),
        )

    def _layer(self, index: int, layer: LayerConfig) -> Layer | ParallelLayer:
        assert layer.mixer == "attention", layer.mixer
        block = self.config.block
        assert block in ("sequential", "post_norms", "parallel"), block
        input_norm = self._layer_norm(index, "input_norm")
        mixer, mlp = self._attention(index, layer), self._mlp(index, layer)
        if block == "parallel":
            return ParallelLayer(input_norm=input_norm, mixer=mixer, mlp=mlp, rope=layer.rope, comm=self.comm)
        post = block == "post_norms"
        return Layer(
            input_norm=input_norm,
            mixer=mixer,
            post_mixer_norm=self._layer_norm(index, "post_mixer_norm") if post else None,
            mlp_norm=self._layer_norm(index, "mlp_norm"),
            mlp=mlp,
            post_mlp_norm=self._layer_norm(index, "post_mlp_norm") if post else None,
            rope=layer.rope,
        )

    def _attention(self, index: int, layer: LayerConfig) -> Attention:
        config, tp = self.config, (self.comm.size, self.comm.rank)
        q_heads = shard.query_heads(config.num_query_heads, *tp)
        kv_heads = shard.kv_heads(config.num_query_heads, config.num_kv_heads, *tp)
        size_k, size_v = config.head_size_k, config.head_size_v
        parts = (
            Rows("q", config.num_query_heads * size_k, head_rows(q_heads, size_k)),
            Rows("k", config.num_kv_heads * size_k, head_rows(kv_heads, size_k)),
            Rows("v", config.num_kv_heads * size_v, head_rows(kv_heads, size_v)),
        )
        out = Rows("o", config.num_query_heads * size_v, head_rows(q_heads, size_v))
        weights = AttentionWeights(
            qkv=self._merged(index, parts, bias=config.qkv_bias),
            out=self._row_parallel(index, out, bias=config.o_bias),
            qk_norm=self._qk_norm(index, len(q_heads), len(kv_heads)) if config.qk_norm else None,
        )
        kv_index = shard.kv_index(config.num_query_heads, config.num_kv_heads, *tp)
        params = AttentionParams(
            scale=config.attention_scale,
            window=layer.window,
            kv_index=torch.tensor(kv_index, dtype=torch.int64, device=self.pieces.device),
            head_size_k=size_k,
            head_size_v=size_v,
            sinks=self._sinks(index, q_heads) if config.sinks else None,
            soft_cap=config.attention_soft_cap,
        )
        return Attention(
            layer=index,
            weights=weights,
            kv_head_ids=kv_heads,
            params=params,
            backend=self.backend,
        )

    def _sinks(self, index: int, q_heads: tuple[int, ...]) -> torch.Tensor:
        """Rounded to the model's dtype, as its other weights are; float32 for the kernels."""
        (rows,) = head_rows(q_heads, 1)
        name = self.names.in_layer(index, "sinks")
        return self.pieces.rows(name, (self.config.num_query_heads,), rows).float()

    def _mlp(self, index: int, layer: LayerConfig) -> Mlp:
        if isinstance(layer.mlp, ExpertsConfig):
            return self._moe(index, layer.mlp)
        assert layer.mlp is not None, "a layer without a feed-forward half"
        return self._gated_mlp(index, layer.mlp)

    def _gated_mlp(self, index: int, mlp: MlpConfig) -> GatedMlp:
        size = mlp.intermediate_size
        rows = (shard.shard_range(size, self.comm.size, self.comm.rank),)
        return GatedMlp(
            self._merged(index, (Rows("gate", size, rows), Rows("up", size, rows)), bias=mlp.bias),
            self._row_parallel(index, Rows("down", size, rows), bias=mlp.bias),
            mlp.activation,
        )

    def _moe(self, index: int, mlp: ExpertsConfig) -> Moe:
        """Whole experts go to ranks, as evenly as they can; the router is on every rank."""
        hidden, size, total = self.config.hidden_size, mlp.intermediate_size, mlp.num_experts
        held = shard.shard_range(total, self.comm.size, self.comm.rank)

        def read(parameter: str, *shape: int) -> torch.Tensor:
            return self.pieces.experts(index, parameter, held, (total, *shape))

        experts = Experts.from_interleaved(
            gate_up=read("experts_gate_up.weight", hidden, 2 * size),
            gate_up_bias=read("experts_gate_up.bias", 2 * size),
            down=read("experts_down.weight", size, hidden),
            down_bias=read("experts_down.bias", hidden),
        )
        every = (Rows("router", total, (range(total),)),)
        return Moe(
            router=self._merged(index, every, bias=True),
            experts=experts,
            first_expert=held.start,
            config=mlp,
            comm=self.comm,
            reduce=self.reduce,
        )

    def _merged(self, index: int, parts: tuple[Rows, ...], *, bias: bool) -> Linear:
        """One matrix of the parts' rows, one under the other."""
        return Linear(
            self.pieces.stacked(index, parts, "weight", (self.config.hidden_size,)),
            self.pieces.stacked(index, parts, "bias", ()) if bias else None,
        )

    def _row_parallel(self, index: int, part: Rows, *, bias: bool) -> RowParallelLinear:
        """The rank's columns of a [hidden, size] matrix, and the whole bias."""
        hidden = self.config.hidden_size
        name = self.names.in_layer(index, f"{part.parameter}.weight")
        weight = self.pieces.columns(name, (hidden, part.size), part.rows)
        bias_name = self.names.in_layer(index, f"{part.parameter}.bias")
        whole = self.pieces.whole(bias_name, hidden) if bias else None
        return RowParallelLinear(weight, whole, self.comm, reduce=self.reduce)

    def _qk_norm(self, index: int, num_q: int, num_kv: int) -> Norm:
        """The head norms of q and k as one weight [Q + H, D]."""
        size = self.config.head_size_k
        q = self.pieces.whole(self.names.in_layer(index, "q_norm.weight"), size)
        k = self.pieces.whole(self.names.in_layer(index, "k_norm.weight"), size)
        return Norm(torch.cat([q.expand(num_q, size), k.expand(num_kv, size)]), self.config.norm)

    def _layer_norm(self, index: int, parameter: str) -> Norm:
        return self._norm(self.names.in_layer(index, f"{parameter}.weight"))

    def _norm(self, name: str) -> Norm:
        return Norm(self.pieces.whole(name, self.config.hidden_size), self.config.norm)

"""Building one rank's decoder from a checkpoint folder, cutting each tensor while it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rayk.attention.backend import AttentionParams
from rayk.models.decoder import Decoder, Layer
from rayk.models.families import FAMILIES
from rayk.models.layers.attention import Attention, AttentionWeights
from rayk.models.layers.embedding import LmHead, VocabEmbedding
from rayk.models.layers.linear import Linear, RowParallelLinear
from rayk.models.layers.mlp import GatedMlp
from rayk.models.layers.norm import RMSNorm
from rayk.models.layers.rope import Rotary
from rayk.models.weights import WeightReader
from rayk.parallel import shard
from rayk.types.errors import CheckpointError, Unsupported

if TYPE_CHECKING:
    from rayk.attention.backend import AttentionBackend
    from rayk.models.config import DecoderConfig, LayerConfig
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
    with WeightReader(path) as reader:
        decoder = _Loader(reader, config, comm, dtype, device, backend).decoder()
        _refuse_unread(reader, config, str(path))
    return decoder


def _refuse_unread(reader: WeightReader, config: DecoderConfig, where: str) -> None:
    """Raise CheckpointError for tensors that nothing read: the model would not be the one saved."""
    names = FAMILIES[config.family].weights
    unread = sorted(
        name
        for name in reader.unread
        if not name.endswith(names.ignored_suffixes)
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """A rank's rows of one stored tensor that has `size` rows in all."""

    parameter: str
    size: int
    rows: tuple[range, ...]


def _head_rows(heads: Sequence[int], head_size: int) -> tuple[range, ...]:
    """Rows of `heads`, joined where heads follow each other."""
    runs: list[range] = []
    for head in heads:
        start = head * head_size
        if runs and runs[-1].stop == start:
            runs[-1] = range(runs[-1].start, start + head_size)
        else:
            runs.append(range(start, start + head_size))
    return tuple(runs)


class _Loader:
    """Cuts and builds the parts of one rank's decoder."""

    def __init__(
        self,
        reader: WeightReader,
        config: DecoderConfig,
        comm: Comm,
        dtype: torch.dtype,
        device: torch.device,
        backend: AttentionBackend,
    ) -> None:
        self.reader = reader
        self.config = config
        self.comm = comm
        self.dtype = dtype
        self.device = device
        self.backend = backend
        self.names = FAMILIES[config.family].weights

    def decoder(self) -> Decoder:
        """Everything."""
        config = self.config
        vocab_rows = shard.shard_range(config.vocab_size, self.comm.size, self.comm.rank)
        embedding = self._vocab(self.names.embedding, vocab_rows)
        head = embedding if config.tie_embeddings else self._vocab(self.names.lm_head, vocab_rows)
        ropes = {layer.rope: None for layer in config.layers if layer.rope is not None}
        return Decoder(
            config=config,
            embedding=VocabEmbedding(embedding, vocab_rows, self.comm),
            layers=tuple(self._layer(i, layer) for i, layer in enumerate(config.layers)),
            final_norm=self._norm(self.names.final_norm, config.hidden_size),
            lm_head=LmHead(head, config.vocab_size, self.comm, tied=config.tie_embeddings),
            rotaries=tuple(Rotary(r, dtype=self.dtype, device=self.device) for r in ropes),
        )

    def _layer(self, index: int, layer: LayerConfig) -> Layer:
        assert layer.mixer == "attention", layer.mixer
        hidden = self.config.hidden_size
        return Layer(
            input_norm=self._norm(self.names.in_layer(index, "input_norm.weight"), hidden),
            mixer=self._attention(index, layer),
            mlp_norm=self._norm(self.names.in_layer(index, "mlp_norm.weight"), hidden),
            mlp=self._gated_mlp(index, layer),
            rope=layer.rope,
        )

    def _attention(self, index: int, layer: LayerConfig) -> Attention:
        config, tp = self.config, (self.comm.size, self.comm.rank)
        q_heads = shard.query_heads(config.num_query_heads, *tp)
        kv_heads = shard.kv_heads(config.num_query_heads, config.num_kv_heads, *tp)
        size_k, size_v = config.head_size_k, config.head_size_v
        parts = (
            _Rows("q", config.num_query_heads * size_k, _head_rows(q_heads, size_k)),
            _Rows("k", config.num_kv_heads * size_k, _head_rows(kv_heads, size_k)),
            _Rows("v", config.num_kv_heads * size_v, _head_rows(kv_heads, size_v)),
        )
        weights = AttentionWeights(
            qkv=self._merged(index, parts, bias=config.qkv_bias),
            out=self._row_parallel(
                index,
                "o",
                config.num_query_heads * size_v,
                _head_rows(q_heads, size_v),
                bias=config.o_bias,
            ),
            qk_norm=self._qk_norm(index, len(q_heads), len(kv_heads)) if config.qk_norm else None,
        )
        kv_index = shard.kv_index(config.num_query_heads, config.num_kv_heads, *tp)
        params = AttentionParams(
            scale=config.attention_scale,
            window=layer.window,
            kv_index=torch.tensor(kv_index, dtype=torch.int64, device=self.device),
            head_size_k=size_k,
            head_size_v=size_v,
        )
        return Attention(
            layer=index,
            weights=weights,
            kv_head_ids=kv_heads,
            params=params,
            backend=self.backend,
        )

    def _gated_mlp(self, index: int, layer: LayerConfig) -> GatedMlp:
        mlp = layer.mlp
        assert (mlp.kind, mlp.activation) == ("gated", "silu"), mlp
        size = mlp.intermediate_size
        rows = (shard.shard_range(size, self.comm.size, self.comm.rank),)
        parts = (_Rows("gate", size, rows), _Rows("up", size, rows))
        return GatedMlp(
            self._merged(index, parts, bias=mlp.bias),
            self._row_parallel(index, "down", size, rows, bias=mlp.bias),
        )

    def _merged(self, index: int, parts: Sequence[_Rows], *, bias: bool) -> Linear:
        """One matrix of the parts' rows, one under the other."""
        return Linear(
            self._stacked(index, parts, "weight", (self.config.hidden_size,)),
            self._stacked(index, parts, "bias", ()) if bias else None,
        )

    def _stacked(
        self, index: int, parts: Sequence[_Rows], kind: str, row_shape: tuple[int, ...]
    ) -> torch.Tensor:
        num_rows = sum(len(rows) for part in parts for rows in part.rows)
        out = torch.empty((num_rows, *row_shape), dtype=self.dtype, device=self.device)
        filled = 0
        for part in parts:
            name = self.names.in_layer(index, f"{part.parameter}.{kind}")
            for rows in part.rows:
                piece = self.reader.read(name, (part.size, *row_shape), rows)
                out[filled : filled + len(rows)].copy_(piece)
                filled += len(rows)
        return out

    def _row_parallel(
        self, index: int, parameter: str, size: int, columns: Sequence[range], *, bias: bool
    ) -> RowParallelLinear:
        """The rank's `columns` of a [hidden, size] matrix, and the whole bias."""
        hidden = self.config.hidden_size
        name = self.names.in_layer(index, f"{parameter}.weight")
        num_columns = sum(len(c) for c in columns)
        weight = torch.empty((hidden, num_columns), dtype=self.dtype, device=self.device)
        filled = 0
        for run in columns:
            piece = self.reader.read(name, (hidden, size), columns=run)
            weight[:, filled : filled + len(run)].copy_(piece)
            filled += len(run)
        bias_name = self.names.in_layer(index, f"{parameter}.bias")
        return RowParallelLinear(weight, self._whole(bias_name, hidden) if bias else None, self.comm)

    def _qk_norm(self, index: int, num_q: int, num_kv: int) -> RMSNorm:
        """The head norms of q and k as one weight [Q + H, D]."""
        size = self.config.head_size_k
        q = self._whole(self.names.in_layer(index, "q_norm.weight"), size)
        k = self._whole(self.names.in_layer(index, "k_norm.weight"), size)
        weight = torch.cat([q.expand(num_q, size), k.expand(num_kv, size)])
        return RMSNorm(weight, self.config.rms_norm_eps)

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._whole(name, size), self.config.rms_norm_eps)

    def _vocab(self, name: str, rows: range) -> torch.Tensor:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self._placed(self.reader.read(name, shape, rows))

    def _whole(self, name: str, size: int) -> torch.Tensor:
        return self._placed(self.reader.read(name, (size,)))

    def _placed(self, piece: torch.Tensor) -> torch.Tensor:
        """A copy in the model's dtype on its device, which owns its memory."""
        return torch.empty(piece.shape, dtype=self.dtype, device=self.device).copy_(piece)

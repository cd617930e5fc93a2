"""Building one rank's decoder from a checkpoint folder, cutting each tensor while it is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rayk.models.builders.altup import build_streams
from rayk.models.builders.context import Build
from rayk.models.builders.layer import build_layer
from rayk.models.decoder import Decoder
from rayk.models.families import FAMILIES
from rayk.models.families.sharing import unused_tensors
from rayk.models.layers.embedding import LmHead, VocabEmbedding, rounded_scale
from rayk.models.layers.places import Placing
from rayk.models.pieces import Pieces
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.models.weights import WeightReader
from rayk.parallel import shard
from rayk.types.errors import CheckpointError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rayk.attention.backend import AttentionBackend
    from rayk.models.config import DecoderConfig
    from rayk.parallel.comm import Comm


def load_decoder(
    path: str | Path,
    config: DecoderConfig,
    *,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend | Callable[[int], AttentionBackend],
) -> Decoder:
    """The decoder of rank `comm.rank`, its weights in `dtype` on `device`.

    `backend` computes attention: one for all layers, or a function of the layer's index. Raises
    CheckpointError naming the tensor and file where the weights do not fit `config`, and Unsupported when
    the model cannot be split over `comm.size` ranks.
    """
    reason = why_tp_unsupported(config, comm.size)
    if reason is not None:
        raise Unsupported(reason)
    names = FAMILIES[config.family].weights
    with WeightReader(path, names.plain) as reader:
        build = Build(
            pieces=Pieces(reader, names, dtype, device),
            config=config,
            comm=comm,
            backend_for=backend if callable(backend) else lambda _: backend,
        )
        decoder = _decoder(build)
        _refuse_unread(reader, config, str(path))
    return decoder


def _refuse_unread(reader: WeightReader, config: DecoderConfig, where: str) -> None:
    """Raise CheckpointError for tensors that nothing read: the model would not be the one saved."""
    names = FAMILIES[config.family].weights
    further = range(config.num_layers, config.num_layers + config.num_further_layers)
    ignored = (*names.ignored_prefixes, *(names.layer_prefix.format(i=i) for i in further))
    unread = sorted(
        name
        for name in reader.unread - unused_tensors(names, config)
        if not name.endswith(names.ignored_suffixes)
        and not name.startswith(ignored)
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


def _decoder(build: Build) -> Decoder:
    config, pieces, names = build.config, build.pieces, build.pieces.names
    vocab_rows = shard.shard_range(config.vocab_size, *build.tp)
    vocab = (config.vocab_size, config.hidden_size)
    embedding = pieces.rows(names.embedding, vocab, vocab_rows)
    scale = config.embedding_scale
    if config.embedding_scale_rounded:
        scale = rounded_scale(scale, pieces.dtype)
    tied = config.tie_embeddings
    built = [build_layer(build, index) for index in range(config.num_layers)]
    return Decoder(
        config=config,
        embedding=VocabEmbedding(embedding, vocab_rows, build.comm, scale=scale),
        layers=tuple(layer for layer, _ in built),
        cache_owners={
            (index, part): user
            for index, (layer, (_, users)) in enumerate(zip(config.layers, built, strict=True))
            for part, user in users.items()
            if layer.kv_source is None
        },
        cache_readers=[
            ((layer.kv_source, part), user)
            for layer, (_, users) in zip(config.layers, built, strict=True)
            for part, user in users.items()
            if layer.kv_source is not None
        ],
        streams=None if config.altup is None else build_streams(build, config.altup),
        final_norm=build.norm(names.final_norm),
        lm_head=LmHead(
            embedding if tied else pieces.rows(names.lm_head, vocab, vocab_rows),
            config.vocab_size,
            build.comm,
            tied=tied,
            scale=config.logit_scale,
            soft_cap=config.final_soft_cap,
        ),
        placing=Placing(config.layers, dtype=pieces.dtype, device=pieces.device),
        dtype=pieces.dtype,
    )

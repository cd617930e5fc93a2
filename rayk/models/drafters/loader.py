"""Builds one rank's drafter from its checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rayk.attention.backend import AttentionBackend
from rayk.models.build import Build
from rayk.models.decoder import Decoder
from rayk.models.drafters.config import DrafterConfig
from rayk.models.drafters.draft_model import DraftModel
from rayk.models.drafters.drafter import RankDrafter
from rayk.models.drafters.eagle3 import build_eagle3
from rayk.models.drafters.mtp import build_mtp
from rayk.models.drafters.reading import FiniteReader
from rayk.models.loader import load_decoder
from rayk.models.pieces import Pieces
from rayk.models.weights import OpenWeights
from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm


def load_drafter(
    config: DrafterConfig,
    target: Decoder,
    *,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    backend_for: Callable[[int], AttentionBackend],
    open_weights: OpenWeights = FiniteReader,
) -> RankDrafter:
    """Load the drafter of rank `comm.rank` of the engine whose model is `target`, and tell that which hidden
    states to keep.

    `backend_for`: a layer's number in the engine -> what computes its attention. Its weights are all
    dequantised. Raises CheckpointError naming tensor and file if they do not fit `config`, or are not finite.
    """
    assert config.tp in (1, comm.size), (config.tp, comm.size)
    own = comm if config.tp > 1 else LocalComm()

    def backend(index: int) -> AttentionBackend:
        return backend_for(config.first_layer + index)

    if config.method == "draft":
        decoder = load_decoder(
            config.path,
            config.decoder,
            comm=own,
            dtype=dtype,
            device=device,
            backend=backend,
            open_weights=open_weights,
        )
        return DraftModel(config, decoder)
    target.taps = config.taps
    with open_weights(config.path, config.names.plain, config.decoder.quantisation) as reader:
        build = Build(
            pieces=Pieces(reader, config.names, dtype, device),
            config=config.decoder,
            comm=own,
            backend_for=backend,
        )
        if config.method == "mtp":
            return build_mtp(build, config, target)
        return build_eagle3(build, config, target.embedding)

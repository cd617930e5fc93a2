"""Builds one rank's decoder from a checkpoint folder, cutting each tensor while it is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rayk.attention.backend import AttentionBackend
from rayk.models.build import Build
from rayk.models.config import DecoderConfig
from rayk.models.decoder import Decoder, build_decoder
from rayk.models.families import FAMILIES
from rayk.models.pieces import Keeping, Pieces
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.models.weights import OpenWeights, WeightReader
from rayk.parallel.comm import Comm
from rayk.types.errors import Unsupported


def load_decoder(
    path: str | Path,
    config: DecoderConfig,
    *,
    comm: Comm,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend | Callable[[int], AttentionBackend],
    open_weights: OpenWeights = WeightReader,
    keeping: Keeping | None = None,
    stage: range | None = None,
) -> Decoder:
    """Load the decoder of rank `comm.rank`, its weights in `dtype` on `device`.

    `backend` computes attention: one for all layers, or a function of the layer's index. `open_weights` may
    take the tensors from elsewhere than the folder. `keeping`: matrices stored in fp8 stay so where kernels
    take them, and are noted in it; None: all are dequantised. `stage`: the layers of a pipeline stage, whose
    ranks are those of `comm`; None: all layers. Raises CheckpointError naming the tensor and
    file if the weights do not fit `config`, and Unsupported if the model cannot be split over `comm.size`
    ranks.
    """
    reason = why_tp_unsupported(config, comm.size)
    if reason is not None:
        raise Unsupported(reason)
    names = FAMILIES[config.family].weights
    with open_weights(Path(path), names.plain, config.quantisation) as reader:
        return build_decoder(
            Build(
                pieces=Pieces(reader, names, dtype, device, keeping),
                config=config,
                comm=comm,
                backend_for=backend if callable(backend) else lambda _: backend,
                stage=stage,
            )
        )

"""Builds one rank's decoder from a checkpoint folder, cutting each tensor while it is read."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from rayk.attention import get_backend
from rayk.attention.backend import AttentionBackend
from rayk.models.build import Build
from rayk.models.config import DecoderConfig
from rayk.models.decoder import Decoder, build_decoder
from rayk.models.families import FAMILIES
from rayk.models.pieces import Keeping, Pieces
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.models.weights import HeaderReader, OpenWeights, WeightReader
from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm
from rayk.types.errors import Unsupported

NAMED_PARTS = 6
"""Most name patterns that a note of unused tensors lists."""


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


def unused_tensors(path: str | Path, config: DecoderConfig) -> dict[str, int]:
    """List tensors of a checkpoint that a decoder of `config` does not use: name pattern (the shortest
    start that no used tensor has, then `*`) -> number of tensors.

    The decoder is built from the files' headers alone, on torch's meta device, so that it requests what it
    needs. Raises CheckpointError for a tensor that is missing or of another shape.
    """
    names = FAMILIES[config.family].weights
    backend = get_backend("reference", "cpu")
    with HeaderReader(path, names.plain, config.quantisation) as reader:
        pieces = Pieces(reader, names, torch.float32, torch.device("meta"))
        build_decoder(Build(pieces=pieces, config=config, comm=LocalComm(), backend_for=lambda _: backend))
    starts = {start for name in reader.names - reader.unread for start in _starts(name)}
    return dict(Counter(_part(name, starts) for name in sorted(reader.unread)))


def note_unused(path: str | Path, config: DecoderConfig) -> str:
    """Return one line about the `unused_tensors`, which may raise; empty if all are used."""
    parts = unused_tensors(path, config)
    if not parts:
        return ""
    count, names = sum(parts.values()), list(parts)
    more = f" and {len(names) - NAMED_PARTS} more" if len(names) > NAMED_PARTS else ""
    return f"{path}: {count} tensor{'s'[: count != 1]} not used: {', '.join(names[:NAMED_PARTS])}{more}"


def _starts(name: str) -> Iterator[str]:
    """Yield the dotted prefixes of a name, shortest first, the name itself last."""
    return itertools.accumulate(name.split("."), lambda start, word: f"{start}.{word}")


def _part(name: str, used: set[str]) -> str:
    """Return the shortest prefix of `name` that no used name has, with numbers before its last word as
    `*`."""
    start = next((s for s in _starts(name) if s not in used), name)
    *before, last = start.split(".")
    shown = ".".join([*("*" if word.isdecimal() else word for word in before), last])
    return shown if start == name else f"{shown}.*"

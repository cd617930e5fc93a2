"""Counts a model's weights from its config.json alone: what each rank reads, in the bytes of the release,
and what it holds then."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from rayk.attention import get_backend
from rayk.models.build import Build
from rayk.models.config import DecoderConfig
from rayk.models.decoder import build_decoder
from rayk.models.families import FAMILIES
from rayk.models.formats import Fp8
from rayk.models.pieces import Pieces
from rayk.models.weights import ShapeReader
from rayk.parallel.local import LocalComm


class _Shapes(ShapeReader):
    """Remembers what was read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_pieces: dict[tuple[str, range, range | None], tuple[int, ...]] = {}

    def read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        piece = super().read(name, shape, rows, columns)
        self.read_pieces[name, range(shape[0]) if rows is None else rows, columns] = tuple(piece.shape)
        return piece


@lru_cache(maxsize=2)
def rank_pieces(
    config: DecoderConfig, tp: int, rank: int, stage: range | None = None
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """List (name on disk, shape) of every piece of a tensor that the rank reads, each once; `stage`: of a
    pipeline stage with these layers, in which `tp` and `rank` count; None: of all layers.

    The decoder is built on torch's meta device, so that its layers say what they hold. The model must run at
    this TP size (tensor_parallel).
    """
    comm, backend, reader = LocalComm(), get_backend("reference", "cpu"), _Shapes()
    comm.size, comm.rank = tp, rank
    pieces = Pieces(reader, FAMILIES[config.family].weights, torch.bfloat16, torch.device("meta"))
    build_decoder(Build(pieces=pieces, config=config, comm=comm, backend_for=lambda _: backend, stage=stage))
    return tuple((name, shape) for (name, _, _), shape in reader.read_pieces.items())


def num_parameters(config: DecoderConfig) -> int:
    """Count the elements of all tensors that the decoder uses."""
    return sum(math.prod(shape) for _, shape in rank_pieces(config, 1, 0))


def held_bytes(
    config: DecoderConfig, tp: int, rank: int, *, keeps_fp8: bool, stage: range | None = None
) -> int:
    """Count the bytes of the weights of a rank (of a pipeline stage, as in `rank_pieces`) once they are
    loaded: in the model's dtype, whatever the release stores, but with `keeps_fp8` matrices in fp8 as they
    are (a cut inside a block is not looked for)."""
    itemsize: int = getattr(torch, config.dtype).itemsize
    quantisation = config.quantisation

    def of_piece(name: str, shape: tuple[int, ...]) -> int:
        if keeps_fp8 and quantisation is not None and isinstance(quantisation.format_of(name), Fp8):
            return quantisation.stored_bytes(name, shape, itemsize)
        return math.prod(shape) * itemsize

    return sum(of_piece(name, shape) for name, shape in rank_pieces(config, tp, rank, stage))


def rank_bytes(config: DecoderConfig, tp: int, rank: int) -> int:
    """Count the bytes of the rank's weights as the release stores them."""
    itemsize, quantisation = getattr(torch, config.dtype).itemsize, config.quantisation
    return sum(
        math.prod(shape) * itemsize
        if quantisation is None
        else quantisation.stored_bytes(name, shape, itemsize)
        for name, shape in rank_pieces(config, tp, rank)
    )

"""Counts a model's weights from its config.json alone: what each rank reads, in the bytes of the release,
and what it holds then."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from rayk.attention import get_backend
from rayk.models.build import Build
from rayk.models.config import DecoderConfig
from rayk.models.decoder import Decoder, build_decoder
from rayk.models.drafters.config import DrafterConfig
from rayk.models.drafters.loader import load_drafter
from rayk.models.families import FAMILIES
from rayk.models.formats import Fp8, Quantisation
from rayk.models.headers import StoredTensor
from rayk.models.pieces import Pieces
from rayk.models.weights import HeaderReader, ShapeReader, WeightReader
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


class _Headers(HeaderReader):
    """Counts the elements that are read of files, and reads numbers of tokens in earnest."""

    def __init__(self, folder: Path, plain: Callable[[str], str], quantisation: Quantisation | None) -> None:
        super().__init__(folder, plain, quantisation)
        self.num_read: dict[tuple[str, range | None, range | None], int] = {}

    def read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        piece = super().read(name, shape, rows, columns)
        self.num_read[name, rows, columns] = piece.numel()
        return piece

    def _piece(
        self, name: str, tensor: StoredTensor, rows: range | None, columns: range | None
    ) -> torch.Tensor:
        if tensor.dtype in _NUMBERS:
            return WeightReader._piece(self, name, tensor, rows, columns)
        return super()._piece(name, tensor, rows, columns)


_NUMBERS = ("I64", "I32", "BOOL")
"""Dtypes of the tensors that say which tokens a head proposes."""


@lru_cache(maxsize=2)
def rank_pieces(
    config: DecoderConfig, tp: int, rank: int, stage: range | None = None
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """List (name on disk, shape) of every piece of a tensor that the rank reads, each once; `stage`: of a
    pipeline stage with these layers, in which `tp` and `rank` count; None: of all layers.

    The decoder is built on torch's meta device, so that its layers say what they hold. The model must run at
    this TP size (tensor_parallel).
    """
    reader = _Shapes()
    _shape_of_decoder(config, reader, tp, rank, stage)
    return tuple((name, shape) for (name, _, _), shape in reader.read_pieces.items())


def _shape_of_decoder(
    config: DecoderConfig, reader: _Shapes, tp: int, rank: int, stage: range | None = None
) -> Decoder:
    backend = get_backend("reference", "cpu")
    pieces = Pieces(reader, FAMILIES[config.family].weights, torch.bfloat16, torch.device("meta"))
    comm = _imagined(tp, rank)
    return build_decoder(
        Build(pieces=pieces, config=config, comm=comm, backend_for=lambda _: backend, stage=stage)
    )


def _imagined(size: int, rank: int) -> LocalComm:
    """Return what says which rank a layer is cut for; nothing is sent by it."""
    comm = LocalComm()
    comm.size, comm.rank = size, rank
    return comm


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


def drafter_bytes(config: DecoderConfig, drafter: DrafterConfig, tp: int, rank: int) -> int:
    """Count the bytes of the weights that a drafter adds to a rank of the model's, in the model's dtype: it
    is dequantised. Its files' headers say which it has. Raises as load_drafter does."""
    readers: list[_Headers] = []

    def opened(folder: Path, plain: Callable[[str], str], quantisation: Quantisation | None) -> WeightReader:
        readers.append(_Headers(folder, plain, quantisation))
        return readers[-1]

    backend = get_backend("reference", "cpu")
    dtype: torch.dtype = getattr(torch, config.dtype)
    load_drafter(
        drafter,
        _shape_of_decoder(config, _Shapes(), tp, rank),
        comm=_imagined(tp, rank),
        dtype=dtype,
        device=torch.device("meta"),
        backend_for=lambda _: backend,
        open_weights=opened,
    )
    return sum(count for reader in readers for count in reader.num_read.values()) * dtype.itemsize

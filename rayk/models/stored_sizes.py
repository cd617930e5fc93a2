"""Counts a model's weights from its config.json alone: what each rank reads, in the bytes of the release."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rayk.attention import get_backend
from rayk.models.build import Build
from rayk.models.config import DecoderConfig
from rayk.models.decoder import build_decoder
from rayk.models.families import FAMILIES
from rayk.models.headers import StoredTensor
from rayk.models.pieces import Pieces
from rayk.models.weights import HeaderReader
from rayk.parallel.local import LocalComm
from rayk.types.errors import UnsupportedArchitecture

FP8_BLOCK_SCALE_BYTES = 4
"""A float32 per block, `weight_scale_inv` (transformers/integrations/finegrained_fp8.py)."""
MXFP4_GROUP, MXFP4_GROUP_BYTES = 32, 17
"""Elements that share a scale, and their bytes: 4 bits each and one of scale (OCP MX 1.0, 5.2)."""
QUANTISED = ("fp8", "mxfp4")
"""Values of `quant_method` whose stored size is known."""


class _Shapes(HeaderReader):
    """Stands in for files: every tensor is there in the shape asked for. Remembers what was read."""

    def __init__(self) -> None:
        self._stored, self._unread = {}, set()
        self.max_read_bytes = self.total_read_bytes = 0
        self.read_pieces: dict[tuple[str, range, range | None], tuple[int, ...]] = {}

    def require(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        return StoredTensor(Path(), "F32", shape, 0, 0)

    def _piece(self, name: str, tensor: StoredTensor, rows: range, columns: range | None) -> torch.Tensor:
        piece = super()._piece(name, tensor, rows, columns)
        self.read_pieces[name, rows, columns] = tuple(piece.shape)
        return piece


@lru_cache(maxsize=2)
def rank_pieces(config: DecoderConfig, tp: int, rank: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """List (name on disk, shape) of every piece of a tensor that the rank reads, each once.

    The decoder is built on torch's meta device, so that its layers say what they hold. The model must run at
    this TP size (tensor_parallel).
    """
    comm, backend, reader = LocalComm(), get_backend("reference", "cpu"), _Shapes()
    comm.size, comm.rank = tp, rank
    pieces = Pieces(reader, FAMILIES[config.family].weights, torch.bfloat16, torch.device("meta"))
    build_decoder(Build(pieces=pieces, config=config, comm=comm, backend_for=lambda _: backend))
    return tuple((name, shape) for (name, _, _), shape in reader.read_pieces.items())


def num_parameters(config: DecoderConfig) -> int:
    """Count the elements of all tensors that the decoder uses."""
    return sum(math.prod(shape) for _, shape in rank_pieces(config, 1, 0))


def rank_bytes(config: DecoderConfig, tp: int, rank: int, quantisation: Mapping[str, Any]) -> int:
    """Count the bytes of the rank's weights as the release stores them; `quantisation` is its
    `quantization_config`, empty without one. Raises UnsupportedArchitecture if its size is not known."""
    itemsize = getattr(torch, config.dtype).itemsize
    return sum(
        stored_bytes(name, shape, itemsize, quantisation) for name, shape in rank_pieces(config, tp, rank)
    )


def stored_bytes(name: str, shape: tuple[int, ...], itemsize: int, quantisation: Mapping[str, Any]) -> int:
    """Count the bytes of a piece of the tensor `name`, its scales included. Raises
    UnsupportedArchitecture for an unknown `quant_method`."""
    method, elements = quantisation.get("quant_method"), math.prod(shape)
    if quantisation and method not in QUANTISED:
        raise UnsupportedArchitecture(
            f"the stored size of `quant_method` {method!r} is not known", mend=" or ".join(QUANTISED)
        )
    if not quantisation or _is_kept(name, quantisation):
        return elements * itemsize
    if method == "mxfp4":
        is_packed = ".experts." in name and not name.endswith("bias")
        return elements // MXFP4_GROUP * MXFP4_GROUP_BYTES if is_packed else elements * itemsize
    # Matrices of layers but the router's are converted; embeddings, norms and biases are not.
    router = name.endswith((".gate.weight", ".router.weight"))
    if len(shape) != 2 or ".layers." not in name or not name.endswith(".weight") or router:
        return elements * itemsize
    block = quantisation.get("weight_block_size")
    scales = math.prod(-(-n // size) for n, size in zip(shape, block, strict=True)) if block else 1
    return elements + scales * FP8_BLOCK_SCALE_BYTES


def _is_kept(name: str, quantisation: Mapping[str, Any]) -> bool:
    """Tell whether `modules_to_not_convert` names the tensor's module, or one that it lies in."""
    pattern = _any_of(tuple(map(str, quantisation.get("modules_to_not_convert") or ())))
    return pattern is not None and pattern.match(name) is not None


@lru_cache
def _any_of(modules: tuple[str, ...]) -> re.Pattern[str] | None:
    """Compile a pattern of names in these modules, in whose names * stands for anything; None without any."""
    return re.compile("|".join(fnmatch.translate(f"{m}.*") for m in modules)) if modules else None

"""What of a checkpoint neither its decoder nor its drafter uses, from the headers of its files."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from rayk.attention import get_backend
from rayk.models.build import Build
from rayk.models.config import DecoderConfig
from rayk.models.decoder import build_decoder
from rayk.models.drafters.config import drafter_of
from rayk.models.drafters.loader import load_drafter
from rayk.models.families import FAMILIES
from rayk.models.formats import Quantisation
from rayk.models.pieces import Pieces
from rayk.models.weights import HeaderReader, WeightReader
from rayk.parallel.local import LocalComm
from rayk.types.config import EngineConfig
from rayk.types.speculative import SpeculativeConfig

NAMED_PARTS = 6
"""Most name patterns that a note of unused tensors lists."""


def unused_tensors(path: str | Path, config: DecoderConfig, *, mtp: bool = False) -> dict[str, int]:
    """List tensors of a checkpoint that a decoder of `config` does not use: name pattern (the shortest
    start that no used tensor has, then `*`) -> number of tensors. `mtp`: nor do its multi-token prediction
    layers.

    The decoder is built from the files' headers alone, on torch's meta device, so that it requests what it
    needs. Raises CheckpointError for a tensor that is missing or of another shape, and as drafter_of does.
    """
    readers: list[HeaderReader] = []

    def opened(folder: Path, plain: Callable[[str], str], quantisation: Quantisation | None) -> WeightReader:
        readers.append(HeaderReader(folder, plain, quantisation))
        return readers[-1]

    names, device = FAMILIES[config.family].weights, torch.device("meta")
    backend = get_backend("reference", "cpu")
    with opened(Path(path), names.plain, config.quantisation) as reader:
        pieces = Pieces(reader, names, torch.float32, device)
        decoder = build_decoder(
            Build(pieces=pieces, config=config, comm=LocalComm(), backend_for=lambda _: backend)
        )
    if mtp:
        engine = EngineConfig(model=str(path), num_blocks=2)
        load_drafter(
            drafter_of(SpeculativeConfig(method="mtp", num_tokens=1), config, engine),
            decoder,
            comm=LocalComm(),
            dtype=torch.float32,
            device=device,
            backend_for=lambda _: backend,
            open_weights=opened,
        )
    unread = frozenset.intersection(*(reader.unread for reader in readers))
    starts = {start for name in readers[0].names - unread for start in _starts(name)}
    return dict(Counter(_part(name, starts) for name in sorted(unread)))


def note_unused(path: str | Path, config: DecoderConfig, *, mtp: bool = False) -> str:
    """Return one line about the `unused_tensors`, which may raise; empty if all are used."""
    parts = unused_tensors(path, config, mtp=mtp)
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

"""Which weights of a rank are not finite: asked once something that it computed is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rayk.engine.rank import EngineRank


def not_finite_weights(rank: EngineRank) -> tuple[str, ...]:
    """By their place in the decoder, `layers.3.mixer.o_proj.weight`; none of its caches."""
    own = rank.caches.buffer.untyped_storage().data_ptr()
    found = []
    for name, tensor in _tensors(rank.decoder, "", set()):
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        dense = tensor.to_dense() if tensor.is_mkldnn else tensor
        if dense.untyped_storage().data_ptr() != own and not _is_finite(dense):
            found.append(name)
    return tuple(found)


def _is_finite(tensor: torch.Tensor) -> bool:
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    return bool(torch.linalg.vector_norm(wide, torch.inf).isfinite())


def _tensors(thing: object, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a tree of rayk's own objects, each once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield name, thing
        return
    if isinstance(thing, Mapping):
        parts = [(str(key), value) for key, value in thing.items()]
    elif isinstance(thing, list | tuple):
        parts = [(str(index), value) for index, value in enumerate(thing)]
    elif type(thing).__module__.startswith("rayk.models."):
        names = getattr(thing, "__slots__", None) or vars(thing)
        parts = [(part, getattr(thing, part)) for part in names]
    else:
        return
    for part, value in parts:
        yield from _tensors(value, f"{name}.{part.lstrip('_')}".lstrip("."), seen)

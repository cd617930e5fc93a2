"""Walk the parts of a model: its layers, what these hold, and their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

import torch


def parts_of(thing: object, name: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, object]]:
    """Yield (place, part) of every tensor and object of rayk.models, each once, e.g. `layers.3.mixer`."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        parts = {str(key): value for key, value in thing.items()}
    elif isinstance(thing, list | tuple):
        parts = {str(index): value for index, value in enumerate(thing)}
    elif isinstance(thing, torch.Tensor):
        yield name, thing
        return
    elif type(thing).__module__.startswith(("rayk.models.", "rayk.kernels.scaled_matmul.")):
        yield name, thing
        slots = [] if hasattr(thing, "__dict__") else fields(thing)  # type: ignore[arg-type]
        parts = {f.name: getattr(thing, f.name) for f in slots} or vars(thing)
    else:
        return
    for part, value in parts.items():
        yield from parts_of(value, f"{name}.{part.lstrip('_')}".lstrip("."), seen)

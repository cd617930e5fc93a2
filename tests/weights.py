"""Checkpoints with chosen weights spoiled."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def spoil(model: Path, folder: Path, places: Mapping[str, Any], *, value: float) -> Path:
    """A copy of a tiny checkpoint, under `folder`, with `value` at an index of some of its tensors."""
    path = folder / "spoiled"
    shutil.copytree(model, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, index in places.items():
        tensors[name][index] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return path

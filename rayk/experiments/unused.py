"""What earlier runs found of a checkpoint's headers, so that a second run need not build its decoder."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

from rayk.models.config import DecoderConfig
from rayk.models.headers import stored_tensors
from rayk.models.hub import model_folder
from rayk.oracle.cache import AnswerStore, code_digest

_PACKAGE = Path(__file__).parents[1]
_ANSWERING = ("types", "parallel", "kv", "kernels", "attention", "models")
"""Packages of rayk that the answer depends on: models, and what it may import."""


def note_unused(model: str, config: DecoderConfig, notes: AnswerStore, *, mtp: bool = False) -> str:
    """Return `models.unused.note_unused`, without torch where `notes` keeps what it said of such tensors.
    Raises CheckpointError like it: that is kept nowhere."""
    folder = model_folder(model)
    tensors = {name: (t.dtype, t.shape) for name, t in stored_tensors(folder).items()}
    question = {
        "ask": "unused tensors",
        "rayk": code_digest(*(_PACKAGE / name for name in _ANSWERING)),
        "torch": importlib.metadata.version("torch"),
        "folder": str(folder),
        "mtp": mtp,
        "config": _digest(config),
        "tensors": _digest(sorted(tensors.items())),
    }
    kept = notes.get(question)
    if kept is not None:
        return str(kept.answer["note"])
    from rayk.models import unused  # imports torch

    note = unused.note_unused(folder, config, mtp=mtp)
    notes.put(question, {"note": note})
    return note


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()

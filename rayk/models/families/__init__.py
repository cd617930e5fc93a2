"""The model families: each maps its config.json and its weight names. Free of torch.

A family is a module here with a `FAMILY`, and is found by that. The decoder knows only `DecoderConfig`.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from rayk.models.config import DecoderConfig
from rayk.models.families.common import Family, WeightNames
from rayk.models.families.quantisation import parse_quantisation
from rayk.models.families.raw import RawConfig, read_json
from rayk.models.families.sharing import apply_sharing
from rayk.models.hub import QUANT_CONFIG
from rayk.types.errors import CheckpointError, UnsupportedArchitecture

__all__ = [
    "FAMILIES",
    "SUPPORTED",
    "Family",
    "WeightNames",
    "load_config",
    "parse_config",
    "read_config",
]

_MODULES = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]

FAMILIES: dict[str, Family] = {m.FAMILY.name: m.FAMILY for m in _MODULES if hasattr(m, "FAMILY")}

_BY_ARCHITECTURE = {name: family for family in FAMILIES.values() for name in family.architectures}

SUPPORTED: tuple[str, ...] = tuple(sorted(_BY_ARCHITECTURE))
"""Architectures, as config.json names them."""

CONFIG_BYTES = 4 << 20
"""Largest config.json that is read; released ones have at most 100 kB."""


def load_config(model_path: str | Path) -> DecoderConfig:
    """Read the decoder that a Hugging Face checkpoint folder describes.

    Raises CheckpointError if the folder, its config.json or its weights are missing or unreadable, and
    UnsupportedArchitecture if the model, or one of its settings, is not implemented.
    """
    folder = Path(model_path)
    if not folder.is_dir():
        raise _no_such(folder)
    config = read_config(folder)
    _require_weights(folder)
    return config


def read_config(path: str | Path) -> DecoderConfig:
    """Read the decoder that a config.json (the file, or that of a folder) describes. Raises like
    `load_config`, but does not look for weights."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise _no_such(path)
    if not file.exists():
        raise CheckpointError(
            "the checkpoint folder has no config.json",
            where=str(path),
            mend="pass a folder in Hugging Face format",
        )
    values = read_json(file, CONFIG_BYTES) | _generation_eos(file.parent)
    return parse_config(_quantisation_beside(file.parent) | values, where=str(file))


def _no_such(folder: Path) -> CheckpointError:
    return CheckpointError(
        "no such checkpoint folder",
        where=str(folder),
        mend="pass a local folder, or a model's name on the Hugging Face hub (org/name[@revision]), or write "
        "a small one with `rayk checkpoint FAMILY DIR`",
    )


def parse_config(values: dict[str, object], where: str = "config.json") -> DecoderConfig:
    """Parse the decoder that the contents of a config.json describe; `where` is for messages."""
    names = values.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise CheckpointError("`architectures` is missing or empty", where=where)
    family = _BY_ARCHITECTURE.get(str(names[0]))
    if family is None:
        raise UnsupportedArchitecture(
            f"architecture {names[0]} is not supported",
            where=where,
            mend="supported: " + ", ".join(SUPPORTED),
            architecture=str(names[0]),
            supported=SUPPORTED,
        )
    model_type, known = values.get("model_type"), family.model_types or (family.name,)
    if model_type not in (None, *known):
        raise CheckpointError(
            f"`model_type` {model_type!r} is not that of architecture {names[0]}",
            where=where,
            mend=f"`model_type`: {' or '.join(known)}, or the architecture that belongs to it",
        )
    raw = RawConfig(values, where, str(names[0]), family.name).of_text(family.defaults)
    config = replace(family.parse(raw), quantisation=parse_quantisation(raw))
    return apply_sharing(raw, config)


def _generation_eos(folder: Path) -> dict[str, object]:
    """End-of-sequence ids of generation_config.json, which generation obeys if the file exists."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    ids = read_json(file).get("eos_token_id")
    return {} if ids is None else {"eos_token_id": ids}


def _quantisation_beside(folder: Path) -> dict[str, object]:
    """Return nvidia-modelopt's hf_quant_config.json, in which its older exports alone say how they are
    quantised, under the key of config.json."""
    file = folder / QUANT_CONFIG
    return {"quantization_config": {"quant_method": "modelopt", **read_json(file)}} if file.is_file() else {}


def _require_weights(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))
    found = f" (only {', '.join(others[:3])})" if others else ""
    raise CheckpointError(
        f"the checkpoint folder has no .safetensors weights{found}",
        where=str(folder),
        mend="save the model with save_pretrained(..., safe_serialization=True)",
    )

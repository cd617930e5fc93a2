"""KV-cache scales of a checkpoint, read apart from rayk's loader."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors import safe_open

_NAME = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:[kv]_proj\.)?([kv])_scale$")


def checkpoint_kv_scales(folder: Path) -> dict[int, tuple[float, float]]:
    """Layer -> (k, v), 1 for a missing side; layers without either are absent.

    Of two names of a scale the shorter one counts. With latents the key's scale is used for both, since a
    latent and its rotated key share one.
    """
    found: dict[tuple[int, str], float] = {}
    names = [(name, file) for file in sorted(folder.glob("*.safetensors")) for name in _scale_names(file)]
    for name, file in sorted(names, key=lambda pair: -len(pair[0])):
        layer, side = _NAME.search(name).groups()  # type: ignore[union-attr]  # it was found by this pattern
        with safe_open(file, framework="pt") as tensors:
            found[int(layer), side] = float(tensors.get_tensor(name).float().item())
    layers = sorted({layer for layer, _ in found})
    if "kv_lora_rank" in json.loads((folder / "config.json").read_text()):
        return {layer: (found.get((layer, "k"), 1.0),) * 2 for layer in layers}
    return {layer: (found.get((layer, "k"), 1.0), found.get((layer, "v"), 1.0)) for layer in layers}


def _scale_names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return [name for name in tensors.keys() if _NAME.search(name)]  # noqa: SIM118  # no mapping

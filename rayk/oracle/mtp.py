"""Multi-token prediction layers: transformers' own, and random ones beside a tiny checkpoint's weights.

Transformers leaves them out when it loads the model, and reads them for `generate(use_mtp=True)`.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rayk.oracle.gains import Gains
from rayk.oracle.tiny import MTP_KEY
from rayk.types.errors import UserError

INDEX = "model.safetensors.index.json"
_FILE = "model-mtp.safetensors"


class TransformersMtp:
    """The layers of a checkpoint, by transformers' MtpModel: a drafting.WholeDrafter.

    It wants released sizes: the names that a model ignores hold a released number of layers, and qwen3_next's
    config does not say that there are any. Both are told it here.
    """

    def __init__(self, model: Any) -> None:
        """`model`: as from_pretrained loaded it."""
        from transformers.modeling_layers import MtpModel

        config = model.config
        if config.model_type == "deepseek_v3":
            more = range(config.num_hidden_layers, config.num_hidden_layers + config.num_mtp_layers)
            model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}\..*" for number in more]
        else:
            config.num_mtp_layers = getattr(config, MTP_KEY)
            config.mtp_layer_types = ["full_attention"] * config.num_mtp_layers
        self.model = MtpModel.from_pretrained(model).eval()
        self.depths = int(config.num_mtp_layers)

    def rows(self, token_ids: torch.Tensor, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        """Compute a depth's rows of a whole text, as WholeDrafter says."""
        from transformers.cache_utils import MtpCache

        # transformers counts a row by its token; depth d reads tokens d + 1 behind the model's.
        positions = torch.arange(depth + 1, depth + 1 + len(token_ids))[None]
        cache = MtpCache(config=self.model.config)
        found: torch.Tensor = self.model.forward_layer(
            depth, hidden[None], positions, cache, input_ids=token_ids[None]
        )
        return found[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the model's own head's logits [T, V]."""
        found: torch.Tensor = self.model._project_to_logits(hidden)
        return found


def add_mtp(folder: Path, model: Any, num_layers: int, *, seed: int, dtype: torch.dtype) -> None:
    """Add `num_layers` random layers to a saved tiny checkpoint of `model`, by the names of releases."""
    gains = Gains.of(model)
    tensors = {
        name: _draw(gains, name, shape, seed).to(dtype)
        for name, shape in _shapes(folder, model.config, num_layers).items()
    }
    index, whole = folder / INDEX, folder / "model.safetensors"
    if not index.is_file():
        save_file(load_file(whole) | tensors, whole, metadata={"format": "pt"})
        return
    save_file(tensors, folder / _FILE, metadata={"format": "pt"})
    listed = json.loads(index.read_text())
    listed["weight_map"] |= dict.fromkeys(tensors, _FILE)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    listed["metadata"]["total_size"] = listed["metadata"].get("total_size", 0) + num_bytes
    index.write_text(json.dumps(listed, indent=2), encoding="utf-8")


def _draw(gains: Gains, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/mtp/{name}".encode()))
    return gains.draw(name, shape, generator)


def _shapes(folder: Path, config: Any, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Name on disk -> shape. A layer is like the last of the model with its kind of each half."""
    stored: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
    size = config.hidden_size
    deepseek = config.model_type == "deepseek_v3"
    attention = _like(stored, r"self_attn\.", r"")
    routed = deepseek or _is_routed(config)
    halves = attention | _like(stored, r"mlp\.experts\." if routed else r"mlp\.gate_proj", r"mlp\.")
    found: dict[str, tuple[int, ...]] = {}
    for number in range(num_layers):
        prefix = f"model.layers.{config.num_hidden_layers + number}." if deepseek else f"mtp.layers.{number}."
        found |= {prefix + rest: shape for rest, shape in halves.items()}
        norms = ("enorm", "hnorm", "shared_head.norm") if deepseek else ()
        found |= {f"{prefix}{norm}.weight": (size,) for norm in norms}
        if deepseek:
            found[f"{prefix}eh_proj.weight"] = (size, 2 * size)
    if not deepseek:
        found |= {
            f"mtp.{norm}.weight": (size,) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        }
        found["mtp.fc.weight"] = (size, 2 * size)
    return found


def _like(stored: Mapping[str, tuple[int, ...]], marked: str, wanted: str) -> dict[str, tuple[int, ...]]:
    """Take the tensors `wanted` (all but those of a feed-forward half if empty), by the rest of their names,
    of the last layer that has one of a name `marked`."""
    layers = [int(m[1]) for name in stored if (m := re.match(rf"model\.layers\.(\d+)\.{marked}", name))]
    if not layers:
        raise UserError(
            "no layer of the model is like those that predict further",
            where=MTP_KEY,
            mend="a model with attention, and with experts where layer 0 would have them",
        )
    prefix = f"model.layers.{max(layers)}."
    rest = {name.removeprefix(prefix): shape for name, shape in stored.items() if name.startswith(prefix)}
    return {name: s for name, s in rest.items() if (re.match(wanted, name) if wanted else "mlp." not in name)}


def _is_routed(config: Any) -> bool:
    """Tell whether layer 0 of a qwen3_next, which its MTP layer is like, would have experts."""
    return bool(config.num_experts and config.decoder_sparse_step == 1 and 0 not in config.mlp_only_layers)

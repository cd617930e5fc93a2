"""Tiny checkpoints in the formats of quantised releases: `rayk checkpoint FAMILY DIR --quantise FORMAT`.

A library packs the weights where it has the format: transformers' fp8 operation, compressed-tensors. mxfp4 is
packed as its specification says. The weights that a draw is judged by are what comes back (dequantised).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rayk.oracle import packed_releases as releases
from rayk.oracle.dequantised import KEY, Module, by_module, compressed_scheme, full_name, pad, unpacker
from rayk.types.errors import UserError

FP8_BLOCK = [24, 40]
"""Rows and columns of a block: no tiny matrix is a whole number of them. Releases have [128, 128]."""
GROUP = 32
_UNPACKED = ("gate", "router", "layer", "shared_expert_gate")
"""Last words of the names of linear maps that no release quantises."""


@dataclass(frozen=True, kw_only=True)
class Packer:
    """One FORMAT of --quantise."""

    settings: Callable[[Sequence[str]], dict[str, Any]]
    """(the modules that stay plain) -> config.json's `quantization_config`."""
    pack: Callable[[Mapping[str, Any], str, Module], Module]
    """(`quantization_config`, the module's name, its plain tensors) -> its tensors as stored."""
    picks: Callable[[str, Module], bool]
    """Tell whether the module of this name and tensors is quantised."""


class Packed:
    """A model's weights in one format, packed anew whenever the model is drawn."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self.settings: dict[str, Any] = {}
        self.modules: dict[str, Module] = {}
        """Quantised modules -> their tensors that are not in the plain checkpoint."""
        self._replaced: dict[str, str] = {}
        """Plain tensors that these stand for -> the module."""

    def round(self, model: Any) -> None:
        """Replace the model's weights by what their packed forms mean. What was packed is kept: packing the
        result again could move a scale by its last bit."""
        from transformers.core_model_loading import revert_weight_conversion

        from rayk.oracle.quiet import no_progress_bars

        modules = by_module(dict(revert_weight_conversion(model, model.state_dict())))
        picked = {name for name, local in modules.items() if self._packer.picks(name, local)}
        matrices = [name for name, local in modules.items() if _is_matrix(local) and name not in picked]
        self.settings = self._packer.settings(matrices)
        self.modules, self._replaced = {}, {}
        unpack = unpacker(self.settings)
        plain: Module = {}
        for module, local in modules.items():
            if module in picked:
                stored = self._packer.pack(self.settings, module, local)
                self.modules[module] = {n: t for n, t in stored.items() if local.get(n) is not t}
                gone = (name for name, tensor in local.items() if stored.get(name) is not tensor)
                self._replaced |= {full_name(module, name): module for name in gone}
                local = unpack(self.settings, module, dict(stored))
            plain |= {full_name(module, name): tensor.clone() for name, tensor in local.items()}
        with no_progress_bars():
            loaded = type(model).from_pretrained(
                None, config=model.config, state_dict=plain, dtype=torch.float32
            )
        model.load_state_dict(loaded.state_dict())

    def replace(self, folder: Path) -> None:
        """Put the packed tensors into a saved checkpoint, in place of the plain ones of their modules."""
        index = folder / "model.safetensors.index.json"
        files: dict[str, str] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors = load_file(file)
            here = dict.fromkeys(self._replaced[name] for name in tensors if name in self._replaced)
            kept = {name: tensor for name, tensor in tensors.items() if name not in self._replaced}
            fresh = {full_name(m, n): tensor for m in here for n, tensor in self.modules[m].items()}
            save_file({**kept, **fresh}, file, metadata={"format": "pt"})
            files |= dict.fromkeys((*kept, *fresh), file.name)
        if index.is_file():
            index.write_text(json.dumps(json.loads(index.read_text()) | {"weight_map": files}, indent=2))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {KEY: self.settings}, indent=2))


def _is_matrix(local: Mapping[str, torch.Tensor]) -> bool:
    return "weight" in local and local["weight"].ndim == 2


def is_linear(module: str, local: Module) -> bool:
    """Tell whether a module is a linear map of a layer, other than a router."""
    return _is_matrix(local) and ".layers." in module and module.rpartition(".")[2] not in _UNPACKED


def _fp8_settings(kept: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": FP8_BLOCK,
        "modules_to_not_convert": list(kept),
    }


def _pack_fp8(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    """Use transformers' operation, which takes whole blocks alone."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    block = settings["weight_block_size"]
    chosen = SimpleNamespace(weight_block_size=block, scale_fmt=None)
    weight = local["weight"]
    packed: Module = Fp8Quantize(SimpleNamespace(quantization_config=chosen)).convert(
        {"weight": pad(weight.float(), block)}
    )
    rows, columns = weight.shape
    return local | packed | {"weight": packed["weight"][:rows, :columns].contiguous()}


def _compressed_settings(group: Mapping[str, Any], form: str) -> Callable[[Sequence[str]], dict[str, Any]]:
    def settings(kept: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], **group}},
            "ignore": list(kept),
        }

    return settings


def _pack_compressed(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    """Use compressed-tensors' own scales and compression. Static scales of inputs are 1: nothing here
    measures inputs, or uses them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme, form = compressed_scheme(settings, module)
    weight = local["weight"].float()
    strategy, size = scheme.weights.strategy, scheme.weights.group_size
    groups = weight.reshape(len(weight), -1, size) if strategy == "group" else weight
    axes = {"tensor": (0, 1), "channel": (1,), "group": (2,)}[strategy]
    least, most = groups.amin(axes, keepdim=True), groups.amax(axes, keepdim=True)
    scale, zeros = calculate_qparams(least, most, scheme.weights)
    scale = {"tensor": scale.reshape(-1), "channel": scale, "group": scale.flatten(1)}[strategy]
    stored = {"weight": weight, "weight_scale": scale}
    if not scheme.weights.symmetric:
        stored["weight_zero_point"] = zeros.reshape(scale.shape).to(torch.int8)
    packed: Module = BaseCompressor.get_value_from_registry(form).compress(stored, scheme)
    inputs = scheme.input_activations
    if inputs is not None and not inputs.dynamic:
        packed["input_scale"] = torch.ones(1)
    return releases.others(local) | packed


def _mxfp4_settings(kept: Sequence[str]) -> dict[str, Any]:
    """Return what gpt-oss releases say."""
    names = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(names)}


def _pack_mxfp4(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    """Pack the experts' matrices, which are stored transposed (transformers/integrations/mxfp4.py)."""
    packed = dict(local)
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = mxfp4(packed.pop(name).mT)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return packed


def mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert [..., 32 groups] to blocks [..., groups, 16] and scales [..., groups].

    OCP Microscaling Formats 1.0, 6.3: the shared exponent is the largest element's less that of the largest
    number (6 = 1.5 * 2^2).
    """
    if values.shape[-1] % GROUP:
        raise UserError(
            f"experts with {values.shape[-1]} inputs cannot be stored in groups of {GROUP}",
            where="--quantise mxfp4",
            mend=f"sizes that are multiples of {GROUP}: --set intermediate_size=96",
        )
    groups = values.float().reshape(*values.shape[:-1], -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    exponents = (torch.frexp(largest).exponent - 1 - 2).clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponents).contiguous()
    return releases.e2m1(scaled), (exponents[..., 0] + 127).to(torch.uint8)


def _integers(**weights: Any) -> Packer:
    group = {"weights": {"type": "int", **weights}}
    settings = _compressed_settings(group, "pack-quantized")
    return Packer(settings=settings, pack=_pack_compressed, picks=is_linear)


def _floats(scaled_by: str, **inputs: Any) -> Packer:
    """Make a packer of 8-bit floats with a scale per `scaled_by`; `inputs` says how inputs are quantised."""
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {"weights": {**float8, "strategy": scaled_by}, "input_activations": {**float8, **inputs}}
    settings = _compressed_settings(group, "float-quantized")
    return Packer(settings=settings, pack=_pack_compressed, picks=is_linear)


PACKERS: dict[str, Packer] = {
    "fp8-block": Packer(
        settings=_fp8_settings,
        pack=_pack_fp8,
        picks=is_linear,
    ),
    "fp8-tensor": _floats("tensor", strategy="tensor", dynamic=False),
    "fp8-channel": _floats("channel", strategy="token", dynamic=True),
    "awq": Packer(settings=releases.awq_settings, pack=releases.pack_awq, picks=is_linear),
    "gptq": Packer(settings=releases.gptq_settings, pack=releases.pack_gptq, picks=is_linear),
    "int4": _integers(num_bits=4, symmetric=False, strategy="group", group_size=8),
    "int8": _integers(num_bits=8, symmetric=True, strategy="channel"),
    "modelopt-fp8": Packer(
        settings=releases.modelopt_settings("FP8"), pack=releases.pack_modelopt, picks=is_linear
    ),
    "modelopt-nvfp4": Packer(
        settings=releases.modelopt_settings("NVFP4"), pack=releases.pack_modelopt, picks=is_linear
    ),
    "mxfp4": Packer(
        settings=_mxfp4_settings,
        pack=_pack_mxfp4,
        picks=lambda module, local: "gate_up_proj" in local,
    ),
}
"""FORMAT (release_formats.RELEASE_FORMATS) -> how it is packed."""

"""Modules of releases in AWQ, GPTQ and ModelOpt, packed for tiny checkpoints, dequantised for the reference.

No library reads these without a GPU, so that both sides are written here from the formats' definitions
(oracle/packed.py), and held to what their tools wrote (tests/models/packed). The same goes for what
compressed-tensors wrote in the order of activations.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rayk.oracle import packed
from rayk.oracle.quantised import E2M1_LARGEST, E2M1_LEVELS, E4M3_LARGEST
from rayk.types.errors import UserError

Module = dict[str, torch.Tensor]
"""A module's tensors by their names within it."""

WORD = 8
"""Integers of 4 bits in a word, of which AWQ and GPTQ store whole ones alone."""
AWQ_GROUP = 8
"""Inputs that share a scale. It divides every tiny matrix, as AutoAWQ asks, and no cut in two."""
GPTQ_GROUP = 16
"""The last group of some tiny matrices is smaller. Releases have 128."""
NVFP4_GROUP = 16
SMALLEST = 1e-30
"""Groups of zeros are divided by it."""


def awq_settings(kept: Sequence[str]) -> dict[str, Any]:
    common = {"quant_method": "awq", "bits": 4, "group_size": AWQ_GROUP, "zero_point": True}
    return common | {"version": "gemm", "modules_to_not_convert": list(kept)}


def pack_awq(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    weight = _whole_words(module, local["weight"])
    groups = packed.neighbours(weight.shape[1], settings["group_size"])
    codes, zeros, scales = packed.affine(weight, 4, groups, symmetric=False)
    return others(local) | _tensors(packed.write_awq(codes, zeros, scales))


def unpack_awq(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    if "qweight" not in local:
        return local
    stored = _arrays(local, "qweight", "qzeros", "scales")
    return local | _matrix(packed.read_awq(stored, _group_size(settings)))


def gptq_settings(kept: Sequence[str]) -> dict[str, Any]:
    """Return settings with zero points of version 1 and groups in the order of activations."""
    common = {"quant_method": "gptq", "bits": 4, "group_size": GPTQ_GROUP, "sym": False, "desc_act": True}
    dynamic: dict[str, Any] = {f"-:{re.escape(name)}$": {} for name in kept}
    return common | {"checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": dynamic}


def pack_gptq(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    """Shuffle inputs into groups, as an order of activations would."""
    weight = _whole_words(module, local["weight"])
    groups = packed.neighbours(weight.shape[1], settings["group_size"])
    groups = np.random.default_rng(zlib.crc32(module.encode())).permutation(groups)
    bits = settings["bits"]
    codes, zeros, scales = packed.affine(weight, bits, groups, symmetric=settings["sym"])
    return others(local) | _tensors(packed.write_gptq(codes, zeros, scales, bits, groups=groups))


def unpack_gptq(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    if "qweight" not in local:
        return local
    overrides = settings.get("dynamic") or {}
    matching = (part for key, part in overrides.items() if re.match(key.removeprefix("+:"), module))
    settings = {**settings, **next(matching, {})}
    version = 2 if settings.get("checkpoint_format") == "gptq_v2" else 1
    stored = _arrays(local, "qweight", "qzeros", "scales", *(["g_idx"] if "g_idx" in local else []))
    return local | _matrix(packed.read_gptq(stored, settings["bits"], _group_size(settings), version))


def unpack_ordered(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    """Dequantise what compressed-tensors packed in the order of activations; since 0.20 it reads none."""
    (group,) = settings["config_groups"].values()
    optional = [name for name in ("weight_zero_point",) if name in local]
    names = ("weight_packed", "weight_scale", "weight_shape", "weight_g_idx", *optional)
    return local | _matrix(packed.read_packed(_arrays(local, *names), group["weights"]["num_bits"], None))


def modelopt_settings(algorithm: str) -> Any:
    """Return what makes settings as modelopt 0.47 exports them."""

    def settings(kept: Sequence[str]) -> dict[str, Any]:
        producer = {"name": "modelopt", "version": "0.47.0"}
        common = {"quant_method": "modelopt", "quant_algo": algorithm, "producer": producer}
        return common | {"ignore": list(kept)}

    return settings


def pack_modelopt(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    """Scale the largest weight to the format's largest number. Inputs' scales are 1: nothing here uses
    them."""
    weight = local["weight"].float()
    if settings["quant_algo"] == "FP8":
        scale = weight.abs().amax() / E4M3_LARGEST
        return local | {
            "weight": (weight / scale).to(torch.float8_e4m3fn),
            "weight_scale": scale,
            "input_scale": torch.ones(()),
        }
    if weight.shape[1] % NVFP4_GROUP:
        raise UserError(
            f"{module} with {weight.shape[1]} inputs cannot be stored in groups of {NVFP4_GROUP}",
            where="--quantise modelopt-nvfp4",
            mend=f"sizes that are multiples of {NVFP4_GROUP}: --set intermediate_size=176",
        )
    groups = weight.reshape(len(weight), -1, NVFP4_GROUP)
    scale = weight.abs().amax() / (E2M1_LARGEST * E4M3_LARGEST)
    scales = (groups.abs().amax(-1) / (E2M1_LARGEST * scale)).to(torch.float8_e4m3fn)
    shown = groups / (scales.float() * scale).clamp(min=SMALLEST)[..., None]
    return local | {
        "weight": e2m1(shown.flatten(1)),
        "weight_scale": scales,
        "weight_scale_2": scale,
        "input_scale": torch.ones(()),
    }


def e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round values [..., 2 n] to 4-bit floats in bytes [..., n], the first in the lower half.

    OCP Microscaling Formats 1.0, 5.3.3 and 6.3: to the nearest, of two equally near ones to the even, and
    clamped.
    """
    levels = torch.tensor(E2M1_LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    sizes = values.abs().contiguous()
    lower, upper = torch.bucketize(sizes, middles), torch.bucketize(sizes, middles, right=True)
    codes = torch.where(lower % 2 == 0, lower, upper) + 8 * (values < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def unpack_modelopt(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    local.pop("input_scale", None)
    if "weight_scale" not in local:
        return local
    weight, scale = local["weight"], local.pop("weight_scale")
    if weight.dtype == torch.uint8:
        scales = scale.double().numpy()
        return local | _matrix(packed.read_nvfp4(weight.numpy(), scales, float(local.pop("weight_scale_2"))))
    return local | {"weight": weight.float() * scale.float().reshape(-1, 1)}


def others(local: Module) -> Module:
    """Return the module's tensors that are not its matrix."""
    return {name: tensor for name, tensor in local.items() if name != "weight"}


def _whole_words(module: str, weight: torch.Tensor) -> packed.Array:
    """Return a matrix in float64. Raises UserError if the packed words of its sides are not whole."""
    if any(side % WORD for side in weight.shape):
        raise UserError(
            f"{module} of {list(weight.shape)} cannot be stored in words of {WORD} integers",
            where="--quantise",
            mend=f"sizes that are multiples of {WORD}: --set intermediate_size=168",
        )
    return np.asarray(weight.double().numpy(), np.float64)


def _group_size(settings: Mapping[str, Any]) -> int | None:
    size = settings.get("group_size", -1)
    return None if size == -1 else int(size)


def _arrays(local: Module, *names: str) -> dict[str, Any]:
    """Take tensors out of the module."""
    found = {name: local.pop(name) for name in names}
    # numpy has no bfloat16.
    return {name: (t.float() if t.is_floating_point() else t).numpy() for name, t in found.items()}


def _tensors(arrays: Mapping[str, Any]) -> Module:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _matrix(values: packed.Array) -> Module:
    return {"weight": torch.from_numpy(values).float()}

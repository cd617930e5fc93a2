"""The plain checkpoint that a quantised release means, written by the formats' own libraries.

transformers' loading operations read fp8 and mxfp4, the library compressed-tensors what it wrote. Every
format is dequantised in float32: a model in another dtype rounds it once, as rayk's engines do. Nothing here
uses rayk's own readers.

`Module` below maps the names of a module's tensors, without the module's, to the tensors.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rayk.oracle.packed_releases import unpack_awq, unpack_gptq, unpack_modelopt, unpack_ordered
from rayk.types.errors import CheckpointError
from rayk.types.files import JSON_BYTES, parse_json, read_text

Module = dict[str, torch.Tensor]
Unpack = Callable[[Mapping[str, Any], str, Module], Module]
"""(config.json's `quantization_config`, the module's name, its tensors as stored) -> its plain tensors."""

KEY = "quantization_config"
FILE_BYTES = 2 << 30
"""A file of the plain checkpoint is closed when it has grown to this size."""


def quantization_config(folder: Path) -> dict[str, Any]:
    """Return what config.json says of the weights' format; empty if they are plain."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config")
    return config.get(KEY) or (text.get(KEY) if isinstance(text, dict) else None) or {}


@contextmanager
def plain_checkpoint(folder: Path) -> Iterator[Path]:
    """Yield a folder whose weights transformers loads without quantising anything: `folder` itself, if it is
    such a one, else a temporary one. Raises CheckpointError for a format that has no library here."""
    settings = quantization_config(folder)
    if not settings:
        yield folder
        return
    with TemporaryDirectory(prefix="rayk-dequantised-") as target:
        _write(folder, Path(target), settings)
        yield Path(target)


def unpacker(settings: Mapping[str, Any], where: str = KEY) -> Unpack:
    """Return what dequantises modules. Raises CheckpointError for an unknown method."""
    found = UNPACK.get(str(settings.get("quant_method")))
    if found is None:
        raise CheckpointError(
            f"the reference cannot dequantise `quant_method` {settings.get('quant_method')!r}",
            where=where,
            mend="one of " + ", ".join(UNPACK),
        )
    return found


def by_module(names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort name -> value into module -> name within it -> value."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in names.items():
        module, _, local = name.rpartition(".")
        found[module][local] = value
    return dict(found)


def full_name(module: str, local: str) -> str:
    return f"{module}.{local}" if module else local


def _write(folder: Path, target: Path, settings: Mapping[str, Any]) -> None:
    """Write the plain checkpoint, module by module."""
    unpack = unpacker(settings, str(folder))
    for file in folder.glob("*.json"):
        if file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, target)
    config = json.loads((folder / "config.json").read_text())
    config.pop(KEY, None)
    if isinstance(config.get("text_config"), dict):
        config["text_config"].pop(KEY, None)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    files: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        for module, stored in by_module(_handles(folder, stack)).items():
            local = {name: handle.get_tensor(full_name(module, name)) for name, handle in stored.items()}
            pending |= {full_name(module, name): t for name, t in unpack(settings, module, local).items()}
            if sum(tensor.nbytes for tensor in pending.values()) > FILE_BYTES:
                _flush(target, pending, files)
        _flush(target, pending, files)
    index = {"metadata": {}, "weight_map": files}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def _flush(target: Path, pending: dict[str, torch.Tensor], files: dict[str, str]) -> None:
    """Write the pending tensors to a file, and note in which."""
    name = f"model-{len(set(files.values())) + 1:05}.safetensors"
    tensors = {key: tensor.contiguous() for key, tensor in pending.items()}
    save_file(tensors, target / name, metadata={"format": "pt"})
    files |= dict.fromkeys(pending, name)
    pending.clear()


def _handles(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return tensor -> the open file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = parse_json(read_text(index, JSON_BYTES))["weight_map"]
    else:
        (file,) = folder.glob("*.safetensors")
        with safe_open(file, framework="pt") as opened:
            files = dict.fromkeys(opened.keys(), file.name)
    opened = {
        name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in set(files.values())
    }
    return {tensor: opened[name] for tensor, name in files.items()}


def _unpack_fp8(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    """Use transformers' operation for `dequantize=True`. It takes whole blocks alone, so that zeros are put
    after the last rows and columns, and taken away again."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    scale = next((local.pop(name) for name in ("weight_scale_inv", "weight_scale") if name in local), None)
    for unused in ("input_scale", "activation_scale"):
        local.pop(unused, None)
    if scale is None:
        return local
    weight = local["weight"]
    block = settings.get("weight_block_size") or list(weight.shape)
    padded = pad(weight.float(), block).to(weight.dtype)
    stored = {"weight": padded, "weight_scale_inv": scale.float().reshape(_grid(weight, block))}
    plain = Fp8Dequantize(None).convert(stored)["weight"]
    return local | {"weight": plain[: weight.shape[0], : weight.shape[1]]}


def pad(weight: torch.Tensor, block: list[int]) -> torch.Tensor:
    """Add zeros below and beside a matrix, up to whole blocks."""
    below, beside = (-size % side for size, side in zip(weight.shape, block, strict=True))
    return torch.nn.functional.pad(weight, (0, beside, 0, below))


def _grid(weight: torch.Tensor, block: list[int]) -> tuple[int, ...]:
    return tuple(-(-size // side) for size, side in zip(weight.shape, block, strict=True))


def _unpack_mxfp4(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    """Use transformers' operation for `dequantize=True`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = [name.removesuffix("_blocks") for name in local if name.endswith("_blocks")]
    for name in packed:
        blocks, scales = local.pop(f"{name}_blocks"), local.pop(f"{name}_scales")
        local[name] = convert_moe_packed_tensors(blocks, scales.view(torch.uint8), dtype=torch.float32)
    return local


def _unpack_compressed(settings: Mapping[str, Any], module: str, local: Module) -> Module:
    """Use the library's own decompression. It computes in the scales' dtype, here made float32."""
    from compressed_tensors.compressors import BaseCompressor

    if "weight_scale" not in local:
        return local
    if "weight_g_idx" in local:
        return unpack_ordered(settings, module, local)
    scheme, form = compressed_scheme(settings, module)
    packed = local | {"weight_scale": local["weight_scale"].float()}
    plain = BaseCompressor.get_value_from_registry(form).decompress(packed, scheme)
    kept = {name: tensor for name, tensor in plain.items() if name in ("weight", "bias")}
    return kept | {name: local[name] for name in ("k_scale", "v_scale") if name in local}


def compressed_scheme(settings: Mapping[str, Any], module: str) -> tuple[Any, str]:
    """Return the library's scheme of a module, and the name of its format."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    config = QuantizationConfig.model_validate(dict(settings))
    groups = [scheme for scheme in config.config_groups.values() if not isinstance(scheme, list)]
    # A class is a target as well; here every quantised module is a linear map.
    (scheme, *_) = [s for s in groups if any(t == "Linear" or match_name(module, t) for t in s.targets)]
    return scheme, scheme.format or config.format


UNPACK: dict[str, Unpack] = {
    "fp8": _unpack_fp8,
    "mxfp4": _unpack_mxfp4,
    "compressed-tensors": _unpack_compressed,
    "awq": unpack_awq,
    "gptq": unpack_gptq,
    "modelopt": unpack_modelopt,
}
"""`quant_method` -> what dequantises its modules."""

"""Writes the fixtures beside it: small matrices packed by the tools that write releases.

Run in an environment of its own with torch, gptqmodel, autoawq, compressed-tensors and nvidia-modelopt:
`python make_packed.py FOLDER [OLD]`. OLD is a folder in which compressed-tensors 0.11 lies unpacked: the
last that wrote `weight_g_idx`; with it, only that fixture is written. Each file holds a layer's tensors as
the tool names them, and `expected`: the matrix [out, in] as the tool itself dequantises it. Those of GPTQ
hold the zero points of both versions of its files: `qzeros` and `qzeros_v2`.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

OUTPUTS, INPUTS = 32, 96
NUM_GROUPS = {"group": 3, "channel": 1}
"""Groups of inputs that share a scale: of 32, or all."""


def matrix(seed: int, outputs: int = OUTPUTS, inputs: int = INPUTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=generator) * 0.05


def write(folder: Path, name: str, tensors: dict[str, torch.Tensor], **facts: object) -> None:
    """Write a fixture, with the settings and the tools' versions as metadata."""
    tensors = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
    save_file(
        tensors, folder / f"{name}.safetensors", {key: json.dumps(value) for key, value in facts.items()}
    )


def version(*packages: str) -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in (*packages, "torch"))


def affine(
    weight: torch.Tensor, groups: torch.Tensor, bits: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales (of float16's values) and zero points [out, groups] by the groups' least and largest
    weights; `groups` [in] names each input's. A zero point of 0 occurs, which v1 of GPTQ stores as -1."""
    num, top = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = torch.zeros(len(weight), num), torch.zeros(len(weight), num)
    for group in range(num):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scales[:, group] = ((high - low) / top).half().float()
        zeros[:, group] = (-low / scales[:, group]).round().clamp(0, top)
        if symmetric:
            zeros[:, group] = (top + 1) // 2
    if not symmetric:
        zeros[::5] = 0
    return scales, zeros


def gptq(folder: Path) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    cases = {
        "gptq_sym": (4, "group", True, False),
        "gptq_asym": (4, "group", False, False),
        "gptq_order": (4, "group", False, True),
        "gptq_channel": (4, "channel", False, False),
        "gptq_8": (8, "group", False, True),
    }
    for seed, (name, (bits, strategy, symmetric, ordered)) in enumerate(cases.items()):
        weight = matrix(seed)
        size = INPUTS // NUM_GROUPS[strategy]
        groups = torch.arange(INPUTS, dtype=torch.int32) // size
        if ordered:
            groups = groups[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(seed))]
        scales, zeros = affine(weight, groups, bits, symmetric=symmetric)
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        linear.weight.data = weight
        group_size = size if strategy == "group" else -1
        layer = TorchLinear(
            bits=bits,
            group_size=group_size,
            sym=symmetric,
            desc_act=ordered,
            in_features=INPUTS,
            out_features=OUTPUTS,
            bias=False,
            register_buffers=True,
        )
        layer.pack_original(linear, scales, zeros, groups)
        layer.post_init()
        expected = layer.dequantize_weight().T.clone()
        stored = {key: getattr(layer, key).clone() for key in ("qweight", "qzeros", "scales", "g_idx")}
        stored["qzeros_v2"] = stored["qzeros"]
        config = QuantizeConfig(bits=bits, group_size=group_size, sym=symmetric, desc_act=ordered)
        convert_gptq_v2_to_v1_format_module(layer, config)
        stored["qzeros"] = layer.qzeros.clone()
        settings = {"quant_method": "gptq", "bits": bits, "group_size": group_size}
        settings |= {"sym": symmetric, "desc_act": ordered, "checkpoint_format": "gptq"}
        tensors = stored | {"expected": expected}
        write(folder, name, tensors, config=settings, tools=version("gptqmodel"))


def awq(folder: Path) -> None:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    weight, size = matrix(10), INPUTS // NUM_GROUPS["group"]
    scales, zeros = affine(weight, torch.arange(INPUTS) // size, 4, symmetric=False)
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    # What lies below a group's range is left to the caller.
    linear.weight.data = weight.maximum(-(zeros * scales).repeat_interleave(size, 1))
    linear.weight.data = linear.weight.minimum(((15 - zeros) * scales).repeat_interleave(size, 1))
    layer = WQLinear_GEMM.from_linear(
        linear, 4, size, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    stored = {key: getattr(layer, key).clone() for key in ("qweight", "qzeros", "scales")}
    expected = dequantize_gemm(stored["qweight"], stored["qzeros"], stored["scales"], 4, size).T
    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    write(folder, "awq", stored | {"expected": expected}, config=settings, tools=version("autoawq"))


def ordered_groups(folder: Path) -> None:
    """Write the fixture of compressed-tensors 0.11, with columns in the order of their activations."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationArgs

    groups = torch.arange(INPUTS, dtype=torch.int32) // 32
    groups = groups[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(3))]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    args, weight = QuantizationArgs(**weights, actorder="group"), matrix(20)
    scales = affine(weight, groups, 4, symmetric=True)[0].half()
    layer = PackedQuantizationCompressor()
    # It does not unpack zero points, so there are none.
    stored = layer.compress_weight(weight=weight, scale=scales, g_idx=groups, quantization_args=args)
    stored |= {"weight_scale": scales, "weight_g_idx": groups}
    expected = layer.decompress_weight(stored, args)
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | {"actorder": "group"}}},
        "ignore": ["lm_head"],
    }
    tools = f"compressed-tensors 0.11.0, torch {torch.__version__}"
    write(folder, "packed_order", stored | {"expected": expected}, config=settings, tools=tools)


def modelopt(folder: Path) -> None:
    """Write layer 0's feed-forward down projection of a small model that modelopt exported."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 1}
    names = {
        "modelopt_fp8": "FP8_DEFAULT_CFG",
        "modelopt_fp8_channel": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
        "modelopt_nvfp4": "NVFP4_DEFAULT_CFG",
    }
    for name, settings in names.items():
        torch.manual_seed(0)
        config = LlamaConfig(**sizes, dtype="bfloat16", architectures=["LlamaForCausalLM"])
        model = LlamaForCausalLM(config).bfloat16()
        mtq.quantize(model, getattr(mtq, settings), lambda m: m(torch.arange(32).view(1, 32)))
        with tempfile.TemporaryDirectory() as scratch:
            export_hf_checkpoint(model, export_dir=scratch)
            quantised = json.loads((Path(scratch) / "config.json").read_text())["quantization_config"]
            beside = json.loads((Path(scratch) / "hf_quant_config.json").read_text())
            start = "model.layers.0.mlp.down_proj."
            exported = load_file(Path(scratch) / "model.safetensors")
        tensors = {
            key.removeprefix(start): exported[key].clone() for key in exported if key.startswith(start)
        }
        weight, scale = tensors["weight"], tensors["weight_scale"]
        if name == "modelopt_nvfp4":
            packed = NVFP4QTensor(torch.Size((32, 48)), torch.float32, weight)
            double = tensors["weight_scale_2"]
            tensors["expected"] = packed.dequantize(
                torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16}
            )
        else:
            packed = FP8QTensor(torch.Size((32, 48)), torch.float32, weight)
            by_row = scale if scale.ndim == 0 else scale[:, None]
            tensors["expected"] = packed.dequantize(torch.float32, scale=by_row)
        facts = {"config": quantised, "hf_quant_config": beside}
        write(folder, name, tensors, **facts, tools=version("nvidia-modelopt", "transformers"))


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) > 2:
        sys.path.insert(0, sys.argv[2])
        ordered_groups(folder)
        return
    gptq(folder)
    awq(folder)
    modelopt(folder)


if __name__ == "__main__":
    main()

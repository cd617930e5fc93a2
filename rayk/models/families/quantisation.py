"""Reads config.json's `quantization_config`: the format in which each tensor of a release is stored."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rayk.models.families.patterns import check_pattern
from rayk.models.families.raw import RawConfig
from rayk.models.formats import (
    Awq,
    Fp8,
    Gptq,
    Mxfp4,
    Nvfp4,
    PackQuantized,
    Quantisation,
    Scheme,
    WeightFormat,
)
from rayk.types.errors import CheckpointError

KEY = "quantization_config"
MOST_BLOCK = 1 << 16
"""Limit of a block's sides."""
PATTERN = "re:"
"""compressed-tensors' mark of a regular expression, which matches from a name's start."""
SHOWN = 100
"""Characters of a pattern that an error shows."""
FP8_VALUES = MappingProxyType(
    {"e4m3": "F8_E4M3", "float8_e4m3fn": "F8_E4M3", "e5m2": "F8_E5M2", "float8_e5m2": "F8_E5M2"}
)
"""`fmt` of releases in fp8 -> the dtype of their values as safetensors names it."""


def parse_quantisation(raw: RawConfig) -> Quantisation | None:
    """Return None for a release that is not quantised. Raises UnsupportedArchitecture for a method, or one of
    its settings, that is not read, CheckpointError for values that mean nothing."""
    values = raw.get(KEY)
    if values is None:
        return None
    if not isinstance(values, dict):
        raise CheckpointError(f"`{KEY}` must be an object, not {values!r}", where=raw.where)
    method = values.get("quant_method")
    parse = METHODS.get(method) if isinstance(method, str) else None
    if parse is None:
        raise raw.refuse(
            f"`{KEY}`: quantized weights of `quant_method` {method!r} are not supported",
            "one of " + ", ".join(METHODS) + "; or a checkpoint in float32, bfloat16 or float16",
        )
    return parse(raw.of(values))


def _fp8(raw: RawConfig) -> Quantisation:
    """transformers' FineGrainedFP8Config; without `weight_block_size` there is a scale per tensor. Scales of
    inputs in powers of two (`scale_fmt`) are not known to kernels."""
    block = raw.get("weight_block_size")
    inputs = {"dynamic": "token" if block is None else "group", "static": "static"}
    scheme = _one_word(raw, "activation_scheme", "dynamic", inputs)
    known = _one_word(raw, "scale_fmt", "float", ("float", "ue8m0")) == "float"
    values = None if raw.get("fmt") is None else FP8_VALUES[_one_word(raw, "fmt", "", FP8_VALUES)]
    form = Fp8(
        (None, None) if block is None else _block(raw, "weight_block_size", block),
        inputs[scheme] if known else None,
        values,
    )
    return Quantisation(method="fp8", schemes=(Scheme(form),), kept=_kept(raw, "modules_to_not_convert"))


def _mxfp4(raw: RawConfig) -> Quantisation:
    kept = _kept(raw, "modules_to_not_convert")
    return Quantisation(method="mxfp4", schemes=(Scheme(Mxfp4()),), kept=kept)


def _awq(raw: RawConfig) -> Quantisation:
    """transformers' AwqConfig: AutoAWQ's files, and gptqmodel's of that layout."""
    for key in ("version", "format", "checkpoint_format"):
        text = raw.get(key, "gemm")
        if not isinstance(text, str) or text.lower() != "gemm":
            raise raw.refuse(f"`{KEY}`: awq with `{key}` {text!r} is not supported", "a release in `gemm`")
    if not raw.flag("zero_point", default=True):
        raise raw.refuse(f"`{KEY}`: awq without zero points is not supported", "a release with zero points")
    if _bits(raw, "bits", 4) != 4:
        raise raw.refuse(f"`{KEY}`: awq with `bits` {raw.get('bits')} is not supported", "`bits` 4")
    form = Awq(_group_size(raw, 128))
    return Quantisation(method="awq", schemes=(Scheme(form),), kept=_kept(raw, "modules_to_not_convert"))


def _gptq(raw: RawConfig) -> Quantisation:
    """gptqmodel's QuantizeConfig, and AutoGPTQ's before it. `dynamic` sets modules apart by regular
    expressions from their names' starts, the first counts: `-:` leaves them plain, `+:` or nothing overrides
    settings (gptqmodel/quantization/config.py, dynamic_get)."""
    dynamic = raw.get("dynamic", {})
    if not isinstance(dynamic, dict) or not all(isinstance(part, dict) for part in dynamic.values()):
        raise CheckpointError(f"`{KEY}`: `dynamic` must map patterns to objects", where=raw.where)
    schemes, kept = [], []
    for key, part in dynamic.items():
        pattern = _checked(raw, "dynamic", key.removeprefix("+:").removeprefix("-:"))
        if key.startswith("-:"):
            kept.append(pattern)
        else:
            schemes.append(Scheme(_gptq_format(raw.of({**raw.values, **part})), (pattern,)))
    schemes.append(Scheme(_gptq_format(raw)))
    return Quantisation(method="gptq", schemes=tuple(schemes), kept=tuple(kept))


def _gptq_format(raw: RawConfig) -> Gptq:
    form = raw.get("checkpoint_format", raw.get("format", "gptq"))
    version = {"gptq": 1, "gptq_v2": 2}.get(form) if isinstance(form, str) else None
    if version is None or raw.flag("is_marlin_format"):
        found = "marlin" if version else form
        raise raw.refuse(f"`{KEY}`: gptq in the format {found!r} is not supported", "gptq or gptq_v2")
    if raw.get("pack_dtype", "int32") != "int32":
        raise raw.refuse(f"`{KEY}`: `pack_dtype` {raw.get('pack_dtype')!r} is not supported", "int32")
    return Gptq(_bits(raw, "bits", None), _group_size(raw, -1), version, raw.flag("desc_act"))


def _modelopt(raw: RawConfig) -> Quantisation:
    """nvidia-modelopt's exports: config.json, or hf_quant_config.json, whose settings lie under
    `quantization` (modelopt/torch/export/convert_hf_config.py)."""
    inner = raw.get("quantization", raw.values)
    if not isinstance(inner, dict):
        raise CheckpointError(f"`{KEY}`: `quantization` must be an object", where=raw.where)
    raw = raw.of(inner)
    algorithm = raw.get("quant_algo")
    form = MODELOPT.get(algorithm) if isinstance(algorithm, str) else None
    if form is None:
        mend = "one of " + ", ".join(MODELOPT)
        raise raw.refuse(f"`{KEY}`: modelopt's `quant_algo` {algorithm!r} is not supported", mend)
    if isinstance(form, Nvfp4) and raw.count("group_size", 16) != 16:
        raise raw.refuse(f"`{KEY}`: NVFP4 in groups of {raw.count('group_size')} is not supported", "16")
    excluded = [*_texts(raw, "exclude_modules"), *_texts(raw, "ignore")]
    kept = tuple(fnmatch.translate(name) for name in excluded)
    return Quantisation(method="modelopt", schemes=(Scheme(form),), kept=kept)


def _compressed(raw: RawConfig) -> Quantisation:
    """compressed-tensors: groups of modules, each with its scheme (compressed_tensors/quantization)."""
    sparsity, transform = raw.get("sparsity_config"), raw.get("transform_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        raise raw.refuse(f"`{KEY}`: `sparsity_config` is not supported", "a release without it")
    if transform:
        raise raw.refuse(f"`{KEY}`: `transform_config` is not supported", "a release without it")
    groups = raw.get("config_groups")
    is_mapping = isinstance(groups, dict) and all(isinstance(group, dict) for group in groups.values())
    if not groups or not is_mapping:
        raise CheckpointError(f"`{KEY}`: `config_groups` must map names to objects", where=raw.where)
    schemes = tuple(_group(raw, name, group) for name, group in groups.items())
    ignored = _texts(raw, "ignore")
    names = _one_of([name for name in ignored if not name.startswith(PATTERN)])
    patterns = [_pattern(raw, "ignore", name) for name in ignored if name.startswith(PATTERN)]
    return Quantisation(method="compressed-tensors", schemes=schemes, kept=(*names, *patterns))


def _group(raw: RawConfig, name: str, group: Mapping[str, Any]) -> Scheme:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise raw.refuse(f"`{KEY}`: group {name!r} says nothing about weights", "a group with `weights`")
    kind = (weights.get("type", "int"), weights.get("num_bits", 8))
    make = WEIGHTS.get(kind) if isinstance(kind[0], str) and type(kind[1]) is int else None
    if make is None:
        known = ", ".join(f"{bits}-bit {type_}" for type_, bits in WEIGHTS)
        raise raw.refuse(f"`{KEY}`: group {name!r} has weights of {kind[1]}-bit {kind[0]}", f"one of {known}")
    targets, inputs = _texts(raw.of(group), "targets"), group.get("input_activations")
    if not targets:
        raise CheckpointError(f"`{KEY}`: group {name!r} has no `targets`", where=raw.where)
    if inputs is not None and not isinstance(inputs, dict):
        problem = f"`{KEY}`: group {name!r} has `input_activations` that are no object: {inputs!r}"
        raise CheckpointError(problem, where=raw.where)
    weights = {"format": group.get("format") or raw.get("format"), **weights}
    weights["inputs"] = inputs
    return Scheme(make(raw, weights), tuple(_target(raw, target) for target in targets))


def _compressed_fp8(raw: RawConfig, weights: Mapping[str, Any]) -> WeightFormat:
    strategy = weights.get("strategy")
    block: tuple[int, int] | tuple[None, None] = (None, None)
    if strategy == "block":
        block = _block(raw, "block_structure", weights.get("block_structure"))
    inputs = _compressed_inputs(weights["inputs"], block[1])
    if strategy in ("tensor", "block"):
        return Fp8(block, inputs)
    if strategy == "channel":
        return Fp8((1, None), inputs)
    mend = "one of tensor, channel, block"
    raise raw.refuse(f"`{KEY}`: 8-bit floats with `strategy` {strategy!r} are not supported", mend)


def _compressed_integers(raw: RawConfig, weights: Mapping[str, Any]) -> WeightFormat:
    form, strategy = weights.get("format"), weights.get("strategy")
    if form != "pack-quantized":
        problem = f"`{KEY}`: integers in the `format` {form!r} are not supported"
        raise raw.refuse(problem, "a release in pack-quantized")
    values = raw.of(weights)
    if strategy not in ("group", "channel"):
        problem = f"`{KEY}`: integers with `strategy` {strategy!r} are not supported"
        raise raw.refuse(problem, "group or channel")
    size = values.count("group_size") if strategy == "group" else None
    return PackQuantized(_bits(values, "num_bits", None), size, values.flag("symmetric", default=True))


def _compressed_nvfp4(raw: RawConfig, weights: Mapping[str, Any]) -> WeightFormat:
    form = weights.get("format")
    if form != "nvfp4-pack-quantized" or weights.get("group_size") != 16:
        problem = f"`{KEY}`: 4-bit floats in the `format` {form!r}, groups of {weights.get('group_size')}, "
        raise raw.refuse(problem + "are not supported", "nvfp4-pack-quantized in groups of 16")
    return Nvfp4("compressed-tensors")


def _compressed_inputs(settings: Mapping[str, Any] | None, columns: int | None) -> str | None:
    """Return how inputs are quantised (Fp8.inputs), given `input_activations` and the columns of a block."""
    if settings is None or (settings.get("type"), settings.get("num_bits")) != ("float", 8):
        return None
    if not settings.get("symmetric", True):
        return None
    match settings.get("dynamic"), settings.get("strategy"):
        case True, "token":
            return "token"
        case True, "group" if columns is not None and settings.get("group_size") == columns:
            return "group"
        case False, "tensor":
            return "static"
    return None


METHODS: Mapping[str, Callable[[RawConfig], Quantisation]] = MappingProxyType(
    {
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "compressed-tensors": _compressed,
        "awq": _awq,
        "gptq": _gptq,
        "modelopt": _modelopt,
    }
)
"""`quant_method` -> its reader, given the settings beside it."""
WEIGHTS: Mapping[tuple[str, int], Callable[[RawConfig, Mapping[str, Any]], WeightFormat]] = MappingProxyType(
    {
        ("float", 8): _compressed_fp8,
        ("float", 4): _compressed_nvfp4,
        ("int", 4): _compressed_integers,
        ("int", 8): _compressed_integers,
    }
)
"""(type, bits) of compressed-tensors' weights -> what makes their format, given the group's `weights`."""

MODELOPT: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "FP8": Fp8((None, None), "static"),
        "FP8_PER_CHANNEL_PER_TOKEN": Fp8((1, None), "token"),
        "NVFP4": Nvfp4("modelopt"),
    }
)
"""`quant_algo` of nvidia-modelopt -> its format."""


def _bits(raw: RawConfig, key: str, default: int | None) -> int:
    bits = raw.count(key, default)
    if bits not in (4, 8):
        raise raw.refuse(f"`{KEY}`: packed integers of {bits} bits are not supported", f"`{key}` 4 or 8")
    return bits


def _group_size(raw: RawConfig, default: int) -> int | None:
    """Return inputs per group; None for -1, which is all."""
    return None if raw.get("group_size", default) == -1 else raw.count("group_size", default)


def _block(raw: RawConfig, key: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(f"`{KEY}`: `{key}` must be two integers, not {value!r}", where=raw.where)
    for side in value:
        if type(side) is not int or not 1 <= side <= MOST_BLOCK:
            problem = f"`{KEY}`: `{key}` {value!r} must hold integers from 1 to {MOST_BLOCK}"
            raise CheckpointError(problem, where=raw.where)
    return value[0], value[1]


def _one_word(raw: RawConfig, key: str, default: str, known: Collection[str]) -> str:
    """Return a setting that must be one of `known`, in small letters."""
    word = raw.get(key, default)
    if not isinstance(word, str) or word.lower() not in known:
        raise raw.refuse(f"`{KEY}`: `{key}` {word!r} is not supported", "one of " + ", ".join(known))
    return word.lower()


def _texts(raw: RawConfig, key: str) -> list[str]:
    """Return a list of texts, empty if the key is absent or null."""
    values = raw.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"`{KEY}`: `{key}` must be a list of names, not {values!r}", where=raw.where)
    return values


def _kept(raw: RawConfig, key: str) -> tuple[str, ...]:
    """Read modules as transformers does: a regular expression from a name's start up to a dot or its end, or
    the end of a name (transformers/quantizers/quantizers_utils.py)."""
    names = _texts(raw, key)
    starts = [_checked(raw, key, name, r"(?:{})(?:(?<=\.)|(?=\.|$))") for name in names]
    return (*starts, *(f".*{ending}" for ending in _one_of(names)))


def _one_of(names: Sequence[str]) -> tuple[str, ...]:
    """Return a pattern of `names` as they are up to a name's end; none without names."""
    return (f"(?:{'|'.join(map(re.escape, names))})$",) if names else ()


def _target(raw: RawConfig, name: str) -> str:
    """Read a module as compressed-tensors does: a pattern, a name, or a class (all linear maps; which tensors
    these are, the files say)."""
    if name.startswith(PATTERN):
        return _pattern(raw, "targets", name)
    return ".*" if name in ("Linear", "FusedMoE") else rf"{re.escape(name)}$"


def _pattern(raw: RawConfig, key: str, name: str) -> str:
    return _checked(raw, key, name.removeprefix(PATTERN))


def _checked(raw: RawConfig, key: str, pattern: str, within: str = "{}") -> str:
    """Return `within` with the pattern in place of its braces: it compiles, and takes no long time."""
    whole = within.replace("{}", pattern)
    try:
        check_pattern(whole)
    except ValueError as error:
        mend = "a pattern such as `.*self_attn.*`, or the names themselves"
        shown = pattern if len(pattern) <= SHOWN else f"{pattern[:SHOWN]}..."
        problem = f"`{KEY}`: `{key}` holds {shown!r}: {error}"
        raise CheckpointError(problem, where=raw.where, mend=mend) from error
    return whole

"""Reads config.json's `quantization_config`: the format in which each tensor of a release is stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from rayk.models.families.raw import RawConfig
from rayk.models.formats import Fp8, Mxfp4, Quantisation, Scheme, WeightFormat
from rayk.types.errors import CheckpointError

KEY = "quantization_config"
MOST_BLOCK = 1 << 16
"""Limit of a block's sides."""


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
    """transformers' FineGrainedFP8Config; without `weight_block_size` there is a scale per tensor."""
    block = raw.get("weight_block_size")
    form = Fp8((None, None) if block is None else _block(raw, "weight_block_size", block))
    return Quantisation(method="fp8", schemes=(Scheme(form),), kept=_kept(raw, "modules_to_not_convert"))


def _mxfp4(raw: RawConfig) -> Quantisation:
    kept = _kept(raw, "modules_to_not_convert")
    return Quantisation(method="mxfp4", schemes=(Scheme(Mxfp4()),), kept=kept)


def _compressed(raw: RawConfig) -> Quantisation:
    """compressed-tensors: groups of modules, each with its scheme (compressed_tensors/quantization)."""
    for key, harmless in (("sparsity_config", "dense"), ("transform_config", None)):
        found = raw.get(key)
        if found and not (isinstance(found, dict) and found.get("format") == harmless):
            raise raw.refuse(f"`{KEY}`: `{key}` is not supported", "a release without it")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"`{KEY}`: `config_groups` must map names to objects", where=raw.where)
    schemes = tuple(_group(raw, name, group) for name, group in groups.items())
    ignored = tuple(_matching(raw, "ignore", name) for name in _texts(raw, "ignore"))
    return Quantisation(method="compressed-tensors", schemes=schemes, kept=ignored)


def _group(raw: RawConfig, name: str, group: Mapping[str, Any]) -> Scheme:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise raw.refuse(f"`{KEY}`: group {name!r} says nothing about weights", "a group with `weights`")
    kind = (weights.get("type", "int"), weights.get("num_bits", 8))
    make = WEIGHTS.get(kind)
    if make is None:
        known = ", ".join(f"{bits}-bit {type_}" for type_, bits in WEIGHTS)
        raise raw.refuse(f"`{KEY}`: group {name!r} has weights of {kind[1]}-bit {kind[0]}", f"one of {known}")
    targets = _texts(raw.of(group), "targets")
    return Scheme(make(raw, weights), tuple(_matching(raw, "targets", target) for target in targets))


def _compressed_fp8(raw: RawConfig, weights: Mapping[str, Any]) -> WeightFormat:
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return Fp8((None, None))
    if strategy == "channel":
        return Fp8((1, None))
    if strategy == "block":
        return Fp8(_block(raw, "block_structure", weights.get("block_structure")))
    mend = "one of tensor, channel, block"
    raise raw.refuse(f"`{KEY}`: 8-bit floats with `strategy` {strategy!r} are not supported", mend)


METHODS: Mapping[str, Callable[[RawConfig], Quantisation]] = MappingProxyType(
    {"fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed}
)
"""`quant_method` -> its reader, given the settings beside it."""
WEIGHTS: Mapping[tuple[str, int], Callable[[RawConfig, Mapping[str, Any]], WeightFormat]] = MappingProxyType(
    {("float", 8): _compressed_fp8}
)
"""(type, bits) of compressed-tensors' weights -> what makes their format, given the group's `weights`."""


def _block(raw: RawConfig, key: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise CheckpointError(f"`{KEY}`: `{key}` must be two integers, not {value!r}", where=raw.where)
    for side in value:
        if type(side) is not int or not 1 <= side <= MOST_BLOCK:
            problem = f"`{KEY}`: `{key}` {value!r} must hold integers from 1 to {MOST_BLOCK}"
            raise CheckpointError(problem, where=raw.where)
    return value[0], value[1]


def _texts(raw: RawConfig, key: str) -> list[str]:
    """Return a list of texts, empty if the key is absent or null."""
    values = raw.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"`{KEY}`: `{key}` must be a list of names, not {values!r}", where=raw.where)
    return values


def _kept(raw: RawConfig, key: str) -> tuple[str, ...]:
    """Read modules as transformers does: a regular expression from a name's start up to a dot or its end, or
    the end of a name (transformers/quantizers/quantizers_utils.py)."""
    return tuple(
        _compiled(raw, key, rf"(?:{name})(?:(?<=\.)|(?=\.|$))|.*{re.escape(name)}$")
        for name in _texts(raw, key)
    )


def _matching(raw: RawConfig, key: str, name: str) -> str:
    """Read a module as compressed-tensors does: `re:` and a regular expression from a name's start, a name,
    or a class (all linear maps; which tensors these are, the files say)."""
    if name.startswith("re:"):
        return _compiled(raw, key, name.removeprefix("re:"))
    return ".*" if name in ("Linear", "FusedMoE") and key == "targets" else rf"{re.escape(name)}$"


def _compiled(raw: RawConfig, key: str, pattern: str) -> str:
    """Return a regular expression that compiles."""
    try:
        re.compile(pattern)
    except re.error as error:
        problem = f"`{KEY}`: `{key}` holds {pattern!r}, which is no regular expression: {error}"
        raise CheckpointError(problem, where=raw.where) from error
    return pattern

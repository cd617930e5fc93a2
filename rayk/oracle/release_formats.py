"""The formats of quantised releases that tiny checkpoints are written in, and of which families.

What packs them is in packing.py, under the same names; this table loads without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from rayk.types.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ReleaseFormat:
    families: tuple[str, ...]
    """Families with releases in this format."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The config's values that the format needs, where the user says nothing."""


_COMPRESSED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "phi3")
_PACKED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_WORDS = {"intermediate_size": 168}
"""Words of eight integers are whole. Half of it lies within one."""

RELEASE_FORMATS: Mapping[str, ReleaseFormat] = MappingProxyType(
    {
        "fp8-block": ReleaseFormat(families=("deepseek_v3", "qwen3", "qwen3_moe", "qwen3_next")),
        "fp8-tensor": ReleaseFormat(families=_COMPRESSED),
        "fp8-channel": ReleaseFormat(families=_COMPRESSED),
        "awq": ReleaseFormat(families=_PACKED, values=_WORDS),
        "gptq": ReleaseFormat(families=_PACKED, values=_WORDS),
        "int4": ReleaseFormat(families=_PACKED, values=_WORDS),
        "int8": ReleaseFormat(families=_COMPRESSED),
        "modelopt-fp8": ReleaseFormat(families=_COMPRESSED),
        "modelopt-nvfp4": ReleaseFormat(
            families=("llama", "qwen2", "qwen3"), values={"intermediate_size": 176}
        ),
        # Experts' inputs come in groups of 32.
        "mxfp4": ReleaseFormat(families=("gpt_oss",), values={"intermediate_size": 96}),
    }
)
"""FORMAT of `rayk checkpoint --quantise FORMAT` -> where it is found."""


def release_format(name: str, family: str) -> ReleaseFormat:
    """Look a format up for a family. Raises UserError if there is no such format, or no such release."""
    found = RELEASE_FORMATS.get(name)
    if found is None:
        raise UserError(
            f"no format {name!r}", where="--quantise", mend=f"one of {', '.join(RELEASE_FORMATS)}"
        )
    if family not in found.families:
        mend = f"{name} is for {', '.join(found.families)}"
        others = [other for other, form in RELEASE_FORMATS.items() if family in form.families]
        if others:
            mend = f"for {family}: {', '.join(others)}; {mend}"
        raise UserError(f"no release of {family} is in the format {name}", where="--quantise", mend=mend)
    return found

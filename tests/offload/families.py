"""What layers of each kind of state keep, small: specs for (tokens per attention block, tokens per state).

Windows and chunks are shorter than the 96 tokens that tests store, and longer than a block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rayk.kv.specs import ChunkedLocalSpec, FullAttentionSpec, MlaSpec, SlidingWindowSpec
from tests.transfer.families import HEADS, Specs, delta, mamba1, mamba2

WINDOW, CHUNK = 40, 56
MakeSpecs = Callable[[int, int], Specs]


def _full(block: int, kv_heads: int = 6, dtype: str = "bfloat16") -> FullAttentionSpec:
    return FullAttentionSpec(block, kv_heads, 16, 16, dtype, HEADS)


def _slide(block: int, kv_heads: int = 2) -> SlidingWindowSpec:
    return SlidingWindowSpec(block, kv_heads, 8, 4, "bfloat16", HEADS, WINDOW)


def _attend(*specs: FullAttentionSpec | MlaSpec | None) -> Specs:
    return {(layer, "attention"): spec for layer, spec in enumerate(specs) if spec is not None}


def _gqa(block: int, state: int, dtype: str = "bfloat16") -> Specs:
    """Six heads of keys: each rank of TP 4 shares one with another."""
    return _attend(*[_full(block, dtype=dtype)] * 3)


def _gpt_oss(block: int, state: int) -> Specs:
    full = FullAttentionSpec(block, 2, 8, 4, "bfloat16", HEADS)
    return _attend(_slide(block), full, _slide(block), full)


def _gemma3(block: int, state: int) -> Specs:
    full = FullAttentionSpec(block, 2, 8, 4, "bfloat16", HEADS)
    return _attend(*[_slide(block)] * 5, full)


def _llama4(block: int, state: int) -> Specs:
    chunked = ChunkedLocalSpec(block, 3, 6, 4, "bfloat16", HEADS, CHUNK)
    return _attend(*[chunked] * 3, FullAttentionSpec(block, 3, 6, 4, "bfloat16", HEADS))


def _deepseek(block: int, state: int, dtype: str = "bfloat16") -> Specs:
    return _attend(*[MlaSpec(block, 32, 16, dtype, HEADS)] * 3)


def _jamba(block: int, state: int) -> Specs:
    full = FullAttentionSpec(block, 3, 6, 4, "float32", HEADS)
    states = {(layer, "state"): mamba1(state) for layer in (0, 1, 3)}
    return {**states, (2, "attention"): full}


def _mamba2(block: int, state: int) -> Specs:
    return {(layer, "state"): mamba2(state) for layer in range(2)}


def _granite(block: int, state: int) -> Specs:
    full = FullAttentionSpec(block, 4, 6, 4, "bfloat16", HEADS)
    states = {(layer, "state"): mamba2(state, 2) for layer in range(3)}
    return {**states, (3, "attention"): full}


def _qwen3_next(block: int, state: int) -> Specs:
    full = FullAttentionSpec(block, 2, 6, 4, "bfloat16", HEADS)
    states = {(layer, "state"): delta(state) for layer in range(3)}
    return {**states, (3, "attention"): full}


def _gemma3n(block: int, state: int) -> Specs:
    """Layers 3 to 5 use the pages of the others: they have none."""
    return _attend(_slide(block), _slide(block), _full(block, 2), None, None, None)


FAMILIES: dict[str, MakeSpecs] = {
    "full": _gqa,
    "gpt_oss": _gpt_oss,
    "gemma3": _gemma3,
    "llama4": _llama4,
    "deepseek": _deepseek,
    "jamba": _jamba,
    "mamba2": _mamba2,
    "granite": _granite,
    "qwen3_next": _qwen3_next,
    "gemma3n": _gemma3n,
    "fp8": partial(_gqa, dtype="fp8_e4m3"),
    "fp8_token_head": partial(_gqa, dtype="fp8_e4m3_token_head"),
    "nvfp4": partial(_gqa, dtype="nvfp4"),
    "deepseek_fp8_token_head": partial(_deepseek, dtype="fp8_e4m3_token_head"),
    "deepseek_nvfp4": partial(_deepseek, dtype="nvfp4"),
}

"""Floating-point operations of a decoder's layers, counted from its shapes. Free of torch.

A multiplication and an addition are two. Of a layer that computes T tokens which see K keys in all (each
token those up to its own position):

    q            2 T hidden Q Dk
    k, v         2 T hidden H (Dk + Dv)     not where the layer reuses another's keys and values
    scores       2 K Q Dk
    sums of v    2 K Q Dv
    o            2 T Q Dv hidden
    MLP          2 T 3 hidden intermediate  2 in place of 3 without a gate

Q query heads, H KV heads, Dk and Dv their sizes. Norms, rotations, the softmax, activations and biases are
left out, as torch.utils.flop_counter leaves them out: together they are a few operations per element.
"""

from __future__ import annotations

from collections.abc import Iterable

from rayk.models.config import DecoderConfig, MlpConfig


def layer_flops(config: DecoderConfig, index: int, positions: range) -> int:
    """Of layer `index` for the tokens at these positions; see the formula above."""
    layer = config.layers[index]
    assert layer.mixers == ("attention",), f"layer {index}: only attention is counted"
    assert layer.window is None, f"layer {index}: only full attention is counted"
    assert layer.chunk is None, f"layer {index}: only full attention is counted"
    assert isinstance(layer.mlp, MlpConfig), f"layer {index}: only dense MLPs are counted"
    num_q, num_kv = config.num_query_heads, 0 if layer.kv_source is not None else config.num_kv_heads
    size_k, size_v = config.head_size_k, config.head_size_v
    projections = num_q * size_k + num_kv * (size_k + size_v) + num_q * size_v
    matrices = 3 if layer.mlp.gated else 2
    per_token = config.hidden_size * (projections + matrices * layer.mlp.intermediate_size)
    per_key = num_q * (size_k + size_v)
    num_keys = sum(position + 1 for position in positions)
    return 2 * (len(positions) * per_token + num_keys * per_key)


def group_flops(config: DecoderConfig, layers: Iterable[int], positions: range) -> int:
    return sum(layer_flops(config, index, positions) for index in layers)


def num_token_layers(
    config: DecoderConfig, num_prompt_tokens: int, *, fast_prefill: bool, num_decoded: int = 0
) -> int:
    """Tokens computed, summed over layers, of one prompt and of `num_decoded` tokens fed back after it.

    With fast prefill the layers at the end that reuse keys and values compute the prompt's last token alone,
    in however many chunks it comes.
    """
    num_fast = len(config.fast_prefill_layers) if fast_prefill else 0
    num_slow = config.num_layers - num_fast
    return num_prompt_tokens * num_slow + num_fast + num_decoded * config.num_layers

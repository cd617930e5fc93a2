"""The parts that llama-like families share: rope, windows, weight names, and the config itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rayk.models.config import DecoderConfig, LayerConfig, MlpConfig, RopeConfig
from rayk.types.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rayk.models.families.raw import RawConfig

ROPE_KINDS = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightNames:
    """Names on disk of the decoder's parameters. `{i}` in a layer's name is the layer index."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    layer: Mapping[str, str]
    """The decoder's own name of a layer's parameter -> name on disk."""
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Tensors that old checkpoints carry and nothing reads."""

    def in_layer(self, index: int, parameter: str) -> str:
        """Name on disk of `parameter` of layer `index`."""
        return self.layer[parameter].format(i=index)


LLAMA_WEIGHTS = WeightNames(
    layer=MappingProxyType(
        {
            "input_norm.weight": "model.layers.{i}.input_layernorm.weight",
            "mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
            "q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
            "k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
            **{
                f"{name}.{part}": f"model.layers.{{i}}.{module}.{name}_proj.{part}"
                for module, names in (
                    ("self_attn", ("q", "k", "v", "o")),
                    ("mlp", ("gate", "up", "down")),
                )
                for name in names
                for part in ("weight", "bias")
            },
        }
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """All that rayk knows of one model family."""

    name: str
    architecture: str
    parse: Callable[[RawConfig], DecoderConfig]
    """config.json -> DecoderConfig. Raises CheckpointError and UnsupportedArchitecture."""
    weights: WeightNames
    tiny: Mapping[str, Any]
    """config.json values of a small debug model of the real architecture."""


TINY_COMMON: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 64,
        "intermediate_size": 136,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    }
)


def parse_llama_like(
    raw: RawConfig,
    *,
    family: str,
    windows: tuple[int | None, ...],
    head_size: int | None = None,
    num_kv_heads: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderConfig:
    """The config of a pre-norm decoder with GQA attention and a gated MLP in every layer.

    `windows` has one entry per layer. `head_size` and `num_kv_heads` are the family's defaults
    where config.json has none (hidden / heads; required).
    """
    _refuse_unknown_settings(raw)
    hidden_size = raw.count("hidden_size")
    num_query_heads = raw.count("num_attention_heads")
    num_kv_heads = raw.count("num_key_value_heads", num_kv_heads)
    if num_query_heads % num_kv_heads:
        raise CheckpointError(
            f"`num_key_value_heads` {num_kv_heads} does not divide `num_attention_heads` {num_query_heads}",
            where=raw.where,
        )
    head_size = raw.count("head_dim", head_size or max(1, hidden_size // num_query_heads))
    rope = parse_rope(raw, head_size)
    mlp = MlpConfig(intermediate_size=raw.count("intermediate_size"), bias=mlp_bias)
    return DecoderConfig(
        architecture=raw.architecture,
        family=family,
        hidden_size=hidden_size,
        num_layers=len(windows),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=raw.count("vocab_size"),
        max_positions=raw.count("max_position_embeddings"),
        rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
        intermediate_size=mlp.intermediate_size,
        tie_embeddings=raw.flag("tie_word_embeddings"),
        dtype=parse_dtype(raw),
        layers=tuple(LayerConfig(window=window, rope=rope, mlp=mlp) for window in windows),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        bos_token_id=raw.token_id("bos_token_id"),
        eos_token_ids=raw.token_ids("eos_token_id"),
        pad_token_id=raw.token_id("pad_token_id"),
    )


def _refuse_unknown_settings(raw: RawConfig) -> None:
    """Raise UnsupportedArchitecture for settings that would change the mathematics."""
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise raw.refuse(f"`hidden_act` {activation!r} is not supported", "silu is")
    if raw.get("quantization_config") is not None:
        raise raw.refuse(
            "`quantization_config`: quantized weights are not supported",
            "use a checkpoint in float32, bfloat16 or float16",
        )


def parse_dtype(raw: RawConfig) -> str:
    """`dtype`, or `torch_dtype` as released checkpoints write it; float32 where both are absent."""
    value = str(raw.get("dtype", raw.get("torch_dtype", "float32"))).removeprefix("torch.")
    if value not in DTYPES:
        raise raw.refuse(f"`dtype` {value!r} is not supported", "one of " + ", ".join(DTYPES))
    return value


def parse_rope(raw: RawConfig, head_size: int) -> RopeConfig:
    """`rope_parameters`, or the older `rope_theta` beside `rope_scaling`."""
    values = raw.get("rope_parameters", raw.get("rope_scaling", {}))
    if not isinstance(values, dict):
        raise CheckpointError(f"rope settings must be an object: {values!r}", where=raw.where)
    rope = type(raw)(values, f"{raw.where}: rope", raw.architecture)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise raw.refuse(f"rope type {kind!r} is not supported", "one of " + ", ".join(ROPE_KINDS))
    if any(isinstance(value, dict) for value in values.values()):
        raise raw.refuse("rope settings per layer type are not supported in this family")
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise raw.refuse("`partial_rotary_factor` other than 1 is not supported in this family")
    if head_size % 2:
        raise CheckpointError(f"`head_dim` {head_size} is odd and cannot rotate", where=raw.where)
    theta = rope.number("rope_theta", raw.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(kind=kind, theta=theta, rotary_size=head_size)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, rotary_size=head_size, factor=factor)
    return RopeConfig(
        kind=kind,
        theta=theta,
        rotary_size=head_size,
        factor=factor,
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.count(
            "original_max_position_embeddings", raw.count("max_position_embeddings")
        ),
    )


def no_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """Full attention in every layer."""
    return (None,) * raw.count("num_hidden_layers")


def same_window(raw: RawConfig) -> tuple[int | None, ...]:
    """Every layer slides when `sliding_window` is set."""
    window = None if raw.get("sliding_window") is None else raw.count("sliding_window")
    return (window,) * raw.count("num_hidden_layers")


def windows_by_layer(raw: RawConfig) -> tuple[int | None, ...]:
    """`layer_types`, or else layers >= `max_window_layers` slide when `use_sliding_window`."""
    num_layers = raw.count("num_hidden_layers")
    window = None
    if raw.flag("use_sliding_window") and raw.get("sliding_window") is not None:
        window = raw.count("sliding_window")
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        kinds = [
            "sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)
        ]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError(
            f"`layer_types` must list {num_layers} layers (`num_hidden_layers`)", where=raw.where
        )
    for i, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise raw.refuse(f"`layer_types`[{i}] {kind!r} is not supported in this family")
        if kind == "sliding_attention" and window is None:
            raise CheckpointError(
                f"`layer_types`[{i}] slides, but `use_sliding_window` and `sliding_window` set no window",
                where=raw.where,
            )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)

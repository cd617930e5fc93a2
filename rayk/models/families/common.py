"""Parsing and weight names that families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from rayk.models.config import DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig, NormConfig, RopeConfig
from rayk.models.families.raw import RawConfig
from rayk.models.families.rope import parse_rope
from rayk.types.errors import CheckpointError

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS: Mapping[str, str] = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})
"""config.json's name -> MlpConfig's."""


LLAMA_LAYER: Mapping[str, str] = MappingProxyType(
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


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightNames:
    """Names on disk of the decoder's parameters. `{i}` in a layer's name is the layer index.

    Parameters that share a name on disk are rows of one tensor, in the order in which the decoder stacks them
    (q, k, v; gate, up).
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    layer: Mapping[str, str] = field(default_factory=lambda: LLAMA_LAYER)
    """The decoder's name of a layer's parameter -> name on disk."""
    first_layer: int = 0
    """Number on disk of the decoder's layer 0."""
    around: Mapping[str, str] = field(default_factory=dict)
    """Further parameters outside the layers; `{s}` is a stream's index, counted without the first."""
    nested: tuple[tuple[str, str], ...] = ()
    """Prefixes of names in a larger model that contains the text model -> prefixes of the names above."""
    experts: str = "interleaved"
    """How routed experts are stored: interleaved (all experts in one tensor, x @ W, gate and up columns
    alternating, with biases), halves (the same, gate columns before up columns, no biases), stacked (all
    experts in one tensor, rows of W, gate before up) or single (one tensor per expert, rows of W, `{{e}}` in
    the name).
    """

    def in_layer(self, index: int, parameter: str) -> str:
        return self.layer[parameter].format(i=self.first_layer + index)

    def of_expert(self, index: int, expert: int, parameter: str) -> str:
        return self.in_layer(index, parameter).format(e=expert)

    def plain(self, stored: str) -> str:
        """Strip the prefix of a larger model from `stored`."""
        for prefix, ours in self.nested:
            if stored.startswith(prefix):
                return ours + stored.removeprefix(prefix)
        return stored


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpNames:
    """Names on disk of multi-token prediction layers.

    Beside a layer's own, each has the parameters embedding_norm, hidden_norm (of its inputs), join (the
    projection of both) and output_norm; embedding and output head are the model's.
    """

    weights: WeightNames
    numbered_on: bool
    """Their numbers continue those of the model's layers; otherwise they begin at 0, and there is one, whose
    further parameters have no number."""

    def after(self, num_layers: int) -> WeightNames:
        """Return the names in a model of so many layers, by the layer's number among these."""
        return replace(self.weights, first_layer=num_layers) if self.numbered_on else self.weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    name: str
    architectures: tuple[str, ...]
    """Names of config.json's `architectures`."""
    model_types: tuple[str, ...] = ()
    """Values of config.json's `model_type`; empty: `name` alone."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults of transformers' config class."""
    parse: Callable[[RawConfig], DecoderConfig]
    """config.json, completed by `defaults` -> DecoderConfig. Raises CheckpointError and
    UnsupportedArchitecture."""
    weights: WeightNames = WeightNames()
    mtp: MtpNames | None = None
    """Names of multi-token prediction layers; None: its checkpoints have none."""


def parse_llama_like(
    raw: RawConfig,
    *,
    windows: tuple[int | None, ...] | None = None,
    head_size: int | None = None,
    num_kv_heads: int | None = None,
    ropes: tuple[RopeConfig | None, ...] | None = None,
    norm: NormConfig | None = None,
    mlp: MlpConfig | ExpertsConfig | None = None,
    tied: bool = False,
    bias: bool = False,
) -> DecoderConfig:
    """Parse the config of a decoder with GQA attention and one kind of feed-forward half.

    `windows` and `ropes` have one entry per layer (default: no windows, one rope for all). `head_size`,
    `num_kv_heads` and `tied` are the family's defaults for config.json. `bias`: on q, k, v and o. A family
    replaces its other differences in the result.
    """
    hidden_size = raw.count("hidden_size")
    num_query_heads = raw.count("num_attention_heads")
    num_kv_heads = raw.count("num_key_value_heads", num_kv_heads)
    if num_query_heads % num_kv_heads:
        raise CheckpointError(
            f"`num_key_value_heads` {num_kv_heads} does not divide `num_attention_heads` {num_query_heads}",
            where=raw.where,
        )
    head_size = raw.count("head_dim", head_size or default_head_size(raw))
    windows = windows or (None,) * raw.count("num_hidden_layers")
    ropes = ropes or (parse_rope(raw, head_size),) * len(windows)
    mlp = mlp or parse_mlp(raw)
    stated = raw.count("max_position_embeddings")
    served = min((r.original_max_positions for r in ropes if r and r.kind == "longrope"), default=stated)
    return DecoderConfig(
        architecture=raw.architecture,
        family=raw.family,
        hidden_size=hidden_size,
        num_layers=len(windows),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=raw.count("vocab_size"),
        max_positions=min(stated, served),
        stated_positions=stated if served < stated else None,
        norm=norm or NormConfig(eps=raw.number("rms_norm_eps", 1e-6)),
        tie_embeddings=raw.flag("tie_word_embeddings", default=tied),
        dtype=parse_dtype(raw),
        layers=tuple(
            LayerConfig(window=window, rope=rope, mlp=mlp)
            for window, rope in zip(windows, ropes, strict=True)
        ),
        qkv_bias=bias,
        o_bias=bias,
        bos_token_id=raw.token_id("bos_token_id"),
        eos_token_ids=raw.token_ids("eos_token_id"),
        pad_token_id=raw.token_id("pad_token_id"),
    )


def default_head_size(raw: RawConfig) -> int:
    """Divide hidden by heads, for configs without `head_dim`."""
    return max(1, raw.count("hidden_size") // raw.count("num_attention_heads"))


def parse_mlp(
    raw: RawConfig, *, bias: bool = False, key: str = "hidden_act", activation: str = "silu"
) -> MlpConfig:
    """Parse a gated MLP, its activation read from `key` (default: `activation`)."""
    activation = raw.get(key, activation)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise raw.refuse(f"`{key}` {activation!r} is not supported", "one of " + ", ".join(ACTIVATIONS))
    return MlpConfig(
        activation=ACTIVATIONS[activation], intermediate_size=raw.count("intermediate_size"), bias=bias
    )


def parse_dtype(raw: RawConfig) -> str:
    """Read `dtype`, or `torch_dtype` of older checkpoints; float32 by default."""
    value = str(raw.get("dtype", raw.get("torch_dtype", "float32"))).removeprefix("torch.")
    if value not in DTYPES:
        raise raw.refuse(f"`dtype` {value!r} is not supported", "one of " + ", ".join(DTYPES))
    return value


def same_window(raw: RawConfig) -> tuple[int | None, ...]:
    """Every layer slides if `sliding_window` is set."""
    window = None if raw.get("sliding_window") is None else raw.count("sliding_window")
    return (window,) * raw.count("num_hidden_layers")


def upper_windows(raw: RawConfig) -> tuple[int | None, ...]:
    """Read windows by `layer_types`; without it, layers from `max_window_layers` on slide if
    `use_sliding_window`."""
    window = None
    if raw.flag("use_sliding_window") and raw.get("sliding_window") is not None:
        window = raw.count("sliding_window")
    first = raw.get("max_window_layers", 28)
    return _windows_by_layer(raw, window, lambda i: window is not None and i >= first)


def periodic_windows(raw: RawConfig, *, period: int) -> tuple[int | None, ...]:
    """Read windows by `layer_types`; without it, all layers slide except every `sliding_window_pattern`-th
    (default `period`)."""
    window = None if raw.get("sliding_window") is None else raw.count("sliding_window")
    pattern = raw.count("sliding_window_pattern", period)
    return _windows_by_layer(raw, window, lambda i: bool((i + 1) % pattern))


def _windows_by_layer(
    raw: RawConfig, window: int | None, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Read the windows from `layer_types`, or from `slides` without it."""
    num_layers = raw.count("num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if slides(i) else "full_attention" for i in range(num_layers)]
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

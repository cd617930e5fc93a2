"""What a decoder is, read from a checkpoint's config.json by models/families. Free of torch.

Every number is global (before tensor parallelism). Settings that may differ between layers stand in
`LayerConfig`. The decoder is built from these alone, so that it knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rayk.models.formats import Quantisation

PARTS: Mapping[str, str] = MappingProxyType(
    {"attention": "attention", "mla": "attention", "mamba1": "state", "mamba2": "state", "gdn": "state"}
)
"""Mixer -> the part of a layer's cache that it owns (KVCacheSpec.part)."""


def why_bad_source(layers: Sequence[LayerConfig], index: int) -> str | None:
    """Say why layer `index` cannot use the keys and values of its `kv_source`; None if it can or has its
    own."""
    layer, source = layers[index], layers[index].kv_source
    if source is None:
        return None
    if not 0 <= source < len(layers):
        return f"layer {index} reuses the keys and values of layer {source}, of layers 0 to {len(layers) - 1}"
    if source >= index:
        return f"layer {index} reuses the keys and values of layer {source}, which does not come before it"
    target = layers[source]
    if target.kv_source is not None:
        return f"layer {index} reuses the keys and values of layer {source}, which has none of its own"
    for what, mine, its in (
        ("mixer", layer.mixer, target.mixer),
        ("window", layer.window, target.window),
        ("chunk", layer.chunk, target.chunk),
    ):
        if mine != its:
            return (
                f"layer {index} ({what} {mine}) reuses the keys and values of layer {source} ({what} {its})"
            )
    if layer.mixer != "attention":
        return f"layer {index} reuses the cache of layer {source}, but a {layer.mixer} mixer cannot"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_size` dimensions of each head of q and k.

    `pairing`: "half" rotates dimension i with i + rotary_size / 2, "interleaved" 2i with 2i + 1. `kind` says
    how frequencies are scaled: default (not at all), linear, llama3, yarn or longrope; each uses the fields
    that name it.
    """

    kind: str
    theta: float
    rotary_size: int
    pairing: str = "half"
    factor: float = 1.0
    """linear, llama3, yarn: factor by which (long) wavelengths are stretched."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 1.0
    """llama3."""
    original_max_positions: int = 0
    """llama3, yarn, longrope: positions of the model before it was extended."""
    wide: bool = False
    """cos and sin stay float32 in any model dtype (llama4)."""
    beta_fast: float = 32.0
    """yarn: pairs with at least this many turns over the original positions keep their frequency."""
    beta_slow: float = 1.0
    """yarn: pairs with at most this many turns are stretched by the whole factor."""
    truncate: bool = True
    """yarn: the borders between the two are rounded outwards to whole pairs."""
    attention_factor: float = 1.0
    """yarn, longrope: factor on cos and sin."""
    short_factors: tuple[float, ...] = ()
    """longrope: stretch of each pair's wavelength up to `original_max_positions`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TemperatureConfig:
    """Queries are multiplied by 1 + scale * ln(1 + floor((position + 1) / floor)), so that attention to long
    texts stays sharp (llama4/modeling_llama4.py:359)."""

    scale: float
    floor: int
    """Positions per step of the growth; below, the factor is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    """A normalisation; statistics are float32 in every kind."""

    kind: str = "rms"
    """rms: x / sqrt(mean(x^2) + eps). layer: the same of x - mean(x)."""
    eps: float
    wide: bool = False
    """Multiply by the weight in float32 and then round, instead of the other way round."""
    offset: float = 0.0
    """Added to the stored weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig:
    """Feed-forward half of a layer: `down(act(gate x) * up x)`, or `down(act(up x))` without `gated`."""

    activation: str = "silu"
    """silu, gelu_tanh or relu2 (relu squared)."""
    intermediate_size: int
    bias: bool = False
    gated: bool = True
    gate_multiplier: float = 1.0
    """Factor on gate x, before the activation (falcon_h1)."""
    down_multiplier: float = 1.0
    """Factor on the result (falcon_h1)."""
    sparsity: float = 0.0
    """Share of a token's gates (0: none) that would be cut to 0 before the activation if they were normally
    distributed; the others lose the cut-off (gemma3n/modeling_gemma3n.py:970)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Which experts a token goes to, and with what weights.

    `scoring`: softmax_chosen (the largest logits are chosen; weights are the softmax over them), softmax_all
    (weights are entries of the softmax over all), sigmoid_chosen (the largest logits are chosen; weights are
    their sigmoids), sigmoid (weights are sigmoids; a correction bias is added for choosing only).
    `num_groups`, `num_chosen_groups`: experts are chosen only from the groups with the largest sums of their
    two best scores (deepseek_v3/modeling_deepseek_v3.py:120).
    """

    scoring: str = "softmax_chosen"
    wide: bool = False
    """Compute the logits in float32."""
    bias: bool = False
    """The linear map has a bias."""
    num_groups: int = 1
    num_chosen_groups: int = 1
    renormalise: bool = False
    """Divide the chosen weights by their sum."""
    scale: float = 1.0
    """Factor on the final weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Feed-forward half of a layer: a router sends each token to `num_chosen` of `num_experts` experts.

    `kind` of an expert: clamped (down((up + 1) * gate * sigmoid(alpha * gate)), gate limited above by `limit`
    and up to +-limit, biases on both matrices; gpt_oss), swiglu (down(silu(gate) * up)), relu2
    (down(relu(up)^2)). WeightNames says how they are stored.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    kind: str = "clamped"
    router: RouterConfig = RouterConfig(bias=True)
    alpha: float = 1.0
    limit: float = 0.0
    latent_size: int | None = None
    """Experts work on a projection of the hidden states to this size (nemotron_h)."""
    latent_bias: bool = False
    """The projections to and from the latent have biases."""
    weighs_inputs: bool = False
    """Multiply an expert's input by the weight, instead of its output (llama4)."""
    shared: MlpConfig | None = None
    """An additional expert that every token goes to."""
    shared_gate: bool = False
    """Multiply the shared expert's output by sigmoid(w . x)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaConfig:
    """Multi-head latent attention (deepseek_v3/modeling_deepseek_v3.py:349). Sizes in elements."""

    query_rank: int | None
    """Size of the compressed query; None: queries are projected directly."""
    latent_size: int
    nope_size: int
    """Size of the part of a head's query and key without positions."""
    rope_size: int
    value_size: int
    scale: float
    """Factor on q . k."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of compressed query and latent."""
    bias: bool = False
    """Bias on the down projections and the output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1Config:
    """Selective scan per channel (jamba/modeling_jamba.py:444)."""

    num_channels: int
    state_size: int
    conv_width: int
    dt_rank: int
    conv_bias: bool
    proj_bias: bool
    inner_norm_eps: float | None
    """Epsilon of the RMSNorms of dt, B and C; None: there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config:
    """State-space duality per head (mamba2/modeling_mamba2.py:257). Inner width = num_heads * head_size."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    conv_width: int
    conv_bias: bool
    proj_bias: bool
    """Bias on the input projection."""
    out_bias: bool = False
    """Bias on the output projection."""
    gate: str
    """gate_norm: norm(y * silu(z)); norm_gate: norm(y) * silu(z), norms over groups of inner / num_groups
    channels; plain: y * silu(z)."""
    norm_eps: float
    in_multiplier: float = 1.0
    """Factor on the layer's input (falcon_h1)."""
    out_multiplier: float = 1.0
    part_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """Factors on the z, x, B, C and dt parts of the input projection (falcon_h1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GdnConfig:
    """Gated delta net (qwen3_next/modeling_qwen3_next.py:582)."""

    num_key_heads: int
    key_head_size: int
    num_value_heads: int
    value_head_size: int
    conv_width: int
    norm_eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUpConfig:
    """Alternating updates: a residual stream made of several, of which a layer computes one and corrects all;
    and per-layer embeddings: every token has a separate input to each layer (gemma3n/modeling_gemma3n.py:987,
    :1258, :1748)."""

    num_streams: int
    active_stream: int
    """The stream that mixers and feed-forward halves see."""
    scales_active: bool
    """Scale the active stream by a weight before it gates the per-layer input."""
    laurel_rank: int
    """Rank of the learned map beside every mixer."""
    per_layer_size: int
    """Elements of a token's input to one layer."""
    per_layer_vocab_size: int
    """Rows of the table of these inputs; larger token ids read row 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """One layer: its mixer, its positions, and its feed-forward half."""

    mixer: str = "attention"
    """A key of PARTS, two of them joined by + (side by side, summed), or none."""
    window: int | None = None
    """Keys that a query sees, the current token included; None: all."""
    chunk: int | None = None
    """Chunked attention: position p sees the keys from p // chunk * chunk to p; None: all."""
    kv_source: int | None = None
    """The earlier layer whose keys and values this layer uses instead of its own (see
    models.families.sharing)."""
    rope: RopeConfig | None
    """None: no positions."""
    temperature: TemperatureConfig | None = None
    mlp: MlpConfig | ExpertsConfig | None
    """None: the layer ends with its mixer."""

    @property
    def mixers(self) -> tuple[str, ...]:
        """The mixers, side by side if there are two; empty for none."""
        return () if self.mixer == "none" else tuple(self.mixer.split("+"))

    @property
    def mixer_parts(self) -> tuple[str, ...]:
        """The cache parts that the layer uses, one per mixer, its own or another layer's."""
        return tuple(PARTS[kind] for kind in self.mixers)

    @property
    def parts(self) -> tuple[str, ...]:
        """The cache parts that the layer owns, one per mixer; none if it uses another layer's."""
        return self.mixer_parts if self.kv_source is None else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A decoder-only model as its checkpoint describes it."""

    architecture: str
    """First entry of config.json's `architectures`, e.g. Qwen3ForCausalLM."""
    family: str
    """Key of models.families.FAMILIES, e.g. qwen3."""
    hidden_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int
    """Positions served: the model's, or fewer (see `stated_positions`)."""
    stated_positions: int | None = None
    """config.json's positions if fewer are served: beyond them longrope changes its factors, which would give
    cached keys another meaning."""
    norm: NormConfig
    tie_embeddings: bool
    dtype: str
    """The checkpoint's dtype, e.g. bfloat16."""
    layers: tuple[LayerConfig, ...]
    mtp_layers: tuple[LayerConfig, ...] = ()
    """Multi-token prediction layers that config.json states: a drafter's (models.drafters). The model itself
    does not use them, and its weights may lack them."""
    quantisation: Quantisation | None = None
    """How the release quantises its weights; None: not at all."""
    block: str = "sequential"
    """sequential: x + mixer(norm(x)), then x + mlp(norm(x)). post_norms: each half's output is normalised
    again before it is added. parallel: x + mixer(n) + mlp(n), n = norm(x)."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each head of q and k, before the rotation."""
    v_norm: bool = False
    """RMSNorm without weight on each head of v (gemma3n)."""
    turned_norm_eps: float | None = None
    """Epsilon of an RMSNorm without weight on each rotated head of q and k, in layers with rope; None: no
    such norm (llama4)."""
    sinks: bool = False
    """A learned logit per query head that only adds to the softmax's denominator."""
    attention_soft_cap: float | None = None
    """Scores become cap * tanh(score / cap), before the mask."""
    query_scalar: float | None = None
    """Scores are divided by its square root; None: by that of the head size."""
    embedding_scale: float = 1.0
    """Factor on token embeddings."""
    embedding_scale_rounded: bool = False
    """Round the scale to the weights' dtype first (gemma3/modeling_gemma3.py:116)."""
    logit_scale: float = 1.0
    final_soft_cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""
    score_multiplier: float | None = None
    """Factor on q . k, instead of a square root (granite)."""
    attention_gate: bool = False
    """q's projection yields, per head, q and a gate; the head's output is multiplied by sigmoid(gate)."""
    key_multiplier: float = 1.0
    """Factor on keys, before the rotation (falcon_h1)."""
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on what each half of a layer adds (granite)."""
    residual_wide: bool = False
    """The residual stream is float32 in any model dtype (mamba2)."""
    mla: MlaConfig | None = None
    mamba1: Mamba1Config | None = None
    mamba2: Mamba2Config | None = None
    gdn: GdnConfig | None = None
    altup: AltUpConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        assert len(self.layers) == self.num_layers, (len(self.layers), self.num_layers)
        if self.attention_layers:
            assert self.num_query_heads % self.num_kv_heads == 0
        for index, layer in enumerate(self.layers):
            reason = why_bad_source(self.layers, index)
            assert reason is None, reason
            for kind in layer.mixers:
                assert kind in PARTS, kind
                assert kind == "attention" or getattr(self, kind) is not None, f"no {kind} settings"

    def __hash__(self) -> int:
        # A few distinguishing fields: hashing every layer takes longer than computing what is cached by it.
        return hash((self.architecture, self.hidden_size, self.num_layers, self.vocab_size))

    @property
    def head_size_k(self) -> int:
        return self.head_size

    @property
    def head_size_v(self) -> int:
        return self.head_size

    @property
    def attention_scale(self) -> float:
        """Factor on q k^T."""
        if self.score_multiplier is not None:
            return self.score_multiplier
        return float((self.query_scalar or self.head_size) ** -0.5)

    @property
    def positions_text(self) -> str:
        """The limit of a request in words, e.g. `the model's 4096 positions`."""
        if self.stated_positions is None:
            return f"the model's {self.max_positions} positions"
        return (
            f"the {self.max_positions} positions that are served of the model's {self.stated_positions} "
            "(its longrope factors change there, and with them what cached keys mean)"
        )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers that cache something of every token: keys and values, or latents."""
        return self._layers_with("attention")

    @property
    def attending_layers(self) -> tuple[int, ...]:
        """Layers that attend, to their own cache or to another's."""
        return tuple(i for i, layer in enumerate(self.layers) if "attention" in layer.mixer_parts)

    @property
    def sharing_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.kv_source is not None)

    @property
    def fast_prefill_layers(self) -> range:
        """The trailing layers that share another's cache: of a prompt they compute only the tokens whose
        logits are wanted, since nothing behind them caches the others."""
        first = self.num_layers
        while first > 0 and self.layers[first - 1].kv_source is not None:
            first -= 1
        return range(first, self.num_layers)

    @property
    def state_layers(self) -> tuple[int, ...]:
        return self._layers_with("state")

    def _layers_with(self, part: str) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if part in layer.parts)

    def is_behind_experts(self, layer: int) -> bool:
        """Tell whether a layer before this one routes experts; `num_layers` stands for the output."""
        return any(isinstance(before.mlp, ExpertsConfig) for before in self.layers[:layer])

    @property
    def is_routed(self) -> bool:
        return self.is_behind_experts(self.num_layers)

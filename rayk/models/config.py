"""What a decoder is, read from a checkpoint's config.json by models/families. Free of torch.

Every number is global (before tensor parallelism). What may differ between layers stands in
`LayerConfig`; the decoder is built from it and from nothing else, so that it knows no family.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_size` dimensions of each head of q and k.

    `pairing`: "half" turns dimension i with i + rotary_size / 2, "interleaved" 2i with 2i + 1.
    `kind` says how frequencies are scaled: default (not), linear, llama3, yarn or longrope; each uses
    only the fields that name it.
    """

    kind: str
    theta: float
    rotary_size: int
    pairing: str = "half"
    factor: float = 1.0
    """linear, llama3, yarn: what the (long) wavelengths are stretched by."""
    low_freq_factor: float = 1.0
    """llama3."""
    high_freq_factor: float = 1.0
    """llama3."""
    original_max_positions: int = 0
    """llama3, yarn, longrope: positions of the model before it was extended."""
    beta_fast: float = 32.0
    """yarn: pairs with at least so many turns over the original positions keep their frequency."""
    beta_slow: float = 1.0
    """yarn: pairs with at most so many turns are stretched by the whole factor."""
    truncate: bool = True
    """yarn: the borders between the two are rounded outwards to whole pairs."""
    attention_factor: float = 1.0
    """yarn, longrope: cos and sin are multiplied by it."""
    short_factors: tuple[float, ...] = ()
    """longrope: what each pair's wavelength is stretched by, up to `original_max_positions`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormConfig:
    """How activations are normalised; statistics are float32 in every kind."""

    kind: str = "rms"
    """rms: x / sqrt(mean(x^2) + eps). layer: the same of x - mean(x)."""
    eps: float
    wide: bool = False
    """Multiplied by the weight in float32 and then rounded, instead of the other way round."""
    offset: float = 0.0
    """Added to the stored weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig:
    """Feed-forward half of a layer: `down(act(gate x) * up x)`."""

    activation: str = "silu"
    """silu or gelu_tanh."""
    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Feed-forward half of a layer: a router sends each token to `num_chosen` experts.

    The router's largest logits choose, and their softmax weighs the experts' outputs. An expert is
    down((up + 1) * gate * sigmoid(alpha * gate)), gate cut off above `limit` and up beyond +-limit;
    router and experts have biases.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """One layer: what mixes tokens, how positions enter, and the feed-forward half."""

    mixer: str = "attention"
    window: int | None = None
    """Keys a query sees, the current token included; None is all of them."""
    rope: RopeConfig | None
    """None: the layer has no positions."""
    mlp: MlpConfig | ExpertsConfig


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
    """Positions that are served: the model's, or fewer (see `stated_positions`)."""
    stated_positions: int | None = None
    """config.json's own where fewer are served: beyond them longrope takes other factors, with which
    keys that are cached already would mean something else."""
    norm: NormConfig
    tie_embeddings: bool
    dtype: str
    """The checkpoint's own, e.g. bfloat16."""
    layers: tuple[LayerConfig, ...]
    block: str = "sequential"
    """sequential: x + mixer(norm(x)), then x + mlp(norm(x)). post_norms: each half's output is
    normalised once more before it is added. parallel: x + mixer(n) + mlp(n), n = norm(x)."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each head of q and k, before the rotation."""
    sinks: bool = False
    """A learned logit per query head that only adds to the softmax's denominator."""
    attention_soft_cap: float | None = None
    """Scores become cap * tanh(score / cap), before the mask."""
    query_scalar: float | None = None
    """Scores are divided by its root; None: by the root of the head size."""
    embedding_scale: float = 1.0
    """Token embeddings are multiplied by it, rounded to the weights' dtype."""
    logit_scale: float = 1.0
    final_soft_cap: float | None = None
    """Logits become cap * tanh(logit / cap)."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        assert len(self.layers) == self.num_layers, (len(self.layers), self.num_layers)
        assert self.num_query_heads % self.num_kv_heads == 0

    @property
    def head_size_k(self) -> int:
        """Elements of one key head."""
        return self.head_size

    @property
    def head_size_v(self) -> int:
        """Elements of one value head."""
        return self.head_size

    @property
    def attention_scale(self) -> float:
        """What q k^T is multiplied by."""
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
        """Indices of the layers that keep keys and values."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer == "attention")

"""What a decoder is, read from a checkpoint's config.json by models/families. Free of torch.

Every number is global (before tensor parallelism). What may differ between layers stands in
`LayerConfig`; the decoder is built from it and from nothing else, so that it knows no family.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding: dimension i pairs with i + rotary_size / 2 ("half" pairing).

    `kind` is default, linear or llama3. Linear divides every frequency by `factor`; llama3 divides
    the long wavelengths and blends between `low_freq_factor` and `high_freq_factor`.
    """

    kind: str
    theta: float
    rotary_size: int
    """Head dimensions that rotate, counted from the first."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MlpConfig:
    """Feed-forward half of a layer: `down(act(gate x) * up x)`."""

    kind: str = "gated"
    activation: str = "silu"
    intermediate_size: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConfig:
    """One layer: what mixes tokens, how positions enter, and the feed-forward half."""

    mixer: str = "attention"
    window: int | None = None
    """Keys a query sees, the current token included; None is all of them."""
    rope: RopeConfig | None
    """None: the layer has no positions."""
    mlp: MlpConfig


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
    rms_norm_eps: float
    intermediate_size: int
    tie_embeddings: bool
    dtype: str
    """The checkpoint's own, e.g. bfloat16."""
    layers: tuple[LayerConfig, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMSNorm on each head of q and k, before the rotation."""
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
        return float(self.head_size**-0.5)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep keys and values."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.mixer == "attention")

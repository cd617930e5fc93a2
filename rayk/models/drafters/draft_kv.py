"""How a drafter on ranks gets its KV of a prompt that another engine computed without it. Free of torch.

`recompute`: the decode engine computes the drafter's rows of the prompt. A smaller model needs the tokens for
that, and nothing else. A row of an EAGLE-3 head or an MTP layer takes the model's hidden state, which nobody
has but the engine that computed the prompt: to compute it again is the whole prefill. `hidden`: these states
travel in place of the rows. `none`: nothing is proposed for such a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from rayk.models.config import DecoderConfig, LayerConfig, MlpConfig
from rayk.models.drafters.config import DrafterConfig
from rayk.types.speculative import SpeculativeConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
USUAL_TOKENS = 1024
"""Length of the prompt by which `auto` decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftKVCosts:
    """What a prompt's rows of a drafter take where they did not come with the model's."""

    recompute_flops: float
    """To compute them at the decode engine, over all its ranks."""
    model_flops: float
    """What the model itself took for the same tokens."""
    hidden_bytes: int
    """Size of the hidden states from which they can be computed; 0: a smaller model takes none."""

    @property
    def choice(self) -> str:
        """Return what `draft_kv: auto` is: rows that cost more than the prefill that was handed over are not
        worth computing."""
        return "recompute" if self.recompute_flops <= self.model_flops else "none"


def draft_kv_costs(
    drafter: DrafterConfig, target: DecoderConfig, dtype: str, num_tokens: int = USUAL_TOKENS
) -> DraftKVCosts:
    """Estimate them of a prompt of so many tokens. `dtype`: the engine's."""
    model, own = prefill_flops(target, num_tokens), prefill_flops(drafter.decoder, num_tokens)
    if not drafter.takes_hidden:
        return DraftKVCosts(recompute_flops=own, model_flops=model, hidden_bytes=0)
    num_streams = max(1, len(drafter.taps))
    state_bytes = num_streams * drafter.target_hidden_size * ITEM_BYTES[dtype]
    return DraftKVCosts(recompute_flops=model + own, model_flops=model, hidden_bytes=num_tokens * state_bytes)


def draft_kv_of(
    speculative: SpeculativeConfig, drafter: DrafterConfig | None, target: DecoderConfig, dtype: str
) -> str:
    """Return what an engine does: `recompute` or `none`."""
    if drafter is None:
        return "none"
    if speculative.draft_kv != "auto":
        return speculative.draft_kv
    return draft_kv_costs(drafter, target, dtype).choice


def prefill_flops(config: DecoderConfig, num_tokens: int) -> float:
    """Count multiplications and additions of a prompt's rows: those of the matrices, two for each of their
    elements and tokens, and of causal attention. Scans of states, norms, embeddings and logits are left out:
    they are small beside them."""
    elements = sum(_mixer_elements(config, layer) + _mlp_elements(config, layer) for layer in config.layers)
    pairs = sum(
        _num_pairs(num_tokens, layer.window or layer.chunk) * _pair_elements(config, kind)
        for layer in config.layers
        for kind in layer.mixers
    )
    return 2.0 * (elements * num_tokens + pairs)


def _num_pairs(num_tokens: int, seen: int | None) -> int:
    """Count the keys that all queries see together, each the last `seen` tokens or all before it."""
    most = num_tokens if seen is None else min(seen, num_tokens)
    return most * (most + 1) // 2 + (num_tokens - most) * most


def _pair_elements(config: DecoderConfig, kind: str) -> int:
    if kind == "mla":
        assert config.mla is not None
        return config.num_query_heads * (2 * config.mla.latent_size + config.mla.rope_size)
    return config.num_query_heads * (config.head_size_k + config.head_size_v) if kind == "attention" else 0


def _mixer_elements(config: DecoderConfig, layer: LayerConfig) -> int:
    """Count the elements of a layer's projections, each used once per token."""
    elements = config.hidden_size * sum(_projected(config, kind) for kind in layer.mixers)
    if "mla" not in layer.mixers or (own := config.mla) is None:
        return elements
    queries = 0 if own.query_rank is None else own.query_rank * (own.nope_size + own.rope_size)
    return elements + config.num_query_heads * (queries + own.latent_size * (own.nope_size + own.value_size))


def _projected(config: DecoderConfig, kind: str) -> int:
    """Count what a mixer's projections make of a hidden state, and take to make one."""
    heads = config.num_query_heads
    match kind:
        case "attention":
            gates = heads * config.head_size_v if config.attention_gate else 0
            return (heads + config.num_kv_heads) * (config.head_size_k + config.head_size_v) + gates
        case "mla":
            own = config.mla
            assert own is not None
            queries = heads * (own.nope_size + own.rope_size) if own.query_rank is None else own.query_rank
            return queries + own.latent_size + own.rope_size + heads * own.value_size
        case "mamba1":
            assert config.mamba1 is not None
            return 3 * config.mamba1.num_channels
        case "mamba2":
            state = config.mamba2
            assert state is not None
            inner = state.num_heads * state.head_size
            return 3 * inner + 2 * state.num_groups * state.state_size + state.num_heads
        case "gdn":
            net = config.gdn
            assert net is not None
            keys, values = net.num_key_heads * net.key_head_size, net.num_value_heads * net.value_head_size
            return 2 * keys + 3 * values + 2 * net.num_value_heads
    raise AssertionError(f"no mixer {kind}")


def _mlp_elements(config: DecoderConfig, layer: LayerConfig) -> int:
    """Count the elements that a token's feed-forward half uses: of experts those that it chooses."""
    mlp, hidden = layer.mlp, config.hidden_size
    if mlp is None:
        return 0
    if isinstance(mlp, MlpConfig):
        return (3 if mlp.gated else 2) * hidden * mlp.intermediate_size
    width = mlp.latent_size or hidden
    chosen = mlp.num_chosen * (2 if mlp.kind == "relu2" else 3) * width * mlp.intermediate_size
    shared = (
        0 if mlp.shared is None else (3 if mlp.shared.gated else 2) * hidden * mlp.shared.intermediate_size
    )
    return chosen + shared + hidden * mlp.num_experts

"""llama4 against transformers: chunked layers, layers without positions, experts weighed at their input."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.llama4.modeling_llama4 import (
    Llama4Router,
    Llama4TextAttention,
    Llama4TextRotaryEmbedding,
    apply_rotary_emb,
)

from rayk.models.config import RouterConfig, TemperatureConfig
from rayk.models.families import load_config, parse_config
from rayk.models.layers.linear import Linear
from rayk.models.layers.places import query_factors
from rayk.models.layers.rope import Rotary, rotate
from rayk.models.layers.router import ExpertRouter
from rayk.models.unused import unused_tensors
from rayk.parallel.local import LocalComm
from tests.helpers import assert_matches
from tests.markers import one_per
from tests.models.test_decoder import every_logit, prompts
from tests.models.tiny import (
    DIMS,
    FAMILY_DIMS,
    Checkpoint,
    Paged,
    assert_right,
    draw,
    load,
    reference_logits,
    run_ranks,
    write_checkpoint,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "mixed": {},
    # Chunks that are no multiple of a block of 8 tokens, nor of 4.
    "all-routed": {
        "use_qk_norm": False,
        "moe_layers": [0, 1, 2, 3],
        "num_experts_per_tok": 1,
        "attention_chunk_size": 21,
        "no_rope_layers": [0, 1, 1, 0],
    },
    "biases": {"attention_bias": True, "tie_word_embeddings": True, "attn_temperature_tuning": False},
    # Which layers rotate and which attend in chunks are two things.
    "crossed": {
        "layer_types": ["full_attention", "chunked_attention"] * 2,
        "no_rope_layers": [1, 0, 0, 1],
        "moe_layers": [],
    },
}


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp(request.param), "llama4", **VARIANTS[request.param])


@one_per()
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("checkpoint", list(VARIANTS), indirect=True)
def test_logits_equal_transformers(checkpoint: Checkpoint, tp_size: int) -> None:
    """The longest prompt is longer than three chunks."""
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size), strict=True):
        assert_right(checkpoint, token_ids, logits)


@pytest.mark.parametrize("checkpoint", ["mixed", "all-routed"], indirect=True)
def test_logits_with_the_fast_backend(checkpoint: Checkpoint) -> None:
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, 2, backend="cpu"), strict=True):
        assert_right(checkpoint, token_ids, logits)


@pytest.mark.parametrize("checkpoint", ["mixed"], indirect=True)
def test_a_prompt_cut_anywhere(checkpoint: Checkpoint) -> None:
    """Into two steps at every token of two chunks, borders and their neighbours among them."""
    ids = prompts()[2][:48]
    exact, eager = (reference_logits(m, ids) for m in (checkpoint.exact, checkpoint.model))
    decoder = load(checkpoint, LocalComm())
    cuts = range(1, 48)
    with torch.inference_mode():
        paged = Paged(decoder, len(cuts))
        heads = paged.step([ids[:cut] for cut in cuts])
        tails = paged.step([ids[cut:] for cut in cuts])
    for cut, head, tail in zip(cuts, heads, tails, strict=True):
        assert_matches(torch.cat([head, tail]), exact, eager, what=f"cut at {cut}")


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("checkpoint", ["mixed", "all-routed"], indirect=True)
def test_cache_holds_what_transformers_caches(checkpoint: Checkpoint, tp_size: int) -> None:
    """Keys behind rotation and norm; queries' factors leave no trace in it."""
    ids = prompts()[1]

    def body(comm: Any) -> dict[tuple[int, int], torch.Tensor]:
        paged = Paged(load(checkpoint, comm), 1)
        paged.step([ids])
        return paged.cached_rows()

    exact, eager = (
        model(torch.tensor([ids]), past_key_values=transformers.DynamicCache()).past_key_values
        for model in (checkpoint.exact, checkpoint.model)
    )
    for cached in run_ranks(tp_size, body):
        for (layer, head), rows in cached.items():
            for mine, name in zip(rows[: len(ids)].chunk(2, dim=1), ("keys", "values"), strict=True):
                theirs = [getattr(c.layers[layer], name)[0, head].detach() for c in (exact, eager)]
                assert_matches(mine, *theirs, what=f"{name} of layer {layer}, head {head}")


CHANGES: dict[str, Any] = {
    "chunk": lambda model: setattr(model.config, "attention_chunk_size", 21),
    "temperature": lambda model: [
        setattr(m, "floor_scale", 10) for m in model.modules() if isinstance(m, Llama4TextAttention)
    ],
    "norm": lambda model: [delattr(m, "qk_norm") for m in model.modules() if hasattr(m, "qk_norm")],
    "router": lambda model: [setattr(m, "top_k", 3) for m in model.modules() if isinstance(m, Llama4Router)],
}


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("checkpoint", ["mixed"], indirect=True)
def test_a_wrong_setting_shows(checkpoint: Checkpoint, change: str) -> None:
    """The comparisons above are no accident."""
    ids = prompts()[2]
    logits = reference_logits(checkpoint.model, ids)
    wrong = copy.copy(checkpoint)
    wrong.model, wrong.exact = copy.deepcopy(checkpoint.model), copy.deepcopy(checkpoint.exact)
    for model in (wrong.model, wrong.exact):
        CHANGES[change](model)
    assert_right(checkpoint, ids, logits)
    with pytest.raises(AssertionError, match="RMS error"):
        assert_right(wrong, ids, logits)


def write_vision_checkpoint(path: Path) -> Checkpoint:
    """A tiny llama4 with a vision model, of which the text model counts."""
    text = DIMS | FAMILY_DIMS["llama4"]
    vision = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    projector = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    config = transformers.Llama4Config(
        text_config=copy.deepcopy(text),
        vision_config=vision | projector | {"image_size": 16, "patch_size": 4},
        attn_implementation="eager",
    )
    model: Any = transformers.Llama4ForConditionalGeneration(config).eval().float()
    draw(model)
    model.save_pretrained(path)
    inner = model.language_model
    return Checkpoint(path, inner, copy.deepcopy(inner).double(), load_config(path))


def test_text_model_of_a_checkpoint_with_vision(tmp_path: Path) -> None:
    checkpoint = write_vision_checkpoint(tmp_path)
    assert checkpoint.config.architecture == "Llama4ForConditionalGeneration"
    tensors = load_file(tmp_path / "model.safetensors")
    for prefix in (
        "vision_model.",
        "multi_modal_projector.",
        "language_model.model.layers.",
        "language_model.lm_head.",
    ):
        assert any(name.startswith(prefix) for name in tensors), prefix
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, 2), strict=True):
        assert_right(checkpoint, token_ids, logits)
    save_file(tensors | {"audio_model.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    parts = unused_tensors(tmp_path, checkpoint.config)
    assert parts.keys() == {"audio_model.*", "multi_modal_projector.*", "vision_model.*"}


def test_factors_of_queries() -> None:
    """As transformers applies them, up to the positions of released models."""
    config = transformers.Llama4TextConfig(
        hidden_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        num_hidden_layers=1,
        no_rope_layers=[0],
        floor_scale=8192,
        attn_scale=0.1,
        attn_implementation="eager",
    )
    layer = Llama4TextAttention(config, 0)
    seen: list[torch.Tensor] = []

    class Past:
        """A cache that says how many tokens there were, and hands on what it is given."""

        def __init__(self, num_tokens: int) -> None:
            self.num_tokens = num_tokens

        def get_seq_length(self, _layer: int) -> int:
            return self.num_tokens

        def update(self, k: torch.Tensor, v: torch.Tensor, _layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            return k, v

    def look(_module: Any, q: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        seen.append(q[0, 0])
        return torch.zeros(1, q.shape[2], 1, 8), None

    temperature = TemperatureConfig(scale=0.1, floor=8192)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "transformers.models.llama4.modeling_llama4.ALL_ATTENTION_FUNCTIONS.get_interface",
            lambda *_: look,
        )
        x = torch.ones(1, 3, 8)
        plain = layer.q_proj(x)[0]
        for start in (0, 8189, 8190, 16381, 262141, 1_048_573, 10_485_757):
            layer(x, None, None, past_key_values=Past(start))
            factors = query_factors(temperature, torch.arange(start, start + 3))
            assert torch.equal(plain * factors[:, 0], seen.pop()), start
            assert factors.dtype == torch.float32
    assert query_factors(temperature, torch.tensor([8190])).item() == 1.0
    assert query_factors(temperature, torch.tensor([8191])).item() > 1.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_is_transformers_own(dtype: torch.dtype) -> None:
    """Of models in bfloat16 as well: angles stay float32."""
    values = DIMS | FAMILY_DIMS["llama4"]
    config = transformers.Llama4TextConfig(**copy.deepcopy(values))
    rope = parse_config(config.to_dict() | {"architectures": ["Llama4ForCausalLM"]}).layers[0].rope
    assert rope is not None
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(2, 300, 3, 16, generator=generator).to(dtype)
    positions = torch.arange(211, 511)
    angles = Llama4TextRotaryEmbedding(config)(q[None], positions[None])
    expected = apply_rotary_emb(q[None], k[None], angles)
    rotation = Rotary(rope, dtype=dtype, device=torch.device("cpu")).at(positions)
    for x, theirs in zip((q, k), expected, strict=True):
        mine = rotate(x, rotation)
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
        exact = torch.view_as_real(pairs * angles[0, :, None].to(torch.complex128)).flatten(-2)
        assert_matches(mine, exact, theirs[0])
        # Rounded once, from sums that may differ in their last bit.
        assert float((mine == theirs[0]).float().mean()) > (0.5 if dtype == torch.float32 else 0.99)


@pytest.mark.parametrize("levels", [None, 3], ids=["distinct", "ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_router_is_transformers_own(dtype: torch.dtype, levels: int | None) -> None:
    """Weights are the identity, so that the inputs are the logits."""
    config = transformers.Llama4TextConfig(hidden_size=12, num_local_experts=12, num_experts_per_tok=4)
    theirs = Llama4Router(config).to(dtype)
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(400, 12, generator=generator)
    if levels is not None:
        logits = torch.randint(0, levels, logits.shape, generator=generator).float()
    with torch.no_grad():
        theirs.weight.copy_(torch.eye(12))
        weights, _ = theirs(logits.to(dtype))
    linear = Linear(theirs.weight.detach(), None)
    routes = ExpertRouter(linear, RouterConfig(scoring="sigmoid_chosen"), 4).forward(logits.to(dtype))
    mine = torch.zeros_like(weights).scatter_(1, routes.experts, routes.weights)
    assert routes.weights.dtype == dtype
    assert torch.equal(mine, weights)

"""deepseek_v3 and qwen3_next against transformers: logits, what is cached, any split of a prompt, any TP."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayk.models.unused import unused_tensors
from rayk.parallel.local import LocalComm
from tests.helpers import assert_matches
from tests.markers import one_per, thorough
from tests.models.test_decoder import every_logit, prompts
from tests.models.tiny import (
    YARN,
    Checkpoint,
    Paged,
    assert_all_right,
    assert_right,
    load,
    reference_logits,
    run_ranks,
    wide_scans,
    write_checkpoint,
)

LAYERS = ["linear_attention", "full_attention"]
UNEVEN = {  # of 3 ranks the middle one's value heads read both key heads
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next-biases-tied": (
        "qwen3_next",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "linear_conv_kernel_dim": 2,
        },
    ),
    "qwen3_next-uneven": ("qwen3_next", UNEVEN),
    "qwen3_next-dense": (
        "qwen3_next",
        {"num_hidden_layers": 2, "layer_types": LAYERS, "mlp_only_layers": [0, 1]},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-direct-queries": (
        "deepseek_v3",
        {"q_lora_rank": None, "attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, "norm_topk_prob": False},
    ),
    "deepseek_v3-halves": ("deepseek_v3", {"rope_interleave": False}),
}


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family, overrides = VARIANTS[request.param]
    return write_checkpoint(tmp_path_factory.mktemp(request.param), family, **overrides)


def cases(*pairs: tuple[str, int]) -> Any:
    """(checkpoint, TP) pairs."""
    return pytest.mark.parametrize(("checkpoint", "tp_size"), pairs, indirect=["checkpoint"])


@one_per()
@cases(
    *(("qwen3_next", tp) for tp in (1, 2, 4)),
    ("qwen3_next-biases-tied", 1),
    ("qwen3_next-uneven", 3),
    *(("deepseek_v3", tp) for tp in (1, 2, 4)),
    ("deepseek_v3-direct-queries", 2),
    ("deepseek_v3-yarn", 1),
    ("deepseek_v3-halves", 2),
)
def test_logits_equal_transformers(checkpoint: Checkpoint, tp_size: int) -> None:
    assert_all_right(checkpoint, prompts(), every_logit(checkpoint, tp_size))


@pytest.mark.slow
@cases(("qwen3_next", 8), ("deepseek_v3", 8), ("qwen3_next-biases-tied", 2), ("deepseek_v3-yarn", 4))
def test_logits_equal_transformers_at_more_sizes(checkpoint: Checkpoint, tp_size: int) -> None:
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size), strict=True):
        assert_right(checkpoint, token_ids, logits)


@cases(("qwen3_next-uneven", 3))
def test_logits_with_a_state_every_few_tokens(checkpoint: Checkpoint, tp_size: int) -> None:
    """States move on from slot to slot; chunks of 7 and 30 tokens end at borders and between them."""
    for token_ids, logits in zip(
        prompts(), every_logit(checkpoint, tp_size, state_block_size=7), strict=True
    ):
        assert_right(checkpoint, token_ids, logits)


FURTHER: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_v3": ({"num_nextn_predict_layers": 2}, "model.layers.{}.enorm.weight"),
    "qwen3_next": ({}, "mtp.layers.{}.input_layernorm.weight"),
}


@pytest.mark.parametrize("family", FURTHER)
def test_layers_that_predict_further_are_not_read(tmp_path: Path, family: str) -> None:
    """deepseek_v3 numbers them on from its last layer."""
    overrides, name = FURTHER[family]
    saved = write_checkpoint(tmp_path, family, **overrides)
    file = tmp_path / "model.safetensors"
    tensors, num_layers = load_file(file), saved.config.num_layers
    more = {name.format(i): torch.ones(64) for i in (num_layers, num_layers + 1)}
    save_file(tensors | more, file)
    load(saved, LocalComm())
    assert sum(unused_tensors(tmp_path, saved.config).values()) == 2


@cases(("deepseek_v3", 2))
def test_logits_with_the_fast_backend(checkpoint: Checkpoint, tp_size: int) -> None:
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size, backend="cpu"), strict=True):
        assert_right(checkpoint, token_ids, logits)


@one_per()
@pytest.mark.parametrize(
    ("checkpoint", "state_block_size"),
    [("qwen3_next-dense", None), ("qwen3_next-dense", 5), ("deepseek_v3", None)],
    indirect=["checkpoint"],
)
def test_a_prompt_split_at_any_token(checkpoint: Checkpoint, state_block_size: int | None) -> None:
    ids = prompts()[1]
    decoder = load(checkpoint, LocalComm())
    for cut in range(1, 13):
        paged = Paged(decoder, 1, state_block_size=state_block_size)
        with torch.inference_mode():
            logits = [paged.step([part])[0] for part in (ids[:cut], ids[cut:])]
        assert_right(checkpoint, ids, torch.cat(logits))


def caches_of(checkpoint: Checkpoint, ids: list[int]) -> tuple[Any, Any]:
    """transformers' caches after `ids`, from float64 and from float32."""
    caches = []
    for model in (checkpoint.exact, checkpoint.model):
        with torch.no_grad(), wide_scans(model):
            caches.append(model(torch.tensor([ids]), use_cache=True).past_key_values.layers)
    return caches[0], caches[1]


@cases(
    ("deepseek_v3", 1),
    ("deepseek_v3", 4),
    ("deepseek_v3-yarn", 2),
    ("deepseek_v3-halves", 1),
)
def test_latents_are_what_transformers_caches(checkpoint: Checkpoint, tp_size: int) -> None:
    """The normed latent and the rotated key, element by element; the same bits on every rank."""
    ids = prompts()[1]

    def body(comm: Any) -> dict[tuple[int, str], torch.Tensor]:
        paged = Paged(load(checkpoint, comm), 1)
        paged.step([ids[:20]])
        paged.step([ids[20:]])
        return {
            (layer, field.name): field.view[paged.block_table[0].long()].flatten(0, 2)[: len(ids)]
            for (layer, _), owner in paged.decoder.cache_owners.items()
            for field in owner.field_views()
        }

    exact, eager = caches_of(checkpoint, ids)
    ranks = run_ranks(tp_size, body)
    assert {name for _, name in ranks[0]} == {"latent", "rope"}
    for (layer, name), mine in ranks[0].items():
        theirs = ({"latent": "keys", "rope": "values"}[name], layer)
        rows = [getattr(cache[theirs[1]], theirs[0])[0, 0] for cache in (exact, eager)]
        assert_matches(mine, *rows, what=f"{name} of layer {layer}")
        assert all(torch.equal(mine, other[layer, name]) for other in ranks)


@pytest.mark.parametrize("num_tokens", [2, 37])
@cases(("qwen3_next", 1), ("qwen3_next", 4), ("qwen3_next-uneven", 3))
def test_states_are_what_transformers_caches(checkpoint: Checkpoint, tp_size: int, num_tokens: int) -> None:
    """Every unit of every field, on the first and the last rank that holds it. After 2 tokens one tap of a
    channel is zero."""
    ids = prompts()[1][:num_tokens]

    def body(comm: Any) -> dict[tuple[int, str, int], torch.Tensor]:
        paged = Paged(load(checkpoint, comm), 1, tp=(comm.size, comm.rank))
        paged.step([ids[: num_tokens // 2]])
        paged.step([ids[num_tokens // 2 :]])
        slot = int(paged.slots[0, 0])
        return {
            (layer, field.name, unit): field.view[slot, place].flatten()
            for (layer, part), owner in paged.decoder.cache_owners.items()
            if part == "state"
            for field in owner.field_views()
            for place, unit in enumerate(field.units)
        }

    ranks = run_ranks(tp_size, body)
    exact, eager = caches_of(checkpoint, ids)
    for layer in checkpoint.config.state_layers:
        fields = [_state_fields(checkpoint, cache[layer]) for cache in (exact, eager)]
        for name, wanted in fields[0].items():
            # A field at a time: one unit's few elements would be too few to judge their error by.
            replicas = [[rank[layer, name, u] for rank in ranks if (layer, name, u) in rank]
                        for u in range(len(wanted))]  # fmt: skip
            for pick in (0, -1):
                mine = torch.stack([units[pick] for units in replicas]).view(wanted.shape)
                assert_matches(mine, wanted, fields[1][name], what=f"{name} of layer {layer}")


def _state_fields(checkpoint: Checkpoint, cache: Any) -> dict[str, torch.Tensor]:
    """transformers' taps, of which it keeps one more than is read, and states: [units, ...] each."""
    gdn = checkpoint.config.gdn
    assert gdn is not None
    keys, values = gdn.num_key_heads * gdn.key_head_size, gdn.num_value_heads * gdn.value_head_size
    taps = cache.conv_states[0][0, :, 1:].detach()
    q, k, v = taps.split([keys, keys, values])
    return {
        "conv_q": q.unflatten(0, (gdn.num_key_heads, -1)),
        "conv_k": k.unflatten(0, (gdn.num_key_heads, -1)),
        "conv_v": v.unflatten(0, (gdn.num_value_heads, -1)),
        "delta": cache.recurrent_states[0][0].detach(),
    }


@thorough
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_next", {"num_experts": 3, "num_experts_per_tok": 2, "layer_types": LAYERS}),
        ("deepseek_v3", {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 1}),
    ],
)
def test_every_weight_counts(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """Changing any tensor of the checkpoint changes the logits."""
    checkpoint = write_checkpoint(tmp_path, family, num_hidden_layers=2, **overrides)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    ids = prompts()[2]

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            return Paged(load(checkpoint, LocalComm()), 1).step([ids])[0]

    before = logits()
    draw = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        changed = tensor * (0.5 + torch.rand(tensor.shape, generator=draw))
        save_file(tensors | {name: changed}, file)
        assert not torch.equal(logits(), before), name


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_next", {"layer_types": LAYERS, "mlp_only_layers": [0, 1]}),
        ("deepseek_v3", {"num_hidden_layers": 1}),
    ],
)
def test_bfloat16_is_close_to_transformers_bfloat16(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    """A smoke test on dense layers: the two round at different places."""
    checkpoint = write_checkpoint(tmp_path, family, **{"num_hidden_layers": 2} | overrides)
    ids = prompts()[1]
    rounded = copy.deepcopy(checkpoint.model).bfloat16()
    exact = reference_logits(copy.deepcopy(rounded).double(), ids)
    eager = reference_logits(rounded, ids)

    def body(comm: Any) -> torch.Tensor:
        tp = (comm.size, comm.rank)
        return Paged(load(checkpoint, comm, torch.bfloat16), 1, tp=tp, dtype="bfloat16").step([ids])[0]

    for tp_size in (1, 2):
        assert_matches(run_ranks(tp_size, body)[0], exact, eager.float())


@pytest.mark.parametrize("checkpoint", ["qwen3_next", "deepseek_v3"], indirect=True)
def test_unbinding_and_binding_again(checkpoint: Checkpoint) -> None:
    """Unbound, a layer lets go of its buffer and says so; bound again, the answers are the same."""
    decoder, ids = load(checkpoint, LocalComm()), prompts()[0]
    for _ in range(2):
        paged = Paged(decoder, 1)
        with torch.inference_mode():
            assert_right(checkpoint, ids, paged.step([ids])[0])
    for owner in decoder.cache_owners.values():
        owner.unbind_kv_cache()
        with pytest.raises(AssertionError, match="cache is bound"):
            owner.field_views()
    with pytest.raises(AssertionError, match="cache is bound"):
        paged.step([[1]])

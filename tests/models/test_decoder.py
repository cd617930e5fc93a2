"""The decoder against transformers, float32, on tiny random checkpoints of every family."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayk.models.layers import linear
from rayk.models.unused import unused_tensors
from rayk.parallel.local import LocalComm
from tests.helpers import assert_matches
from tests.markers import one_per, sweep
from tests.models.tiny import (
    LLAMA3,
    LONGROPE,
    YARN,
    Checkpoint,
    Paged,
    assert_right,
    load,
    reference_logits,
    run_ranks,
    write_checkpoint,
    write_vision_checkpoint,
)

VARIANTS = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 8}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"head_dim": "absent"}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biases-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe-windows-biases-tied": (
        "qwen3_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 21,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "head_dim": "absent",
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 21, "head_dim": 24}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "phi3": ("phi3", {"sliding_window": 21}),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 0.5}),
    "gemma3-tied-biases": ("gemma3", {"tie_word_embeddings": True, "attention_bias": True}),
    "cohere2": ("cohere2", {"tie_word_embeddings": True}),
    "cohere2-biases": ("cohere2", {"attention_bias": True}),
    "gpt_oss": ("gpt_oss", {}),
}


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(263) for _ in range(n)] for n in (5, 37, 70)]


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    family, overrides = VARIANTS[request.param]
    return write_checkpoint(tmp_path_factory.mktemp(request.param), family, **overrides)


def every_logit(
    checkpoint: Checkpoint,
    tp_size: int,
    num_decoded: int = 12,
    backend: str = "reference",
    state_block_size: int | None = None,
) -> list[torch.Tensor]:
    """Logits of every position: mixed batches of chunks, then one token per step and request.

    What each rank returns must be the same bits.
    """
    ids = prompts()

    def body(comm):
        tp = (comm.size, comm.rank)
        decoder = load(checkpoint, comm, backend=backend)
        paged = Paged(decoder, len(ids), tp=tp, state_block_size=state_block_size)
        parts: list[list[torch.Tensor]] = [[] for _ in ids]
        # Request 0 whole; 1 and 2 in chunks, so that prefills and decodes share a step.
        heads = [len(p) - num_decoded if len(p) > num_decoded else 1 for p in ids]
        cuts = [[0, heads[0]], [0, 7, heads[1]], [0, 30, 31, heads[2]]]
        for r, cut in enumerate(cuts):
            cut.extend(range(heads[r] + 1, len(ids[r]) + 1))
        for step in range(max(len(cut) for cut in cuts) - 1):
            batch = [
                ids[r][cut[step] : cut[step + 1]] if step + 1 < len(cut) else [] for r, cut in enumerate(cuts)
            ]
            for r, logits in enumerate(paged.step(batch)):
                parts[r].append(logits)
        return [torch.cat([p for p in some if p.numel()]) for some in parts]

    ranks = run_ranks(tp_size, body)
    for other in ranks[1:]:
        for mine, theirs in zip(ranks[0], other, strict=True):
            assert torch.equal(mine, theirs), "ranks of one group return different logits"
    return ranks[0]


@sweep(2)
@one_per()
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("checkpoint", list(VARIANTS), indirect=True)
def test_logits_equal_transformers(checkpoint: Checkpoint, tp_size: int) -> None:
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size), strict=True):
        assert_right(checkpoint, token_ids, logits)


@pytest.mark.parametrize("checkpoint", ["qwen3-biases-tied"], indirect=True)
def test_whole_prefill_equals_transformers(checkpoint: Checkpoint) -> None:
    ids = prompts()
    with torch.inference_mode():
        logits = Paged(load(checkpoint, LocalComm()), len(ids)).step(ids)
    for token_ids, mine in zip(ids, logits, strict=True):
        assert_right(checkpoint, token_ids, mine)


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("checkpoint", ["qwen3-layer-types", "mistral", "gemma2", "gpt_oss"], indirect=True)
def test_logits_with_the_fast_backend(checkpoint: Checkpoint, tp_size: int) -> None:
    mine = every_logit(checkpoint, tp_size, backend="cpu")
    for token_ids, logits in zip(prompts(), mine, strict=True):
        assert_right(checkpoint, token_ids, logits)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("checkpoint", ["llama-biases", "llama-tied"], indirect=True)
def test_packed_weights_give_the_same_logits(
    checkpoint: Checkpoint, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large models have them on the CPU."""
    monkeypatch.setattr(linear, "MIN_PACKED_ELEMENTS", 0)
    monkeypatch.setattr(linear, "is_packable", lambda weight: True)
    decoder = load(checkpoint, LocalComm())
    assert isinstance(decoder.layers[0].mlp.gate_up.weight, linear.PackedWeight), "nothing was packed"
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size), strict=True):
        assert_right(checkpoint, token_ids, logits)


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize(
    "checkpoint",
    [
        "llama-llama3",
        "qwen2",
        "qwen3-biases-tied",
        "phi3-longrope",
        "gemma3",
        "cohere2",
        "gpt_oss",
    ],
    indirect=True,
)
def test_cache_holds_what_transformers_caches(checkpoint: Checkpoint, tp_size: int) -> None:
    """Keys after the rotation, at the right positions: logits alone see only their distances."""
    ids = prompts()[1]

    def body(comm):
        paged = Paged(load(checkpoint, comm), 1)
        paged.step([ids])
        return {
            (layer, head): attention.kv_cache[paged.block_table[0].long(), slot].flatten(0, 1)
            for layer, attention in paged.decoder.attention_layers.items()
            for slot, head in enumerate(attention.kv_head_ids)
        }

    exact, eager = (
        model(torch.tensor([ids]), use_cache=True).past_key_values
        for model in (checkpoint.exact, checkpoint.model)
    )
    for cached in run_ranks(tp_size, body):
        for (layer, head), rows in cached.items():
            for mine, name in zip(rows[: len(ids)].chunk(2, dim=1), ("keys", "values"), strict=True):
                theirs = [getattr(c.layers[layer], name)[0, head].detach() for c in (exact, eager)]
                # Of a sliding layer transformers keeps what the next token sees beside itself.
                window = checkpoint.config.layers[layer].window
                num_kept = len(ids) if window is None else window - 1
                assert len(theirs[0]) == num_kept
                assert_matches(mine[-num_kept:], *theirs, what=f"{name} of layer {layer}, head {head}")


@pytest.mark.parametrize("tp_size", [1, 2])
def test_text_model_of_a_checkpoint_with_vision(tmp_path: Path, tp_size: int) -> None:
    checkpoint = write_vision_checkpoint(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.startswith("vision_tower.") for name in names)
    assert any(name.startswith("language_model.model.layers.") for name in names)
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size), strict=True):
        assert_right(checkpoint, token_ids, logits)


def test_other_names_of_a_text_model_within_a_larger_one(tmp_path: Path) -> None:
    """As module names have it, and with the output head saved too."""
    checkpoint = write_vision_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {n.replace("language_model.model.", "model.language_model."): t for n, t in tensors.items()}
    head = {"lm_head.weight": tensors["language_model.model.embed_tokens.weight"].clone()}
    save_file(renamed | head, tmp_path / "model.safetensors")
    ids = prompts()[1]
    with torch.inference_mode():
        (logits,) = Paged(load(checkpoint, LocalComm()), 1).step([ids])
    assert_right(checkpoint, ids, logits)
    save_file(renamed | {"audio_tower.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    parts = unused_tensors(tmp_path, checkpoint.config)
    assert {"audio_tower.*", "vision_tower.*"} <= parts.keys()


def test_attention_soft_cap_is_what_makes_the_difference(tmp_path: Path) -> None:
    """The gemma2 comparison above is no accident: with another cap it fails."""
    checkpoint = write_checkpoint(tmp_path, "gemma2")
    ids = prompts()[2]
    logits = reference_logits(checkpoint.model, ids)
    for model in (checkpoint.model, checkpoint.exact):
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = 2.1
    with pytest.raises(AssertionError, match="RMS error"):
        assert_right(checkpoint, ids, logits)


def test_window_is_what_makes_the_difference(tmp_path: Path) -> None:
    """The mistral comparison above is no accident: with one key more it fails."""
    checkpoint = write_checkpoint(tmp_path, "mistral", sliding_window=21)
    ids = prompts()[2]
    logits = reference_logits(checkpoint.model, ids)
    for model in (checkpoint.model, checkpoint.exact):
        model.config.sliding_window = 22
    with pytest.raises(AssertionError, match="RMS error"):
        assert_right(checkpoint, ids, logits)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {}),
        ("phi3", {}),
        ("gemma3", {"layer_types": ["sliding_attention"], "final_logit_softcapping": 5.0}),
        ("cohere2", {"layer_types": ["sliding_attention"]}),
        ("gpt_oss", {}),
        ("llama4", {"no_rope_layers": [1], "moe_layers": [0]}),
        ("llama4", {"no_rope_layers": [0], "moe_layers": []}),
    ],
)
def test_bfloat16_is_close_to_transformers_bfloat16(
    tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    """A smoke test: the two round at different places."""
    checkpoint = write_checkpoint(tmp_path, family, num_hidden_layers=1, **overrides)
    ids = prompts()[1]
    rounded = copy.deepcopy(checkpoint.model).bfloat16()
    exact = reference_logits(copy.deepcopy(rounded).double(), ids)
    eager = reference_logits(rounded, ids)

    def body(comm):
        paged = Paged(load(checkpoint, comm, torch.bfloat16), 1)
        for attention in paged.decoder.attention_layers.values():
            attention.bind_kv_cache(attention.kv_cache.bfloat16())
        return paged.step([ids])[0]

    for tp_size in (1, 2):
        mine = run_ranks(tp_size, body)[0]
        # As float32, because a chain of bfloat16 roundings may err by what eager's chain errs.
        assert_matches(mine, exact, eager.float())


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_kv_head_ids_are_what_was_cut(tmp_path: Path, tp_size: int) -> None:
    """Head h's key projection is set to h + 1: the cache shows which heads a rank really holds."""
    checkpoint = write_checkpoint(tmp_path, "llama", num_hidden_layers=1, attention_bias=True)
    attention = checkpoint.model.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.zero_()
        attention.v_proj.bias.copy_(torch.arange(2).repeat_interleave(16) + 1.0)
    checkpoint.model.save_pretrained(tmp_path)

    def body(comm):
        decoder = load(checkpoint, comm)
        paged = Paged(decoder, 1)
        paged.step([[1, 2, 3]])
        layer = decoder.attention_layers[0]
        slot_blocks = paged.block_table[0, 0]
        values = layer.kv_cache[slot_blocks, :, 0, 16:]
        return layer.kv_head_ids, layer.num_query_heads, values[:, 0].tolist()

    ranks = run_ranks(tp_size, body)
    for heads, num_query_heads, values in ranks:
        assert num_query_heads == 8 // tp_size
        assert values == [h + 1.0 for h in heads]
    expected = {1: [(0, 1)], 2: [(0,), (1,)], 4: [(0,), (0,), (1,), (1,)]}
    assert [r[0] for r in ranks] == expected.get(tp_size, [(0,)] * 4 + [(1,)] * 4)


@pytest.mark.parametrize("checkpoint", ["qwen3"], indirect=True)
def test_unbound_cache_is_an_error(checkpoint: Checkpoint) -> None:
    decoder = load(checkpoint, LocalComm())
    paged = Paged(decoder, 1)
    decoder.attention_layers[1].unbind_kv_cache()
    with pytest.raises(AssertionError, match="layer 1: no KV cache is bound"):
        paged.step([[1, 2]])

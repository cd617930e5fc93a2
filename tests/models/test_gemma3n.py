"""gemma3n against transformers: its streams, per-layer inputs, sparse gates, and layers that share."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gemma3n import modeling_gemma3n

from rayk.models.families import load_config
from rayk.models.layers.mlp import GateCut
from rayk.models.load_memory import tensors_of
from rayk.models.unused import unused_tensors
from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm
from rayk.types.errors import CheckpointError
from tests.helpers import assert_matches
from tests.markers import one_per, sweep
from tests.models.test_decoder import every_logit, prompts
from tests.models.tiny import (
    Checkpoint,
    Paged,
    assert_right,
    load,
    reference_logits,
    run_ranks,
    write_checkpoint,
)

FULL, SLIDING = "full_attention", "sliding_attention"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "other-stream": {
        "altup_active_idx": 2,
        "altup_num_inputs": 3,
        "altup_correct_scale": False,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "intermediate_size": 101,
    },
    "one-stream": {"altup_num_inputs": 1, "num_kv_shared_layers": 0},
    "most-share": {
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING, SLIDING],
        "num_kv_shared_layers": 3,
        "tie_word_embeddings": True,
        "activation_sparsity_pattern": [0.95] * 5,
    },
}


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("gemma3n"), "gemma3n", **VARIANTS[request.param])


@sweep(2)
@one_per()
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("checkpoint", list(VARIANTS), indirect=True)
def test_logits_equal_transformers(checkpoint: Checkpoint, tp_size: int) -> None:
    """In chunks and in mixed batches; the longest prompt is longer than three windows."""
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size), strict=True):
        assert_right(checkpoint, token_ids, logits)


@pytest.mark.parametrize("checkpoint", ["plain"], indirect=True)
def test_logits_with_the_fast_backend(checkpoint: Checkpoint) -> None:
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, 2, backend="cpu"), strict=True):
        assert_right(checkpoint, token_ids, logits)


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("checkpoint", ["plain", "other-stream"], indirect=True)
def test_cache_holds_what_transformers_caches(checkpoint: Checkpoint, tp_size: int) -> None:
    """Keys normed and turned, values normed; nothing of the layers that share."""
    ids = prompts()[1]

    def body(comm: Comm) -> dict[tuple[int, int], torch.Tensor]:
        paged = Paged(load(checkpoint, comm), 1)
        paged.step([ids])
        return paged.cached_rows()

    exact, eager = (
        model(
            torch.tensor([ids]), use_cache=True, past_key_values=transformers.DynamicCache()
        ).past_key_values
        for model in (checkpoint.exact, checkpoint.model)
    )
    assert len(exact.layers) == 3
    for cached in run_ranks(tp_size, body):
        assert {layer for layer, _ in cached} == {0, 1, 2}
        for (layer, head), rows in cached.items():
            for mine, name in zip(rows[: len(ids)].chunk(2, dim=1), ("keys", "values"), strict=True):
                theirs = [getattr(c.layers[layer], name)[0, head].detach() for c in (exact, eager)]
                assert_matches(mine, *theirs, what=f"{name} of layer {layer}, head {head}")


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("checkpoint", ["plain", "most-share"], indirect=True)
def test_computing_only_wanted_tokens_changes_none_of_their_logits(
    checkpoint: Checkpoint, tp_size: int
) -> None:
    """The last layers compute them alone: their streams and per-layer inputs are picked out."""
    ids, next_ids = prompts(), [[9], [8], [7]]
    cases = [(1, 1, 1), (0, 1, 0), (5, 37, 70), (2, 0, 33), (0, 0, 0)]

    def body(comm: Comm) -> list[list[torch.Tensor]]:
        decoder = load(checkpoint, comm)
        num_tokens, num_fast = sum(map(len, ids)), len(decoder.config.fast_prefill_layers)
        num_whole = decoder.config.num_layers - num_fast
        assert num_fast in (2, 3)
        found = []
        for num_wanted in cases:
            paged = Paged(decoder, len(ids))
            found.append(paged.step(ids, num_wanted))
            assert decoder.num_token_layers == num_tokens * num_whole + sum(num_wanted) * num_fast
            # The layers that compute everything have stored all of it: the next tokens see it.
            found[-1] += paged.step(next_ids)
        return found

    whole = [prompt + more for prompt, more in zip(ids, next_ids, strict=True)]
    right = [[reference_logits(m, w) for m in (checkpoint.exact, checkpoint.model)] for w in whole]
    for num_wanted, found in zip(cases, run_ranks(tp_size, body)[0], strict=True):
        assert [len(logits) for logits in found[:3]] == list(num_wanted)
        for step in range(2):
            # Of all requests together: the largest error of a single row is a matter of luck.
            exact, eager = (
                torch.cat(
                    [
                        theirs[i][-1:] if step else theirs[i][len(theirs[i]) - 1 - count : -1]
                        for theirs, count in zip(right, num_wanted, strict=True)
                    ]
                )
                for i in range(2)
            )
            assert_matches(torch.cat(found[3 * step : 3 * step + 3]), exact, eager)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_bfloat16_is_close_to_transformers_bfloat16(tmp_path: Path, tp_size: int) -> None:
    """A smoke test: the two round at different places."""
    kinds = {"layer_types": [SLIDING, SLIDING], "num_hidden_layers": 2, "num_kv_shared_layers": 1}
    sizes = {"intermediate_size": 101, "activation_sparsity_pattern": [0.5, 0.0]}
    checkpoint = write_checkpoint(tmp_path, "gemma3n", **kinds, **sizes)
    ids = prompts()[1]
    # Loaded anew, since `bfloat16()` would round the frequencies of the rotation as well.
    rounded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    exact = reference_logits(copy.deepcopy(rounded).double(), ids)
    eager = reference_logits(rounded, ids)

    def body(comm: Comm) -> torch.Tensor:
        return Paged(load(checkpoint, comm, torch.bfloat16), 1, dtype="bfloat16").step([ids])[0]

    assert_matches(run_ranks(tp_size, body)[0], exact, eager.float())


def test_text_model_of_a_larger_checkpoint(tmp_path: Path) -> None:
    """Names and config as released models have them, which transformers' text model can load too."""
    checkpoint = write_checkpoint(tmp_path, "gemma3n", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    named = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    others = ("vision_tower.timm_model.conv_stem.weight", "audio_tower.conv.weight")
    others += ("embed_vision.embedding.weight", "embed_audio.embedding.weight")
    save_file(
        named | {f"model.{name}": torch.ones(2) for name in others},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    text = json.loads((tmp_path / "config.json").read_text())
    theirs = transformers.Gemma3nForCausalLM.from_pretrained(tmp_path, config=checkpoint.model.config)
    ids = prompts()[1]
    assert torch.equal(reference_logits(theirs, ids), reference_logits(checkpoint.model, ids))
    whole = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "audio_config": {},
        "vision_config": {},
        "text_config": text,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(whole))
    checkpoint.config = load_config(tmp_path)
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, 2), strict=True):
        assert_right(checkpoint, token_ids, logits)


def test_keys_and_values_of_layers_that_share_are_ignored(tmp_path: Path) -> None:
    """Released checkpoints hold them; they may be anything. No other tensor may be left over."""
    checkpoint = write_checkpoint(tmp_path, "gemma3n")
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.{}.self_attn.{}.weight"
    names = ("k_proj", "v_proj", "k_norm")
    assert not any(prefix.format(i, name) in tensors for i in (3, 4) for name in names)
    extra = {prefix.format(i, name): torch.full((3,), torch.nan) for i in (3, 4) for name in names}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    ids = prompts()[1]
    with torch.inference_mode():
        (logits,) = Paged(load(checkpoint, LocalComm()), 1).step([ids])
    assert_right(checkpoint, ids, logits)
    for stray in (
        prefix.format(3, "q_proj_2"),
        prefix.format(5, "k_proj"),
        "model.altup_projections.3.weight",
    ):
        save_file(tensors | extra | {stray: torch.ones(1)}, tmp_path / "model.safetensors")
        assert sum(unused_tensors(tmp_path, checkpoint.config).values()) == len(extra) + 1, stray


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "gemma3n")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("model.layers.2.altup.correct_output_scale", "model.altup_unembed_projections.2.weight"):
        save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=name):
            load(checkpoint, LocalComm())


@pytest.mark.parametrize("checkpoint", ["plain"], indirect=True)
def test_ranks_hold_their_own_rows_of_the_input_table(checkpoint: Checkpoint) -> None:
    """201 rows of 5 x 12 elements: by far the largest tensor of a released model."""

    def body(comm: Comm) -> set[tuple[int, ...]]:
        shapes = {tuple(tensor.shape) for tensor in tensors_of(load(checkpoint, comm))}
        return {shape for shape in shapes if shape[-1:] == (60,)}

    assert sorted(run_ranks(4, body), key=str) == [{(50, 60)}, {(50, 60)}, {(50, 60)}, {(51, 60)}]


class Counting:
    """A rank's comm that notes what is summed."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.size, self.rank = comm.size, comm.rank
        self.summed: list[tuple[int, ...]] = []

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.summed.append(tuple(tensor.shape))
        return self._comm.all_reduce(tensor)


def gates(num_tokens: int, size: int) -> torch.Tensor:
    """Every token's of another mean and deviation."""
    torch.manual_seed(5)
    return torch.randn(num_tokens, size) * torch.rand(num_tokens, 1) * 4 + torch.randn(num_tokens, 1)


def transformers_cut(sparsity: float, size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    text = transformers.Gemma3nTextConfig(
        hidden_size=16, intermediate_size=size, num_hidden_layers=1, activation_sparsity_pattern=[sparsity]
    )
    return modeling_gemma3n.Gemma3nTextMLP(text)._gaussian_topk


def cut_by_ranks(sparsity: float, x: torch.Tensor, tp_size: int) -> torch.Tensor:
    """Gates [T, N] in shares as unlike as can be, cut with one sum of two numbers a token."""
    num_tokens, size = x.shape

    def body(comm: Comm) -> torch.Tensor:
        counting = Counting(comm)
        share = x.tensor_split(tp_size, dim=1)[comm.rank]
        cut = GateCut(sparsity, size, counting).of(share).apply(share)
        assert counting.summed == ([(num_tokens, 2)] if tp_size > 1 else [])
        return cut

    return torch.cat(run_ranks(tp_size, body), dim=1)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("sparsity", [0.02, 0.5, 0.95])
def test_gates_are_cut_as_transformers_cuts_them(sparsity: float, tp_size: int) -> None:
    """Over the gates of all ranks, which hold unlike numbers of them."""
    x = gates(6, 101)
    mine, theirs = cut_by_ranks(sparsity, x, tp_size), transformers_cut(sparsity, 101)
    assert_matches(mine, theirs(x.double()), theirs(x))
    kept = float((mine > 0).float().mean())
    assert kept == pytest.approx(1 - sparsity, abs=0.06)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("sparsity", [0.3, 0.95])
def test_gates_far_from_zero_are_cut_as_transformers_cuts_them(sparsity: float, tp_size: int) -> None:
    """A mean of a thousand deviations: its square hides theirs in float32."""
    torch.manual_seed(6)
    x = 100 + 0.1 * torch.randn(64, 101)
    x[::2] *= -1
    mine, theirs = cut_by_ranks(sparsity, x, tp_size), transformers_cut(sparsity, 101)
    assert_matches(mine, theirs(x.double()), theirs(x))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("size", [3, 7, 100, 101, 1000, 8192])
def test_nothing_is_left_of_gates_that_are_alike(size: int, tp_size: int) -> None:
    """What rounding makes of their variance, which is 0, may be negative, and has no root then."""
    alike = torch.tensor([0.1, 1 / 3, -0.1, -2 / 3, 1e-3, 100.1, -7e5, 1e19, 0.0])
    x = alike[:, None].expand(-1, size).contiguous()
    for sparsity in (0.02, 0.5, 0.95):
        assert torch.equal(cut_by_ranks(sparsity, x, tp_size), torch.zeros_like(x))
        # In float32 theirs leaves a bit of rounding.
        left = transformers_cut(sparsity, size)(x.double()) / x.abs().clamp(min=1e-9)
        assert float(left.max()) < 1e-13

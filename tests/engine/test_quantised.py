"""Engines that keep quantised keys and values: right against transformers with a rounding cache, and as they
must be across tensor parallelism, chunks and transfers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from rayk.engine.build import ThreadEngine
from rayk.kernels.quantise import QuantisedKV
from rayk.kv.formats import FORMATS
from rayk.kv.groups import measure_waste
from rayk.models.families import load_config
from rayk.models.kv_specs import engine_groups, engine_specs
from rayk.oracle.checkpoint import read_marker
from rayk.types.config import EngineConfig
from rayk.types.errors import CheckpointError, HandshakeMismatch, KVMismatch, Unsupported
from tests.engine.fake_quantised import RoundingCache
from tests.pd import HANG_S, NAN_POISON, Pair, make_request

SETTINGS: dict[str, dict[str, str]] = {
    "fp8_e4m3": {"kv_dtype": "fp8_e4m3"},
    "fp8_e4m3_token_head": {"kv_dtype": "fp8_e4m3", "kv_scales": "token_head"},
    "nvfp4": {"kv_dtype": "nvfp4"},
}
FAMILIES = ("qwen3", "gemma3", "gpt_oss", "mistral")
"""Plain attention; windows; sinks; a window in every layer."""
NUM_TOKENS = 8


def prompts_of(path: Path) -> list[list[int]]:
    """The probes of 5 and 37 tokens."""
    return [probe["prompt"] for probe in read_marker(path)["probes"]][:2]


def with_scales(
    path: Path, folder: Path, names: tuple[str, str], of: Callable[[int], tuple[float, float]]
) -> Path:
    """A copy of a checkpoint with scales of every layer under the given names."""
    shutil.copytree(path, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(load_config(path).num_layers):
        for name, scale in zip(names, of(layer), strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def scales_of(layer: int) -> tuple[float, float]:
    return 0.75 + 0.1 * layer, 2.0 - 0.3 * layer


def rounded_once(of: Callable[[int], tuple[float, float]]) -> Callable[[int], tuple[float, float]]:
    """As float32, what a checkpoint holds."""
    return lambda layer: (float(torch.tensor(of(layer)[0])), float(torch.tensor(of(layer)[1])))


def run(path: Path, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, **config: Any) -> list[Any]:
    settings = {"num_blocks": 64, "model": str(path), **config}
    with ThreadEngine(EngineConfig(**settings), poison=NAN_POISON, timeout_s=HANG_S) as engine:
        requests = [make_request(f"r{i}", p, num_tokens, prompt_logprobs=0) for i, p in enumerate(prompts)]
        done = engine.generate(requests)
    assert all(d.error is None for d in done), done
    return done


def told(done: Any) -> Tensor:
    """The prompt's log probabilities, from its second token on."""
    return torch.tensor([entry.logprob for entry in done.prompt_logprobs[1:]], dtype=torch.float64)


def forced(model: Any, prompt: list[int], cache: Any = None) -> Tensor:
    """The same of transformers, with a cache or without."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), past_key_values=cache).logits[0].double()
    return logits.log_softmax(-1)[torch.arange(len(prompt) - 1), prompt[1:]]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_cache_that_rounds_so(
    checkpoint: Callable[..., Path], family: str, name: str
) -> None:
    """Teacher-forced. Where a last-bit difference flips no element to the next step, log probabilities agree
    to 1e-5; where one flips, RMS 2% of what rounding itself does to them (measured). The bound is 10%."""
    path = checkpoint(family)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    prompts = prompts_of(path)
    for prompt, done in zip(prompts, run(path, prompts, **SETTINGS[name]), strict=True):
        exact = forced(model, prompt)
        wanted = forced(model, prompt, RoundingCache(name, lambda _: (1.0, 1.0)))
        moved = (wanted - exact).square().mean().sqrt()
        off = (told(done) - wanted).square().mean().sqrt()
        assert moved > 1e-4, "rounding must show"
        assert off < 0.1 * moved, (off, moved)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")], ids=str)
def test_scales_come_from_the_checkpoint(
    checkpoint: Callable[..., Path], tmp_path: Path, names: tuple[str, str], name: str
) -> None:
    path = with_scales(checkpoint("qwen3"), tmp_path / "scaled", names, scales_of)
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen3"), attn_implementation="eager").eval()
    prompt = prompts_of(path)[1]
    (done,) = run(path, [prompt], **SETTINGS[name])
    exact, unscaled = forced(model, prompt), forced(model, prompt, RoundingCache(name, lambda _: (1.0, 1.0)))
    wanted = forced(model, prompt, RoundingCache(name, rounded_once(scales_of)))
    off = (told(done) - wanted).square().mean().sqrt()
    assert off < 0.1 * (wanted - exact).square().mean().sqrt()
    assert off < 0.1 * (wanted - unscaled).square().mean().sqrt(), "the scales must show"


def test_scales_do_not_matter_where_nothing_is_rounded_by_them(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = with_scales(checkpoint("qwen3"), tmp_path / "scaled", ("k_scale", "v_scale"), scales_of)
    for settings in ({}, SETTINGS["fp8_e4m3_token_head"]):
        plain, scaled = (run(p, prompts_of(path), **settings) for p in (checkpoint("qwen3"), path))
        assert [d.token_ids for d in plain] == [d.token_ids for d in scaled]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_scales_nothing_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, scale: float
) -> None:
    path = with_scales(
        checkpoint("qwen3"), tmp_path / "bad", ("k_scale", "v_scale"), lambda layer: (1.0, scale)
    )
    with pytest.raises(CheckpointError, match=r"self_attn\.v_scale is"):
        run(path, [[5, 6, 7]], **SETTINGS["fp8_e4m3"])


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (2, 4)], ids=str)
def test_scales_move_with_what_they_scale(
    checkpoint: Callable[..., Path], tp: tuple[int, int], name: str
) -> None:
    """Digests agree field by field, or the pair would fail; tokens are those of one engine with P's TP."""
    path = checkpoint("gemma3")
    prompts = prompts_of(path)
    layouts = ("BHLNC", "LBNHC")
    with Pair.open(path, tp=tp, layouts=layouts, block_size=16, **SETTINGS[name]) as pair:
        found = pair.generate(prompts, NUM_TOKENS)
        fields = {
            f.field.name for e in pair.d.engine.ranks for g in e.caches.geometry.groups for f in g.fields
        }
        pair.check_all_free()
    assert fields == {"k", "v"} if name == "fp8_e4m3" else {"k", "v", "k_scale", "v_scale"}
    assert found == [d.token_ids for d in run(path, prompts, tp=tp[0], **SETTINGS[name])]


@pytest.mark.parametrize("field", ["k_scale", "v_scale"])
@pytest.mark.parametrize("name", ["fp8_e4m3_token_head", "nvfp4"])
def test_a_wrong_byte_of_a_scale_is_caught(checkpoint: Callable[..., Path], name: str, field: str) -> None:
    path = checkpoint("qwen3")
    with Pair.open(path, tp=(1, 2), **SETTINGS[name]) as pair:
        request = make_request("r", prompts_of(path)[1], NUM_TOKENS)
        prefilled = pair.prefill(request)
        ticket = prefilled.payload
        layer = pair.p.engine.ranks[0].decoder.attention_layers[2]
        assert isinstance(layer.kv_cache, QuantisedKV)
        view = layer.kv_cache.fields()[field].view(torch.uint8)
        # Token 19, head 1: after P told its digests, and until D has read.
        view[ticket.block_tables[0][1], 1, 3, 0] ^= 1
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, KVMismatch), done
        view[ticket.block_tables[0][1], 1, 3, 0] ^= 1
        where = pair.explain("r", ticket)
        assert (where.layer, where.field, where.head, where.token) == (2, field, 1, 19)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_engines_with_other_scales_do_not_meet(
    checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """Each layer that differs is named, with both sides' scales."""
    plain = checkpoint("qwen3")
    scaled = with_scales(
        plain, tmp_path / "scaled", ("k_scale", "v_scale"), lambda n: (1.0, 2.0 if n == 2 else 1.0)
    )
    with (
        Pair.open((plain, scaled), connect=False, **SETTINGS[name]) as pair,
        pytest.raises(HandshakeMismatch) as caught,
    ):
        pair.connect()
    named = {key: (ours, theirs) for key, ours, theirs in caught.value.fields if "kv_scales" in key}
    assert named == {"layer 2.attention.kv_scales": ("k 1.0, v 1.0", "k 1.0, v 2.0")}


@pytest.mark.parametrize("name", SETTINGS)
def test_states_keep_their_own_dtypes_and_share_blocks_with_quantised_pages(
    checkpoint: Callable[..., Path], name: str
) -> None:
    """falcon_h1 has attention and a state in each layer."""
    path = checkpoint("falcon_h1")
    plain = EngineConfig(model=str(path))
    config = EngineConfig(model=str(path), **SETTINGS[name])  # type: ignore[arg-type]
    model = load_config(path)
    states = {key: spec for key, spec in engine_specs(config, model).items() if not spec.has_token_rows}
    assert states
    assert states == {key: spec for key, spec in engine_specs(plain, model).items() if key in states}
    pages = {g.spec.kind: g.spec for g in engine_groups(config, model)}
    before = {g.spec.kind: g.spec for g in engine_groups(plain, model)}
    # Rows are smaller, and so more tokens fill a block beside the same state.
    assert pages["full"].block_size >= 2 * before["full"].block_size
    assert measure_waste(engine_groups(config, model)).percent < 8
    (done,) = run(path, prompts_of(path)[:1], **SETTINGS[name])
    assert len(done.token_ids) == NUM_TOKENS


def test_what_a_format_cannot_hold_is_refused_by_name(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(Unsupported, match="nvfp4 of latents of 32 and 8 elements: 16 elements share a scale"):
        run(checkpoint("deepseek_v3"), [[5, 6]], **SETTINGS["nvfp4"])
    with pytest.raises(Unsupported, match="16 elements share a scale"):
        FORMATS["nvfp4"].fields(24, 16)
    with pytest.raises(Unsupported, match="multiple of 4 bytes"):
        FORMATS["fp8_e4m3_token_head"].fields(5, 6)

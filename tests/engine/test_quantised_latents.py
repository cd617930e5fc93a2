"""Engines that keep quantised latents (MLA): right against transformers with a cache that rounds its latents
and rotated keys, with the checkpoint's scale for both, and across tensor parallelism and transfers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayk.kernels.quantise import QuantisedKV
from rayk.models.layers.mla import Mla
from rayk.oracle.kv_scales import checkpoint_kv_scales
from rayk.types.errors import HandshakeMismatch, KVMismatch
from tests.engine.fake_quantised import RoundingCache
from tests.engine.test_quantised import (
    NUM_TOKENS,
    SETTINGS,
    forced,
    prompts_of,
    rounded_once,
    run,
    scales_of,
    told,
    with_scales,
)
from tests.pd import Pair, make_request

Checkpoints = Callable[..., Path]


def deepseek(checkpoint: Checkpoints) -> Path:
    """With rotated keys that are whole blocks of 16."""
    return checkpoint("deepseek_v3", overrides={"qk_rope_head_dim": 16})


def reference(path: Path) -> Any:
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **options).eval()


def one_scale(layer: int) -> tuple[float, float]:
    """Of the latent, and as it is for its rotated key."""
    return rounded_once(scales_of)(layer)[0], rounded_once(scales_of)(layer)[0]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_a_cache_that_rounds_so(checkpoint: Checkpoints, name: str, tp: int) -> None:
    """Teacher-forced, as of keys and values."""
    path = deepseek(checkpoint)
    model, prompts = reference(path), prompts_of(path)
    for prompt, done in zip(prompts, run(path, prompts, tp=tp, **SETTINGS[name]), strict=True):
        exact = forced(model, prompt)
        wanted = forced(model, prompt, RoundingCache(name, lambda _: (1.0, 1.0)))
        moved = (wanted - exact).square().mean().sqrt()
        off = (told(done) - wanted).square().mean().sqrt()
        assert moved > 1e-4, "rounding must show"
        assert off < 0.1 * moved, (off, moved)


@pytest.mark.parametrize("name", ["fp8_e4m3", "nvfp4"])
def test_the_keys_scale_is_the_latents(checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    """A latent and its rotated key have one scale in common; that of values is not used."""
    plain = deepseek(checkpoint)
    path = with_scales(plain, tmp_path / "scaled", ("k_scale", "v_scale"), scales_of)
    model, prompt = reference(plain), prompts_of(plain)[1]
    (done,) = run(path, [prompt], **SETTINGS[name])
    unscaled = forced(model, prompt, RoundingCache(name, lambda _: (1.0, 1.0)))
    wanted = forced(model, prompt, RoundingCache(name, one_scale))
    off = (told(done) - wanted).square().mean().sqrt()
    assert off < 0.1 * (wanted - unscaled).square().mean().sqrt(), "the scales must show"
    found = checkpoint_kv_scales(path)
    assert found == {layer: one_scale(layer) for layer in found}
    assert len(found) == model.config.num_hidden_layers


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (2, 4)], ids=str)
def test_quantised_latents_move_at_any_tp(checkpoint: Checkpoints, tp: tuple[int, int], name: str) -> None:
    """Digests agree field by field, or the pair would fail; tokens are those of one engine with P's TP."""
    path = deepseek(checkpoint)
    prompts = prompts_of(path)
    with Pair.open(path, tp=tp, layouts=("BHLNC", "LBNHC"), block_size=16, **SETTINGS[name]) as pair:
        found = pair.generate(prompts, NUM_TOKENS)
        geometries = [rank.caches.geometry for rank in pair.d.engine.ranks]
        fields = {f.field.name for geometry in geometries for g in geometry.groups for f in g.fields}
        pair.check_all_free()
    scales = set() if name == "fp8_e4m3" else {"latent_scale", "rope_scale"}
    assert fields == {"latent", "rope"} | scales
    assert found == [d.token_ids for d in run(path, prompts, tp=tp[0], **SETTINGS[name])]


@pytest.mark.parametrize(
    ("name", "field"),
    [("fp8_e4m3", "latent"), ("fp8_e4m3_token_head", "rope_scale"), ("nvfp4", "latent_scale")],
)
def test_a_wrong_byte_is_caught(checkpoint: Checkpoints, name: str, field: str) -> None:
    path = deepseek(checkpoint)
    with Pair.open(path, tp=(1, 2), **SETTINGS[name]) as pair:
        request = make_request("r", prompts_of(path)[1], NUM_TOKENS)
        prefilled = pair.prefill(request)
        ticket = prefilled.payload
        layer = pair.p.engine.ranks[0].decoder.cache_owners[2, "attention"]
        assert isinstance(layer, Mla)
        assert isinstance(layer.kv_cache, QuantisedKV)
        view = layer.kv_cache.fields()[field].view(torch.uint8)
        # Token 19: after P told its digests, and until D has read.
        view[ticket.block_tables[0][1], 0, 3, 0] ^= 1
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, KVMismatch), done
        view[ticket.block_tables[0][1], 0, 3, 0] ^= 1
        where = pair.explain("r", ticket)
        assert (where.layer, where.field, where.head, where.token) == (2, field, 0, 19)


def test_engines_with_other_scales_do_not_meet(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The one that both use is told for both; another scale of values differs from nothing."""
    plain = deepseek(checkpoint)
    scales = {1: (1.0, 7.0), 2: (0.5, 1.0)}
    scaled = with_scales(
        plain, tmp_path / "scaled", ("k_scale", "v_scale"), lambda n: scales.get(n, (1.0, 1.0))
    )
    with (
        Pair.open((plain, scaled), connect=False, **SETTINGS["fp8_e4m3"]) as pair,
        pytest.raises(HandshakeMismatch) as caught,
    ):
        pair.connect()
    named = {key: (ours, theirs) for key, ours, theirs in caught.value.fields if "kv_scales" in key}
    assert named == {"layer 2.attention.kv_scales": ("k 1.0, v 1.0", "k 0.5, v 0.5")}

"""The fault `wrong_kv`: P computes wrong KV. Digests agree; `kv_values` names layer, head, token, culprit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.experiments.compare import ValueComparison, compare_values, measure_values
from rayk.experiments.noise import ROUTED_ROWS, broken, measure
from rayk.experiments.references import References
from rayk.handover.planted import PlantedFault, commit_wrong_kv
from rayk.models.decoder import Decoder
from rayk.models.families import load_config
from rayk.types.errors import KVMismatch
from tests.experiments.teacher import handed_over, prompts_of
from tests.pd import Pair

NUM_TOKENS = 37
"""Of the prompt: two blocks of 16 and 5 tokens."""


def compare_with_fault(
    path: Path,
    point: str,
    layer: int,
    *,
    tp: int = 1,
    rank: int = 0,
    dtype: str = "float32",
    commit: Callable[[Decoder, Sequence[PlantedFault]], None] = commit_wrong_kv,
) -> ValueComparison:
    """Prefill and hand over one prompt, with the fault at one rank of P."""
    config, prompts = load_config(path), prompts_of(path)
    routed = config.is_routed
    references = References(str(path), None, dtype, routed=routed)
    prompt = prompts[1]
    # As a worker's memory is: what nobody wrote is zero.
    with Pair.open(path, tp=(tp, 1), dtype=dtype, poison=0) as pair:
        engine_rank = pair.p.engine.ranks[rank]
        fault = PlantedFault(kind="wrong_kv", point=point, layer=layer)
        pair.p.run(lambda: commit(engine_rank.decoder, [fault]))
        # D takes the bytes for right: as bytes, they are.
        _, (captured,) = handed_over(pair, [prompt])
        groups = engine_rank.plan.groups
    assert len(prompt) == NUM_TOKENS
    bounds = measure_values(references, prompts[:2], config)
    return compare_values(
        "r", captured, references.kv(prompt), groups, len(prompt), bounds=bounds, model=config
    )


def place(mismatch: KVMismatch | None) -> tuple[int, str, int, int]:
    assert mismatch is not None
    return mismatch.layer, mismatch.field, mismatch.head, mismatch.token


K_NORM = "k-norm weight: un-rotated keys are off by one factor per channel"
ROPE = "rope: positions are off by +1"
STORE = "store_kv: token t holds token t-1 (3 of 37 wrong tokens hold something else)"


@pytest.mark.parametrize(
    ("model", "point", "layer", "why"),
    [
        ("qwen3", "k_norm", 1, K_NORM),
        ("qwen3", "rope", 1, ROPE),
        ("qwen3", "store_kv", 1, STORE),
        # Layers with a rope of their own, and with one that scales.
        ("gemma3", "k_norm", 2, K_NORM),
        ("gemma3", "rope", 2, ROPE),
        ("gemma3", "rope", 3, ROPE),
        # Interleaved pairs; a layer without positions.
        ("cohere2", "rope", 1, ROPE),
        ("cohere2", "store_kv", 2, STORE),
        # Pairs of a part of the head; frequencies of longrope and yarn, which scale the keys too.
        ("phi3", "rope", 3, ROPE),
        ("gpt_oss", "rope", 1, ROPE),
        ("gpt_oss", "store_kv", 3, STORE),
        # Layers with a state beside their keys and values, whose blocks have more than 16 tokens.
        ("falcon_h1", "rope", 1, ROPE),
        ("falcon_h1", "store_kv", 1, "store_kv: token t holds token t-1 (1 of 37 wrong tokens"),
    ],
)
def test_the_culprit_is_named(
    checkpoint: Callable[..., Path], model: str, point: str, layer: int, why: str
) -> None:
    mismatch = compare_with_fault(checkpoint(model), point, layer).mismatch
    assert place(mismatch) == (layer, "k", 0, 0)
    assert why in mismatch.classification  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("point", "layer", "field", "why"),
    [("rope", 1, "rope", "rope: positions are off by +1"), ("store_kv", 2, "latent", STORE)],
)
def test_the_culprit_is_named_in_latents(
    checkpoint: Callable[..., Path], point: str, layer: int, field: str, why: str
) -> None:
    """Before and behind layers that route experts."""
    mismatch = compare_with_fault(checkpoint("deepseek_v3"), point, layer).mismatch
    assert place(mismatch) == (layer, field, 0, 0)
    assert why in mismatch.classification  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "point", "why"),
    [
        ("qwen3", "k_norm", K_NORM),
        ("qwen3", "rope", ROPE),
        ("qwen3", "store_kv", STORE),
        # Behind routed experts, where only medians are bounded.
        ("gpt_oss", "rope", ROPE),
        ("gpt_oss", "store_kv", STORE),
    ],
)
def test_the_culprit_is_named_in_bfloat16_at_the_rank_that_commits_it(
    checkpoint: Callable[..., Path], model: str, point: str, why: str
) -> None:
    """Rank 1 of 2 holds head 1."""
    mismatch = compare_with_fault(checkpoint(model), point, 2, tp=2, rank=1, dtype="bfloat16").mismatch
    assert place(mismatch) == (2, "k", 1, 0)
    assert why in mismatch.classification  # type: ignore[union-attr]
    if point == "rope":
        assert "(tokens 0 to 36 of head 1)" in mismatch.classification  # type: ignore[union-attr]


def stretch_keys(decoder: Decoder, faults: Sequence[PlantedFault]) -> None:
    """The layer's keys come out 1.1 times as long."""
    attention = decoder.attention_layers[faults[0].layer or 0]
    qkv, params = attention._weights.qkv, attention.params
    sizes = [n * params.head_size_k for n in (attention.num_query_heads, len(attention.kv_head_ids))]
    for part in (qkv.weight, qkv.bias):
        part[sizes[0] : sum(sizes)] *= 1.1


@pytest.mark.parametrize("commit", [stretch_keys, None])
def test_stretched_keys_show_in_float16_between_flipped_routes(
    checkpoint: Callable[..., Path], commit: Callable[[Decoder, Sequence[PlantedFault]], None] | None
) -> None:
    """Behind routed experts, where eager bfloat16's noise would hide them."""
    commit = commit or (lambda decoder, faults: None)
    found = compare_with_fault(checkpoint("gpt_oss"), "k_scale", 2, dtype="float16", commit=commit)
    if commit is stretch_keys:
        assert place(found.mismatch) == (2, "k", 0, 0)
        assert "k projection" in found.mismatch.classification  # type: ignore[union-attr]
        assert "1.1 times" in found.mismatch.classification  # type: ignore[union-attr]
    else:
        assert found.mismatch is None


def test_a_flipped_route_passes_in_a_prompt_too_short_to_meet_one_twice() -> None:
    """Rows of 5 tokens as far off as bfloat16's, where eager float16 met no flip; not those of 1000."""
    own, rough = torch.full((5,), 0.01), torch.full((5,), 0.1)
    bound = measure(own, floor=0.0, routed=ROUTED_ROWS, further=rough)
    flipped = torch.tensor([0.01, 0.2, 0.15, 0.3, 0.2])
    assert not broken(flipped, bound).any()
    assert broken(flipped.repeat(200), bound).sum() == 800
    assert broken(flipped, measure(own, floor=0.0, routed=ROUTED_ROWS)).sum() == 4


def test_faults_of_other_kinds_leave_the_decoder_alone(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("qwen3")
    with Pair.open(path) as pair:
        decoder = pair.p.engine.ranks[0].decoder
        layers = decoder.layers
        weights = [a.key_norm_weight for a in decoder.attention_layers.values()]
        before = [w.clone() for w in weights if w is not None]
        commit_wrong_kv(decoder, [PlantedFault(kind="kill", point="rope", layer=1)])
        assert decoder.layers is layers
        commit_wrong_kv(decoder, [PlantedFault(kind="wrong_kv", point="k_norm", layer=1)])
        after: list[Any] = [a.key_norm_weight for a in decoder.attention_layers.values()]
        changed = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
        assert changed == [False, True, False, False]
        assert torch.equal(after[1], before[1].roll(1, -1))

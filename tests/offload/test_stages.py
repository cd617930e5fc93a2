"""Engines of pipeline stages behind a host tier: what stages stored any other engine loads, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.engine.test_quantised import scales_of, with_scales
from tests.markers import one_per, sweep, thorough
from tests.offload.node import Node
from tests.pd import make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    family: (family, {}) for family in ("qwen3", "gemma3n", "falcon_h1", "deepseek_v3")
}


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


def load_what_the_other_stored(path: Path, prompt: list[int], engines: list[Any], **settings: Any) -> Any:
    """Tokens when each engine computes a prompt itself, and when it loads what the other one stored."""
    with Node.open(path, engines, **settings) as node:
        found = []
        for first, second in (node.engines, node.engines[::-1]):
            node.thread.ask(lambda tier: tier.clear())
            name = first.engine.name
            for engine in (first, second):
                (done,) = engine.complete([make_request(f"{name}-{engine.engine.name}", prompt, NUM_TOKENS)])
                node.settle()
                found.append(done.token_ids)
            assert done.info["num_host_tokens"] > len(prompt) // 2
            rows = done.info["transfers"]
            assert {row.consumer_rank for row in rows} == set(range(second.engine._config.num_ranks))
            assert not first.offloading.counts["stores_failed"], first.offloading.storing.last_failure
        assert "mismatches" not in node.status()
    return found


@sweep(3)
@one_per()
@pytest.mark.parametrize("outboxes", [False, True], ids=["blocks", "outboxes"])
@pytest.mark.parametrize(
    ("model", "engines"),
    [
        ("falcon_h1", ({"pp": 2, "state_block_size": 16}, {"tp": 2, "state_block_size": 16})),
        ("qwen3", ({"pp": 3, "layout": "LBHNC"}, {"tp": 2, "pp": 2})),
        ("deepseek_v3", ({"tp": 2, "dcp": 2, "pp": 2}, {"block_size": 32})),
        ("gemma3n", ({"pp": 2, "pp_layers": (2, 4)}, {"pp": 2, "pp_layers": (1, 5)})),
    ],
)
def test_what_stages_stored_others_load_and_back(
    answers: Callable[[str], Answers], model: str, engines: tuple[Any, Any], outboxes: bool
) -> None:
    found = answers(model)
    how: dict[str, Any] = {"common": {"num_blocks": 128}} | ({"outbox_bytes": 16 << 20} if outboxes else {})
    tokens = load_what_the_other_stored(found.path, found.prompts[-1], list(engines), **how)
    assert tokens == [found.expected[-1]] * 4


@thorough
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "nvfp4"])
def test_a_tier_knows_the_scales_of_all_stages(
    checkpoint: Callable[..., Path], tmp_path: Path, answers: Callable[[str], Answers], kv_dtype: str
) -> None:
    """It opens like an engine of which no rank has all of them."""
    path = with_scales(checkpoint("qwen3"), tmp_path / "scaled", ("k_scale", "v_scale"), scales_of)
    prompt = answers("qwen3").prompts[-1]
    engines: list[dict[str, Any]] = [{"pp": 2}, {"pp": 3, "pp_layers": (2, 1, 1)}, {}]
    with Node.open(path, engines, common={"kv_dtype": kv_dtype}) as node:
        assert len(node.thread.tier.description.kv_scales) == 4
    tokens = load_what_the_other_stored(path, prompt, engines[1:], common={"kv_dtype": kv_dtype})
    assert tokens == [tokens[0]] * 4

"""Every family passes `kv_values` and `logprobs` in every dtype, handed over between TP sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rayk.experiments.compare import UNBOUNDED, KVBounds, compare_values, measure_values
from rayk.experiments.logprobs import compare_logprobs
from rayk.experiments.references import References
from rayk.kv.fields import ITEMSIZE
from rayk.kv.groups import KVCacheGroup
from rayk.models.families import load_config
from rayk.oracle.cache import AnswerStore
from rayk.oracle.tiny import HYBRID
from rayk.types.request import SamplingParams
from tests.conftest import CHECKPOINTS
from tests.experiments.teacher import handed_over, prompts_of
from tests.families import ATTENTION
from tests.families import HYBRID as KEEP_STATES
from tests.markers import one_per, sweep
from tests.pd import Pair

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*ATTENTION, *KEEP_STATES)},
    "qwen3-hybrid": ("qwen3", {"overrides": dict(HYBRID)}),
}
TP = {"float32": (4, 1), "bfloat16": (2, 1), "float16": (1, 2)}
ALIKE = ("llama", "mistral", "qwen2", "qwen3-hybrid", "bamba", "falcon_h1", "granitemoehybrid", "qwen3_next")
"""They differ from others (qwen3, nemotron_h, jamba) in nothing that rounds: bfloat16 alone is not slow."""


def cases() -> list[Any]:
    """Every model in every dtype."""
    return [
        pytest.param(model, dtype, marks=pytest.mark.slow if model in ALIKE and dtype != "bfloat16" else ())
        for model in MODELS
        for dtype in TP
    ]


def test_every_model_is_checked_in_every_run() -> None:
    quick = [p.values for p in cases() if not p.marks]
    assert {model for model, dtype in quick if dtype == "bfloat16"} == set(MODELS)
    assert {model for model, dtype in quick if dtype != "bfloat16"} == set(MODELS) - set(ALIKE)


def num_judged(groups: Sequence[KVCacheGroup], tp: int, num_tokens: int, bounds: KVBounds) -> int:
    """Elements that P's ranks hold of a prompt, replicas counted, but for those that have no bound."""
    total = 0
    for group in groups:
        rows = 1 if group.spec.part == "state" else len(group.spec.live_rows(num_tokens))
        for field in group.spec.fields():
            num_units = sum(len(field.shard(tp, rank)) for rank in range(tp))
            judged = sum(bounds[layer, field.name] != UNBOUNDED for layer in group.layers)
            total += judged * num_units * rows * (field.row_bytes // ITEMSIZE[field.dtype])
    return total


@sweep(3)
@one_per()
@pytest.mark.parametrize(("model", "dtype"), cases())
def test_a_right_engine_passes(checkpoint: Callable[..., Path], model: str, dtype: str) -> None:
    family, options = MODELS[model]
    path = checkpoint(family, **options)
    config, prompts = load_config(path), prompts_of(path)[1:]
    routed = config.is_routed
    references = References(str(path), AnswerStore(CHECKPOINTS / "reference-cache"), dtype, routed=routed)
    with Pair.open(path, tp=TP[dtype], dtype=dtype, max_batch_tokens=64, num_blocks=64) as pair:
        rows, captured = handed_over(pair, prompts)
        groups = pair.p.engine.ranks[0].plan.groups
    compared = compare_logprobs(rows, references, SamplingParams())
    assert compared.reasons == ()
    assert (compared.output.num_checked, compared.prompt.num_checked) == (2 * 24, 36 + 299)
    bounds = measure_values(references, prompts, config)
    for index, prompt in enumerate(prompts):
        values = compare_values(
            str(index),
            captured[index],
            references.kv(prompt),
            groups,
            len(prompt),
            bounds=bounds,
            model=config,
        )
        assert values.mismatch is None
        assert values.num_values == num_judged(groups, TP[dtype][0], len(prompt), bounds)
        assert values.max_error_of_bound > 0
        # Flipped routes may lie beyond the bound, if they are few.
        assert values.max_error_of_bound < 1 or (routed and dtype != "float32")


def test_a_prompt_that_ends_with_a_chunk_is_judged_where_rows_live(checkpoint: Callable[..., Path]) -> None:
    """Nothing of chunked layers is live then, and of full ones all is."""
    path = checkpoint("llama4")
    config = load_config(path)
    chunk = next(layer.chunk for layer in config.layers if layer.chunk is not None)
    prompts = [prompts_of(path)[-1][: 2 * chunk]]
    references = References(str(path), AnswerStore(CHECKPOINTS / "reference-cache"), "float32", routed=True)
    with Pair.open(path, tp=(1, 2), max_batch_tokens=64, num_blocks=64) as pair:
        _, captured = handed_over(pair, prompts)
        groups = pair.p.engine.ranks[0].plan.groups
    bounds = measure_values(references, prompts, config)
    kept = references.kv(prompts[0])
    values = compare_values("0", captured[0], kept, groups, 2 * chunk, bounds=bounds, model=config)
    assert values.mismatch is None
    assert values.num_values == num_judged(groups, 1, 2 * chunk, bounds) > 0
    assert any(not g.spec.live_rows(2 * chunk) for g in groups)

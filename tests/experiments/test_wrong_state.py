"""The fault `wrong_kv` in recurrent layers: digests agree, `kv_values` names layer, field and culprit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rayk.experiments.compare import ValueComparison, compare_values
from rayk.experiments.references import References
from rayk.handover.planted import PlantedFault, commit_wrong_kv
from rayk.models.families import load_config
from rayk.oracle.cache import AnswerStore
from rayk.types.errors import KVMismatch
from tests.conftest import CHECKPOINTS
from tests.experiments.teacher import handed_over, prompts_of
from tests.pd import Pair

SHORT, LONG = 0, 1
"""Prompts of 5 and of 37 tokens."""


def compare_with_fault(path: Path, point: str, layer: int, *, tp: int = 1) -> list[ValueComparison]:
    """Prefill and hand over the long prompt and then the short one, with the fault at P's last rank."""
    config, prompts = load_config(path), prompts_of(path)
    references = References(str(path), AnswerStore(CHECKPOINTS / "reference-cache"))
    order = (LONG, SHORT)
    with Pair.open(path, tp=(tp, 1), num_blocks=64, poison=0) as pair:
        rank = pair.p.engine.ranks[-1]
        fault = PlantedFault(kind="wrong_kv", point=point, layer=layer)
        pair.p.run(lambda: commit_wrong_kv(rank.decoder, [fault]))
        # D takes the bytes for right: as bytes, they are.
        _, captured = handed_over(pair, [prompts[i] for i in order])
        groups = rank.plan.groups
    compared = []
    for rows, index in zip(captured, order, strict=True):
        prompt = prompts[index]
        others = {i: references.kv(prompts[i]) for i in order if i != index}
        truth = references.kv(prompt)
        compared.append(compare_values("r", rows, truth, groups, len(prompt), model=config, others=others))
    return compared


def found(mismatch: KVMismatch | None) -> tuple[int, str, int]:
    assert mismatch is not None
    return mismatch.layer, mismatch.field, mismatch.token


@pytest.mark.parametrize(
    ("model", "point", "layer", "field", "why"),
    [
        ("bamba", "swap_taps", 1, "conv_b", "store: conv_b holds conv_c"),
        ("qwen3_next", "swap_taps", 0, "conv_k", "store: conv_k holds conv_q"),
        ("mamba2", "shift_taps", 2, "conv_b", "taps: tap j of conv_b, conv_c, conv_x holds tap j-1"),
        ("jamba", "shift_taps", 3, "conv_x", "taps: tap j of conv_x holds tap j-1"),
        ("falcon_h1", "state_dtype", 1, "ssm", "dtype: ssm holds bfloat16 values, and is read as float32"),
        ("qwen3_next", "state_dtype", 1, "delta", "dtype: delta holds bfloat16 values"),
        ("jamba", "state_dtype", 3, "ssm", "dtype: ssm holds bfloat16 values"),
    ],
)
def test_the_culprit_is_named(
    checkpoint: Callable[..., Path], model: str, point: str, layer: int, field: str, why: str
) -> None:
    compared, _ = compare_with_fault(checkpoint(model), point, layer)
    assert found(compared.mismatch) == (layer, field, 36)
    assert why in compared.mismatch.classification  # type: ignore[union-attr]


def test_a_fault_at_one_rank_is_found_in_its_units(checkpoint: Callable[..., Path]) -> None:
    """Rank 1 of 2 holds the upper half of the heads and group 1."""
    compared, _ = compare_with_fault(checkpoint("bamba"), "swap_taps", 1, tp=2)
    assert found(compared.mismatch) == (1, "conv_b", 36)
    assert "layer 1, group 1, conv_b, group 1, token 36: " in str(compared.mismatch)
    assert "store: conv_b holds conv_c" in compared.mismatch.classification  # type: ignore[union-attr]


@pytest.mark.parametrize("model", ["mamba2", "jamba", "falcon_h1", "qwen3_next"])
def test_a_state_that_the_page_held_before_is_named(checkpoint: Callable[..., Path], model: str) -> None:
    """The first request begins in a page of zeros, the second in the first one's."""
    path = checkpoint(model)
    layer = load_config(path).state_layers[-1]
    first, second = compare_with_fault(path, "stale_state", layer)
    assert first.mismatch is None
    assert found(second.mismatch)[0] == layer
    assert "left over: the state began with that of request 1" in second.mismatch.classification  # type: ignore[union-attr]

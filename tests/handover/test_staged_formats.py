"""Quantised KV between engines of unlike pipeline stages: scales of all stages are known, and agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.oracle.checkpoint import read_marker
from rayk.types.errors import HandshakeMismatch
from tests.engine.test_quantised import scales_of, with_scales
from tests.handover.test_push_converted import FORMATS, Pages
from tests.markers import one_per, thorough
from tests.pd import Pair, make_request

NAMES = ("k_scale", "v_scale")
NUM_TOKENS = 8
Stages = tuple[int, ...]
"""Layers of each stage; none: one stage."""


@pytest.fixture(scope="module")
def scaled(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each layer has scales of its own: those of another would change what is stored."""
    return with_scales(checkpoint("qwen3"), tmp_path_factory.mktemp("scales") / "scaled", NAMES, scales_of)


def changes(formats: tuple[str, str], stages: tuple[Stages, Stages]) -> Any:
    return tuple(
        FORMATS[name] | ({"pp": len(layers), "pp_layers": layers} if layers else {})
        for name, layers in zip(formats, stages, strict=True)
    )


@one_per()
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(
    ("p", "d", "stages"),
    [
        ("fp8", "nvfp4", ((1, 3), (2, 1, 1))),
        ("fp8", "fp8", ((3, 1), (1, 3))),
        ("auto", "fp8", ((), (2, 2))),
        ("fp8", "auto", ((1, 1, 2), ())),
        ("nvfp4", "token-head", ((2, 2), (1, 3))),
    ],
)
def test_rows_are_those_of_engines_without_stages(
    scaled: Path, monkeypatch: pytest.MonkeyPatch, p: str, d: str, stages: tuple[Stages, Stages], push: bool
) -> None:
    """Converted or not, with the scales of every layer."""
    probe: list[int] = read_marker(scaled)["probes"][2]["prompt"]
    pages, found = Pages(monkeypatch), []
    for shapes in (((), ()), stages):
        with Pair.open(scaled, changes=changes((p, d), shapes), push=push, max_batch_tokens=64) as pair:
            prompts = probe[:5], probe[20:57], probe[60:170]
            done = pair.complete([make_request(f"r{i}", x, NUM_TOKENS) for i, x in enumerate(prompts)])
            pair.check_all_free()
        rows = [row for completion in done for row in completion.info["transfers"]]
        assert all(bool(row.convert_ns) == (p != d) for row in rows)
        found.append((pages.take(), [completion.token_ids for completion in done]))
    assert found[0] == found[1]
    assert bool(found[0][0]) == (p != d), "what is converted is seen"


@thorough
@pytest.mark.parametrize("stages", [((2, 2), (1, 3)), ((2, 2), ()), ((), (1, 3))], ids=str)
def test_a_scale_that_differs_is_named_by_whoever_has_its_layer(
    checkpoint: Callable[..., Path], scaled: Path, tmp_path: Path, stages: tuple[Stages, Stages]
) -> None:
    def others(layer: int) -> tuple[float, float]:
        k, v = scales_of(layer)
        return k, 4.0 if layer == 2 else v

    other = with_scales(checkpoint("qwen3"), tmp_path / "other", NAMES, others)
    with (
        Pair.open((scaled, other), connect=False, changes=changes(("fp8", "fp8"), stages)) as pair,
        pytest.raises(HandshakeMismatch) as caught,
    ):
        pair.connect()
    named = [name for name, _, _ in caught.value.fields if "kv_scales" in name]
    assert named == ["layer 2.attention.kv_scales"]

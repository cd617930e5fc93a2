"""Hand-overs between engines that deal tokens unlike: digests are equal, tokens are transformers'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.inputs import InputBuilder
from rayk.kv.geometry import RankGeometry
from rayk.parallel.shard import Stripe
from rayk.types.errors import KVMismatch
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.markers import one_per, sweep
from tests.pd import Pair, make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gemma3n": ("gemma3n", {}),
    "falcon_h1": ("falcon_h1", {}),
}
Shape = tuple[int, int, int]
"""TP, DCP, interleave."""


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


@sweep(2)
@one_per()
@pytest.mark.parametrize(
    ("model", "p", "d"),
    [
        ("llama", (4, 2, 1), (2, 1, 1)),
        ("llama", (1, 1, 1), (4, 2, 16)),
        ("deepseek_v3", (2, 2, 1), (4, 4, 2)),
        ("gpt_oss", (4, 2, 4), (1, 1, 1)),
        ("gemma3n", (1, 1, 1), (4, 2, 1)),
        ("falcon_h1", (4, 2, 1), (2, 1, 1)),
    ],
)
def test_tokens_are_transformers(answers: Callable[[str], Answers], model: str, p: Shape, d: Shape) -> None:
    found = answers(model)
    shapes = tuple({"dcp": dcp, "dcp_interleave": interleave} for _, dcp, interleave in (p, d))
    with Pair.open(found.path, tp=(p[0], d[0]), changes=shapes, max_batch_tokens=70) as pair:  # type: ignore[arg-type]
        assert pair.generate(found.prompts, NUM_TOKENS) == found.expected


@one_per()
@pytest.mark.parametrize(
    ("model", "p", "d"),
    [
        ("llama", (1, 1, 1), (4, 2, 16)),
        ("llama", (4, 2, 16), (4, 2, 1)),
        ("gpt_oss", (4, 2, 4), (1, 1, 1)),
        ("deepseek_v3", (2, 2, 16), (4, 4, 1)),
        ("falcon_h1", (1, 1, 1), (4, 2, 1)),
    ],
)
def test_pushed_tokens_are_transformers(
    answers: Callable[[str], Answers], model: str, p: Shape, d: Shape
) -> None:
    """Of a prompt of five tokens, dealt by sixteens, half of the ranks have none: they write, or are written,
    nothing, and say so all the same."""
    found = answers(model)
    shapes = tuple({"dcp": dcp, "dcp_interleave": interleave} for _, dcp, interleave in (p, d))
    tp = p[0], d[0]
    with Pair.open(found.path, tp=tp, changes=shapes, push=True, max_batch_tokens=70) as pair:  # type: ignore[arg-type]
        assert pair.generate(found.prompts, NUM_TOKENS) == found.expected
        pair.check_all_free()


def deal_by_twos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank that deals tokens one by one computes its slots as if they were dealt two by two; its
    geometry, of which page maps are made, is right."""
    original = InputBuilder.__init__

    def planted(self: InputBuilder, geometry: RankGeometry, **more: Any) -> None:
        original(self, geometry, **more)
        self.tokens = tuple(
            replace(t, interleave=2) if isinstance(t, Stripe) and t.num_shards > 1 else t for t in self.tokens
        )

    monkeypatch.setattr(InputBuilder, "__init__", planted)


def test_slots_of_another_interleave_at_d_are_named(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D's kernels have tokens 0, 1, 4, 5 where the map brings 0, 2, 4, 6: digests that took the map's word
    for it would agree, and only the tokens would be wrong."""
    deal_by_twos(monkeypatch)
    found = answers("llama")
    with Pair.open(found.path, tp=(1, 4), changes=({}, {"dcp": 2}), max_batch_tokens=70) as pair:
        request = make_request("r", found.prompts[0])
        prefilled = pair.prefill(request)
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, KVMismatch), done
        first = pair.explain("r", prefilled.payload)  # type: ignore[arg-type]
        assert (first.layer, first.field, first.head, first.token) == (0, "k", 0, 1)
        assert first.classification == "rows shifted: token t holds token t+1"


def test_slots_of_another_interleave_at_p_are_named(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P computes right tokens: it writes and reads by one rule. What D reads are others' rows."""
    deal_by_twos(monkeypatch)
    found = answers("llama")
    with Pair.open(found.path, tp=(4, 1), changes=({"dcp": 2}, {}), max_batch_tokens=70) as pair:
        request = make_request("r", found.prompts[0])
        prefilled = pair.prefill(request)
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, KVMismatch), done
        first = pair.explain("r", prefilled.payload)  # type: ignore[arg-type]
        assert (first.layer, first.field, first.head, first.token) == (0, "k", 0, 1)

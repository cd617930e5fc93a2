"""Log probabilities of somebody else's text against one forward pass of transformers, in every dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rayk.oracle.cache import AnswerStore
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.reference import Reference
from rayk.types.errors import UserError
from tests.conftest import CheckpointFactory

OUTPUT = [7, 300, 11, 11, 42]


@pytest.fixture(scope="module")
def path(checkpoint: CheckpointFactory) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def prompt(path: Path) -> list[int]:
    return list(read_marker(path)["probes"][1]["prompt"])


def logits_of(path: Path, token_ids: list[int], dtype: torch.dtype, weights: torch.dtype) -> torch.Tensor:
    """float64 [tokens, vocabulary], by transformers alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=weights)
    if weights != dtype:  # a cast of everything would round the rotary frequencies too
        model = model.to(dtype)
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].double()


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [("float32", None), ("bfloat16", None), ("float16", None), ("float32", "bfloat16")],
)
def test_every_token_but_the_first_is_scored(
    path: Path, prompt: list[int], dtype: str, weights: str | None
) -> None:
    text = prompt + OUTPUT
    scores = Reference(path, dtype, weights_dtype=weights).score(prompt, OUTPUT)
    expected = logits_of(path, text[:-1], getattr(torch, dtype), getattr(torch, weights or dtype))
    logprobs = expected.log_softmax(-1)[torch.arange(len(text) - 1), text[1:]]
    found = torch.tensor(scores.prompt_logprobs + scores.output_logprobs, dtype=torch.float64)
    assert len(scores.output_logprobs) == len(scores.output_gaps) == len(OUTPUT)
    torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-4)
    gaps = expected[-len(OUTPUT) :].max(-1).values - expected[range(-len(OUTPUT), 0), OUTPUT]
    torch.testing.assert_close(torch.tensor(scores.output_gaps).double(), gaps, rtol=0, atol=1e-4)


def test_rounded_weights_are_not_the_checkpoints(path: Path, prompt: list[int]) -> None:
    """Nor is exact arithmetic on rounded weights the same as rounded arithmetic."""
    scores = [
        Reference(path, dtype, weights_dtype=weights).score(prompt, OUTPUT).prompt_logprobs
        for dtype, weights in (("float32", None), ("float32", "bfloat16"), ("bfloat16", None))
    ]
    whole, exact, rounded = (torch.tensor(s) for s in scores)
    assert (whole - exact).abs().max() > 0.01
    assert (rounded - exact).abs().max() > 0.01


def test_answers_are_kept_apart_by_the_weights_dtype(path: Path, prompt: list[int], tmp_path: Path) -> None:
    asked = [
        Reference(path, weights_dtype=weights, answers=AnswerStore(tmp_path)).score(prompt, OUTPUT)
        for weights in (None, "bfloat16", None, "bfloat16")
    ]
    assert asked[0] == asked[2] != asked[1] == asked[3]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_prompt_alone_and_the_shortest_text(path: Path, prompt: list[int]) -> None:
    reference = Reference(path)
    alone = reference.score(prompt, [])
    assert len(alone.prompt_logprobs) == len(prompt) - 1
    assert alone.output_logprobs == ()
    assert reference.score(prompt[:1], []).prompt_logprobs == ()


def test_bad_dtypes_and_ids_are_refused(path: Path, prompt: list[int]) -> None:
    with pytest.raises(UserError, match="dtype 'int8'"):
        Reference(path, weights_dtype="int8")
    with pytest.raises(UserError, match="outside the vocabulary"):
        Reference(path).score(prompt, [10**6])

"""Tiny checkpoints with what transformers says of the prompts they were tuned on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rayk.oracle.checkpoint import read_marker

Models = Mapping[str, tuple[str, dict[str, Any]]]
"""A name of our own -> family, and options of its checkpoint."""

PROMPT_LENGTHS = (5, 37, 300)
NUM_TOKENS = 24


class Answers(NamedTuple):
    """A checkpoint, the prompts and what transformers says."""

    path: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def make_answers(
    models: Models, checkpoint: Callable[..., Path], reference: Callable[..., Any]
) -> Callable[[str], Answers]:
    """By model name; each asked once. `checkpoint`, `reference`: the fixtures."""
    made: dict[str, Answers] = {}

    def make(model: str) -> Answers:
        if model not in made:
            family, options = models[model]
            path = checkpoint(family, **options)
            # The prompts that the checkpoint was tuned on: greedy output without near ties.
            prompts = [probe["prompt"] for probe in read_marker(path)["probes"]]
            assert tuple(len(p) for p in prompts) == PROMPT_LENGTHS
            outputs = reference(path).generate(prompts, NUM_TOKENS, ignore_eos=True)
            assert min(min(o.margins) for o in outputs) > 0.03, "no near ties: a wrong token is a bug"
            made[model] = Answers(path, prompts, [list(o.token_ids) for o in outputs])
        return made[model]

    return make

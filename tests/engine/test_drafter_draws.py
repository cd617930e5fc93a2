"""What is drawn with a drafter on ranks that draws, too, has the distribution of transformers' logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rayk.engine import rejecting
from rayk.types.request import SamplingParams
from rayk.types.speculative import SpeculativeConfig
from tests.engine.statistics import P_VALUE, chi_square_p
from tests.engine.test_sampling import Oracle, engine, transformers_scores
from tests.engine.test_speculative import num_drafted_and_accepted
from tests.markers import thorough
from tests.pd import make_request

PROMPT = [5, 77, 300]
PARAMS: dict[str, Any] = {"temperature": 1.5, "top_k": 3}
NUM_TOKENS = 4
"""One of the prompt's step, two that are proposed at once, and the one after them."""
JUDGED = 3


@pytest.fixture(scope="module")
def oracle(checkpoint: Callable[..., Path]) -> Oracle:
    return Oracle(checkpoint("qwen3"))


@pytest.fixture(scope="module")
def drafts(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> SpeculativeConfig:
    """The model with noise on its weights, which says much the same, drafts for it."""
    folder = tmp_path_factory.mktemp("drafts") / "noisy"
    shutil.copytree(oracle.path, folder)
    generator = torch.Generator().manual_seed(3)
    for file in folder.glob("*.safetensors"):
        noisy = {
            name: tensor + 0.1 * float(tensor.std()) * torch.randn(tensor.shape, generator=generator)
            for name, tensor in load_file(file).items()
        }
        save_file(noisy, file, metadata={"format": "pt"})
    return SpeculativeConfig(method="draft", model=str(folder), num_tokens=2, accept="rejection")


def wanted_of(oracle: Oracle) -> dict[tuple[int, ...], float]:
    """Of the first tokens, all that may be said, and how likely it is."""
    params, found = SamplingParams(**PARAMS), {(): 1.0}
    for _ in range(JUDGED):
        more: dict[tuple[int, ...], float] = {}
        for said, p in found.items():
            logits = oracle.logits([*PROMPT, *said])[-1].double()
            scores = transformers_scores(logits, params).softmax(-1)
            more |= {(*said, int(t)): p * float(scores[t]) for t in scores.nonzero()[:, 0]}
        found = more
    return found


def draw(
    oracle: Oracle, drafts: SpeculativeConfig, num_draws: int, **shape: Any
) -> tuple[list[tuple[int, ...]], float]:
    """What requests of as many seeds say first, and the part of the drafts that was accepted."""
    more = {"max_seqs": 128, "max_batch_tokens": 512, "num_blocks": 258, "speculative": drafts}
    with engine(oracle, **more | shape) as made:
        done = made.generate(
            make_request(f"r{seed}", PROMPT, NUM_TOKENS, seed=seed, **PARAMS) for seed in range(num_draws)
        )
        drafted, accepted = num_drafted_and_accepted(made)
    return [tuple(one.token_ids[:JUDGED]) for one in done], accepted / drafted


def sums_of(wanted: dict[tuple[int, ...], float], length: int) -> dict[tuple[int, ...], float]:
    """How likely each beginning of so many tokens is."""
    found: dict[tuple[int, ...], float] = {}
    for tokens, p in wanted.items():
        found[tokens[:length]] = found.get(tokens[:length], 0.0) + p
    return found


def fit(said: Sequence[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    order = {tokens: i for i, tokens in enumerate(wanted)}
    counts = torch.zeros(len(order))
    for tokens in said:
        counts[order[tokens]] += 1
    return chi_square_p(counts, torch.tensor(list(wanted.values()), dtype=torch.float64))


@thorough
@pytest.mark.parametrize("shape", [{}, {"tp": 2}], ids=str)
def test_20000_draws_have_the_references_distribution(
    oracle: Oracle, drafts: SpeculativeConfig, shape: dict[str, Any]
) -> None:
    wanted = wanted_of(oracle)
    said, accepted = draw(oracle, drafts, 20_000, **shape)
    assert 0.1 < accepted < 0.95, "some are kept, and some are not"
    assert fit(said, wanted) > P_VALUE
    firsts, seconds = (sums_of(wanted, length) for length in (1, 2))
    # The test would see a proposed token kept once too often in twenty draws: one that is seldom right.
    worst = {tokens[:1]: tokens[1] for tokens in sorted(seconds, key=seconds.__getitem__, reverse=True)}
    biased = {
        tokens: p
        * (0.95 + 0.05 * (tokens[1] == worst[tokens[:1]]) * firsts[tokens[:1]] / seconds[tokens[:2]])
        for tokens, p in wanted.items()
    }
    assert fit(said, biased) < P_VALUE


@thorough
def test_a_drafter_that_hides_what_it_drew_from_is_found(
    oracle: Oracle, drafts: SpeculativeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verified as sure ones, drawn proposals bend the distribution."""
    probabilities = rejecting._draft_probabilities

    def sure(rows: Any, ids: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
        return torch.where(ids == drafted, probabilities(rows, ids, drafted), 0.0)

    monkeypatch.setattr(rejecting, "_draft_probabilities", sure)
    said, _ = draw(oracle, drafts, 20_000)
    assert fit(said, wanted_of(oracle)) < P_VALUE


def test_equal_seeds_say_the_same_at_any_tp(oracle: Oracle, drafts: SpeculativeConfig) -> None:
    """The quick case: 200 draws, each among what may be said."""
    wanted = wanted_of(oracle)
    said, accepted = draw(oracle, drafts, 200)
    assert 0.1 < accepted < 0.95
    assert set(said) <= set(wanted)
    assert len(set(said)) > 5
    assert draw(oracle, drafts, 200, tp=2) == (said, accepted)

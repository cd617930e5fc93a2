"""What is drawn, scored and held to forms does not depend on drafts: the same tokens with any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.types.request import SamplingParams
from rayk.types.speculative import SpeculativeConfig
from tests.drafts import NGRAM, Prophet
from tests.engine import test_structured as structured
from tests.engine.statistics import P_VALUE, chi_square_p
from tests.engine.test_sampling import (
    KINDS,
    LARGE_P,
    NUM_TOKENS,
    SHORT_D,
    Oracle,
    run_requests,
    transformers_scores,
)
from tests.engine.test_sampling import engine as engine_of
from tests.helpers import assert_matches
from tests.markers import one_per, thorough
from tests.pd import make_request

SETUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tp1": (1, {"num_blocks": 200}),
    "tp2 chunks and preemptions": (2, {"num_blocks": 26, "max_batch_tokens": 64}),
    "p1 d2": ((1, 2), {"num_blocks": 200}),
    "p2 d1, preemptions": ((2, 1), {"block_size": 4, "changes": (LARGE_P, SHORT_D)}),
}


@pytest.fixture(scope="module")
def oracle(checkpoint: Callable[..., Path]) -> Oracle:
    return Oracle(checkpoint("qwen3"))


@one_per()
@pytest.mark.parametrize("setup", SETUPS)
def test_a_seed_gives_the_tokens_that_it_gives_without_drafts(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, setup: str
) -> None:
    """Of all kinds in one batch, from transformers' logits and processors."""
    tp, config = SETUPS[setup]
    asked = []
    for n, prompt in enumerate(oracle.prompts):
        asked += [(prompt, {**kind, "seed": 100 * n + i}) for i, kind in enumerate(KINDS.values())]
        asked.append((prompt, {}))
    if "preemptions" in setup:
        asked = asked[-3:-1] + asked[:9]
    expected = [
        oracle.drawn(prompt, **sampling) if sampling else oracle.generated(prompt, do_sample=False)
        for prompt, sampling in asked
    ]
    Prophet({f"r{i}": output for i, output in enumerate(expected)}).plant(monkeypatch)
    requests = [make_request(f"r{i}", p, NUM_TOKENS, **s) for i, (p, s) in enumerate(asked)]
    preempts = "preemptions" in setup
    done = run_requests(oracle, tp, requests, preempts=preempts, speculative=NGRAM, **config)
    assert [d.token_ids for d in done] == expected
    assert sum(sum(d.info.get("accepted_at", ())) for d in done) > len(done) * NUM_TOKENS / 4


def test_penalties_count_accepted_tokens(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' generate, and a loop over its logits."""
    presence, frequency = 1.5, 2.0

    def penalised(prompt: Sequence[int]) -> list[int]:
        output: list[int] = []
        for _ in range(NUM_TOKENS):
            logits = oracle.logits([*prompt, *output])[-1].tolist()
            for t in set(output):
                logits[t] -= presence + frequency * output.count(t)
            output.append(max(range(len(logits)), key=lambda t: logits[t]))
        return output

    kinds: list[tuple[dict[str, float], list[list[int]]]] = [
        (
            {"presence_penalty": presence, "frequency_penalty": frequency},
            list(map(penalised, oracle.prompts)),
        ),
        (
            {"repetition_penalty": 1.4},
            [oracle.generated(p, do_sample=False, repetition_penalty=1.4) for p in oracle.prompts],
        ),
    ]
    requests, expected = [], {}
    for k, (penalties, outputs) in enumerate(kinds):
        for i, (prompt, output) in enumerate(zip(oracle.prompts, outputs, strict=True)):
            requests.append(make_request(f"r{k}-{i}", prompt, NUM_TOKENS, **penalties))
            expected[f"r{k}-{i}"] = output
    Prophet(expected).plant(monkeypatch)
    done = run_requests(oracle, 1, requests, speculative=NGRAM, num_blocks=200)
    assert [d.token_ids for d in done] == list(expected.values())
    assert all(sum(d.info["accepted_at"]) > 4 for d in done)


def test_log_probabilities_are_the_teacher_forced_references(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One per token, also where a step gave several."""
    prompt = oracle.prompts[1]
    sampling = [{}, {"temperature": 1.0, "seed": 3}]
    outputs = [oracle.generated(prompt, do_sample=False), oracle.drawn(prompt, temperature=1.0, seed=3)]
    Prophet({f"r{i}": output for i, output in enumerate(outputs)}).plant(monkeypatch)
    requests = [
        make_request(f"r{i}", prompt, NUM_TOKENS, logprobs=3 * i, **s) for i, s in enumerate(sampling)
    ]
    done = run_requests(oracle, 1, requests, speculative=NGRAM)
    for i, (one, output) in enumerate(zip(done, outputs, strict=True)):
        assert one.token_ids == output
        assert [told.token_id for told in one.logprobs] == output
        logprobs = {}
        for dtype in (torch.float32, torch.float64):
            logits = oracle.logits([*prompt, *output[:-1]], dtype)[len(prompt) - 1 :]
            logprobs[dtype] = logits.log_softmax(-1)
        places = torch.tensor(output)[:, None]
        exact, eager = (logprobs[d].gather(1, places)[:, 0] for d in (torch.float64, torch.float32))
        assert_matches(torch.tensor([told.logprob for told in one.logprobs]), exact, eager)
        assert [len(told.top) for told in one.logprobs] == [3 * i] * NUM_TOKENS
        best = logprobs[torch.float64].argmax(-1).tolist()
        assert i == 0 or [told.top[0][0] for told in one.logprobs] == best


@pytest.fixture(scope="module")
def formed(checkpoint: Callable[..., Path]) -> structured.Model:
    return structured.Model(checkpoint("qwen3"))


@pytest.mark.parametrize("tp", [None, pytest.param((1, 2), marks=thorough)], ids=["aggregated", "p1 d2"])
def test_forms_hold_inside_drafts(
    formed: structured.Model, monkeypatch: pytest.MonkeyPatch, tp: tuple[int, int] | None
) -> None:
    """Against transformers under the same masks; wrong drafts fit no form."""
    asked = formed.requests()
    Prophet({r.request_id: expected for r, (_, expected) in asked.items()}, err_every=5).plant(monkeypatch)
    if tp is None:
        with formed.engine(speculative=NGRAM) as engine:
            found = engine.generate(asked)
    else:
        with formed.pair(tp, speculative=NGRAM) as pair:
            found = pair.complete(list(asked))
    for done, expected in zip(found, asked.values(), strict=True):
        formed.check(*expected, done)
    assert sum(sum(done.info.get("accepted_at", ())) for done in found) > 30


@thorough
def test_20000_drafted_draws_have_the_references_distribution(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rejection: two tokens of three candidates each, the second proposed; against transformers'."""
    prompt, num_draws = [5, 77, 300], 20_000
    params = SamplingParams(temperature=1.0, top_k=3)

    def probabilities(tokens: list[int]) -> dict[int, float]:
        scores = transformers_scores(oracle.logits(tokens)[-1].double(), params).softmax(-1)
        return {int(t): float(scores[t]) for t in scores.nonzero()[:, 0]}

    joint = {
        (first, second): p * q
        for first, p in probabilities(prompt).items()
        for second, q in probabilities([*prompt, first]).items()
    }
    assert len(joint) == 9
    proposed = dict(joint.keys())  # one of three behind each first token
    monkeypatch.setattr(
        "rayk.sched.drafting.NgramDrafter.propose",
        lambda _, state, num: [proposed[state.tokens[-1]]] if len(state.output_token_ids) == 1 else [],
    )
    rejecting = SpeculativeConfig(method="ngram", num_tokens=1, accept="rejection")
    more = {"max_seqs": 128, "max_batch_tokens": 512, "num_blocks": 258, "speculative": rejecting}
    with engine_of(oracle, **more) as made:
        done = made.generate(
            make_request(f"r{seed}", prompt, 3, temperature=1.0, top_k=3, seed=seed)
            for seed in range(num_draws)
        )
    order = list(joint)
    counts = torch.zeros(len(order))
    for one in done:
        counts[order.index((one.token_ids[0], one.token_ids[1]))] += 1
    wanted = torch.tensor([joint[pair] for pair in order], dtype=torch.float64)
    assert chi_square_p(counts, wanted) > P_VALUE
    # The test would see the proposed token kept once too often in twenty draws.
    planted = torch.tensor([pair[1] == proposed[pair[0]] for pair in order]).double()
    firsts = torch.tensor([sum(p for (a, _), p in joint.items() if a == pair[0]) for pair in order])
    assert chi_square_p(counts, 0.95 * wanted + 0.05 * planted * firsts) < P_VALUE

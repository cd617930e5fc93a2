"""Tokens drawn by whole engines against transformers' logits: their distribution, and each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.engine.build import RequestResult, ThreadEngine
from rayk.engine.noise import draw_key, gumbel
from rayk.oracle.checkpoint import read_marker
from rayk.types.config import EngineConfig
from rayk.types.request import FinishReason, SamplingParams
from rayk.types.structured import StructuredOutputs
from tests.engine.statistics import P_VALUE, chi_square_p
from tests.engine.test_filters import transformers_scores
from tests.helpers import assert_matches
from tests.markers import thorough
from tests.pd import HANG_S, NAN_POISON, Pair, make_request

NUM_TOKENS = 12


class Oracle:
    """transformers' model of a checkpoint, and its three probe prompts (5, 37 and 300 tokens)."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.path = path
        self.prompts: list[list[int]] = [probe["prompt"] for probe in read_marker(path)["probes"]]
        self._models = {
            dtype: AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
            for dtype in (torch.float32, torch.float64)
        }
        self._drawn: dict[Any, list[int]] = {}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[T, V]"""
        logits: torch.Tensor = self._models[dtype](torch.tensor([list(tokens)])).logits[0]
        return logits

    def drawn(self, prompt: Sequence[int], **sampling: Any) -> list[int]:
        """Tokens drawn from transformers' processed logits with the noise of a seed."""
        key = (tuple(prompt), *sorted(sampling.items()))
        if key not in self._drawn:
            params = SamplingParams(**sampling)
            output: list[int] = []
            for index in range(NUM_TOKENS):
                scores = transformers_scores(self.logits([*prompt, *output])[-1].double(), params)
                assert params.seed is not None
                noise = gumbel(torch.tensor([draw_key(params.seed, index)]), torch.arange(len(scores)))[0]
                output.append(int((scores + noise).argmax()))
            self._drawn[key] = output
        return self._drawn[key]

    @torch.inference_mode()
    def generated(self, prompt: Sequence[int], **settings: Any) -> list[int]:
        """model.generate's new tokens."""
        ids = torch.tensor([list(prompt)])
        found = self._models[torch.float32].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
            **settings,
        )  # fmt: skip
        return [int(t) for t in found[0, len(prompt) :]]


@pytest.fixture(scope="module")
def oracle(checkpoint: Callable[..., Path]) -> Oracle:
    return Oracle(checkpoint("qwen3"))


@contextmanager
def engine(oracle: Oracle, **config: Any) -> Iterator[ThreadEngine]:
    settings = {"num_blocks": 64, "model": str(oracle.path), **config}
    with ThreadEngine(EngineConfig(**settings), poison=NAN_POISON, timeout_s=HANG_S) as made:
        yield made


def run_requests(
    oracle: Oracle, tp: Any, requests: Sequence[Any], *, preempts: bool = False, **config: Any
) -> list[RequestResult]:
    """On an aggregated engine of TP `tp`, or on a pair of engines of TP `tp`.

    `preempts`: some requests have to be computed again, on an engine that decodes.
    """
    if isinstance(tp, tuple):
        with Pair.open(oracle.path, tp=tp, **config) as pair:
            done = pair.complete(requests)
            pair.check_all_free()
            num_preemptions = pair.d.engine.leader.scheduler.num_preemptions
    else:
        with engine(oracle, tp=tp, **config) as made:
            done = made.generate(requests)
            num_preemptions = made.leader.scheduler.num_preemptions
    assert (num_preemptions > 0) == preempts
    return done


@thorough
def test_20000_draws_have_the_references_distribution(oracle: Oracle) -> None:
    """One prompt under as many seeds, batched as the engine likes."""
    prompt, num_draws = [5, 77, 300], 20_000
    with engine(oracle, max_seqs=128, max_batch_tokens=384, num_blocks=258) as made:
        done = made.generate(
            make_request(f"r{seed}", prompt, 1, temperature=1.0, seed=seed) for seed in range(num_draws)
        )
    counts = torch.bincount(torch.tensor([d.token_ids[0] for d in done]), minlength=515)
    probabilities = oracle.logits(prompt)[-1].double().softmax(-1)
    assert probabilities.max() < 0.6, "the distribution is spread"
    assert (probabilities * num_draws > 5).sum() > 30
    assert chi_square_p(counts, probabilities) > P_VALUE
    # The test would see a temperature that is off by 5 %, or the best token taken once in twenty draws.
    logits = probabilities.log()
    assert chi_square_p(counts, (logits / 1.05).softmax(-1)) < P_VALUE
    greedy = torch.nn.functional.one_hot(probabilities.argmax(), 515)
    assert chi_square_p(counts, 0.95 * probabilities + 0.05 * greedy) < P_VALUE


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top-k": {"temperature": 1.3, "top_k": 20},
    "top-p": {"temperature": 1.5, "top_p": 0.8},
    "min-p": {"temperature": 2.0, "min_p": 0.02},
    "all": {"temperature": 1.5, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
}
LARGE_P = {"num_blocks": 700}
SHORT_D = {"num_blocks": 85, "max_batch_tokens": 50}
"""Of blocks of 4 tokens: hardly more than the longest prompt needs."""
SETUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp2": (2, {}),
    "tp1 chunks and preemptions": (1, {"num_blocks": 26, "max_batch_tokens": 23}),
    "tp2 chunks and preemptions": (2, {"num_blocks": 26, "max_batch_tokens": 64}),
    "p1 d2": ((1, 2), {"num_blocks": 200}),
    "p2 d1": ((2, 1), {"num_blocks": 200}),
    "p1 d2, preemptions": ((1, 2), {"block_size": 4, "changes": (LARGE_P, SHORT_D)}),
    "p2 d1 chunks and preemptions": (
        (2, 1),
        {"block_size": 4, "changes": ({"max_batch_tokens": 41} | LARGE_P, SHORT_D)},
    ),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_a_seed_gives_the_same_tokens_everywhere(oracle: Oracle, setup: str) -> None:
    """All kinds of requests in one batch, greedy ones between them, under every TP, hand-over and pool.

    The expected tokens come from transformers' logits and processors, one request at a time.
    """
    tp, config = SETUPS[setup]
    asked = []
    for n, prompt in enumerate(oracle.prompts):
        asked += [(prompt, {**kind, "seed": 100 * n + i}) for i, kind in enumerate(KINDS.values())]
        asked.append((prompt, {}))
    if "preemptions" in setup:
        # A long one and many short ones, which grow.
        asked = asked[-3:-1] + asked[:9]
    requests = [make_request(f"r{i}", p, NUM_TOKENS, **s) for i, (p, s) in enumerate(asked)]
    done = run_requests(oracle, tp, requests, preempts="preemptions" in setup, **config)
    assert [d.error for d in done] == [None] * len(asked)
    for completion, (prompt, sampling) in zip(done, asked, strict=True):
        expected = oracle.drawn(prompt, **sampling) if sampling else oracle.generated(prompt, do_sample=False)
        assert completion.token_ids == expected, sampling


def test_seeds_matter_and_a_request_without_one_gets_its_own(oracle: Oracle) -> None:
    prompt = oracle.prompts[0]
    with engine(oracle) as made:
        same = made.generate(
            make_request(f"r{i}", prompt, NUM_TOKENS, temperature=1.0, seed=s)
            for i, s in enumerate((1, 1, 2))
        )
        free = made.generate(make_request(f"f{i}", prompt, NUM_TOKENS, temperature=1.0) for i in range(2))
        assert same[0].token_ids == same[1].token_ids != same[2].token_ids
        seeds = [done.info["seed"] for done in free]
        assert seeds[0] != seeds[1]
        again = made.generate([make_request("a", prompt, NUM_TOKENS, temperature=1.0, seed=seeds[0])])
        assert again[0].token_ids == free[0].token_ids
        greedy = made.generate([make_request("g", prompt, NUM_TOKENS, seed=5)])
        assert "seed" not in greedy[0].info


@pytest.mark.parametrize("tp", [1, (2, 1)], ids=["tp1", "p2 d1"])
def test_repetition_penalty_is_that_of_transformers_generate(oracle: Oracle, tp: Any) -> None:
    requests = [make_request(f"r{i}", p, NUM_TOKENS, repetition_penalty=1.4)
                for i, p in enumerate(oracle.prompts)]  # fmt: skip
    found = [d.token_ids for d in run_requests(oracle, tp, requests)]
    expected = [oracle.generated(p, do_sample=False, repetition_penalty=1.4) for p in oracle.prompts]
    assert found == expected
    assert found != [oracle.generated(p, do_sample=False) for p in oracle.prompts]


@pytest.mark.parametrize("tp", [1, (1, 2)], ids=["tp1", "p1 d2"])
def test_presence_and_frequency_penalties_count_the_output(oracle: Oracle, tp: Any) -> None:
    """Against a loop over transformers' logits; frequent tokens give way."""
    presence, frequency = 1.5, 2.0

    def penalised(prompt: Sequence[int]) -> list[int]:
        output: list[int] = []
        for _ in range(NUM_TOKENS):
            logits = oracle.logits([*prompt, *output])[-1].tolist()
            for t in set(output):
                logits[t] -= presence + frequency * output.count(t)
            output.append(max(range(len(logits)), key=lambda t: logits[t]))
        return output

    penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
    requests = [make_request(f"r{i}", p, NUM_TOKENS, **penalties) for i, p in enumerate(oracle.prompts)]
    expected = [penalised(p) for p in oracle.prompts]
    assert [d.token_ids for d in run_requests(oracle, tp, requests)] == expected
    assert expected != [oracle.generated(p, do_sample=False) for p in oracle.prompts]


LOGPROB_SETUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tp1": (1, {}),
    "tp1 chunks of 1": (1, {"max_batch_tokens": 1}),
    "tp2 chunks and preemptions": (2, {"num_blocks": 26, "max_batch_tokens": 23}),
    "p2 d1 chunks": ((2, 1), {"max_batch_tokens": 64, "num_blocks": 100}),
    "p1 d2 chunks and preemptions": (
        (1, 2),
        {"block_size": 4, "changes": ({"max_batch_tokens": 41} | LARGE_P, SHORT_D)},
    ),
}


@pytest.mark.parametrize("setup", LOGPROB_SETUPS)
def test_log_probabilities_are_the_teacher_forced_references(oracle: Oracle, setup: str) -> None:
    """Of drawn and greedy tokens and of the prompt: each once, however it is cut, recomputed or handed on."""
    tp, config = LOGPROB_SETUPS[setup]
    short, medium, long = oracle.prompts
    order = [short, medium] if setup == "tp1 chunks of 1" else [long, short, short, short, medium, long]
    requests = [
        make_request(f"r{i}", p, 8, temperature=i % 2, seed=i, logprobs=i % 3, prompt_logprobs=2 * (i % 2))
        for i, p in enumerate(order)
    ]
    requests.append(make_request("untold", order[1], 8))
    done = run_requests(oracle, tp, requests, preempts="preemptions" in setup, **config)
    assert done[-1].logprobs == []
    assert done[-1].prompt_logprobs is None
    told, exact, eager = [], [], []
    for request, completion in zip(requests[:-1], done, strict=False):
        prompt, sampling = request.prompt_token_ids, request.sampling
        tokens = [*prompt, *completion.token_ids]
        assert completion.prompt_logprobs is not None
        assert completion.prompt_logprobs[0] is None
        assert len(completion.prompt_logprobs) == len(prompt)
        entries = [*completion.prompt_logprobs[1:], *completion.logprobs]
        assert [e.token_id for e in entries if e is not None] == tokens[1:]
        logits = {dtype: oracle.logits(tokens[:-1], dtype) for dtype in (torch.float64, torch.float32)}
        logprobs = {dtype: values.log_softmax(-1) for dtype, values in logits.items()}
        for at, entry in enumerate(entries):
            assert entry is not None
            row = logits[torch.float64][at]
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            wanted = sampling.logprobs if at >= len(prompt) - 1 else sampling.prompt_logprobs
            assert [t for t, _ in entry.top] == row.topk(wanted or 0).indices.tolist()
            told += [entry.logprob, *(value for _, value in entry.top)]
            ids = [entry.token_id, *(t for t, _ in entry.top)]
            exact.append(logprobs[torch.float64][at, ids])
            eager.append(logprobs[torch.float32][at, ids])
    assert_matches(torch.tensor(told), torch.cat(exact), torch.cat(eager), what="log probabilities")


def test_a_drawn_stop_token_ends_the_output_and_says_so(oracle: Oracle) -> None:
    prompt = oracle.prompts[1]
    drawn = oracle.drawn(prompt, temperature=1.0, seed=3)
    first = next(i for i, t in enumerate(drawn) if t not in drawn[:i] and i > 2)
    request = make_request("r", prompt, NUM_TOKENS, temperature=1.0, seed=3, stop_token_ids=(drawn[first],))
    with engine(oracle) as made:
        (done,) = made.generate([request])
    assert done.token_ids == drawn[: first + 1]
    assert (done.finish_reason, done.stop_reason) == (FinishReason.STOP, drawn[first])


BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, -3, "x", 2.5, []),
    "temperature": (-0.1, "x", [], float("nan"), float("inf")),
    "ignore_eos": ("x", 2.5, None, []),
    "stop_token_ids": ((-3,), "x", 2.5, ("a",)),
    "top_k": (0, -3, "x", 2.5, []),
    "top_p": (0.0, 1.5, -3, "x", float("nan")),
    "min_p": (-0.1, 1.5, "x", float("nan")),
    "seed": ("x", 2.5, 2**63),
    "stop": (("",), "x", 2.5, (3,)),
    "logprobs": (-1, 21, "x", 2.5),
    "prompt_logprobs": (-1, 21, "x", 2.5),
    "presence_penalty": (-3, 2.5, "x", float("nan")),
    "frequency_penalty": (-3, 2.5, "x", float("nan")),
    "repetition_penalty": (0, -3, "x", float("nan")),
    "structured_outputs": ("x", 2.5, {"regex": "a"}, StructuredOutputs(regex=5)),  # type: ignore[arg-type]
}


def test_every_parameter_is_checked_before_it_reaches_the_engine(oracle: Oracle) -> None:
    """A parameter of a wrong type or range is the request's error; the engine goes on."""
    assert set(BAD_VALUES) == {field.name for field in fields(SamplingParams)}
    with engine(oracle) as made:
        for name, values in BAD_VALUES.items():
            for value in values:
                request = make_request("bad", [5, 6], **{"max_tokens": 1, name: value})
                (done,) = made.generate([request])
                assert done.error is not None, (name, value)
                assert str(done.error).startswith(name), (name, value)
        (done,) = made.generate([make_request("good", oracle.prompts[0], NUM_TOKENS)])
        assert done.token_ids == oracle.generated(oracle.prompts[0], do_sample=False)

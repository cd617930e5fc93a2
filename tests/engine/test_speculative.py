"""Engines whose steps verify drafts: greedy output is transformers', whatever is proposed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.engine.build import RequestResult, ThreadEngine
from rayk.engine.verifying import DraftRows
from rayk.types.batch import Rollback, ScheduledBatch
from rayk.types.errors import NotFiniteError, RaykError, UserError
from rayk.types.request import FinishReason
from rayk.types.speculative import SpeculativeConfig
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.drafts import NGRAM, Prophet, other_than
from tests.engine.test_async_scheduling import Turns
from tests.engine.test_token_shards import engine_of
from tests.markers import one_per, sweep
from tests.pd import make_request

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt_oss": ("gpt_oss", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gemma3n": ("gemma3n", {}),
    "mamba2": ("mamba2", {}),
    "jamba": ("jamba", {}),
    "qwen3_next": ("qwen3_next", {}),
    "falcon_h1": ("falcon_h1", {}),
}


@pytest.fixture(scope="module")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    return make_answers(MODELS, checkpoint, reference)


def foreseen(model: Answers, times: int = 1, name: str = "r") -> dict[str, list[int]]:
    """What requests will say, of `times` requests for every prompt."""
    return {f"{name}{k}-{i}": model.expected[i] for k in range(times) for i in range(len(model.prompts))}


def ask(
    engine: ThreadEngine, model: Answers, times: int = 1, name: str = "r", **sampling: Any
) -> list[RequestResult]:
    """Run these together, and hold each to transformers' answer."""
    named = foreseen(model, times, name)
    prompts = model.prompts * times
    found = engine.generate(
        make_request(request_id, prompt, NUM_TOKENS, **sampling)
        for request_id, prompt in zip(named, prompts, strict=True)
    )
    assert [done.error for done in found] == [None] * len(found)
    assert [done.token_ids for done in found] == list(named.values())
    engine.leader.check_integrity()
    pool = engine.leader.manager.pool
    assert pool.num_free_blocks == pool.num_blocks - 1
    return found


def num_drafted_and_accepted(engine: ThreadEngine) -> tuple[int, int]:
    drafting = engine.leader.scheduler.drafting
    assert drafting is not None
    return drafting.counts.num_draft_tokens, drafting.counts.num_accepted_tokens


@sweep(2)
@one_per()
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("llama", {}),
        ("llama", {"tp": 2}),
        ("llama", {"pp": 2}),
        ("llama", {"tp": 4, "dcp": 2}),
        ("llama", {"block_size": 4, "layout": "BHLNC"}),
        ("gpt_oss", {}),
        ("gpt_oss", {"tp": 2, "pp": 2}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"tp": 2}),
        ("gemma3n", {"fast_prefill": True}),
        ("mamba2", {}),
        ("jamba", {"tp": 2}),
        ("qwen3_next", {}),
        ("qwen3_next", {"tp": 2, "state_block_size": 24}),
        ("falcon_h1", {"pp": 2}),
    ],
)
def test_tokens_are_transformers(
    answers: Callable[[str], Answers],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    shape: dict[str, Any],
) -> None:
    """With drafts of which some are wrong; then of looked up ones. Prefill chunks go beside verify steps."""
    found = answers(model)
    settings = {"speculative": NGRAM, "max_batch_tokens": 40, "num_blocks": 200, **shape}
    with engine_of(found, **settings) as engine:
        num_steps = []
        with monkeypatch.context() as patch:
            Prophet(foreseen(found)).plant(patch)
            ask(engine, found)
            drafted, accepted = num_drafted_and_accepted(engine)
            assert 0.5 < accepted / drafted < 1
            num_steps.append(engine.leader.scheduler.num_steps)
        ask(engine, found, name="looked-up")
        assert num_drafted_and_accepted(engine)[0] > drafted, "nothing was looked up"
        num_steps.append(engine.leader.scheduler.num_steps - num_steps[0])
        assert num_steps[0] < num_steps[1], "accepted drafts save steps"


@pytest.mark.parametrize(("model", "num_blocks"), [("llama", 22), ("llama", 26), ("qwen3_next", 30)])
def test_preempted_requests_give_the_same_tokens(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch, model: str, num_blocks: int
) -> None:
    found = answers(model)
    Prophet(foreseen(found, 3)).plant(monkeypatch)
    with engine_of(found, speculative=NGRAM, num_blocks=num_blocks, max_batch_tokens=64) as engine:
        done = ask(engine, found, 3)
        assert engine.leader.scheduler.num_preemptions > 0
        assert sum(d.info["num_preemptions"] for d in done) > 0


def test_prefix_hits_give_the_same_tokens(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that drafts were computed in are found again, as far as these were accepted."""
    found = answers("llama")
    named = foreseen(found)
    longer = replace_prompts(found, 16)
    Prophet(named | foreseen(longer, 1, "later"), err_every=4).plant(monkeypatch)
    settings = {"num_blocks": 120, "block_size": 4, "prefix_caching": True}
    with engine_of(found, speculative=NGRAM, **settings) as engine:
        ask(engine, found)
        requests = [
            make_request(f"later0-{i}", prompt, len(longer.expected[i]))
            for i, prompt in enumerate(longer.prompts)
        ]
        done = engine.generate(requests)
        assert [d.token_ids for d in done] == longer.expected
        assert all(d.info["num_cached_tokens"] > len(p) for d, p in zip(done, found.prompts, strict=True))


def replace_prompts(model: Answers, num_more: int) -> Answers:
    """Prompts that go on with the first tokens of their answers."""
    pairs = list(zip(model.prompts, model.expected, strict=True))
    return Answers(model.path, [p + e[:num_more] for p, e in pairs], [e[num_more:] for _, e in pairs])


def test_requests_tell_what_was_proposed_and_accepted(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All right: 24 tokens are one, four steps of five, and three more; of a step the events come as one."""
    found = answers("llama")
    Prophet(foreseen(found), err_every=0).plant(monkeypatch)
    with engine_of(found, speculative=NGRAM) as engine:
        done = ask(engine, found)
        for one in done:
            assert one.info["drafted_at"] == one.info["accepted_at"] == (5, 5, 4, 4)
        loop = engine.loops[0]
        assert loop.times.num_sampled_tokens == 3 * NUM_TOKENS
        assert loop.times.num_computed_tokens == 5 + 37 + 300 + 3 * (NUM_TOKENS - 1)
        stream = engine.submit(make_request("r0-1", found.prompts[1], NUM_TOKENS))
        sizes = []
        while not (event := stream.get(timeout=20)).is_last:
            sizes.append(len(event.token_ids))
        assert [*sizes, len(event.token_ids)] == [1, 5, 5, 5, 5, 3]
    with engine_of(found) as engine:
        assert all("drafted_at" not in d.info for d in ask(engine, found))


def test_an_end_inside_a_draft(answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch) -> None:
    """By EOS, by a stop token, by the limit, and by a stop string that two tokens complete."""
    found = answers("llama")
    prompt, expected = found.prompts[1], found.expected[1]
    names = ("eos", "stop", "length", "text")
    Prophet(dict.fromkeys(names, expected), err_every=0).plant(monkeypatch)

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(f"<{t}>" for t in token_ids)

    text = decode(expected[7:9])[1:-1]
    first = {
        "eos": expected.index(expected[8]) + 1,
        "stop": expected.index(expected[9]) + 1,
        "length": 8,
        "text": next(i for i in range(1, 25) if text in decode(expected[:i])),
    }
    turns = Turns(found.path, decode, speculative=NGRAM, async_scheduling="auto")
    turns.leader.scheduler._eos_token_ids = frozenset([expected[8]])
    turns.submit(
        make_request("eos", prompt, NUM_TOKENS, ignore_eos=False),
        make_request("stop", prompt, NUM_TOKENS, stop_token_ids=(expected[9],)),
        make_request("length", prompt, 8),
        make_request("text", prompt, NUM_TOKENS, stop=(text,)),
    )
    turns.finish()
    for name, num_tokens in first.items():
        assert turns.tokens(name) == expected[:num_tokens], name
    reasons = [turns.end(name) for name in names]
    assert reasons == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP]
    assert turns.events["text"][-1].stop_reason == text


def test_an_abort_between_verify_steps(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answers("llama")
    Prophet({"gone": found.expected[2], "kept": found.expected[1]}).plant(monkeypatch)
    turns = Turns(found.path, speculative=NGRAM, async_scheduling="auto")
    turns.submit(make_request("gone", found.prompts[2], NUM_TOKENS))
    turns.submit(make_request("kept", found.prompts[1], NUM_TOKENS))
    for _ in range(3):
        turns.loop.turn()
    told = turns.tokens("gone")
    turns.leader.abort("gone")
    turns.finish()
    assert turns.end("gone") is FinishReason.ABORT
    assert turns.tokens("gone") == told == found.expected[2][: len(told)]
    assert turns.tokens("kept") == found.expected[1]


def spoil_at(turns: Turns, position: int, *, drafts_only: bool = False) -> None:
    """The logits behind the token at this position are NaN, in every step or only where it is a draft."""
    step = turns.rank.step

    def spoilt(batch: ScheduledBatch) -> torch.Tensor:
        logits, row = step(batch), 0
        for share in batch.requests:
            first = share.num_computed_tokens + len(share.token_ids) - share.num_logits
            at = position - first
            if drafts_only <= at < share.num_logits:
                with torch.inference_mode():
                    logits[row + at] = float("nan")
            row += share.num_logits
        return logits

    turns.rank.step = spoilt  # type: ignore[method-assign]


def test_a_row_that_is_not_finite_is_what_it_would_be_without_drafts(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was accepted before it is told, with its log probabilities, and an end before it is an end."""
    found = answers("llama")
    prompt, expected = found.prompts[1], found.expected[1]
    bad = len(prompt) + 3
    Prophet(dict.fromkeys(("fails", "ends"), expected), err_every=0).plant(monkeypatch)
    for speculative in (None, NGRAM):
        turns = Turns(found.path, speculative=speculative, async_scheduling="auto")
        turns.leader.scheduler._eos_token_ids = frozenset([expected[3]])
        spoil_at(turns, bad)
        turns.submit(
            make_request("fails", prompt, 10, logprobs=1),
            make_request("ends", prompt, 10, ignore_eos=False, logprobs=1),
        )
        turns.finish()
        for name, num_told in (("fails", 4), ("ends", expected.index(expected[3]) + 1)):
            assert turns.tokens(name) == expected[:num_told]
            told = [one for event in turns.events[name] for one in event.logprobs or ()]
            assert [one.token_id for one in told] == expected[:num_told]
        error = turns.events["fails"][-1].error
        assert isinstance(error, NotFiniteError)
        assert error.what == f"logits at token {bad} are"
        assert turns.end("ends") is FinishReason.STOP
        assert (len(turns.events["fails"]) < 5) == (speculative is not None), "drafts were accepted"


def test_a_row_that_is_not_finite_is_nothing_behind_a_rejected_draft(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answers("llama")
    prompt, expected = found.prompts[1], found.expected[1]
    Prophet({"r": list(map(other_than, expected))}, err_every=0).plant(monkeypatch)
    turns = Turns(found.path, speculative=NGRAM, async_scheduling="auto")
    spoil_at(turns, len(prompt) + 3, drafts_only=True)
    turns.submit(make_request("r", prompt, 10))
    turns.finish()
    assert turns.events["r"][-1].error is None
    assert turns.tokens("r") == expected[:10]


def test_states_of_a_request_that_fails_are_those_of_its_last_token(
    answers: Callable[[str], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks for what was not finite does not find it in drafts."""
    found = answers("mamba2")
    prompt, expected = found.prompts[1], found.expected[1]
    Prophet({"r": expected}, err_every=0).plant(monkeypatch)
    turns = Turns(found.path, speculative=NGRAM, async_scheduling="auto")
    spoil_at(turns, len(prompt) + 3)
    taken_back, roll_back = [], turns.rank.roll_back
    turns.rank.roll_back = lambda rollbacks: (taken_back.append(tuple(rollbacks)), roll_back(rollbacks))  # type: ignore[method-assign]
    turns.submit(make_request("r", prompt, 10))
    turns.finish()
    assert turns.tokens("r") == expected[:4]
    assert isinstance(turns.events["r"][-1].error, NotFiniteError)
    (_, first, last) = turns.shares("r")
    assert (len(first), len(last)) == (5, 5)
    row = turns.batches[-1].requests[0].row
    assert taken_back == [(Rollback(row, 3),), (Rollback(row, 1),)]


@pytest.mark.parametrize(
    ("changes", "more", "error", "match"),
    [
        ({"method": "draft", "model": "x"}, {}, UserError, "prompt_lookup_max is for method ngram"),
        ({"model": "x"}, {}, UserError, "ngram has none"),
        ({"num_tokens": 0}, {}, UserError, "1 to 32"),
        ({"num_tokens": 33}, {}, UserError, "1 to 32"),
        ({"prompt_lookup_min": 5}, {}, UserError, "prompt_lookup_min <= prompt_lookup_max"),
        ({"prompt_lookup_min": 0}, {}, UserError, "prompt_lookup_min <= prompt_lookup_max"),
        ({"method": "medusa"}, {}, UserError, "one of ngram"),
        ({"accept": "typical"}, {}, UserError, "one of match, rejection"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    answers: Callable[[str], Answers],
    changes: dict[str, Any],
    more: dict[str, Any],
    error: type[RaykError],
    match: str,
) -> None:
    with pytest.raises(error, match=match):
        engine_of(answers("llama"), speculative=replace(NGRAM, **changes), **more)


def test_rows_count_up_to_the_first_that_differs() -> None:
    rows = DraftRows([object()] * 6, [(7, 8, 9), (), ()])  # type: ignore[list-item]
    assert rows.kept([7, 8, 1, 9, 5, -1]) == [0, 1, 2, 4, 5]
    assert rows.kept([7, 8, 9, 9, 5, 5]) == [0, 1, 2, 3, 4, 5]
    assert rows.kept([1, 8, 9, 9, 5, 5]) == [0, 4, 5]


def test_the_settings_say_what_they_are() -> None:
    assert SpeculativeConfig(method="ngram").num_tokens == 3

"""Structured outputs of an engine against transformers' generate under the same masks, and against judges of
the form alone; over hand-overs, preemptions, swaps and steps ahead."""

from __future__ import annotations

import json
import math
import queue
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import llguidance.hf
import llguidance.numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList

from rayk.actors.tokenizer import load_decoder, load_vocabulary
from rayk.engine.build import ThreadEngine
from rayk.engine.filters import forbid
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.reference import Reference
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from rayk.types.request import FinishReason, Request
from rayk.types.structured import StructuredOutputs
from tests.engine.test_async_scheduling import Turns
from tests.grammars.test_masks import PERSON
from tests.markers import one_per, thorough
from tests.offload.node import Node
from tests.pd import HANG_S, Pair, make_request

MAX_TOKENS = 150
FORMS: dict[str, StructuredOutputs] = {
    "json": StructuredOutputs(json=json.dumps(PERSON), disable_any_whitespace=True),
    "regex": StructuredOutputs(regex=r"[a-f]{3,12}(-[0-9]{1,6}){2}"),
    "choice": StructuredOutputs(choice=("yes", "no", "perhaps not")),
    "grammar": StructuredOutputs(grammar='start: item ("," item){2,4}\nitem: /[0-9]{1,3}/ | "(" item ")"'),
}


def fits(name: str, text: str) -> bool:
    """Whether the whole text has the form, in the eyes of others than the grammar's library."""
    match name:
        case "json":
            jsonschema.validate(json.loads(text), PERSON)
            return True
        case "regex":
            return re.fullmatch(FORMS[name].regex or "", text) is not None
        case "choice":
            return text in FORMS[name].choice
    while (shorter := re.sub(r"\(([0-9]{1,3})\)", r"\1", text)) != text:
        text = shorter
    return re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3}){2,4}", text) is not None


class Masks(LogitsProcessor):  # type: ignore[misc]
    """The library's masks in transformers' generate, without anything of rayk."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: int, source: str, num_prompt: int) -> None:
        made = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos)
        self.matcher = llguidance.LLMatcher(made, source)
        self.num_prompt, self.words = num_prompt, llguidance.numpy.allocate_token_bitmask(1, vocab_size)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > self.num_prompt:
            self.matcher.consume_token(int(input_ids[0, -1]))
        llguidance.numpy.fill_next_token_bitmask(self.matcher, self.words)
        bits = [bool(self.words[0, t // 32] >> (t % 32) & 1) for t in range(scores.shape[1])]
        return scores.masked_fill(~torch.tensor(bits), float("-inf"))


SOURCES = {
    "json": llguidance.LLMatcher.grammar_from_json_schema(PERSON, overrides={"whitespace_flexible": False}),
    "regex": llguidance.LLMatcher.grammar_from_regex(FORMS["regex"].regex or ""),
    "choice": llguidance.grammar_from("choice", json.dumps(FORMS["choice"].choice)),
    "grammar": llguidance.LLMatcher.grammar_from_lark(FORMS["grammar"].grammar or ""),
}


class Model:
    """A checkpoint, and what transformers answers to its prompts in each form."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.decode = load_decoder(str(path))
        self.loads = {"load_vocabulary": partial(load_vocabulary, str(path))}
        self.prompts = [probe["prompt"] for probe in read_marker(path)["probes"]][:2]
        self.hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.eos = self.tokenizer.eos_token_id
        self.expected = {name: [self.answer(name, prompt) for prompt in self.prompts] for name in FORMS}

    def answer(self, name: str, prompt: list[int]) -> list[int]:
        masks = Masks(self.tokenizer, self.hf.config.vocab_size, self.eos, SOURCES[name], len(prompt))
        found = self.hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=self.eos,
            pad_token_id=self.eos,
            logits_processor=LogitsProcessorList([masks]),
        )
        return found[0, len(prompt) :].tolist()

    def requests(self, times: int = 1, **more: Any) -> dict[Request, tuple[str, list[int]]]:
        """Of every form for every prompt -> the form, and transformers' answer."""
        return {
            make_request(
                f"{name}-{i}-{k}", prompt, MAX_TOKENS, ignore_eos=False, structured_outputs=form, **more
            ): (name, self.expected[name][i])
            for k in range(times)
            for name, form in FORMS.items()
            for i, prompt in enumerate(self.prompts)
        }

    def engine(self, **settings: Any) -> ThreadEngine:
        config = EngineConfig(model=str(self.path), **{"num_blocks": 128, **settings})
        return ThreadEngine(config, timeout_s=HANG_S, **self.loads)

    def pair(self, tp: tuple[int, int], **more: Any) -> Any:
        return Pair.open(self.path, tp=tp, **{"num_blocks": 128, **self.loads, **more})

    def check(self, name: str, expected: list[int], done: Any) -> None:
        """Equal to transformers' but for an EOS that nothing else could have been."""
        assert done.error is None
        assert done.finish_reason is FinishReason.STOP
        assert done.stop_reason is None
        assert done.token_ids == (expected if done.token_ids[-1] == self.eos else expected[:-1])
        assert expected[-1] == self.eos
        assert fits(name, self.decode(done.token_ids))


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Model:
    return Model(checkpoint("qwen3"))


def test_outputs_over_unlike_tps_equal_transformers_under_the_same_masks(model: Model) -> None:
    """P samples the first token under the grammar, D goes on from there."""
    asked = model.requests()
    with model.pair((1, 2)) as pair:
        found = pair.complete(list(asked))
        pair.check_all_free()
    for done, expected in zip(found, asked.values(), strict=True):
        model.check(*expected, done)
    assert sum(done.payload is not None for done in found) > len(found) // 2, "most were handed over"


@thorough
@pytest.mark.parametrize("tp", [(2, 1), None], ids=["p2 d1", "aggregated"])
def test_outputs_elsewhere_equal_them_too(model: Model, tp: tuple[int, int] | None) -> None:
    asked = model.requests()
    if tp is None:
        with model.engine() as engine:
            found = engine.generate(asked)
    else:
        with model.pair(tp, push=True) as pair:
            found = pair.complete(list(asked))
    for done, expected in zip(found, asked.values(), strict=True):
        model.check(*expected, done)


@thorough
def test_drawn_outputs_fit_and_are_the_same_everywhere(model: Model) -> None:
    asked = model.requests(temperature=1.3, top_p=0.9, seed=5, frequency_penalty=0.3, logprobs=4)
    with model.engine() as engine:
        here = engine.generate(asked)
    with model.pair((1, 2)) as pair:
        there = pair.complete(list(asked))
    for a, b, (name, _) in zip(here, there, asked.values(), strict=True):
        assert a.token_ids == b.token_ids
        assert a.finish_reason is FinishReason.STOP
        assert fits(name, model.decode(a.token_ids))


@thorough
def test_preempted_requests_go_on_where_they_were(model: Model) -> None:
    asked = model.requests(4)
    with model.engine(num_blocks=28, block_size=8, max_batch_tokens=64) as engine:
        found = engine.generate(asked)
        assert engine.leader.scheduler.num_preemptions > 0
    for done, expected in zip(found, asked.values(), strict=True):
        model.check(*expected, done)


@thorough
def test_swapped_requests_go_on_where_they_were(model: Model) -> None:
    asked = model.requests(4)
    with Node.open(model.path, [{"num_blocks": 28, "block_size": 8}], load="never", **model.loads) as node:
        found = node.engines[0].complete(list(asked))
        assert node.engines[0].offloading.counts["swaps"] > 0
        node.settle()
    for done, expected in zip(found, asked.values(), strict=True):
        model.check(*expected, done)


@one_per()
@pytest.mark.parametrize("form", FORMS)
def test_a_request_goes_on_elsewhere_from_its_tokens_alone(model: Model, form: str) -> None:
    """As after a lost rank: what was delivered is computed again, and the next tokens are of its form."""
    with model.engine() as engine:
        for request, (name, expected) in model.requests().items():
            if name != form:
                continue
            for num_known in {1, len(expected) // 2, len(expected) - 2} - {0}:
                again = make_request(
                    f"{request.request_id}-{num_known}", request.prompt_token_ids, MAX_TOKENS,
                    ignore_eos=False, structured_outputs=request.sampling.structured_outputs,
                )  # fmt: skip
                known = tuple(expected[:num_known])
                done = engine.collect(_go_on(engine, again, known))
                done.token_ids[:0] = known
                model.check(name, expected, done)


def _go_on(engine: ThreadEngine, request: Request, known: tuple[int, ...]) -> Any:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    leader = engine.leader

    def start() -> None:
        assert leader.open(request, events.put)
        leader.start(request, known, 0)

    leader.prepare(request)
    leader.post(start)
    return events


@one_per()
@pytest.mark.parametrize("form", FORMS)
def test_the_references_answers_are_those_of_transformers(model: Model, form: str) -> None:
    """Of experiments, which judge cells by them; what it says of other tokens is of the form, too."""
    reference, wanted = Reference(model.path), FORMS[form]
    answers = reference.generate(model.prompts, MAX_TOKENS, ignore_eos=True, form=wanted)
    for prompt, answer, expected in zip(model.prompts, answers, model.expected[form], strict=True):
        token_ids = list(answer.token_ids)
        assert token_ids == (expected if token_ids[-1] == model.eos else expected[:-1])
        assert answer.finish_reason == "stop"
        forced = reference.teacher_force(prompt, token_ids, form=wanted)
        scores = reference.score(prompt, token_ids, form=wanted)
        assert {step.gap for step in forced} == {0.0} == set(scores.output_gaps)
        assert scores.output_logprobs == pytest.approx(answer.logprobs, abs=1e-4)
        assert scores.prompt_logprobs == reference.score(prompt, token_ids).prompt_logprobs
        free = reference.score(prompt, token_ids).output_logprobs
        assert all(a >= b - 1e-5 for a, b in zip(scores.output_logprobs, free, strict=True))
        wrong = [*token_ids[:-1], model.tokenizer("!").input_ids[-1]]
        assert reference.teacher_force(prompt, wrong, form=wanted)[-1].gap == math.inf


def test_a_step_waits_for_the_tokens_of_a_grammar_and_no_longer(model: Model) -> None:
    """Where steps run ahead: beside a request without one, too."""
    turns = Turns(model.path, load_vocabulary=model.loads["load_vocabulary"])
    expected = model.expected["regex"][0]
    formed = make_request(
        "formed", model.prompts[0], MAX_TOKENS, ignore_eos=False, structured_outputs=FORMS["regex"]
    )
    free = make_request("free", model.prompts[1], len(expected) + 10)
    turns.submit(formed, free)
    turns.finish()
    tokens = turns.tokens("formed")
    assert tokens == expected[: len(tokens)]
    assert fits("regex", model.decode(tokens))
    shares = turns.shares("free")
    assert all(share[-1] >= 0 for share in shares[: len(tokens)]), "tokens were known"
    assert any(share[-1] < 0 for share in shares[len(tokens) :]), "then it ran ahead again"


@thorough
def test_log_probabilities_are_of_the_tokens_that_may_come(model: Model) -> None:
    request = make_request(
        "r", model.prompts[0], 8, logprobs=5, ignore_eos=False, structured_outputs=FORMS["choice"]
    )
    with model.engine() as engine:
        (done,) = engine.generate([request])
    logits = model.hf(torch.tensor([model.prompts[0]])).logits[0, -1].detach()
    firsts = {t: logits[t].item() for t in range(len(logits)) if _begins_a_choice(model.decode([t]))}
    logprobs = torch.tensor(list(firsts.values())).log_softmax(0)
    wanted = dict(zip(firsts, logprobs.tolist(), strict=True))
    first = done.logprobs[0]
    assert dict(first.top) == pytest.approx({t: wanted[t] for t in dict(first.top)}, abs=5e-5)
    assert len(first.top) == min(5, len(wanted)), "no forbidden token is told of"
    assert first.logprob == pytest.approx(wanted[first.token_id], abs=1e-5)


def _begins_a_choice(text: str) -> bool:
    return bool(text) and any(choice.startswith(text) for choice in FORMS["choice"].choice)


@thorough
def test_limits_and_stop_strings_cut_an_output_short(model: Model) -> None:
    form = StructuredOutputs(regex="[ab]{100}")
    request = partial(make_request, prompt=model.prompts[0], structured_outputs=form)
    config = EngineConfig(model=str(model.path), num_blocks=64)
    decoder = {"load_decoder": partial(load_decoder, str(model.path))}
    with ThreadEngine(config, timeout_s=HANG_S, **model.loads, **decoder) as engine:
        short, stopped = engine.generate(
            [request("short", max_tokens=5), request("stopped", max_tokens=150, stop=("b", "aaa"))]
        )
    assert (len(short.token_ids), short.finish_reason) == (5, FinishReason.LENGTH)
    assert set(model.decode(short.token_ids)) <= {"a", "b"}
    assert (stopped.finish_reason, stopped.stop_reason in ("b", "aaa")) == (FinishReason.STOP, True)


@thorough
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_ends_an_output_also_under_ignore_eos(model: Model, ignore_eos: bool) -> None:
    """With the last token where nothing may follow; else with an EOS, where the model wants it."""
    for form in (FORMS["choice"], StructuredOutputs(regex="a*")):
        request = make_request(
            "r",
            model.prompts[0],
            200,
            ignore_eos=ignore_eos,
            structured_outputs=form,
            temperature=3.0,
            seed=1,
        )
        with model.engine() as engine:
            (done,) = engine.generate([request])
        assert done.finish_reason is FinishReason.STOP
        assert (done.token_ids[-1] == model.eos) == (form.regex is not None)


@thorough
def test_what_cannot_be_compiled_or_goes_wrong_later_ends_one_request(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = make_request("bad", model.prompts[0], structured_outputs=StructuredOutputs(regex="(a"))
    good, broken = (
        make_request(name, model.prompts[0], MAX_TOKENS, ignore_eos=False, structured_outputs=FORMS["regex"])
        for name in ("good", "broken")
    )
    with model.engine() as engine:
        begin = engine.leader._grammars.begin
        broken_form = begin(FORMS["choice"])
        monkeypatch.setattr(
            engine.leader._grammars,
            "begin",
            lambda wanted, output=(): begin(wanted, output) if next(calls) else broken_form,
        )
        calls = iter((1, 0))
        broken_form.mask = begin(FORMS["regex"]).mask  # type: ignore[method-assign]
        found = engine.generate([bad, good, broken])
        pool = engine.leader.manager.pool
        assert pool.num_free_blocks == pool.num_blocks - 1
    assert isinstance(found[0].error, UserError)
    assert found[0].error.where == "structured_outputs.regex"
    model.check("regex", model.expected["regex"][0], found[1])
    assert isinstance(found[2].error, UserError)
    assert found[2].token_ids == []


def test_an_engine_without_a_tokenizer_refuses_by_name(model: Model) -> None:
    with ThreadEngine(EngineConfig(model=str(model.path), num_blocks=64)) as engine:
        (done,) = engine.generate([next(iter(model.requests()))])
    assert isinstance(done.error, UserError)
    assert "tokenizer" in str(done.error)


@pytest.mark.parametrize("vocab_size", [32, 70, 259])
def test_forbidden_tokens_of_some_rows_are_filled_in(vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0))
    allowed = torch.rand(2, vocab_size, generator=torch.Generator().manual_seed(1)) > 0.5
    words = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int64)
    for row, token in allowed.nonzero().tolist():
        words[row, token // 32] |= 1 << token % 32
    expected = logits.clone()
    expected[[3, 1]] = expected[[3, 1]].masked_fill(~allowed, float("-inf"))
    forbid(logits, [3, 1], list(words.numpy().astype("uint32").view("int32")))
    assert torch.equal(logits, expected)

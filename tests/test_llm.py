"""LLM: prompts through engines of unlike TP, without HTTP; bad input before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from rayk import LLM, SamplingParams
from rayk.oracle.tokenizer import build_tokenizer
from rayk.serve.text import Text
from rayk.types.errors import CheckpointError, RaykError, SpecError, Unsupported, UserError
from rayk.types.request import FinishReason
from rayk.types.serving import Delta, ModelCard
from rayk.types.structured import StructuredOutputs
from tests.markers import nixl, ray, thorough

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(checkpoint: Any) -> Path:
    return checkpoint("qwen3")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"prefill_tp": 3}, Unsupported, "TP 3 does not divide the model's 8 query heads"),
        ({"decode_tp": (1, 3)}, Unsupported, "decode: TP 3 does not divide"),
        ({"decode_tp": [2, 1], "num_decode": 1}, SpecError, "2 TP sizes for 1 engines"),
        ({"prefill_tp": []}, SpecError, "0 TP sizes for any number of engines"),
        ({"prefill_tp": [1, 0]}, SpecError, "prefill.tp"),
        ({"dtype": "int4"}, SpecError, "dtype must be one of"),
        ({"settings": {"engine.blocks": 3}}, SpecError, "a server has no key 'engine.blocks'"),
        ({"settings": {"engine.num_blocks": [3, 4]}}, SpecError, "engine.num_blocks has a list of values"),
        ({"mode": "aggregated", "decode_tp": 2}, SpecError, "no decode engines"),
        ({"tensor_parallel_size": 3}, Unsupported, "TP 3 does not divide"),
        ({"max_model_len": 10**9}, SpecError, "--max-model-len 1000000000: the model has"),
        ({"address": "127.0.0.1:1"}, UserError, "no Ray cluster answers"),
    ],
)
def test_bad_options(model: Path, options: dict[str, Any], kind: type[RaykError], message: str) -> None:
    with pytest.raises(kind, match=message):
        LLM(model, **options)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint folder"):
        LLM(tmp_path / "none")


class Scripted:
    """Engines that answer token 70, the request's number and its prompt's length."""

    settings = SimpleNamespace(
        model=ModelCard(model_id="tiny", folder="nowhere", vocab_size=300, max_positions=64)
    )

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.salts: list[str | None] = []

    def complete(self, requests: Any, cache_salt: str | None) -> list[list[Delta]]:
        self.asked += requests
        self.salts.append(cache_salt)
        ends = [Delta(finish_reason=FinishReason.LENGTH, num_cached_tokens=i) for i in range(len(requests))]
        return [[Delta(token_ids=(70 + i, len(p))), ends[i]] for i, (p, _) in enumerate(requests)]


@pytest.fixture
def scripted() -> tuple[LLM, Scripted, Any]:
    llm, engines, tokenizer = object.__new__(LLM), Scripted(), build_tokenizer(300, adds_bos=True)
    llm._engines, llm._text = engines, Text(tokenizer)  # type: ignore[assignment]
    return llm, engines, tokenizer


def test_results_have_vllms_shape_beside_the_short_one(scripted: tuple[LLM, Scripted, Any]) -> None:
    llm, engines, tokenizer = scripted
    drawn = SamplingParams(temperature=1.0, seed=7)
    found = llm.generate(["how many", [5, 6]], drawn, n=2)
    assert [c.prompt for c in found] == ["how many", None]
    assert [[o.token_ids[0] for o in c.outputs] for c in found] == [[70, 71], [72, 73]]
    assert [o.index for o in found[0].outputs] == [0, 1]
    assert found[0].outputs[0].text == found[0].text == tokenizer.decode(found[0].token_ids)
    assert [c.num_cached_tokens for c in found] == [0, 2]
    seeds = [params.seed for _, params in engines.asked]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] == 7 != seeds[1]
    with pytest.raises(UserError, match="n 0"):
        llm.generate("how many", n=0)


def test_bad_requests_reach_no_engine(scripted: tuple[LLM, Scripted, Any]) -> None:
    llm, engines, _ = scripted
    for prompt, params, message in (
        ([], SamplingParams(), "prompt 1: empty"),
        ([9, 300], SamplingParams(), "prompt 1: token id 300 is outside the vocabulary of 300"),
        ([-1], SamplingParams(), "prompt 1: token id -1 is outside"),
        (
            [1] * 50,
            SamplingParams(),
            "prompt 1: prompt of 50 . max_tokens 16 exceeds the model's 64 positions",
        ),
        ([1], SamplingParams(top_p=0.0), "prompt 1: top_p 0.0\n  mend: top_p: above 0"),
        (
            [1],
            SamplingParams(structured_outputs=StructuredOutputs(regex="(a")),
            r"prompt 1: structured_outputs\.regex: at 1",
        ),
    ):
        with pytest.raises(UserError, match=message):
            llm.generate([[1], prompt], [SamplingParams(), params])
    assert engines.asked == []


def test_a_cache_salt_goes_with_all_requests_of_a_call(scripted: tuple[LLM, Scripted, Any]) -> None:
    llm, engines, _ = scripted
    llm.generate([[1], [2]], cache_salt="a")
    llm.chat([{"role": "user", "content": "how many"}], cache_salt="b")
    llm.generate([[1]])
    assert engines.salts == ["a", "b", None]
    with pytest.raises(UserError, match="cache_salt is empty"):
        llm.generate([[1]], cache_salt="")


def test_chats_are_the_templates(scripted: tuple[LLM, Scripted, Any]) -> None:
    llm, engines, tokenizer = scripted
    chats = [[{"role": "user", "content": text}] for text in ("how many", "or few")]
    told = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    assert [c.prompt for c in llm.chat(chats)] == told
    (one,) = llm.chat(chats[0], SamplingParams(max_tokens=3), n=1)
    assert one.prompt == told[0]
    expected = tokenizer.apply_chat_template(chats[0], add_generation_prompt=True)["input_ids"]
    assert list(one.prompt_token_ids) == list(engines.asked[-1][0]) == expected
    for name in ("messages", "chat_template"):
        with pytest.raises(UserError, match=f"chat_template_kwargs: {name} is not for callers to set"):
            llm.chat(chats, chat_template_kwargs={name: "x"})
    llm._text = CheckpointError("there is no tokenizer")
    with pytest.raises(CheckpointError):
        llm.chat(chats)


@pytest.fixture(scope="module")
def llm(model: Path, ray_address: str) -> Iterator[LLM]:
    few = {"engine.max_seqs": 3, "engine.num_blocks": 64}
    with LLM(model, prefill_tp=2, decode_tp=1, device="cpu", address=ray_address, settings=few) as found:
        yield found
    with pytest.raises(UserError, match="closed"):
        found.generate([[1, 2, 3]])
    found.close()


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    from rayk.oracle.checkpoint import read_marker

    return [probe["prompt"] for probe in read_marker(model)["probes"]]


@thorough
@ray
@nixl
def test_token_ids_in_order_as_transformers_says(
    llm: LLM, model: Path, prompts: list[list[int]], reference: Any
) -> None:
    many = [prompt[: 1 + 7 * i % len(prompt)] for i in range(5) for prompt in prompts]
    assert len(many) > 12, "more than have room at once"
    expected = reference(model).generate(many, NUM_TOKENS, ignore_eos=True)
    assert min(min(o.margins) for o in expected) > 1e-4
    found = llm.generate(many, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    assert [list(c.prompt_token_ids) for c in found] == many
    assert [c.token_ids for c in found] == [tuple(o.token_ids) for o in expected]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert [c.text for c in found] == [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in found]
    assert {(c.finish_reason, c.stop_reason, c.logprobs) for c in found} == {("length", None, None)}


@thorough
@ray
@nixl
def test_one_sampling_per_prompt(llm: LLM, model: Path) -> None:
    text = "Once upon a time there was"
    plain = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    (whole,) = llm.generate(text, plain)
    assert whole.text is not None
    assert whole.prompt == text
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert list(whole.prompt_token_ids) == tokenizer(text)["input_ids"]
    printable = re.search("[ -~]{2}", whole.text[4:])
    assert printable is not None
    stop = printable[0]
    asked = [
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, stop=(stop,)),
        SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=(whole.token_ids[4],)),
        SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=0),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=7, ignore_eos=True),
        SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=8, ignore_eos=True),
    ]
    stopped, ended, told, drawn, again, other = llm.generate([text] * len(asked), asked)
    assert stopped.text == whole.text[: whole.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert ended.token_ids == whole.token_ids[: 1 + whole.token_ids.index(whole.token_ids[4])]
    assert ended.stop_reason == whole.token_ids[4]
    assert told.logprobs is not None
    assert told.prompt_logprobs is not None
    assert [(row.token_id, row.rank, len(row.top)) for row in told.logprobs] == [
        (token, 1, 2) for token in told.token_ids
    ]
    ids = [row.token_id for row in told.prompt_logprobs if row is not None]
    assert ids == list(told.prompt_token_ids[1:])
    assert drawn.token_ids == again.token_ids != other.token_ids


@thorough
@ray
@nixl
@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([[1, 2], []], SamplingParams(), "prompt 1: empty"),
        ([""], SamplingParams(), "prompt 0: empty"),
        ([[1, 2]], [SamplingParams()] * 2, "1 prompts and 2 sampling parameters"),
        ([[5, 100_000]], SamplingParams(), "100000"),
        ([[1, 2], [5] * 3000], SamplingParams(), "3000"),
        ([[1]], SamplingParams(temperature=-1.0), "temperature"),
        ([[1], [1.5]], SamplingParams(), "prompt 1: neither text nor a list of token ids"),
    ],
)
def test_bad_prompts_leave_it_as_it_was(llm: LLM, prompts: Any, sampling: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        llm.generate(prompts, sampling)
    assert [c.finish_reason for c in llm.generate([[3, 4, 5]] * 4, SamplingParams(max_tokens=2))] != []


@thorough
@ray
@nixl
def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([]) == []

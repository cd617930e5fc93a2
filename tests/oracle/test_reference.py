"""The reference's own decoding loop against transformers' generate, its cache and its views."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.oracle.cache import AnswerStore
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.reference import Reference
from rayk.oracle.tiny import HYBRID
from rayk.types.errors import CheckpointError, UserError
from tests.conftest import CheckpointFactory
from tests.families import ATTENTION
from tests.families import HYBRID as HYBRIDS
from tests.markers import one_per, sweep
from tests.spec_models import ALL_ROUTED, OTHER_STREAMS

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in ATTENTION if family != "gemma3n"),
    ("qwen3", {"overrides": dict(HYBRID)}),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in ("gemma3n", *HYBRIDS)),
    ("gemma3n", {"overrides": dict(OTHER_STREAMS)}),
    ("llama4", {"overrides": dict(ALL_ROUTED)}),
]


@pytest.fixture(scope="module")
def qwen3(checkpoint: CheckpointFactory) -> Reference:
    return Reference(checkpoint("qwen3"))


def probes(path: Path) -> list[list[int]]:
    return [probe["prompt"] for probe in read_marker(path)["probes"]]


def load(path: Path, implementation: str) -> Any:
    from transformers import AutoModelForCausalLM

    # Of experts, another implementation asks for strides that tiny ones do not have.
    return AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=implementation, experts_implementation="eager"
    )


@sweep(2)
@one_per()
@pytest.mark.parametrize(("family", "options"), [*VARIANTS, *MORE], ids=str)
def test_equal_to_generate(checkpoint: CheckpointFactory, family: str, options: dict[str, Any]) -> None:
    """Tokens and logits; generate uses other attention code and, for windows, another cache."""
    path = checkpoint(family, **options)
    prompts = probes(path)
    outputs = Reference(path).generate(prompts, 24, ignore_eos=True)
    # Those have no other attention code than eager.
    model = load(path, "eager" if family in ("gemma2", "gpt_oss", "mamba2") else "sdpa")
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert list(output.token_ids) == expected.sequences[0, len(prompt) :].tolist()
        for step, logits in enumerate(expected.logits):
            top = logits[0].topk(5)
            assert output.top_ids[step][0] == int(top.indices[0])
            assert output.top_logits[step] == pytest.approx(top.values.tolist(), abs=2e-3)
            assert output.margins[step] == pytest.approx(float(-top.values.diff()[0]), abs=2e-3)
            logprob = float(logits[0].log_softmax(-1).max())
            assert output.logprobs[step] == pytest.approx(logprob, abs=2e-3)


def test_stops_at_a_stop_token_and_keeps_it(qwen3: Reference) -> None:
    prompt = probes(qwen3.model_path)[1]
    free = qwen3.generate([prompt], 24, ignore_eos=True)[0]
    stop = free.token_ids[7]
    stopped = qwen3.generate([prompt], 24, ignore_eos=True, stop_token_ids=[stop])[0]
    first = free.token_ids.index(stop)
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finish_reason == "stop"
    assert len(stopped.margins) == len(stopped.top_ids) == first + 1
    assert free.finish_reason == "length"


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_eos_ids_as_generate_reads_them(checkpoint: CheckpointFactory, tmp_path: Path, where: str) -> None:
    """Of generation_config.json (a list as well), else of config.json; ignored on request."""
    source = checkpoint("qwen3")
    prompt = probes(source)[0]
    free = Reference(source).generate([prompt], 24)[0].token_ids
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    values = json.loads((tmp_path / where).read_text())
    if where == "config.json":
        (tmp_path / "generation_config.json").unlink()
    (tmp_path / where).write_text(json.dumps(values | {"eos_token_id": [1, free[9]]}))

    changed = Reference(tmp_path)
    output = changed.generate([prompt], 24)[0]
    expected = load(tmp_path, "eager").generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=24,
        pad_token_id=2,
    )
    assert list(output.token_ids) == expected[0, len(prompt) :].tolist()
    assert output.token_ids[-1] == free[9]
    assert output.finish_reason == "stop"
    assert changed.generate([prompt], 24, ignore_eos=True)[0].token_ids == free


def test_teacher_forcing_its_own_output_has_no_gap(qwen3: Reference) -> None:
    for prompt in probes(qwen3.model_path):
        output = qwen3.generate([prompt], 24)[0]
        steps = qwen3.teacher_force(prompt, output.token_ids)
        assert tuple(s.argmax_id for s in steps) == output.token_ids
        assert [s.gap for s in steps] == [0.0] * 24
        assert [s.margin for s in steps] == pytest.approx(output.margins, abs=2e-3)
        assert [s.chosen_logprob for s in steps] == pytest.approx(output.logprobs, abs=2e-3)


def test_teacher_forcing_other_tokens(qwen3: Reference) -> None:
    """Each step against one forward of the whole text, by transformers alone."""
    prompt, output = probes(qwen3.model_path)[1], [17, 300, 300, 4, 511]
    steps = qwen3.teacher_force(prompt, output)
    with torch.no_grad():
        logits = load(qwen3.model_path, "sdpa")(torch.tensor([prompt + output])).logits[0]
    assert len(steps) == len(output)
    for i, (step, token) in enumerate(zip(steps, output, strict=True)):
        row = logits[len(prompt) + i - 1]
        assert step.chosen_id == token
        assert step.argmax_id == int(row.argmax())
        assert step.gap == pytest.approx(float(row.max() - row[token]), abs=2e-3)
        assert step.gap > 0.5
        expected = float(row.log_softmax(-1)[token])
        assert step.chosen_logprob == pytest.approx(expected, abs=2e-3)
    assert qwen3.teacher_force(prompt, []) == []


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=str)
def test_caches_hold_every_token_after_rope(
    checkpoint: CheckpointFactory, family: str, options: dict[str, Any]
) -> None:
    """Shapes, and that a later token sees the same cache a shorter prompt leaves (causality)."""
    path = checkpoint(family, **options)
    ours = Reference(path)
    prompt = probes(path)[2]
    layers = ours.caches(prompt)
    assert len(layers) == 4
    head_size = 24 if family == "phi3" else 16
    for layer, shorter in zip(layers, ours.caches(prompt[:100]), strict=True):
        assert layer.keys() == shorter.keys() == {"k", "v"}
        for name, rows in layer.items():
            assert rows.shape == (2, 300, head_size)
            assert float((rows[:, :100] - shorter[name]).abs().max()) < 1e-3
    # The first layer's keys depend on token and position only: RoPE must tell positions apart.
    same = ours.caches([7, 7, 7])[0]
    assert math.isclose(float(same["k"][0, 0].norm()), float(same["k"][0, 2].norm()), rel_tol=1e-4)
    assert float((same["k"][0, 0] - same["k"][0, 2]).abs().max()) > 0.1
    assert torch.allclose(same["v"][0, 0], same["v"][0, 2], atol=1e-5)


def test_caches_of_a_model_whose_last_layers_share(checkpoint: CheckpointFactory) -> None:
    """Those keep nothing; their targets keep every token, beyond the window too."""
    ours = Reference(checkpoint("gemma3n"))
    prompt = probes(ours.model_path)[2]
    layers, shorter = ours.caches(prompt), ours.caches(prompt[:100])
    assert layers[4:] == [{}, {}]
    assert len(layers) == 6
    for layer, short in zip(layers[:4], shorter, strict=False):
        assert layer["k"].shape == layer["v"].shape == (2, 300, 16)
        assert all(float((layer[f][:, :100] - short[f]).abs().max()) < 1e-3 for f in "kv")
        # Values are normed without weight; no two tokens' are alike.
        assert torch.allclose(layer["v"].square().mean(-1), torch.ones(2, 300), atol=1e-2)
        assert float((layer["v"][0, 0] - layer["v"][0, 1]).abs().max()) > 0.1


def test_answers_come_from_disk(
    checkpoint: CheckpointFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("qwen3")
    prompts = probes(path)
    first = Reference(path, answers=AnswerStore(tmp_path))
    outputs = first.generate(prompts, 8)
    steps = first.teacher_force(prompts[0], [5, 6])
    assert len(list(tmp_path.iterdir())) == 4

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    second = Reference(path, answers=AnswerStore(tmp_path))
    assert second.generate(prompts, 8) == outputs
    assert second.teacher_force(prompts[0], [5, 6]) == steps
    # Another question, another checkpoint or a spoilt file are asked again.
    with pytest.raises(AssertionError, match="the model was loaded"):
        second.generate(prompts, 9)
    with pytest.raises(AssertionError, match="the model was loaded"):
        Reference(checkpoint("qwen2"), answers=AnswerStore(tmp_path)).generate(prompts, 8)
    for file in tmp_path.iterdir():
        file.write_text("{")
    with (
        pytest.warns(UserWarning, match="is not trusted"),
        pytest.raises(AssertionError, match="the model was loaded"),
    ):
        second.generate(prompts, 8)


def test_bad_prompts(qwen3: Reference) -> None:
    with pytest.raises(UserError, match="token id 515 is outside the vocabulary of 515"):
        qwen3.generate([[5, 515]], 4)
    with pytest.raises(UserError, match="token id -1"):
        qwen3.teacher_force([5], [-1])
    with pytest.raises(UserError, match="empty"):
        qwen3.generate([[]], 4)
    with pytest.raises(UserError, match="2040 prompt tokens and 9 more exceed the model's 2048"):
        qwen3.generate([[5] * 2040], 9)


def test_longrope_ends_where_its_factors_change(checkpoint: CheckpointFactory) -> None:
    """Of 4096 positions the first 1024 mean one thing."""
    phi3 = Reference(checkpoint("phi3"))
    assert len(phi3.generate([[5] * 1021], 3, ignore_eos=True)[0].token_ids) == 3
    with pytest.raises(UserError, match="1021 prompt tokens and 4 more exceed the model's 1024 positions"):
        phi3.generate([[5] * 1021], 4)


def test_bad_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Reference(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(CheckpointError, match="no-such-model"):
        Reference(tmp_path).generate([[1]], 1)
    with pytest.raises(UserError, match="float32"):
        Reference(tmp_path, "int8")


def test_weights_that_do_not_fit_the_config(tmp_path: Path, checkpoint: CheckpointFactory) -> None:
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 200}))
    with pytest.raises(CheckpointError, match="transformers cannot load it"):
        Reference(folder).generate([[1]], 1)

"""The check `logprobs`: right engines pass in every dtype, planted errors do not, reasons name the token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.attention.backends import paged
from rayk.engine.build import ThreadEngine
from rayk.experiments.logprobs import LOGPROB_FLOOR, compare_logprobs, near_tie_tolerance
from rayk.experiments.references import References
from rayk.kernels.paged_attention import paged_attention
from rayk.models.layers.moe import Moe
from rayk.oracle.cache import AnswerStore
from rayk.oracle.reference import TextScores
from rayk.types.config import EngineConfig
from rayk.types.request import SamplingParams
from rayk.types.rows import RequestRow
from rayk.types.structured import StructuredOutputs
from tests.conftest import CHECKPOINTS
from tests.experiments.teacher import aggregated, handed_over, prompts_of
from tests.pd import Pair

GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def qwen3(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def bfloat16(qwen3: Path) -> References:
    return References(str(qwen3), AnswerStore(CHECKPOINTS / "reference-cache"), "bfloat16")


# Without an engine: what the bounds let through.


class Told:
    """Stands for the references: exact logprobs are 0, eager's errors are given."""

    def __init__(
        self,
        noise: list[float],
        dtype: str = "bfloat16",
        gaps: list[float] | None = None,
        further: list[float] | None = None,
        routed: bool = False,
    ) -> None:
        self.routed, self.eager_dtype = routed, dtype
        self.noise, self.dtype, self.further = noise, dtype, further
        self.gaps = gaps or [0.0] * len(noise)
        self.is_exact = dtype == "float32"

    def scores(self, prompt: list[int], output: list[int]) -> tuple[TextScores, TextScores]:
        n = len(output)
        exact = TextScores(
            prompt_logprobs=(),
            output_logprobs=(0.0,) * n,
            output_gaps=tuple(self.gaps),
            further_logprobs=((0.0,),) * n,
        )
        further = tuple((error,) for error in (self.further or self.noise))
        return exact, replace(exact, output_logprobs=tuple(self.noise), further_logprobs=further)


def judged(
    found: list[float], told: Told, sampling: SamplingParams = GREEDY, **options: Any
) -> tuple[str, ...]:
    row = RequestRow(
        cell_id="c", repeat=0, request_id="r", prompt_index=4, prompt_token_ids=[1],
        output_token_ids=list(range(len(found))), output_logprobs=found,
    )  # fmt: skip
    return compare_logprobs([row], told, sampling).reasons  # type: ignore[arg-type]


NOISE = [0.1, -0.02, 0.05, 0.01] * 6
"""RMS 0.057: 4 times that is more than twice the worst."""
ZERO = [0.0] * 24


@pytest.mark.parametrize(
    ("found", "told", "reason"),
    [
        (NOISE[::-1], Told(NOISE), ""),
        ([0.22, *NOISE[1:]], Told(NOISE), ""),
        ([0.24, *NOISE[1:]], Told(NOISE), "output token 0: 0.24, the reference's is 0 (off by 0.24; bound"),
        ([*NOISE[:-1], float("nan")], Told(NOISE), "output token 23: nan"),
        ([0.1] * 24, Told(NOISE), ""),
        ([0.15] * 24, Told(NOISE), "(off by 0.15, 0.15 RMS over 24 tokens; bound 0.12 RMS, measured from"),
        ([1.9e-3] * 24, Told(ZERO, "float32"), ""),
        ([*ZERO[1:], 2.1e-3], Told(ZERO, "float32"), "output token 23: 0.0021, the reference's is 0"),
        (ZERO, Told(NOISE, gaps=[*ZERO[1:], 0.45]), ""),
        (ZERO, Told(NOISE, gaps=[*ZERO[1:], 0.47]), "token 23 was chosen greedily 0.47 logits below"),
        (ZERO, Told(NOISE, gaps=[0.3] * 24), "token 0 was chosen greedily 0.3 logits below"),
    ],
)  # fmt: skip
def test_what_the_bounds_let_through(found: list[float], told: Told, reason: str) -> None:
    reasons = judged(found, told)
    assert bool(reasons) == bool(reason)
    assert all(reason in text for text in reasons[:1])


def test_a_token_that_its_form_does_not_allow_is_named() -> None:
    """The reference finds such a token impossible: its own logits are none the worse for that."""
    told = Told(ZERO, "float32", gaps=[*ZERO[:5], float("inf"), *ZERO[6:]])
    formed = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    assert judged(ZERO, told, formed) == ("logprobs: request 4, token 5 is not of the form asked for",)


def test_only_the_models_own_greedy_choice_must_be_its_best() -> None:
    told = Told(NOISE, gaps=[9.0] * 24)
    assert judged([0.0] * 24, told)
    for changes in ({"temperature": 0.7}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}):
        assert not judged([0.0] * 24, told, SamplingParams(**changes))


def test_flipped_routes_are_let_through_and_a_lost_head_is_not() -> None:
    """Eager: small errors and two flips. Flips at other tokens pass; most tokens wrong do not."""
    told = Told([0.05, -0.1] * 35 + [4.0, -7.0], routed=True)
    assert not judged([0.1, -0.05] * 25 + [6.0, 0.7, -5.0, 3.0, 0.9, 11.0] * 3 + [0.1] * 4, told)
    assert not judged([0.14] * 72, told)
    assert "0.2 lower quartile over 72 tokens; bound 0.147 lower quartile" in judged([0.2] * 72, told)[0]
    assert "0.9 median over 72 tokens" in judged([0.9, -0.9] * 36, told)[0]


def test_few_tokens_of_small_noise_are_bounded_by_that_of_others() -> None:
    """Two tokens that eager got right by chance; elsewhere at the same steps it is off by 0.1."""
    by_chance = Told([1e-3, -1e-3], further=[0.1, -0.1])
    assert not judged([0.2, -0.1], by_chance)
    assert judged([0.6, -0.1], by_chance)
    assert judged([0.2, -0.1], Told([1e-3, -1e-3]))


def test_a_flipped_route_in_few_tokens_is_let_through_where_few_are_met() -> None:
    """float16: eager met none in these tokens, bfloat16 did at the same steps."""
    assert not judged([0.23, 0.2, 0.002, 0.3], Told([0.005] * 4, further=[0.25] * 4, routed=True))
    assert judged([0.23, 0.2, 0.002, 0.3], Told([0.005] * 4, routed=True))
    many = [0.005] * 1200
    assert judged([0.23, 0.2, 0.002, 0.3] * 300, Told(many, further=[0.25] * 1200, routed=True))


# With engines.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_right_engine_passes_at_any_temperature(
    qwen3: Path, bfloat16: References, temperature: float
) -> None:
    prompts = prompts_of(qwen3)
    with Pair.open(qwen3, tp=(2, 1), dtype="bfloat16", max_batch_tokens=64) as pair:
        rows, _ = handed_over(pair, prompts, temperature=temperature, seed=3)
    sampling = SamplingParams(temperature=temperature)
    compared = compare_logprobs(rows, bfloat16, sampling)
    assert compared.reasons == ()
    assert compared.output.num_checked == 3 * 24
    assert compared.prompt.num_checked == 4 + 36 + 299
    assert 0 < compared.output.max_error < compared.output.bound.worst
    # Not float32 by mistake: that would be far closer.
    assert compared.prompt.typical_error > 10 * LOGPROB_FLOOR


def test_float32_engines_keep_the_bound_of_float32(qwen3: Path) -> None:
    exact = References(str(qwen3), AnswerStore(CHECKPOINTS / "reference-cache"))
    with ThreadEngine(EngineConfig(model=str(qwen3), num_blocks=64)) as engine:
        rows = aggregated(engine, prompts_of(qwen3))
    compared = compare_logprobs(rows, exact, GREEDY)
    assert compared.reasons == ()
    assert compared.output.bound.worst == LOGPROB_FLOOR
    rows[1].output_logprobs[7] += 2.1e-3  # type: ignore[index]
    (reason,) = compare_logprobs(rows, exact, GREEDY).reasons
    assert "request 1, output token 7" in reason
    rows[2].prompt_logprobs[200] -= 2.1e-3  # type: ignore[index,operator]
    assert "request 2, prompt token 200" in compare_logprobs(rows, exact, GREEDY).reasons[1]


@contextmanager
def last_block_dropped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In decode, the last full block of each request is read where the one before it lies."""

    def attend(
        q: Any, cache: Any, table: torch.Tensor, starts: Any, lengths: torch.Tensor, *args: Any, **kw: Any
    ) -> Any:
        if q.shape[0] == len(lengths):
            table = table.clone()
            for row, length in enumerate(lengths.tolist()):
                last = length // cache.shape[2] - 1
                if last > 0:
                    table[row, last] = table[row, last - 1]
        return paged_attention(q, cache, table, starts, lengths, *args, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(paged, "paged_attention", attend)
        yield


def with_other_theta(path: Path, folder: Path, theta: float) -> Path:
    shutil.copytree(path, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = theta
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_engine(
    path: Path, change: Callable[[ThreadEngine], None] = lambda engine: None, dtype: str = "bfloat16"
) -> list[RequestRow]:
    with ThreadEngine(EngineConfig(model=str(path), dtype=dtype, num_blocks=64)) as engine:
        change(engine)
        return aggregated(engine, prompts_of(path))


def swap_heads(engine: ThreadEngine) -> None:
    """In one layer of four, query heads read each other's KV head."""
    attention = engine.ranks[0].decoder.attention_layers[2]
    attention.params = replace(attention.params, kv_index=attention.params.kv_index.flip(0))


@pytest.mark.parametrize("model", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize("error", ["none", "block", "theta", "head"])
def test_planted_errors_are_seen_in_bfloat16(
    checkpoint: Callable[..., Path], model: str, error: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = checkpoint(model)
    references = References(
        str(path), AnswerStore(CHECKPOINTS / "reference-cache"), "bfloat16", routed=model == "gpt_oss"
    )
    if error == "block":
        with last_block_dropped(monkeypatch):
            rows = run_engine(path)
    elif error == "theta":
        rows = run_engine(with_other_theta(path, tmp_path / "other", 30000.0))
    else:
        rows = run_engine(path, swap_heads if error == "head" else lambda engine: None)
    compared = compare_logprobs(rows, references, GREEDY)
    assert bool(compared.reasons) == (error != "none"), compared
    assert all("measured from eager bfloat16" in reason for reason in compared.reasons[:1])


def lose_expert_biases(engine: ThreadEngine) -> None:
    for layer in engine.ranks[0].decoder.layers:
        assert isinstance(layer.mlp, Moe)
        layer.mlp.experts.down_bias.zero_()


def lose_the_sinks_of_a_layer(engine: ThreadEngine) -> None:
    attention = engine.ranks[0].decoder.attention_layers[1]
    attention.params = replace(attention.params, sinks=None)


def sharpen_attention(engine: ThreadEngine) -> None:
    """Scores of all layers are 1.1 times what they should be."""
    for attention in engine.ranks[0].decoder.attention_layers.values():
        attention.params = replace(attention.params, scale=1.1 * attention.params.scale)


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        ("bfloat16", lose_expert_biases),
        ("bfloat16", sharpen_attention),
        ("float16", None),
        ("float16", lose_expert_biases),
        ("float16", sharpen_attention),
        # Too little for bfloat16.
        ("float16", lose_the_sinks_of_a_layer),
    ],
)
def test_small_errors_show_between_flipped_routes(
    checkpoint: Callable[..., Path], dtype: str, change: Callable[[ThreadEngine], None] | None
) -> None:
    path = checkpoint("gpt_oss")
    references = References(str(path), AnswerStore(CHECKPOINTS / "reference-cache"), dtype, routed=True)
    rows = run_engine(path, change or (lambda engine: None), dtype)
    reasons = compare_logprobs(rows, references, GREEDY).reasons
    assert bool(reasons) == (change is not None), reasons
    assert all(f"measured from eager {dtype}" in reason for reason in reasons[:1])


def test_near_ties_outside_float32_are_as_wide_as_eagers_noise(qwen3: Path, bfloat16: References) -> None:
    tolerance = near_tie_tolerance(run_engine(qwen3), bfloat16)
    assert 0.05 < tolerance < 5

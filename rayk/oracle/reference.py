"""The reference: what transformers computes for a model, one prompt at a time, in a chosen dtype.

Decoding is rayk's own loop over transformers' forward with a KV cache (tests compare it with
`model.generate`), because it also reports how near each choice was. Shapes: T tokens, H KV heads, D head dim.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayk.oracle.cache import Answer, AnswerStore, Question, code_digest
from rayk.oracle.files import checkpoint_hash
from rayk.oracle.quiet import no_progress_bars
from rayk.types.errors import CheckpointError, UserError
from rayk.types.structured import StructuredOutputs

if TYPE_CHECKING:  # torch is imported when a question needs the model
    from torch import Tensor

    from rayk.oracle.following import Following, StoredKV
    from rayk.oracle.forms import ModelForms
    from rayk.oracle.quantised import KVRounding
    from rayk.oracle.states import Fields
    from rayk.oracle.text import FedText

NUM_TOP = 5
"""Number of best tokens that an answer lists per step."""
NUM_FURTHER = 8
"""Number of further tokens whose log probability `score` gives per step."""

_GRAMMARS = Path(__file__).parents[1] / "grammars"
_ANSWERING = ("rayk", "transformers", "torch", "compressed-tensors")
"""Packages whose version an answer depends on. The last one dequantises formats of its own."""
_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, kw_only=True)
class ReferenceOutput:
    """Greedy decoding of one prompt. Per-step tuples are as long as `token_ids`."""

    token_ids: tuple[int, ...]
    """Includes the stop token."""
    margins: tuple[float, ...]
    """Best minus second-best logit."""
    top_ids: tuple[tuple[int, ...], ...]
    """The NUM_TOP best tokens, best first."""
    top_logits: tuple[tuple[float, ...], ...]
    logprobs: tuple[float, ...]
    """Natural logarithm of the chosen token's probability."""
    finish_reason: str
    """stop or length."""


@dataclass(frozen=True, kw_only=True)
class ForcedStep:
    """The reference's view of a step where somebody else chose `chosen_id`."""

    chosen_id: int
    argmax_id: int
    gap: float
    """Best logit minus the chosen token's; 0 if the reference agrees."""
    margin: float
    """Best minus second-best logit."""
    chosen_logprob: float
    top_ids: tuple[int, ...]
    top_logits: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TextScores:
    """Log probabilities of every token of somebody else's text, given those before it."""

    prompt_logprobs: tuple[float, ...]
    """Logprobs of the prompt's tokens from the second on."""
    output_logprobs: tuple[float, ...]
    output_gaps: tuple[float, ...]
    """Best logit minus the output token's; 0 if the reference agrees."""
    further_logprobs: tuple[tuple[float, ...], ...]
    """Logprobs of NUM_FURTHER other tokens at every step, spread over the vocabulary."""


class Reference:
    """One checkpoint under transformers. The model is loaded when a question needs it.

     answers:       keeps what generate, teacher_force, score and caches answer; None: nothing does.
     weights_dtype: the weights are rounded to it first: the exact mathematics of a model in that dtype.
     rounding:      keys and values are rounded as a quantised cache would store them.

    Raises CheckpointError without a checkpoint, UserError for an unknown dtype.
    """

    def __init__(
        self,
        model_path: str | Path,
        dtype: str = "float32",
        device: str = "cpu",
        *,
        weights_dtype: str | None = None,
        rounding: KVRounding | None = None,
        answers: AnswerStore | None = None,
    ) -> None:
        for name in (dtype, weights_dtype or dtype):
            if name not in _DTYPES:
                raise UserError(f"dtype {name!r}", mend=f"one of {', '.join(_DTYPES)}")
        self.model_path = Path(model_path)
        self.dtype = dtype
        self.weights_dtype = weights_dtype or dtype
        self.device = device
        self.kept_since: str | None = None
        """When the earliest of its answers that an earlier run kept was computed; None: it used none."""
        self._identity: Question = {
            **{name: _version(name) for name in _ANSWERING},
            "code": code_digest(),
            "checkpoint": checkpoint_hash(self.model_path, whole=True),
            "dtype": dtype,
            "device": device,
            "num_top": NUM_TOP,
        }
        if self.weights_dtype != dtype:
            self._identity["weights_dtype"] = self.weights_dtype
        self._rounding = rounding
        if rounding is not None:
            self._identity["kv"] = rounding.identity
        self._answers = answers or AnswerStore(None)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] = (),
        form: StructuredOutputs | None = None,
    ) -> list[ReferenceOutput]:
        """Greedy output of each prompt by itself (the lowest id wins a tie).

        An answer ends at `max_tokens`, at a stop token id, or at one of the model's EOS ids unless
        `ignore_eos`. With a `form` each token is the best of those that it allows, an EOS ends the answer
        whatever `ignore_eos` says, and so does a token behind which nothing may follow. Raises UserError for
        a prompt that is empty, holds ids outside the vocabulary, or is too long.
        """
        stops = sorted({int(i) for i in stop_token_ids})

        def decode(question: Question) -> ReferenceOutput:
            ends_at_eos = form is not None or not ignore_eos
            all_stops = frozenset(stops) | (self._eos_ids if ends_at_eos else frozenset())
            return self._decode(question["prompt"], max_tokens, all_stops, form)

        limits = {"max_tokens": max_tokens, "ignore_eos": ignore_eos, "stop_token_ids": stops}
        limits |= _about_form(form)
        answers = (
            self._answer(
                {"ask": "generate", "prompt": [int(i) for i in prompt], **limits}, lambda q: asdict(decode(q))
            )
            for prompt in prompts
        )
        return [ReferenceOutput(**answer) for answer in answers]

    def teacher_force(
        self, prompt: Sequence[int], output_ids: Sequence[int], form: StructuredOutputs | None = None
    ) -> list[ForcedStep]:
        """Return the reference's view of each of `output_ids`, given the prompt and those before it. A token
        that the `form` does not allow lies infinitely far below the best. Raises UserError like generate."""
        answer = self._answer(
            {
                "ask": "teacher_force",
                "prompt": [int(i) for i in prompt],
                "output_ids": [int(i) for i in output_ids],
                **_about_form(form),
            },
            lambda q: {"steps": [asdict(step) for step in self._force(q["prompt"], q["output_ids"], form)]},
        )
        return [ForcedStep(**step) for step in answer["steps"]]

    def score(
        self, prompt: Sequence[int], output_ids: Sequence[int], form: StructuredOutputs | None = None
    ) -> TextScores:
        """Log probability of every token but the first; of the output's, among those that the `form` allows.
        Raises UserError like generate."""
        answer = self._answer(
            {
                "ask": "score",
                "num_further": NUM_FURTHER,
                "prompt": [int(i) for i in prompt],
                "output_ids": [int(i) for i in output_ids],
                **_about_form(form),
            },
            lambda q: asdict(self._score(q["prompt"], q["output_ids"], form)),
        )
        return TextScores(**answer)

    def follow(
        self,
        prompt: Sequence[int],
        output_ids: Sequence[int],
        stored: StoredKV,
        form: StructuredOutputs | None = None,
    ) -> tuple[TextScores, Following]:
        """Like `score`, but with the keys and values of the prompt that an engine stored, where these are
        legal; and the outcome. Not cached. Raises UserError like generate."""
        from rayk.oracle.following import Following
        from rayk.oracle.text import FedText

        assert self._rounding is not None, "nothing is rounded"
        following = Following(self._rounding, stored)
        return self._score(prompt, output_ids, form, FedText(self._model, following)), following

    def caches(self, prompt_ids: Sequence[int]) -> list[Fields]:
        """Return what every layer caches of the prompt, field -> [units, rows, elements]; see oracle.states.
        Covers all tokens, also of sliding-window layers. Raises UserError like generate."""
        from rayk.oracle.states import layer_caches

        token_ids = [int(i) for i in prompt_ids]
        question = self._about_caches(token_ids)
        kept = self._answers.get_tensors(question)
        if kept is not None:
            self._note(kept[1])
            return [{name: t.to(self.device) for name, t in of.items()} for of in kept[0]]
        self._check(token_ids, 0)
        text = self._text()
        text.feed(token_ids, logits_to_keep=1)
        layers = layer_caches(self._model.config, text.cache)
        self._answers.put_tensors(question, layers)
        return layers

    def keeps_caches(self, prompt_ids: Sequence[int]) -> bool:
        """Tell, without torch, whether an answer of `caches` is there."""
        return self._answers.holds(self._about_caches([int(i) for i in prompt_ids]))

    def _about_caches(self, token_ids: list[int]) -> Question:
        return self._identity | {"ask": "caches", "prompt": token_ids}

    def _answer(self, question: Question, compute: Callable[[Question], Answer]) -> Answer:
        """Return the kept answer, or a computed one, with tuples in place of lists."""
        question = self._identity | question
        kept = self._answers.get(question)
        if kept is None:
            answer = compute(question)
            self._answers.put(question, answer)
        else:
            answer = kept.answer
            self._note(kept.since)
        return {name: _tuples(value) for name, value in answer.items()}

    def _note(self, since: str | None) -> None:
        self.kept_since = min(filter(None, (self.kept_since, since)), default=None)

    @cached_property
    def _model(self) -> Any:
        import torch
        import transformers
        from safetensors import SafetensorError

        from rayk.oracle.dequantised import plain_checkpoint

        try:
            with no_progress_bars(), plain_checkpoint(self.model_path) as folder:
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    folder,
                    dtype=getattr(torch, self.weights_dtype),
                    attn_implementation="eager",
                    # The default for experts has no float64.
                    experts_implementation="eager",
                    local_files_only=True,
                )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            # RuntimeError: weights whose shapes differ from config.json.
            raise CheckpointError(
                f"transformers cannot load it: {error}", where=str(self.model_path)
            ) from error
        if self.weights_dtype != self.dtype:  # else parts that stay in float32 would be rounded as well
            model = model.to(getattr(torch, self.dtype))
        return model.to(self.device).eval()

    @cached_property
    def _eos_ids(self) -> frozenset[int]:
        """Ids in generation_config.json, else in the config, as in `model.generate`."""
        ids = self._model.generation_config.eos_token_id
        if ids is None:
            ids = self._model.config.eos_token_id
        if ids is None:
            return frozenset()
        return frozenset([ids] if isinstance(ids, int) else ids)

    @cached_property
    def _forms(self) -> ModelForms:
        from rayk.oracle.forms import ModelForms

        vocab_size = self._model.config.get_text_config().vocab_size
        return ModelForms(self.model_path, vocab_size, self._eos_ids)

    def _check(self, prompt: Sequence[int], num_more: int) -> None:
        """Raise UserError for input outside the vocabulary or the model's positions."""
        config = self._model.config.get_text_config()
        where = str(self.model_path)
        if not prompt:
            raise UserError("the prompt is empty", where=where)
        outside = [i for i in prompt if not 0 <= i < config.vocab_size]
        if outside:
            raise UserError(
                f"token id {outside[0]} is outside the vocabulary of {config.vocab_size}", where=where
            )
        positions = _positions(config)
        if positions is not None and len(prompt) + num_more > positions:
            raise UserError(
                f"{len(prompt)} prompt tokens and {num_more} more exceed the model's {positions} positions",
                where=where,
            )

    def _text(self) -> FedText:
        from rayk.oracle.text import FedText

        return FedText(self._model, self._rounding)

    def _decode(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop_ids: frozenset[int],
        form: StructuredOutputs | None,
    ) -> ReferenceOutput:
        self._check(prompt, max_tokens)
        steps: list[ForcedStep] = []
        next_ids, text, output = list(prompt), self._text(), self._forms.begin(form)
        stopped = False
        while len(steps) < max_tokens and not stopped:
            logits = _wide(text.feed(next_ids, logits_to_keep=1))[-1]
            step = _describe(output.within(logits), None)
            steps.append(step)
            stopped = output.feed(step.chosen_id) or step.chosen_id in stop_ids
            next_ids = [step.chosen_id]
        return ReferenceOutput(
            token_ids=tuple(s.chosen_id for s in steps),
            margins=tuple(s.margin for s in steps),
            top_ids=tuple(s.top_ids for s in steps),
            top_logits=tuple(s.top_logits for s in steps),
            logprobs=tuple(s.chosen_logprob for s in steps),
            finish_reason="stop" if stopped else "length",
        )

    def _force(
        self, prompt: Sequence[int], output_ids: Sequence[int], form: StructuredOutputs | None
    ) -> list[ForcedStep]:
        if not output_ids:
            return []
        self._check(prompt, len(output_ids))
        self._check(output_ids, 0)
        # The last output token is judged, never fed.
        fed = self._text().feed_both(prompt, output_ids[:-1], logits_to_keep=len(output_ids))
        logits = self._forms.begin(form).within_all(_wide(fed), output_ids)
        return [_describe(row, chosen) for row, chosen in zip(logits, output_ids, strict=True)]

    def _score(
        self,
        prompt: Sequence[int],
        output_ids: Sequence[int],
        form: StructuredOutputs | None,
        text: FedText | None = None,
    ) -> TextScores:
        import torch

        self._check(prompt, len(output_ids))
        if output_ids:
            self._check(output_ids, 0)
        token_ids = torch.tensor([*prompt, *output_ids], device=self.device)
        if len(token_ids) < 2:
            return TextScores(prompt_logprobs=(), output_logprobs=(), output_gaps=(), further_logprobs=())
        fed = token_ids[:-1].tolist()
        logits = _wide((text or self._text()).feed_both(fed[: len(prompt)], fed[len(prompt) :]))
        first = len(prompt) - 1
        others = torch.linspace(0, logits.shape[1] - 1, NUM_FURTHER, device=self.device).long()
        further = (logits[:, others] - logits.logsumexp(-1, keepdim=True)).tolist()
        if form is not None:  # further tokens are told of all the same: they show what rounding changes
            formed = self._forms.begin(form).within_all(logits[first:], output_ids)
            logits = torch.cat([logits[:first], formed])
        chosen = logits.gather(1, token_ids[1:, None])[:, 0]
        logprobs = (chosen - logits.logsumexp(-1)).tolist()
        gaps = (logits.amax(-1) - chosen).tolist()
        return TextScores(
            prompt_logprobs=tuple(logprobs[:first]),
            output_logprobs=tuple(logprobs[first:]),
            output_gaps=tuple(gaps[first:]),
            further_logprobs=tuple(tuple(step) for step in further),
        )


def _about_form(form: StructuredOutputs | None) -> Question:
    if form is None:
        return {}
    return {"form": asdict(form), "llguidance": _version("llguidance"), "grammars": code_digest(_GRAMMARS)}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wide(logits: Tensor) -> Tensor:
    import torch

    return logits if logits.dtype == torch.float64 else logits.float()


def _positions(config: Any) -> int | None:
    """Longest text with one meaning: beyond `original_max_position_embeddings` longrope changes its factors,
    also for what is cached. None for mamba2, which states no limit."""
    stated: int | None = getattr(config, "max_position_embeddings", None)
    if stated is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return min(stated, int(rope["original_max_position_embeddings"]))
    return stated


def _describe(logits: Tensor, chosen_id: int | None) -> ForcedStep:
    """Return one step from its logits [vocabulary]; with `chosen_id` None the reference chooses."""
    argmax_id = int(logits.argmax())
    chosen = argmax_id if chosen_id is None else chosen_id
    best = float(logits[argmax_id])
    top = logits.topk(min(NUM_TOP, logits.numel()))
    return ForcedStep(
        chosen_id=chosen,
        argmax_id=argmax_id,
        gap=best - float(logits[chosen]),
        margin=float(top.values[0] - top.values[1]) if logits.numel() > 1 else math.inf,
        chosen_logprob=float(logits[chosen] - logits.logsumexp(-1)),
        top_ids=tuple(top.indices.tolist()),
        top_logits=tuple(top.values.tolist()),
    )


def _tuples(value: Any) -> Any:
    """Nested lists, as JSON gives them, become tuples."""
    if isinstance(value, dict):
        return {name: _tuples(part) for name, part in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value

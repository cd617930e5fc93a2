"""LLM: a server's engines behind a Python object, without HTTP."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayk.actors.environment import wanted_address
from rayk.grammars import check
from rayk.serve.llm_engines import LLMEngines
from rayk.specs.server_plan import ServerOptions, ServerPlan, note_unused_tensors, plan_server
from rayk.types.admission import check_request
from rayk.types.errors import CheckpointError, UserError
from rayk.types.request import SamplingParams, TokenLogprobs
from rayk.types.serving import Delta

if TYPE_CHECKING:
    from rayk.serve.text import Text

Prompt = str | Sequence[int]
Sampling = SamplingParams | Sequence[SamplingParams]
"""One for all prompts, or one for each."""
Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    index: int
    text: str | None
    """Without special tokens, and without the stop string that ended it; None: the model has no tokenizer."""
    token_ids: tuple[int, ...]
    """The stop token included."""
    finish_reason: str
    """stop or length."""
    stop_reason: str | int | None
    """The stop string or token id behind `stop`; None: the model's own end."""
    logprobs: tuple[TokenLogprobs, ...] | None
    """One per token, if asked for."""
    num_drafted: int = 0
    """Tokens that were proposed for it; 0 where engines draft nothing."""
    num_accepted: int = 0
    """How many of these the model agreed to, those included that a stop cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What became of one prompt. Its short properties are those of its first output."""

    prompt: str | None
    """None: it was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Output, ...]
    """`n` of them."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    """One per prompt token, if asked for; the first has none."""
    num_cached_tokens: int
    """Prompt tokens whose KV was in a prefix cache."""

    @property
    def text(self) -> str | None:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.outputs[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.outputs[0].logprobs


class LLM:
    """A model on engines of its own: `with LLM(model, prefill_tp=2, decode_tp=1) as llm: llm.generate(...)`.

    The options are those of `rayk serve`, vLLM's names among them, `settings` its `--set`:
    {"engine.num_blocks": 512}; a sequence of TP sizes makes an engine of each. Engines run on the Ray cluster
    at `address` or $RAY_ADDRESS, on the one that this process has joined already, or else on a local one that
    `close` ends. Engines that die are started again, and what ran on them goes on.

    Raises UserError (bad input: before any actor starts), Unsupported where the model cannot run so, and
    whatever kept the engines from starting.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        prefill_tp: int | Sequence[int] | None = None,
        decode_tp: int | Sequence[int] | None = None,
        num_prefill: int | None = None,
        num_decode: int | None = None,
        prefill_pp: int | None = None,
        decode_pp: int | None = None,
        prefill_dcp: int | None = None,
        decode_dcp: int | None = None,
        mode: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        policy: str = "round_robin",
        failure_policy: str = "migrate",
        settings: Mapping[str, Any] | None = None,
        address: str | None = None,
        tensor_parallel_size: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        kv_cache_dtype: str = "auto",
        pipeline_parallel_size: int | None = None,
        decode_context_parallel_size: int | None = None,
        cp_kv_cache_interleave_size: int | None = None,
        speculative_config: Mapping[str, Any] | None = None,
    ) -> None:
        options = ServerOptions(
            model=str(model),
            mode=mode,
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            num_prefill=num_prefill,
            num_decode=num_decode,
            prefill_pp=prefill_pp,
            decode_pp=decode_pp,
            prefill_dcp=prefill_dcp,
            decode_dcp=decode_dcp,
            dtype=dtype,
            device=device,
            policy=policy,
            failure_policy=failure_policy,
            overrides=tuple(f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()),
            tensor_parallel_size=tensor_parallel_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_dtype=kv_cache_dtype,
            pipeline_parallel_size=pipeline_parallel_size,
            decode_context_parallel_size=decode_context_parallel_size,
            cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
            speculative_config=speculative_config,
        )
        plan = plan_server(options, is_local=wanted_address(address) is None)
        note = note_unused_tensors(plan)
        if note:
            logging.getLogger("rayk").warning(note)
        self._engines = _Engines(plan, address)
        # Whoever forgets to close it leaves that to the end of the process.
        self._close = weakref.finalize(self, self._engines.close)
        self._text: Text | CheckpointError | None = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = SamplingParams(),  # noqa: B008 - frozen
        *,
        n: int = 1,
        cache_salt: str | None = None,
    ) -> list[Completion]:
        """Complete prompts, all at once as far as the engines have room; answers in order.

        `prompts`: texts or lists of token ids, or one of them. `sampling`: of all, or one per prompt. `n`:
        outputs of each prompt; of these the i-th draws with a seed made of the prompt's and i, as over HTTP.
        `cache_salt`: cached KV is shared with calls that have an equal one, or like this one none.
        Raises UserError (bad input), ServerEnded where it is closed meanwhile, or whatever else the first
        request to fail ended with; the others are then aborted.
        """
        listed = _listed(prompts)
        ids = [self._token_ids(i, prompt) for i, prompt in enumerate(listed)]
        texts = [p if isinstance(p, str) else None for p in listed]
        return self._complete(texts, ids, sampling, n, cache_salt)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling = SamplingParams(),  # noqa: B008 - frozen
        *,
        n: int = 1,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer conversations, or one, as `generate` completes prompts: each is the text that the
        checkpoint's chat template makes of it. Raises UserError where there is none, or it refuses them."""
        from rayk.serve.text import reserved_arguments

        text = self._need_tokenizer()
        chats: Any = [messages] if all(isinstance(m, Mapping) for m in messages) else messages
        arguments = dict(chat_template_kwargs or {})
        if reserved := reserved_arguments(arguments):
            raise UserError(f"chat_template_kwargs: {reserved[0]} is not for callers to set")
        texts = [text.conversation(chat, **arguments) for chat in chats]
        ids = [tuple(text.encode(prompt, add_special_tokens=False)) for prompt in texts]
        return self._complete(texts, ids, sampling, n, cache_salt)

    def _complete(
        self,
        prompts: Sequence[str | None],
        ids: Sequence[tuple[int, ...]],
        sampling: Sampling,
        n: int,
        cache_salt: str | None,
    ) -> list[Completion]:
        from rayk.serve.request_parsing import choice_seed

        if isinstance(sampling, SamplingParams):
            sampling = [sampling] * len(ids)
        if len(sampling) != len(ids):
            raise UserError(f"{len(ids)} prompts and {len(sampling)} sampling parameters")
        if cache_salt == "":
            raise UserError("cache_salt is empty", mend="a text, or None for none")
        if n < 1:
            raise UserError(f"n {n}: a prompt has at least one output")
        for i, (tokens, params) in enumerate(zip(ids, sampling, strict=True)):
            check_request(tokens, params, self._engines.settings.model, f"prompt {i}")
            _check_form(params, f"prompt {i}")
        requests = [
            (
                tokens,
                params if n == 1 else replace(params, seed=choice_seed(params.temperature, params.seed, i)),
            )
            for tokens, params in zip(ids, sampling, strict=True)
            for i in range(n)
        ]
        answers = self._engines.complete(requests, cache_salt)
        return [
            self._completion(prompt, ids[k], sampling[k], answers[k * n : (k + 1) * n])
            for k, prompt in enumerate(prompts)
        ]

    def close(self) -> None:
        """End the engines, and the cluster if it is its own. A second call does nothing."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _token_ids(self, index: int, prompt: Prompt) -> tuple[int, ...]:
        found = tuple(self._need_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt)
        if not all(isinstance(t, int) for t in found):
            raise UserError("neither text nor a list of token ids", where=f"prompt {index}")
        return found

    def _need_tokenizer(self) -> Text:
        text = self._tokenizer()
        if isinstance(text, CheckpointError):
            raise text
        return text

    def _tokenizer(self) -> Text | CheckpointError:
        """Load the tokenizer, or tell why there is none: prompts of token ids need none."""
        if self._text is None:
            from rayk.serve.text import Text

            try:
                self._text = Text.load(self._engines.settings.model.folder)
            except CheckpointError as error:
                self._text = error
        return self._text

    def _completion(
        self,
        prompt: str | None,
        ids: tuple[int, ...],
        params: SamplingParams,
        answers: Sequence[Sequence[Delta]],
    ) -> Completion:
        first = answers[0]
        return Completion(
            prompt=prompt,
            prompt_token_ids=ids,
            outputs=tuple(self._output(i, params, deltas) for i, deltas in enumerate(answers)),
            prompt_logprobs=next((d.prompt_logprobs for d in first if d.prompt_logprobs is not None), None),
            num_cached_tokens=first[-1].num_cached_tokens or 0,
        )

    def _output(self, index: int, params: SamplingParams, deltas: Sequence[Delta]) -> Output:
        tokens = tuple(itertools.chain.from_iterable(d.token_ids for d in deltas))
        logprobs = [d.logprobs for d in deltas if d.logprobs is not None]
        last = deltas[-1]
        assert last.finish_reason is not None, "a stream ends with a reason or an error"
        return Output(
            index=index,
            text=self._decoded(tokens, params.stop),
            token_ids=tokens,
            finish_reason=str(last.finish_reason),
            stop_reason=last.stop_reason,
            logprobs=None if params.logprobs is None else tuple(itertools.chain.from_iterable(logprobs)),
            num_drafted=last.num_drafted,
            num_accepted=last.num_accepted,
        )

    def _decoded(self, tokens: Sequence[int], stop: Sequence[str]) -> str | None:
        tokenizer = self._tokenizer()
        if isinstance(tokenizer, CheckpointError):
            return None
        text = tokenizer.decode(tokens)
        ends = [at for at in (text.find(s) for s in stop) if at >= 0]
        return text[: min(ends)] if ends else text


class _Engines:
    """Holds the cluster, and the engines on it."""

    def __init__(self, plan: ServerPlan, address: str | None) -> None:
        # Ray is imported here so that bad input is refused in a second.
        import ray

        from rayk.actors import launch
        from rayk.actors.naming import JOB_NAME, fleet_name, models_in_words
        from rayk.actors.router import Router
        from rayk.serve.fleet_part import FleetPart

        self._stack = ExitStack()
        self._lock = threading.Lock()
        try:
            if not ray.is_initialized():
                model = models_in_words([plan.options.model])
                about = {"rayk": "LLM", "model": model, JOB_NAME: f"rayk LLM {model}"}
                joined = self._stack.enter_context(launch.connect(address, about=about))
            else:
                joined = launch.joined_before()
            if not joined.is_own:
                level = logging.INFO if joined.is_protected else logging.WARNING
                logging.getLogger("rayk").log(level, joined.in_words())
            self.settings = launch.fit_server(plan)
            name = fleet_name(self.settings.model.model_id)
            router = Router(name, self.settings, namespace=ray.get_runtime_context().namespace)
            num_at_once = sum(e.config.max_seqs for e in self.settings.engines)
            engines = LLMEngines(FleetPart(name, self.settings), router, num_at_once)
            self._stack.callback(engines.close)
            engines.start()
        except BaseException:
            self._stack.close()
            raise
        self.complete = engines.complete

    def close(self) -> None:
        with self._lock:
            self._stack.close()


def _check_form(params: SamplingParams, where: str) -> None:
    """Refuse structured outputs that no engine would take. Raises UserError."""
    if params.structured_outputs is not None:
        try:
            check(params.structured_outputs)
        except UserError as error:
            raise replace(error, where=f"{where}: {error.where}") from None


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]

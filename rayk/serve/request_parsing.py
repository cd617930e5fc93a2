"""From what a client sent, which is checked here and by `protocol`, to what the engines are asked."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from rayk.serve.choices import Choice, Choices, Prompt
from rayk.serve.errors import ApiError
from rayk.serve.forms import Forms
from rayk.serve.limits import HttpSettings
from rayk.serve.metrics import FrontMetrics
from rayk.serve.protocol import LEAST_TEMPERATURE, ChatRequest, Generation, check_extra
from rayk.serve.text import Text
from rayk.types.errors import CheckpointError, Overloaded, UserError
from rayk.types.request import Request, SamplingParams
from rayk.types.serving import Completer, ModelCard, ServerRequest
from rayk.types.structured import StructuredOutputs

T = TypeVar("T")


class BoundedThreads:
    """Runs a few calls at once, each on a thread, while a bounded number waits."""

    PLACES = 4
    WAITING = 64

    def __init__(self, what: str) -> None:
        """`what` waits, in words."""
        self._what = what
        self._places = asyncio.Semaphore(self.PLACES)
        self._num_waiting = 0

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call `work` in order of arrival. Its place is free once the thread is done, also where nobody waits
        for it any more. Raises Overloaded where too many wait."""
        if self._num_waiting >= self.WAITING:
            raise Overloaded(f"{self.WAITING} {self._what} already", 1.0)
        self._num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._num_waiting -= 1
        thread = asyncio.ensure_future(asyncio.to_thread(work, *args))
        thread.add_done_callback(lambda _: self._places.release())
        return await asyncio.shield(thread)


@dataclass(frozen=True, kw_only=True)
class Front:
    """Everything that the handlers of one app share."""

    completer: Completer
    settings: HttpSettings
    metrics: FrontMetrics
    text: Text | None
    why_no_text: str = ""
    """What is wrong with the checkpoint's tokenizer where `text` is None."""
    chats: BoundedThreads = field(
        default_factory=partial(BoundedThreads, "conversations wait for the chat template")
    )
    """Conversations become text and tokens there."""
    grammars: BoundedThreads = field(
        default_factory=partial(BoundedThreads, "schemas, expressions and grammars wait to be looked at")
    )
    """What clients ask for in structured outputs is checked there."""
    forms: Forms = field(default_factory=Forms)
    """Checks it."""

    def close(self) -> None:
        """End its processes. They would outlive the app: FastAPI remembers the functions of its routes, and
        all that these know."""
        self.forms.close()
        with contextlib.suppress(UserError):  # then it has no process
            if self.text is not None and self.text.templates is not None:
                self.text.templates.close()

    def need_text(self) -> Text:
        """Get the tokenizer. Raises CheckpointError where the model has none."""
        if self.text is None:
            raise CheckpointError(f"this model's server has no tokenizer: {self.why_no_text}")
        return self.text


@dataclass(frozen=True, kw_only=True)
class Call:
    """One HTTP call, checked: its names, and the choices that it asks for."""

    body: Generation
    call_id: str
    created_s: int
    choices: Choices

    @property
    def model_id(self) -> str:
        """The name of the model that answers."""
        return self.choices.completer.model.model_id

    def prompt_of(self, index: int) -> Prompt:
        """Find the prompt that a choice belongs to."""
        return self.choices.prompts[index // (self.body.n or 1)]


def check_call(front: Front, body: Generation, num_prompts: int) -> None:
    """Refuse what no engine need see: another model's name, unknown fields, more than the limits allow.
    Raises ApiError."""
    model, settings, n = front.completer.model, front.settings, body.n or 1
    if body.model is not None and body.model != model.model_id:
        problem = f"The model `{body.model[:200]}` does not exist; this server has `{model.model_id}`"
        raise ApiError(404, problem, param="model", code="model_not_found")
    check_extra(body, settings)
    for param, value, limit in (
        ("n", n, settings.max_n),
        ("prompt", num_prompts * n, settings.max_choices),
        ("stop", len(_stops(body)), settings.max_stop),
        ("stop_token_ids", len(body.stop_token_ids or ()), settings.max_stop),
    ):
        if value > limit:
            what = "choices in one call (prompts times n)" if param == "prompt" else param
            raise ApiError(400, f"{what}: {value} is more than {limit}", param=param, code="above_limit")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is for streams only", param="stream_options")


def open_call(
    front: Front,
    body: Generation,
    kind: str,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    marks: Sequence[str] = (),
) -> Call:
    """Make the call, with a ServerRequest per choice. `kind` begins its id. With max_tokens 0 only the
    prompt's log probabilities are computed. `marks`: special tokens that answers have all the same. Raises
    ApiError where a prompt does not fit."""
    call_id = f"{kind}-{uuid.uuid4().hex}"
    choices: list[Choice] = []
    for prompt in prompts:
        check_prompt(front, prompt, sampling.max_tokens, _length_field(body))
        for i in range(body.n or 1):
            own = replace(
                sampling,
                max_tokens=max(1, sampling.max_tokens),
                seed=choice_seed(sampling.temperature, body.seed, i),
            )
            index = len(choices)
            request = Request(
                request_id=f"{call_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=own,
                cache_salt=body.cache_salt,
            )
            server_request = ServerRequest(
                request=request,
                priority=body.priority or 0,
                deadline_s=body.deadline_s,
                session=body.prompt_cache_key,
            )
            choice = Choice(
                index=index,
                server_request=server_request,
                text=front.text,
                skip_special_tokens=body.skip_special_tokens is not False,
                marks=tuple(marks),
                wants_output=sampling.max_tokens > 0,
            )
            choices.append(choice)
    choice_set = Choices(completer=front.completer, prompts=prompts, each=choices)
    return Call(body=body, call_id=call_id, created_s=int(time.time()), choices=choice_set)


def sampling_of(
    body: Generation,
    settings: HttpSettings,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    structured_outputs: StructuredOutputs | None = None,
) -> SamplingParams:
    """Take OpenAI's defaults where the client says nothing: temperature 1. Raises ApiError."""
    temperature, top_p, top_k = _or(body.temperature, 1.0), _or(body.top_p, 1.0), body.top_k or -1
    if 0 < temperature < LEAST_TEMPERATURE:
        problem = f"temperature: 0, or at least {LEAST_TEMPERATURE:g}"
        raise ApiError(400, problem, param="temperature", code="invalid_value")
    stop = _stops(body)
    longest = settings.max_stop_characters
    if not all(0 < len(s) <= longest for s in stop):
        problem = f"stop: texts of 1 to {longest} characters"
        raise ApiError(400, problem, param="stop", code="invalid_value")
    if top_p == 0:  # the fewest tokens are one
        top_p, top_k = 1.0, 1
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        top_k=top_k if top_k > 0 else None,
        top_p=top_p,
        min_p=_or(body.min_p, 0.0),
        stop=stop,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        structured_outputs=structured_outputs,
    )


def num_tokens_left(front: Front, num_prompt_tokens: int) -> int:
    """Count the tokens that may follow a prompt of so many."""
    model = front.completer.model
    return min(model.max_positions, model.pool_tokens or model.max_positions) - num_prompt_tokens


def check_text(front: Front, text: str) -> None:
    """Refuse a text that no tokenizing can make fit, without doing that: it would take seconds of a thread.
    Raises ApiError."""
    fewest, limit = front.need_text().fewest_tokens(text), front.settings.max_prompt_tokens
    if limit is not None and fewest > limit:
        problem = f"the prompt has at least {fewest} tokens; this server takes {limit}"
        raise ApiError(400, problem, param="prompt", code="prompt_too_long")
    max_positions = front.completer.model.max_positions
    if fewest >= max_positions:
        problem = (
            f"This model's maximum context length is {max_positions} tokens. However, your prompt of "
            f"{len(text)} characters has at least {fewest}."
        )
        raise ApiError(400, problem, param="prompt", code="context_length_exceeded")


def check_prompt(front: Front, prompt: Prompt, max_tokens: int, length_field: str = "max_tokens") -> None:
    """Raises ApiError where a prompt is empty, has ids of no token, or leaves no room. `length_field`: the
    field that said `max_tokens`."""
    model, num_tokens = front.completer.model, len(prompt.token_ids)
    if not num_tokens:
        raise ApiError(400, "the prompt has no tokens", param="prompt", code="invalid_value")
    limit = front.settings.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        problem = f"the prompt has {num_tokens} tokens; this server takes {limit}"
        raise ApiError(400, problem, param="prompt", code="prompt_too_long")
    if max(prompt.token_ids) >= model.vocab_size:
        outside = next(t for t in prompt.token_ids if t >= model.vocab_size)
        problem = f"token id {outside} is outside the vocabulary of {model.vocab_size}"
        raise ApiError(400, problem, param="prompt", code="invalid_value")
    _check_context(model, num_tokens, max_tokens, length_field)


def _check_context(model: ModelCard, num_tokens: int, max_tokens: int, length_field: str) -> None:
    num_requested = num_tokens + max(1, max_tokens)
    if num_requested > model.max_positions:
        problem = (
            f"This model's maximum context length is {model.max_positions} tokens. However, you requested "
            f"{num_requested} tokens ({num_tokens} in the prompt, {max(1, max_tokens)} in the completion)."
        )
        # A prompt that leaves room for a token is not what is wrong.
        param = "prompt" if num_tokens >= model.max_positions else length_field
        raise ApiError(400, problem, param=param, code="context_length_exceeded")


def _length_field(body: Generation) -> str:
    """Name the field that says how many tokens may be generated."""
    is_new = isinstance(body, ChatRequest) and body.max_completion_tokens is not None
    return "max_completion_tokens" if is_new else "max_tokens"


def _stops(body: Generation) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def choice_seed(temperature: float, seed: int | None, index: int) -> int | None:
    """Choose one choice's seed: None where nothing is drawn, and a random one where the client gave none, so
    that a request goes on alike wherever it is placed again."""
    if not temperature:
        return None
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    mixed = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed) >> 1


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)

"""What clients get, for the app's OpenAPI document; the writers are held to it by the fuzzing tests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None


class ErrorBody(BaseModel):
    """Of every answer that is none."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


class CompletionLogprobs(BaseModel):
    """One entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """Of prompt index // n."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    """The stop string or token id that ended it; null for the model's own end of text."""
    token_ids: list[int] | None = None
    """With return_token_ids."""


class CompletionAnswer(BaseModel):
    """A whole completion; chunks of a stream differ in `usage` only."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(BaseModel):
    """The model's."""

    role: str
    content: str
    refusal: str | None


class ChatChoice(BaseModel):
    """One answer of n."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    """A whole chat completion."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ModelAnswer(BaseModel):
    """A model's card."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelsAnswer(BaseModel):
    """All models: one."""

    object: str
    data: list[ModelAnswer]


class HealthAnswer(BaseModel):
    """ready or unavailable. Why, and each engine's state: for those who have the key, where there is one."""

    status: str
    reason: str = ""
    engines: list[dict[str, Any]] = []


class EngineAnswer(BaseModel):
    """One engine as it is now: see types.serving.EngineState."""

    object: str
    name: str
    role: str
    tp: int
    state: str
    trouble: str
    epoch: int
    num_restarts: int
    restart: dict[str, Any]
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_running: int | None
    num_waiting: int | None
    num_steps: int | None
    forward_s: float | None
    num_computed_tokens: int | None
    num_sampled_tokens: int | None
    num_free_blocks: int | None
    num_blocks: int | None


class EnginesAnswer(BaseModel):
    """Every engine."""

    object: str
    data: list[EngineAnswer]


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request is wrong; `param` says where",
        401: "No API key, or a wrong one",
        404: "No such model",
        408: "The body took too long",
        413: "The body is too large",
        429: "No room now; Retry-After says when it may be worth trying again",
        500: "A fault of the server",
        503: "The engines failed, or are about to end",
        504: "The deadline passed",
    }.items()
}
"""Of endpoints that generate."""
SIMPLE_PROBLEMS: dict[int | str, dict[str, Any]] = {401: PROBLEMS[401], 404: PROBLEMS[404]}
STATE_PROBLEMS: dict[int | str, dict[str, Any]] = {code: PROBLEMS[code] for code in (401, 500, 503, 504)}
"""Of what engines are asked."""
ROLE_PROBLEMS: dict[int | str, dict[str, Any]] = {
    **{code: problem for code, problem in PROBLEMS.items() if code != 429},
    404: {"model": ErrorBody, "description": "No such engine"},
    409: {"model": ErrorBody, "description": "The engine cannot take this role, as things are"},
}
"""Of changes of roles."""


def streamed(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Answers of an endpoint that also streams."""
    ok = {"model": model, "content": {"text/event-stream": {}}}
    return {200: ok, **PROBLEMS}

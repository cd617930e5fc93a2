"""What clients get. The handlers build these dicts, mypy checks them, and FastAPI describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NotRequired

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on only

from rayk.types.serving import EngineState


class ErrorDetail(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None


class ErrorBody(TypedDict):
    """Every answer whose status is 400 or more."""

    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    """How much of the prompt was computed before."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """What became of tokens that were proposed for the answer. Accepted ones may exceed those in it: a stop
    may cut the last."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: NotRequired[CompletionTokensDetails]
    """Where engines drafted."""


class AnswerHead(TypedDict):
    """What precedes the choices, in whole answers and in chunks of streams."""

    id: str
    object: str
    created: int
    model: str


class CompletionLogprobs(TypedDict):
    """One entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """Choice `index` completes prompt index // n."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    """The stop string or token id that ended it; null for the model's own end of text."""
    token_ids: NotRequired[list[int]]
    """Ids of the answer's tokens, with return_token_ids."""


class CompletionAnswer(AnswerHead):
    """A whole completion; chunks of a stream differ in `usage` only."""

    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(TypedDict):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The chosen token, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(TypedDict):
    """A function and its arguments, as JSON text; a stream may tell these in parts."""

    name: NotRequired[str]
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool, or a part of one: the first part has its id and name."""

    index: NotRequired[int]
    """In streams."""
    id: NotRequired[str]
    type: NotRequired[str]
    function: CalledFunction


class ChatMessage(TypedDict):
    """What the model says."""

    role: str
    content: str | None
    """null where it only calls tools."""
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One answer of n."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatAnswer(AnswerHead):
    """A whole chat completion."""

    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(TypedDict, total=False):
    """What a chunk adds to the message; the first one names the role."""

    role: str
    content: str
    tool_calls: list[ToolCall]


class ChatChunkChoice(TypedDict):
    """A part of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]
    stop_reason: NotRequired[str | int | None]
    """Every chunk but the one that names the role has it."""


class ModelAnswer(TypedDict):
    """A model's card."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int


class ModelsAnswer(TypedDict):
    """All models: one."""

    object: str
    data: list[ModelAnswer]


class HealthAnswer(TypedDict):
    """Whether the server takes requests. Clients with the key are also told why, and each engine's state."""

    status: str
    """ready or unavailable."""
    reason: NotRequired[str]
    engines: NotRequired[list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAnswer(EngineState):
    """One engine as it is now."""

    object: str


class EnginesAnswer(TypedDict):
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
"""How endpoints that generate can fail."""
SIMPLE_PROBLEMS: dict[int | str, dict[str, Any]] = {401: PROBLEMS[401], 404: PROBLEMS[404]}
STATE_PROBLEMS: dict[int | str, dict[str, Any]] = {code: PROBLEMS[code] for code in (401, 500, 503, 504)}
"""How questions to the engines can fail."""
ROLE_PROBLEMS: dict[int | str, dict[str, Any]] = {
    **{code: problem for code, problem in PROBLEMS.items() if code != 429},
    404: {"model": ErrorBody, "description": "No such engine"},
    409: {"model": ErrorBody, "description": "The engine cannot take this role, as things are"},
}
"""How a change of roles can fail."""


def streamed(model: Any) -> dict[int | str, dict[str, Any]]:
    """Describe the answers of an endpoint that also streams."""
    ok = {"model": model, "content": {"text/event-stream": {}}}
    return {200: ok, **PROBLEMS}

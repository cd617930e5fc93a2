"""What clients may send: OpenAI's fields, and rayk's own beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rayk.serve.errors import ApiError
from rayk.serve.limits import HttpSettings
from rayk.types.request import MAX_LOGPROBS, MAX_PENALTY, MAX_SEED

LEAST_TEMPERATURE = 1e-3
"""Lower temperatures, other than 0, would push logits out of float32."""
MOST = 100.0
"""Bounds temperatures and repetition penalties."""

MOST_WHOLE = 2**31 - 1
MAX_TOOLS = 128
"""OpenAI's limit."""
MAX_DEPTH = 64
"""Bounds how deep lists and objects may be nested."""

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
        "prompt_cache_options",
    }
)
"""OpenAI's fields that change nothing in the answer: ignored."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "min_tokens": (0,),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
}
"""Fields of OpenAI and others that are not implemented -> values that ask for nothing, as null does."""
RENAMED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_decoding_backend": "",
    "guided_whitespace_pattern": "disable_any_whitespace",
}
"""vLLM's older fields -> their names in structured_outputs."""


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no text") from None
    return text


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        parts = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [child for part in parts for child in part]
    return bool(level)


String = Annotated[str, AfterValidator(_check_text)]
"""A JSON string that is Unicode text."""
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Count = Annotated[int, Field(ge=1, le=MOST_WHOLE)]
TokenId = Annotated[int, Field(ge=0, le=MOST_WHOLE)]


class _Strict(BaseModel):
    """Takes JSON's own types alone: "5" is not a number."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, use_attribute_docstrings=True)


class StreamOptions(_Strict):
    """Asks for the usage of a stream."""

    include_usage: bool | None = None
    """A last chunk without choices tells the usage."""
    continuous_usage_stats: bool | None = None
    """Every chunk tells the usage so far. (OpenAI has no such field.)"""


class JsonSchema(_Strict):
    """A schema with what OpenAI's clients say about it."""

    name: String | None = None
    description: String | None = None
    strict: bool | None = None
    """Answers fit the schema either way."""
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")


class ResponseFormat(_Strict):
    """OpenAI's way to ask for an answer of a certain form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredFields(_Strict):
    """vLLM's way to ask for an answer of a certain form: one of these fields says which."""

    json_schema: dict[str, Any] | String | bool | None = Field(default=None, alias="json")
    """A JSON schema, also as text."""
    json_object: bool | None = None
    regex: String | None = None
    """The whole answer matches it: Rust's syntax, without look-around."""
    choice: list[String] | None = None
    grammar: String | None = None
    """Of Lark's or GBNF's syntax."""
    disable_any_whitespace: bool | None = None
    """JSON has no white space between its tokens."""


class Generation(_Strict):
    """The fields that both endpoints take. null means the same as leaving a field out."""

    model: String | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=MOST)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    """Choice i of a prompt draws with a seed made of this one and i; choice 0 with this one."""
    stop: String | list[String] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    prompt_cache_key: Annotated[String, Field(max_length=1024)] | None = None
    """Requests with one key are kept together where the server's policy heeds sessions."""
    cache_salt: Annotated[String, Field(min_length=1, max_length=1024)] | None = None
    """Cached KV is shared by requests with one salt, and by those without any. (vLLM's field.)"""

    top_k: Annotated[int, Field(ge=-1, le=MOST_WHOLE)] | None = None
    """-1 and 0 mean all tokens, as with other servers."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1 / MOST, le=MOST)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Of waiting requests, lower ones go first."""
    deadline_s: Annotated[float, Field(gt=0, le=MOST_WHOLE)] | None = None
    """The answer must be complete this long after the request came."""

    @model_validator(mode="before")
    @classmethod
    def _check_depth(cls, body: Any) -> Any:
        """Refuse what is nested too deep to be walked through by calls. Raises ApiError."""
        for name, value in body.items() if isinstance(body, dict) else ():
            if name != "prompt" and _is_deep(value):  # whose one shape is checked, and may be long
                problem = f"{name[:100]}: nested more than {MAX_DEPTH} levels deep"
                raise ApiError(400, problem, param=name[:100], code="invalid_value")
        return body


class CompletionRequest(Generation):
    """The body of POST /v1/completions."""

    prompt: String | list[String] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[int, Field(ge=0, le=MOST_WHOLE)] | None = None
    """16 if left out. 0 is allowed with `echo` only."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None
    """Whether texts begin as the tokenizer begins them (default true)."""


class ContentPart(_Strict):
    """One piece of a message's content."""

    type: String
    text: String | None = None


class Message(_Strict):
    """One message of a conversation. Chat templates see all its fields."""

    role: String
    content: String | list[ContentPart] | None = None


class FunctionTool(_Strict):
    """A function as the model is told of it."""

    name: Annotated[String, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: String | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; none: there are no parameters."""
    strict: bool | None = None
    """Arguments of a call that tool_choice asks for fit the schema either way."""


class Tool(_Strict):
    """Something that the model may ask for."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(_Strict):
    """Names a function of the tools."""

    name: String


class NamedTool(_Strict):
    """Asks for a call of one function."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Generation):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    """The rest of the context if left out."""
    max_completion_tokens: Count | None = None
    """OpenAI's newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """auto, the default where there are tools: the model calls functions or not."""
    parallel_tool_calls: bool | None = None
    """False: one call at most."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the chat template, e.g. {"enable_thinking": false}."""


def check_extra(body: Generation, settings: HttpSettings) -> None:
    """Refuse fields that would be ignored though they ask for something. Raises ApiError."""
    for name, value in (body.model_extra or {}).items():
        if value is None or name in HARMLESS or _is_neutral(body, name, value):
            continue
        if name in RENAMED:
            problem = f"{name} is not supported; use structured_outputs"
            problem += f': {{"{RENAMED[name]}": ...}}' if RENAMED[name] else ", which has no backends"
            raise ApiError(400, problem, param=name, code="unsupported_parameter")
        if name in NEUTRAL:
            raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")
        if not settings.ignores_unknown:
            problem = f"Unrecognized request argument supplied: {name[:100]}"
            raise ApiError(400, problem, param=name[:100], code="unknown_parameter")


def has_form(body: Generation) -> bool:
    """Tell whether the answer must have a certain form."""
    asked = body.response_format
    is_called = isinstance(body, ChatRequest) and body.tool_choice not in (None, "none", "auto")
    return body.structured_outputs is not None or (asked is not None and asked.type != "text") or is_called


def _is_neutral(body: Generation, name: str, value: Any) -> bool:
    if name == "best_of":
        return bool(value == (body.n or 1))
    if name == "min_tokens" and body.ignore_eos and not (body.stop or body.stop_token_ids or has_form(body)):
        return True  # nothing ends the output before its last token
    return any(type(v) is type(value) and v == value for v in NEUTRAL.get(name, ()))

"""The FastAPI app: the same handlers wherever they run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.responses import PlainTextResponse, Response

from rayk.serve.chat import ChatWriter, open_chat
from rayk.serve.completions import CompletionWriter, open_completion
from rayk.serve.engines import add_engine_routes
from rayk.serve.errors import ApiError, JsonResponse, install_handlers
from rayk.serve.guard import Guard, has_key
from rayk.serve.limits import HttpSettings
from rayk.serve.metrics import CLIENT_GONE, CONTENT_TYPE, Counted, FrontMetrics
from rayk.serve.protocol import ChatRequest, CompletionRequest
from rayk.serve.replies import EventStream, HeadAsGet, unless_gone
from rayk.serve.request_parsing import Call, Front
from rayk.serve.responses import (
    PROBLEMS,
    SIMPLE_PROBLEMS,
    ChatAnswer,
    CompletionAnswer,
    HealthAnswer,
    ModelAnswer,
    ModelsAnswer,
    streamed,
)
from rayk.serve.text import Text
from rayk.serve.writer import Writer
from rayk.types.errors import CheckpointError, RaykError, UserError
from rayk.types.serving import Completer, EngineControl, Health

HEALTH_S = 5.0
"""A server that takes longer to say how it is counts as not well."""


def make_app(
    completer: Completer,
    settings: HttpSettings | None = None,
    *,
    text: Text | None = None,
    engines: EngineControl | None = None,
) -> FastAPI:
    """Make an OpenAI-compatible server of the completer's model. `text`: its tokenizer, where that is loaded
    already. `engines`: those behind the completer, where it has any."""
    settings = settings or HttpSettings()
    front = _front(completer, settings, text)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(front.close)

    app = FastAPI(
        title="rayk", docs_url=None, redoc_url=None, separate_input_output_schemas=False, lifespan=lifespan
    )
    app.state.front = front
    app.state.created_s = int(time.time())
    install_handlers(app)
    _add_model_routes(app, front)
    _add_state_routes(app, front)
    _add_generation_routes(app, front)
    if engines is not None:
        add_engine_routes(app, engines)
    app.add_middleware(Guard, settings=settings)
    app.add_middleware(Counted, metrics=front.metrics)  # outside: also who is turned away counts
    app.add_middleware(HeadAsGet)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _front(completer: Completer, settings: HttpSettings, text: Text | None) -> Front:
    why = ""
    if text is None:
        try:
            text = Text.load(completer.model.folder)
            with contextlib.suppress(UserError):  # which every chat is told
                if text.templates is not None:
                    text.templates.start()
        except CheckpointError as error:
            why = str(error)
    return Front(completer=completer, settings=settings, text=text, why_no_text=why, metrics=FrontMetrics())


def _add_model_routes(app: FastAPI, front: Front) -> None:
    def card() -> ModelAnswer:
        model = front.completer.model
        return {
            "id": model.model_id,
            "object": "model",
            "created": app.state.created_s,
            "owned_by": "rayk",
            "max_model_len": model.max_positions,
            "vocab_size": model.vocab_size,
        }

    @app.get("/v1/models", responses={200: {"model": ModelsAnswer}, 401: PROBLEMS[401]})
    async def models() -> Response:
        """List the model, which is the only one."""
        listed: ModelsAnswer = {"object": "list", "data": [card()]}
        return JsonResponse(listed)

    @app.get("/v1/models/{model_id:path}", responses={200: {"model": ModelAnswer}, **SIMPLE_PROBLEMS})
    async def model(model_id: str) -> Response:
        """Describe the model by its name."""
        if model_id != front.completer.model.model_id:
            problem = f"The model `{model_id[:200]}` does not exist"
            raise ApiError(404, problem, param="model", code="model_not_found")
        return JsonResponse(card())


def _add_state_routes(app: FastAPI, front: Front) -> None:
    @app.get("/metrics", response_class=PlainTextResponse, responses={401: PROBLEMS[401]})
    async def metrics() -> Response:
        """Tell this front's counters, for Prometheus."""
        front.metrics.see(await _health(front))
        return Response(front.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/health", responses={200: {"model": HealthAnswer}, 503: {"model": HealthAnswer}})
    async def health(request: Request) -> Response:
        """Answer 200 once every engine has taken a step lately, else 503. Clients with the key are also told
        why, and of each engine."""
        found = await _health(front)
        answer: HealthAnswer = {"status": "ready" if found.is_ready else "unavailable"}
        if has_key(front.settings, request.scope):
            answer |= {"reason": found.reason, "engines": list(found.engines)}
        return JsonResponse(answer, 200 if found.is_ready else 503)


async def _health(front: Front) -> Health:
    try:
        async with asyncio.timeout(HEALTH_S):
            return await front.completer.health()
    except (TimeoutError, RaykError) as error:
        reason = str(error) or f"no word from the engines within {HEALTH_S:g} s"
        return Health(is_ready=False, reason=reason)


def _add_generation_routes(app: FastAPI, front: Front) -> None:
    @app.post("/v1/completions", responses=streamed(CompletionAnswer))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts, one or many, given as text or token ids."""
        call = await open_completion(front, body)
        return await _answer(CompletionWriter(front, call, body), call, request)

    @app.post("/v1/chat/completions", responses=streamed(ChatAnswer))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, which the checkpoint's chat template writes out."""
        call = await open_chat(front, body)
        return await _answer(ChatWriter(front, call, body), call, request)


async def _answer(writer: Writer[Any], call: Call, request: Request) -> Response:
    headers = {"x-request-id": call.call_id}
    if call.body.stream:
        return EventStream(writer.events(), headers)
    whole = await unless_gone(request.receive, writer.whole())
    if whole is None:
        return Response(status_code=CLIENT_GONE)
    return JsonResponse(whole, headers=headers)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Describe the app, without the framework's form of invalid input, which never leaves it."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version="1", routes=app.routes)
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            found.get("components", {}).get("schemas", {}).pop(name, None)
        app.openapi_schema = found
    return app.openapi_schema

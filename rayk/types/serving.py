"""What a server's front asks of the engines behind it, and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

from rayk.types.request import FinishReason, Request, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRequest:
    """One request to a server. Filled by its front."""

    request: Request
    priority: int = 0
    """Decides among requests that wait for a place: lower ones go first, equal ones in order of arrival."""
    deadline_s: float | None = None
    """It must end so long after its arrival; None: the server's own limit alone."""
    session: str | None = None
    """Requests of one session are kept together where the policy heeds that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """News of one request. The last one has a finish reason; errors are raised."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per token, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Once, if asked for: one per prompt token; the first has none."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or token id behind finish_reason stop; None for the model's own EOS."""
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV was in a prefix cache, told with the last token."""
    num_drafted: int = 0
    """Tokens that were proposed for the output, likewise; 0 where engines draft nothing."""
    num_accepted: int = 0
    """How many of these the model agreed to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCard:
    """What a front needs to know of the model it serves."""

    model_id: str
    folder: str
    vocab_size: int
    max_positions: int
    pool_tokens: int | None = None
    """Prompt and output of one request that every engine's KV pool holds; None: all of `max_positions`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """Whether a server takes requests, and why not."""

    is_ready: bool
    reason: str = ""
    engines: tuple[dict[str, object], ...] = field(default=())
    """Each engine's name, role, state, why it is not ready, epoch, and when it last took a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """One engine of a server as it is now."""

    name: str
    role: str
    """aggregated, prefill or decode."""
    tp: int
    pp: int
    dcp: int
    state: str
    """forming, ready or lost."""
    trouble: str
    """Why it is not ready; empty where nothing is to be said."""
    epoch: int
    """Epoch of its life; engines of one server never share one. 0: it was never formed."""
    num_restarts: int
    """Lives that it has lost."""
    restart: dict[str, object]
    """How long it took to be ready again, the last time, in all (`total_s`) and by parts, as far as known."""
    num_requests: int
    """Placed on it and not over."""
    num_prompt_tokens: int
    """Tokens of prompts that it is to compute, and has not yet."""
    num_output_tokens: int
    """Tokens that requests which decode on it, or are about to, may still generate."""
    num_running: int | None = None
    """This and what follows is what the engine itself says: None where it does not, soon enough."""
    num_waiting: int | None = None
    num_steps: int | None = None
    """Steps of this life."""
    forward_s: float | None = None
    """Seconds that rank 0's forward passes of this life took."""
    num_computed_tokens: int | None = None
    """Tokens that forward passes of this life took."""
    num_sampled_tokens: int | None = None
    """Tokens of output in this life."""
    num_free_blocks: int | None = None
    num_blocks: int | None = None
    """Blocks of the pool, including the null block, which is never free."""
    offload: dict[str, object] | None = None
    """What it stored in its host tier, loaded and swapped, by counter; None where it has none."""


class EngineControl(Protocol):
    """What a server with engines of several roles tells of them, and lets be changed. Its methods run on one
    event loop. They raise what the engines' owner died of."""

    async def engines(self) -> tuple[EngineState, ...]:
        """Return every engine, in the order in which they were asked for."""
        ...

    async def set_role(self, engine: str, role: str) -> None:
        """Have an engine prefill from now on, or decode. Requests that are on it stay. Raises UnknownEngine,
        RoleConflict."""
        ...


class Completer(Protocol):
    """Completes prompts. Its methods run on one event loop."""

    @property
    def model(self) -> ModelCard:
        """The model behind it."""
        ...

    def generate(self, server_request: ServerRequest) -> AsyncIterator[Delta]:
        """Yield the request's news as they come, the first token at once. Closing the iterator aborts the
        request on every engine. Whoever asks has checked the request (serve.request_parsing,
        types.admission); engines check it for themselves. Raises UserError (bad input), Overloaded (no room:
        nothing was started), DeadlineExceeded, or what the engines died of."""
        ...

    async def health(self) -> Health:
        """The server is ready when every engine took a step lately."""
        ...

"""Hold what a user asks for and how tokens are chosen."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from rayk.types.structured import StructuredOutputs

MAX_LOGPROBS = 20  # the most alternatives a request may ask for per token
MAX_PENALTY = 2.0  # presence and frequency penalties lie between its negative and this, as in OpenAI's API
MAX_SEED = 2**63 - 1  # seeds are signed 64-bit integers


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Says how tokens are chosen, when to stop, and what to tell about them.

    A token is chosen from the model's logits by, in this order: structured outputs, penalties, temperature,
    top-k, top-p, min-p, and a draw. Temperature 0 takes the best token instead (the lowest id wins a tie),
    after penalties.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    # draw among the k best tokens and those that tie with the last of them; None: among all
    top_k: int | None = None
    top_p: float = 1.0  # draw among the fewest best tokens whose probabilities add up to this
    min_p: float = 0.0  # draw among tokens at least this fraction as likely as the best one
    # equal seeds give equal tokens, whatever else runs and wherever; None: a seed of its own
    seed: int | None = None
    stop: tuple[str, ...] = ()  # texts that end the output with the token that completes one of them
    logprobs: int | None = None
    """Report each token's log probability and that many of the best tokens'; None: nothing. They are of the
    model's own logits: log_softmax in float32, before penalties and temperature. With structured outputs they
    are of the tokens that these allow, as vLLM's are."""
    prompt_logprobs: int | None = None  # likewise for each prompt token but the first
    presence_penalty: float = 0.0  # subtracted from the logit of every token that was generated
    frequency_penalty: float = 0.0  # subtracted once for every time a token was generated
    # divides positive logits of tokens in prompt or output, multiplies negative ones
    repetition_penalty: float = 1.0
    structured_outputs: StructuredOutputs | None = None  # the form that the output must have; None: any

    @property
    def has_penalty(self) -> bool:
        """Tell whether earlier tokens change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def is_plain(self) -> bool:
        """Tell whether the best token of the model's logits is the one to take."""
        return not self.temperature and not self.has_penalty


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Says how likely the model found one token. Filled by the engine."""

    token_id: int
    logprob: float  # natural logarithm of its probability
    rank: int  # 1 for the most likely token; tokens that tie share the better rank
    top: tuple[tuple[int, float], ...]  # (token id, log probability) of the best tokens, best first


@enum.unique
class FinishReason(enum.StrEnum):
    STOP = enum.auto()
    LENGTH = enum.auto()
    ABORT = enum.auto()
    ERROR = enum.auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to complete. Filled by whoever submits it; never changed afterwards."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    cache_salt: str | None = None  # only requests with an equal one, or without one, share cached KV

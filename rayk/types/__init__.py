"""Words every other package speaks: requests, batches, settings, result rows, errors. They need the standard
library only. A type says what it means, who fills it, and its units; `fault_table` also says what must come
of a planted fault."""

from rayk.types.config import EngineConfig
from rayk.types.request import FinishReason, Request, SamplingParams, TokenLogprobs
from rayk.types.structured import StructuredOutputs

__all__ = [
    "EngineConfig",
    "FinishReason",
    "Request",
    "SamplingParams",
    "StructuredOutputs",
    "TokenLogprobs",
]

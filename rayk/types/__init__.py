"""Words every other package speaks: requests, batches, settings, result rows, errors.

Standard library only. Nothing here computes; a type says what it means, who fills it, and its units.
"""

from rayk.types.config import EngineConfig
from rayk.types.request import FinishReason, Request, SamplingParams, TokenLogprobs

__all__ = ["EngineConfig", "FinishReason", "Request", "SamplingParams", "TokenLogprobs"]

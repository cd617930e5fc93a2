"""Set up what an engine's `speculative` settings ask for, and refuse what it cannot do."""

from __future__ import annotations

from rayk.kv.manager import KVCacheManager
from rayk.models.drafters.refusals import why_no_drafts
from rayk.sched.drafting import Drafting, NgramDrafter
from rayk.types.bounds import MAX_DRAFTS
from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported, UserError
from rayk.types.speculative import ACCEPTS, METHODS, SpeculativeConfig


def make_drafting(config: EngineConfig, manager: KVCacheManager) -> Drafting | None:
    """Make what adds drafts to the engine's steps; None where it does not speculate."""
    wanted = config.speculative
    if wanted is None:
        return None
    assert wanted.method == "ngram", "others are refused"
    drafter = NgramDrafter(wanted.num_tokens, wanted.prompt_lookup_min, wanted.prompt_lookup_max)
    states = [g.spec.block_size for g in manager.groups if not g.spec.has_token_rows]
    return Drafting(drafter, manager, state_block_sizes=states)


def check_speculative(config: EngineConfig) -> None:
    """Refuse `speculative` settings that make no sense, or that this engine cannot follow. Raises UserError
    and Unsupported."""
    wanted = config.speculative
    if wanted is None:
        return
    problem = _problem(wanted)
    if problem is not None:
        raise problem
    why = why_no_drafts(config)
    if why is not None:
        raise Unsupported(why)


def _problem(wanted: SpeculativeConfig) -> UserError | None:
    where = "speculative"
    if wanted.method not in METHODS:
        return UserError(f"method: {wanted.method}", where, f"one of {', '.join(METHODS)}")
    if wanted.accept not in ACCEPTS:
        return UserError(f"accept: {wanted.accept}", where, f"one of {', '.join(ACCEPTS)}")
    if not 1 <= wanted.num_tokens <= MAX_DRAFTS:
        return UserError(f"num_tokens: {wanted.num_tokens}", where, f"1 to {MAX_DRAFTS}")
    if wanted.method != "ngram":
        return None
    if wanted.model is not None:
        return UserError(f"model: {wanted.model}, and ngram has none", where, "leave it out")
    if not 1 <= wanted.prompt_lookup_min <= wanted.prompt_lookup_max:
        shortest, longest = wanted.prompt_lookup_min, wanted.prompt_lookup_max
        problem = f"prompt_lookup_min: {shortest}, prompt_lookup_max: {longest}"
        return UserError(problem, where, "1 <= prompt_lookup_min <= prompt_lookup_max")
    return None

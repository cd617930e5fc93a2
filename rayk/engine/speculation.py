"""Set up what an engine's `speculative` settings ask for, and refuse what it cannot do."""

from __future__ import annotations

from rayk.kv.manager import KVCacheManager
from rayk.models.drafters.refusals import refuse_settings, why_no_drafts
from rayk.sched.drafting import Drafting, NgramDrafter
from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported


def make_drafting(config: EngineConfig, manager: KVCacheManager) -> Drafting | None:
    """Make what adds drafts to the engine's steps; None where it does not speculate."""
    wanted = config.speculative
    if wanted is None:
        return None
    assert wanted.method == "ngram", "others are refused"
    drafter = NgramDrafter(wanted.num_tokens, wanted.prompt_lookup_min, wanted.prompt_lookup_max)
    has_states = any(not g.spec.has_token_rows for g in manager.groups)
    return Drafting(drafter, manager, has_states=has_states)


def check_speculative(config: EngineConfig) -> None:
    """Refuse `speculative` settings that make no sense, or that this engine cannot follow. Raises UserError
    and Unsupported."""
    wanted = config.speculative
    if wanted is None:
        return
    refuse_settings(wanted)
    why = why_no_drafts(config)
    if why is not None:
        raise Unsupported(why)

"""Set up what an engine's `speculative` settings ask for, and refuse what it cannot do."""

from __future__ import annotations

from rayk.kv.manager import KVCacheManager
from rayk.models.config import DecoderConfig
from rayk.models.drafters.refusals import refuse_speculative, why_no_drafts
from rayk.sched.drafting import Drafter, Drafting, NgramDrafter, RanksDrafter
from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported


def make_drafting(
    config: EngineConfig,
    manager: KVCacheManager,
    drafter: Drafter | None = None,
    *,
    draft_kv: str = "none",
    most_positions: int | None = None,
) -> Drafting | None:
    """Make what adds drafts to the engine's steps; None where it does not speculate. `drafter`: in place of
    the one that the settings name. `draft_kv`: what draft_kv_of says of one on ranks. `most_positions`: as of
    Drafting."""
    wanted = config.speculative
    if wanted is None:
        return None
    if drafter is None and wanted.method == "ngram":
        drafter = NgramDrafter(wanted.num_tokens, wanted.prompt_lookup_min, wanted.prompt_lookup_max)
    drafter = drafter or RanksDrafter(wanted.num_tokens)
    has_states = any(not g.spec.has_token_rows for g in manager.groups)

    def lacks_rows(request_id: str) -> bool:
        return manager.first_draft_row(request_id) > 0

    return Drafting(
        drafter,
        manager,
        has_states=has_states,
        lacks_rows=lacks_rows,
        have_rows=manager.have_drafts if draft_kv == "recompute" else None,
        most_rows=config.max_batch_tokens,
        draws=wanted.accept == "rejection",
        most_positions=most_positions,
    )


def check_speculative(config: EngineConfig, model: DecoderConfig) -> None:
    """Refuse `speculative` settings that make no sense, or that an engine of this model cannot follow. Raises
    UserError and Unsupported."""
    wanted = config.speculative
    if wanted is None:
        return
    refuse_speculative(wanted, config, model)
    why = why_no_drafts(config)
    if why is not None:
        raise Unsupported(why)

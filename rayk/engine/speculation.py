"""Set up what an engine's `speculative` settings ask for, and refuse what it cannot do."""

from __future__ import annotations

from rayk.kv.manager import KVCacheManager
from rayk.models.config import DecoderConfig
from rayk.models.drafters.config import DrafterConfig, drafter_of
from rayk.models.drafters.refusals import refuse_speculative, why_no_drafts
from rayk.sched.drafting import Drafter, Drafting, NgramDrafter, RanksDrafter
from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported


def make_drafting(config: EngineConfig, manager: KVCacheManager) -> Drafting | None:
    """Make what adds drafts to the engine's steps; None where it does not speculate."""
    wanted = config.speculative
    if wanted is None:
        return None
    drafter: Drafter = RanksDrafter(wanted.num_tokens)
    if wanted.method == "ngram":
        drafter = NgramDrafter(wanted.num_tokens, wanted.prompt_lookup_min, wanted.prompt_lookup_max)
    has_states = any(not g.spec.has_token_rows for g in manager.groups)

    def lacks_rows(request_id: str) -> bool:
        return manager.first_draft_row(request_id) > 0

    return Drafting(drafter, manager, has_states=has_states, lacks_rows=lacks_rows)


def find_drafter(config: EngineConfig, model: DecoderConfig) -> DrafterConfig | None:
    """Find what drafts on the ranks of an engine; None where nothing does, or n-grams do. Raises as
    drafter_of does, and Unsupported for several layers that draft in turn."""
    wanted = config.speculative
    if wanted is None or wanted.method == "ngram":
        return None
    drafter = drafter_of(wanted, model, config)
    if drafter.depths > 1:
        raise Unsupported(
            f"speculative.method: mtp with {drafter.depths} MTP layers, each for one token; engines draft with "
            "one (mend: num_nextn_predict_layers: 1 in config.json, which is then used for each token)"
        )
    return drafter


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

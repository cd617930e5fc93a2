"""Which engines cannot speculate as they are asked to, and what would do. Free of torch."""

from __future__ import annotations

from dataclasses import fields

from rayk.models.config import DecoderConfig
from rayk.types.bounds import MAX_DRAFTS
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from rayk.types.speculative import ACCEPTS, DRAFT_KVS, HEEDED, METHODS, SpeculativeConfig

WHERE = "speculative"
_DEFAULTS = {field.name: field.default for field in fields(SpeculativeConfig)}


def refuse_speculative(speculative: SpeculativeConfig, engine: EngineConfig, target: DecoderConfig) -> None:
    """Raise UserError for settings that do not belong together, or not to this engine and model.
    config.drafter_of looks into folders."""
    refuse_settings(speculative)
    method = speculative.method
    if method == "ngram":
        return
    for setting, size in (("pp", engine.pp), ("dcp", engine.dcp)):
        if size > 1:
            raise UserError(
                f"method {method} with {setting}: {size}: a drafter computes on ranks that have all layers "
                "and all tokens",
                where=WHERE,
                mend=f"{setting}: 1, or method: ngram",
            )
    if method != "draft" and engine.fast_prefill and target.fast_prefill_layers:
        raise UserError(
            f"method {method} with fast_prefill: layers {target.fast_prefill_layers.start} and on compute no "
            "hidden states of most of a prompt's tokens",
            where=WHERE,
            mend="fast_prefill: false, or method: ngram or draft",
        )


def refuse_settings(speculative: SpeculativeConfig) -> None:
    """Raise UserError for what is wrong whatever the engine and the model are."""
    for name, known in (("method", METHODS), ("accept", ACCEPTS), ("draft_kv", DRAFT_KVS)):
        if (value := getattr(speculative, name)) not in known:
            raise UserError(f"{name}: {value}", where=WHERE, mend=f"one of {', '.join(known)}")
    if not 1 <= speculative.num_tokens <= MAX_DRAFTS:
        raise UserError(f"num_tokens: {speculative.num_tokens}", where=WHERE, mend=f"1 to {MAX_DRAFTS}")
    _refuse_unheeded(speculative)
    least, most = speculative.prompt_lookup_min, speculative.prompt_lookup_max
    if not 1 <= least <= most:
        bound = f"more than prompt_lookup_max {most}" if least > most else "less than 1"
        raise UserError(
            f"prompt_lookup_min {least} is {bound}",
            where=WHERE,
            mend=f"prompt_lookup_min: at most {most}; 1 <= prompt_lookup_min <= prompt_lookup_max",
        )


def _refuse_unheeded(speculative: SpeculativeConfig) -> None:
    method = speculative.method
    for name, default in _DEFAULTS.items():
        if name == "method" or name in HEEDED[method] or getattr(speculative, name) == default:
            continue
        takes = " or ".join(other for other in METHODS if name in HEEDED[other])
        raise UserError(
            f"{name} is for method {takes}, not {method}",
            where=WHERE,
            mend=f"leave `{name}` out: {method} has none",
        )


def why_no_drafts(engine: EngineConfig) -> str | None:
    """Say what of the engine's settings no engine can follow yet; None: it can, or is not to draft. Specs,
    `rayk explain`, servers and engines refuse by this alone."""
    wanted = engine.speculative
    if wanted is None:
        return None
    if wanted.draft_kv == "hidden":
        return (
            "speculative.draft_kv: hidden; hidden states do not travel yet: a drafter's rows come with the "
            "model's KV from a prefill engine that has the same drafter (mend: prefill.speculative as "
            "decode.speculative; or draft_kv: auto)"
        )
    if wanted.draft_kv == "recompute" and wanted.method != "draft":
        return (
            f"speculative.draft_kv: recompute with method {wanted.method}: its rows take hidden states of "
            "the model, so the decode engine would have to compute the whole prompt again (mend: "
            "prefill.speculative as decode.speculative, with which rows come over; or draft_kv: none)"
        )
    if engine.compute == "paced":
        return "speculative with engine.compute: paced, which has no logits to verify drafts by"
    return None

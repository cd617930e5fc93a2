"""How a model can be divided over the ranks of an engine. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import kv_cache_specs
from rayk.parallel.shard import dcp_sizes, split_layers
from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported


def why_tp_unsupported(config: DecoderConfig, tp: int) -> str | None:
    """Say why the model cannot run at this TP size, or None if it can.

    TP must divide the readers of every cache field (query heads, heads of a state, runs of channels).
    Feed-forward halves and vocabularies divide at any size.
    """
    specs = dict.fromkeys(kv_cache_specs(config, block_size=1, dtype="float32").values())
    for field in (field for spec in specs for field in spec.fields()):
        if field.readers % tp:
            return f"TP {tp} does not divide the model's {field.readers} {field.reader_name}"
    return None


@dataclass(frozen=True, slots=True)
class BadDivision:
    """Why a model's units, tokens or layers cannot be divided as a setting asks for."""

    setting: str
    problem: str
    mend: str


def why_shape_unsupported(config: DecoderConfig, engine: EngineConfig) -> str | None:
    """Say in words what `bad_shape` finds."""
    bad = bad_shape(config, engine)
    return None if bad is None else bad.problem


def bad_shape(config: DecoderConfig, engine: EngineConfig) -> BadDivision | None:
    """Find why rayk's engine cannot compute with units, tokens and layers divided like this.

    Geometry, plans and `rayk explain` know any division that `bad_division` lets pass; the others are limits
    of the engine. All of them stand here, and on docs/sharding.md.
    """
    why = why_tp_unsupported(config, engine.tp)
    if why is not None:
        return BadDivision("tp", why, "tp: one that divides them")
    bad = bad_division(config, engine) or _no_dealt_attention(engine)
    if bad is None and engine.pp > 1:
        bad = BadDivision("pp", f"an engine with pp: {engine.pp} cannot be run yet", "pp: 1")
    return bad


def _no_dealt_attention(engine: EngineConfig) -> BadDivision | None:
    backends = {engine.attention_backend, *(name for _, name in engine.layer_backends)}
    if engine.dcp == 1 or (engine.device.startswith("cpu") and "triton" not in backends):
        return None
    problem = (
        f"attention with dcp: {engine.dcp} has no Triton kernel: it runs on CPUs, without backend triton"
    )
    return BadDivision("dcp", problem, "dcp: 1")


def valid_dcp_sizes(config: DecoderConfig, tp: int) -> tuple[int, ...]:
    """List the sizes over which an engine of this TP size can deal tokens, ascending, 1 first: those valid
    for every cache with a row per token. Raises Unsupported for a TP size that the model does not have."""
    specs = dict.fromkeys(kv_cache_specs(config, block_size=1, dtype="float32").values())
    fields = [field for spec in specs if spec.has_token_rows for field in spec.fields()]
    valid = [set(dcp_sizes(field.readers, field.units, tp)) for field in fields]
    return tuple(sorted(set.intersection(*valid))) if valid else (1,)


def bad_division(config: DecoderConfig, engine: EngineConfig) -> BadDivision | None:
    """Find what no engine can do with the model's tokens and layers at this TP size, which is valid."""
    sizes = valid_dcp_sizes(config, engine.tp)
    if engine.dcp not in sizes:
        return BadDivision(
            "dcp",
            f"DCP {engine.dcp} at TP {engine.tp}: a run of {engine.dcp} ranks must keep the same heads "
            "of every cache with a row per token",
            f"dcp: {' or '.join(map(str, sizes))}",
        )
    if engine.dcp > 1 and engine.block_size % engine.dcp_interleave:
        divisors = [n for n in range(1, engine.block_size + 1) if engine.block_size % n == 0]
        return BadDivision(
            "dcp_interleave",
            f"dcp_interleave {engine.dcp_interleave} does not divide blocks of {engine.block_size} tokens",
            f"dcp_interleave: {', '.join(map(str, divisors))}",
        )
    try:
        split_layers(config.num_layers, engine.pp, engine.pp_layers)
    except Unsupported as error:
        stages = f"{engine.pp} numbers of layers, {config.num_layers} in all"
        if engine.pp_layers is not None:
            return BadDivision("pp_layers", error.reason, f"pp_layers: {stages}")
        return BadDivision("pp", error.reason, f"pp: 1 to {config.num_layers}")
    return None

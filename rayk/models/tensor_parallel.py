"""How a model can be divided over the ranks of an engine. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

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
    """Say in words what `bad_shape` finds, and what would do."""
    bad = bad_shape(config, engine)
    return None if bad is None else f"{bad.problem}; {bad.mend}"


def bad_shape(config: DecoderConfig, engine: EngineConfig) -> BadDivision | None:
    """Find why rayk's engine cannot compute with units, tokens and layers divided like this.

    Geometry and plans know any division that `bad_division` lets pass; the others are limits of the engine.
    All of them stand here, and on docs/sharding.md.
    """
    why = why_tp_unsupported(config, engine.tp)
    if why is not None:
        return BadDivision("tp", why, "tp: one that divides them")
    return bad_division(config, engine) or _no_such_stages(config, engine)


def _no_such_stages(config: DecoderConfig, engine: EngineConfig) -> BadDivision | None:
    if engine.pp == 1:
        return None
    if engine.async_scheduling == "always":
        problem = f"async_scheduling: always with pp: {engine.pp}: steps overlap by stages as it is"
        return BadDivision("async_scheduling", problem, "async_scheduling: auto or never")
    stages = split_layers(config.num_layers, engine.pp, engine.pp_layers)
    borders = list(accumulate(stages))[:-1]
    torn = _torn(config, borders)
    if torn is None:
        return None
    layer, source = torn
    problem = f"layer {layer} shares layer {source}'s keys and values: both must be in one stage"
    other = whole_stages(config, stages)
    if other is None:
        most = 1 + len(_free_borders(config))
        return BadDivision("pp", problem, f"pp: {'1' if most == 1 else f'1 to {most}'}")
    return BadDivision("pp_layers", problem, f"pp_layers: [{', '.join(map(str, other))}]")


def _torn(config: DecoderConfig, borders: Sequence[int]) -> tuple[int, int] | None:
    """Find a layer that would share the keys and values of one in another stage, with that one."""
    for layer in config.sharing_layers:
        source = config.layers[layer].kv_source
        assert source is not None
        if any(source < border <= layer for border in borders):
            return layer, source
    return None


def _free_borders(config: DecoderConfig) -> list[int]:
    """List the layers at which a stage can begin, the first aside."""
    return [border for border in range(1, config.num_layers) if _torn(config, [border]) is None]


def whole_stages(config: DecoderConfig, stages: Sequence[int]) -> tuple[int, ...] | None:
    """Deal layers as these stages do, or as near to it as no layer shares the keys and values of one in
    another stage; None where so many stages would always tear some apart."""
    free, chosen = _free_borders(config), [0]
    borders = list(accumulate(stages))[:-1]
    for index, border in enumerate(borders):
        num_later = len(borders) - 1 - index
        left = [b for b in free if b > chosen[-1]]
        able = left[: len(left) - num_later]
        if not able:
            return None
        chosen.append(min(able, key=lambda b: abs(b - border)))
    chosen.append(config.num_layers)
    return tuple(b - a for a, b in pairwise(chosen))


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
        if engine.pp_layers is None:
            return BadDivision("pp", error.reason, f"pp: 1 to {config.num_layers}")
        mend = f"pp_layers: {engine.pp} numbers of layers, {config.num_layers} in all"
        if sum(engine.pp_layers) == config.num_layers:
            mend = f"pp: {len(engine.pp_layers)}"
        elif engine.pp == 1:
            mend = "pp_layers: none without stages"
        return BadDivision("pp_layers", error.reason, mend)
    return None

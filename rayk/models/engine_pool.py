"""What an engine's KV pool takes of its ranks' memory: the model's pages, a drafter's beside them, and the
blocks behind the pool in which steps with drafts keep states. Free of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rayk.kv.geometry import RankGeometry, plan_rank
from rayk.kv.layout import LAYOUTS
from rayk.kv.riders import Riders
from rayk.kv.scratch import plan_scratch
from rayk.models.config import DecoderConfig
from rayk.models.drafters.config import find_drafter
from rayk.models.drafters.riders import unnamed_riders
from rayk.models.kv_specs import engine_groups
from rayk.parallel.shard import engine_shape
from rayk.types.config import EngineConfig


def engine_pool(engine: EngineConfig, config: DecoderConfig) -> tuple[RankGeometry, ...]:
    """Lay out the pool of each rank with `num_blocks` and what drafts need behind them. Nobody is asked for
    vetoes: where the layout is auto, it is the most preferred one. Raises Unsupported for sizes that do not
    fit the model, and as find_drafter does."""
    drafter = find_drafter(engine, config)
    riders = None if drafter is None else unnamed_riders(drafter, engine)
    groups = engine_groups(engine, config, riders)
    draft_tp = 1 if drafter is None else drafter.tp
    shape = replace(engine_shape(engine, config.num_layers), draft_tp=draft_tp)
    layout = next(iter(LAYOUTS.values())) if engine.layout == "auto" else LAYOUTS[engine.layout]
    scratch = plan_scratch(
        groups, num_blocks=engine.num_blocks, max_seqs=engine.max_seqs, num_drafts=engine.max_drafts
    )
    return tuple(
        plan_rank(
            groups,
            layout,
            shape=shape,
            rank=rank,
            num_blocks=engine.num_blocks + (0 if scratch is None else scratch.num_blocks),
        )
        for rank in range(shape.num_ranks)
    )


def shared_riders(engines: Iterable[EngineConfig], config: DecoderConfig) -> Riders | None:
    """Return what the drafter of the first of these engines that has one on its ranks keeps, which a host
    tier behind them keeps, too; None where none has. Raises as find_drafter does."""
    for engine in engines:
        drafter = find_drafter(engine, config)
        if drafter is not None:
            return unnamed_riders(drafter, engine)
    return None

"""What an engine will allocate, decided before anything is: groups, layout, geometry. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayk.kv.geometry import RankGeometry, layout_veto, plan_rank
from rayk.kv.groups import KVCacheGroup, group_layers
from rayk.kv.layout import LayoutResolution, Veto, resolve_layout
from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import kv_cache_specs
from rayk.types.config import EngineConfig


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The memory of every rank of one engine."""

    groups: tuple[KVCacheGroup, ...]
    resolution: LayoutResolution
    ranks: tuple[RankGeometry, ...]


def plan_engine(
    config: EngineConfig, model: DecoderConfig, parties: Sequence[tuple[str, Veto]] = ()
) -> EnginePlan:
    """Groups from canonical sizes, the layout nobody vetoes, and each rank's geometry.

    `parties` are (name, veto) of the backend and the connector; the specs' own veto is added here.
    Raises Unsupported for a TP size the model cannot run at, LayoutVetoed when no layout is left.
    """
    dtype = config.dtype if config.kv_dtype == "auto" else config.kv_dtype
    specs = kv_cache_specs(model, block_size=config.block_size, dtype=dtype, hybrid_kv=config.hybrid_kv)
    groups = group_layers(specs)
    resolution = resolve_layout(
        config.layout, [("specs", lambda layout: layout_veto(groups, layout)), *parties]
    )
    ranks = tuple(
        plan_rank(
            groups,
            resolution.layout,
            tp_size=config.tp,
            tp_rank=rank,
            num_blocks=config.num_blocks,
            kernel_block_size=config.kernel_block_size,
        )
        for rank in range(config.tp)
    )
    return EnginePlan(groups, resolution, ranks)

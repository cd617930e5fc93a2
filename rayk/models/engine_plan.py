"""What an engine will allocate: groups, layout, geometry. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rayk.kv.geometry import RankGeometry, layout_veto, plan_rank
from rayk.kv.groups import KVCacheGroup
from rayk.kv.kernel_blocks import bad_kernel_blocks, kernel_block_sizes
from rayk.kv.layout import KVCacheLayout, LayoutResolution, Veto, resolve_layout
from rayk.kv.riders import Riders
from rayk.kv.scratch import StateScratch, plan_scratch
from rayk.kv.specs import KVCacheSpec
from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import engine_groups, group_chunks
from rayk.parallel.shard import engine_shape
from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported, UserError

SpecVeto = Callable[[str, KVCacheSpec], str | None]
"""(layout name, spec) -> why a party cannot serve layers of this spec in the layout, or None."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    groups: tuple[KVCacheGroup, ...]
    resolution: LayoutResolution
    ranks: tuple[RankGeometry, ...]
    """Their blocks are the pool's, and behind them those of `scratch`."""
    scratch: StateScratch | None = None
    """None for engines without drafts or states."""

    @property
    def num_blocks(self) -> int:
        """Count the pool's blocks, the null block among them."""
        return self.ranks[0].num_blocks if self.scratch is None else self.scratch.first_block

    @property
    def kernel_block_sizes(self) -> tuple[int, ...]:
        """Tokens of a kernel block per group; state kernels take whole blocks."""
        return tuple(g.kernel_block_size * g.tokens_per_row for g in self.ranks[0].groups)


def plan_engine(
    config: EngineConfig,
    model: DecoderConfig,
    parties: Sequence[tuple[str, SpecVeto]] = (),
    *,
    riders: Riders | None = None,
    draft_tp: int = 1,
) -> EnginePlan:
    """Choose groups by canonical sizes, the layout nobody vetoes, and each rank's geometry.

    `parties` are (name, veto), e.g. of attention backends, asked about every group's spec except states
    (whose kernels read any layout by its strides); the groups' own veto is added here. Raises Unsupported for
    a size that the model cannot be divided by, LayoutVetoed if no layout is left, UserError for kernel blocks
    that do not divide a group's blocks or its layers' chunks, or name a group that does not exist.

    `riders`: what the layers of a drafter keep, whose units each `draft_tp` ranks share; parties are asked
    about their specs, too. Raises Unsupported where they cannot ride.
    """
    shape = engine_shape(config, model.num_layers)
    if config.tp % draft_tp:
        raise Unsupported(f"a drafter on TP {draft_tp} beside TP {config.tp} (mend: speculative.tp: 1)")
    shape = replace(shape, draft_tp=draft_tp)
    groups = engine_groups(config, model, riders)
    kernel_blocks = _kernel_blocks(groups, config, group_chunks(groups, model))
    resolution = resolve_layout(
        config.layout,
        [
            ("specs", lambda layout: layout_veto(groups, layout, kernel_blocks, shape.dcp)),
            *((name, _for_every_spec(veto, groups)) for name, veto in parties),
        ],
    )
    scratch = plan_scratch(
        groups,
        num_blocks=config.num_blocks,
        max_seqs=config.max_seqs,
        num_drafts=config.max_drafts,
    )
    num_scratch_blocks = 0 if scratch is None else scratch.num_blocks
    ranks = tuple(
        plan_rank(
            groups,
            resolution.layout,
            shape=shape,
            rank=rank,
            num_blocks=config.num_blocks + num_scratch_blocks,
            kernel_block_sizes=kernel_blocks,
            num_scratch_blocks=num_scratch_blocks,
        )
        for rank in range(shape.num_ranks)
    )
    return EnginePlan(groups, resolution, ranks, scratch)


def _kernel_blocks(
    groups: Sequence[KVCacheGroup], config: EngineConfig, chunks: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """Choose the rows of a kernel block per group. Raises UserError."""
    asked = config.kernel_block_size, dict(config.kernel_block_sizes), chunks
    bad = bad_kernel_blocks(groups, *asked, config.block_size, config.dcp)
    if bad is not None:
        raise UserError(bad.problem, mend=bad.mend)
    return kernel_block_sizes(groups, *asked, config.dcp)


def _for_every_spec(veto: SpecVeto, groups: Sequence[KVCacheGroup]) -> Veto:
    """Return a layout veto: the party's reason for the first group that it cannot serve."""

    def refuse(layout: KVCacheLayout) -> str | None:
        reasons = (veto(layout.name, g.spec) for g in groups if g.spec.has_token_rows)
        return next((reason for reason in reasons if reason is not None), None)

    return refuse

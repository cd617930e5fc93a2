"""Says whether a model fits on some GPUs: weights and blocks however an engine can be divided over them, from
config.json alone; of a drafter beside it, from its files' headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from rayk.kv.groups import KVCacheGroup
from rayk.kv.riders import tabled
from rayk.kv.specs import max_live_blocks, page_bytes
from rayk.models.config import DecoderConfig
from rayk.models.drafters.config import DrafterConfig, drafter_specs, find_drafter
from rayk.models.drafters.refusals import refuse_speculative
from rayk.models.drafters.riders import unnamed_riders
from rayk.models.engine_plan import plan_engine
from rayk.models.families import read_config
from rayk.models.formats import Fp8
from rayk.models.hub import config_file
from rayk.models.kv_specs import kv_cache_specs
from rayk.models.stored_sizes import drafter_bytes, held_bytes, num_parameters
from rayk.models.tensor_parallel import (
    valid_dcp_sizes,
    whole_stages,
    why_shape_unsupported,
    why_tp_unsupported,
)
from rayk.parallel.shard import engine_shape, split_layers
from rayk.types.config import EngineConfig
from rayk.types.errors import Unsupported, UserError
from rayk.types.speculative import SpeculativeConfig

GPU_GB: Mapping[str, int] = MappingProxyType(
    {"A100": 80, "L4": 24, "L40S": 48, "H100": 80, "H200": 141, "B200": 180, "B300": 288, "MI300X": 192}
)
"""Memory of a GPU in 10^9 bytes, as its vendor's data sheet says."""
MULTIPLIES_FP8 = frozenset({"L4", "L40S", "H100", "H200", "B200", "B300"})
"""GPUs on which matrices stay in e4m3 (kernels.scaled_matmul); the MI300X has an e4m3 of its own."""
USED_SHARE = 0.9
"""Share of a GPU's memory that weights and KV may fill; the rest is for activations and the driver."""
MAX_GPUS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class SizePlan:
    """One engine, on `tp * pp` GPUs. Bytes are those of the rank that holds most."""

    tp: int
    pp: int = 1
    pp_layers: tuple[int, ...] | None = None  # to be set, where stages as vLLM deals them would not run
    dcp: int = 1
    reason: str  # why it does not fit or run; empty if it does
    weight_bytes: int = 0
    block_bytes: int = 0  # a block over all layers
    num_blocks: int = 0
    request_bytes: int = 0  # of a request of `MemoryPlan.tokens` tokens, in whole blocks
    num_requests: int = 0  # of `MemoryPlan.tokens` tokens each, at a time
    num_tokens: int = 0  # that these requests keep


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    model: str
    gpu: str
    num_gpus: int
    gpu_bytes: int
    num_parameters: int
    dtype: str  # of KV
    stored_as: str  # the weights' format on disk
    held_as: str  # and in an engine's memory
    kv_token_bytes: int  # a token, all layers and ranks once, while no window or chunk is full
    state_bytes: int  # a request's recurrent states
    drafts: str  # who drafts, by `speculative.method`; empty: nobody
    draft_token_bytes: int  # a token in a drafter's layers, all ranks once
    draft_weight_bytes: int  # of a drafter that a rank has all of
    tokens: int  # length of a request
    sizes: tuple[SizePlan, ...]

    @property
    def fits(self) -> bool:
        return any(not size.reason for size in self.sizes)


def parse_gpus(text: str) -> tuple[int, str]:
    """Read `8xH200` as (8, "H200"). Raises UserError."""
    found = re.fullmatch(r"(?:(\d{1,5})x)?(\w+)", text.strip())
    count, name = (int(found[1] or 1), found[2].upper()) if found else (0, text)
    if name not in GPU_GB or not 1 <= count <= MAX_GPUS:
        raise UserError(f"--gpus {text!r} is not understood", mend=f"e.g. 8xH200; known: {', '.join(GPU_GB)}")
    return count, name


def plan_memory(
    model: str | Path,
    gpus: str,
    *,
    tokens: int | None = None,
    speculative: SpeculativeConfig | None = None,
) -> MemoryPlan:
    """Plan engines of every TP size that divides the GPUs, and of stages that take all of them; at each the
    tokens whole, and dealt over as many ranks as can share them. Requests are of `tokens` (default: 4096, or
    the model's positions). `speculative`: how they draft. Raises UserError, and CheckpointError for a
    config.json, or a drafter, that cannot be read."""
    count, gpu = parse_gpus(gpus)
    name, file = config_file(model)
    config = read_config(file)
    drafts, drafter = speculative, None
    if drafts is not None:
        whole = replace(drafts, tp=None) if drafts.method != "ngram" else drafts
        alone = EngineConfig(model=str(model), dtype=config.dtype, num_blocks=2, speculative=whole)
        refuse_speculative(drafts, alone, config)
        drafter = find_drafter(alone, config)
    tokens = min(tokens or 4096, config.max_positions)
    specs = kv_cache_specs(config, block_size=1, dtype=config.dtype).values()
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    shapes = [(tp, 1) for tp in divisors]
    shapes += [(count // pp, pp) for pp in divisors[1:] if pp <= config.num_layers]
    return MemoryPlan(
        model=name,
        gpu=gpu,
        num_gpus=count,
        gpu_bytes=GPU_GB[gpu] * 10**9,
        num_parameters=num_parameters(config),
        dtype=config.dtype,
        stored_as=config.quantisation.text if config.quantisation else config.dtype,
        held_as=_held_as(config, gpu),
        kv_token_bytes=sum(page_bytes(spec) for spec in specs if spec.has_token_rows),
        state_bytes=sum(page_bytes(spec) for spec in specs if not spec.has_token_rows),
        drafts="" if drafts is None else drafts.method,
        draft_token_bytes=0 if drafter is None else _draft_token_bytes(drafter, alone),
        draft_weight_bytes=0 if drafter is None else drafter_bytes(config, drafter, 1, 0),
        tokens=tokens,
        sizes=tuple(
            plan for tp, pp in shapes for plan in _plan(str(model), config, gpu, tp, pp, tokens, drafts)
        ),
    )


def _draft_token_bytes(drafter: DrafterConfig, engine: EngineConfig) -> int:
    specs = drafter_specs(drafter, engine).values()
    return sum(page_bytes(spec) // spec.block_size for spec in specs)


def _held_as(config: DecoderConfig, gpu: str) -> str:
    """Say in words what `held_bytes` counts."""
    if config.quantisation is None:
        return f"in {config.dtype}"
    keeps = gpu in MULTIPLIES_FP8 and any(isinstance(s.format, Fp8) for s in config.quantisation.schemes)
    return f"in fp8 as stored, the rest in {config.dtype}" if keeps else f"dequantised in {config.dtype}"


def _plan(
    model: str,
    config: DecoderConfig,
    gpu: str,
    tp: int,
    pp: int,
    tokens: int,
    drafts: SpeculativeConfig | None,
) -> Iterator[SizePlan]:
    """Plan an engine of these sizes, without DCP and with the most of it."""
    reason = why_tp_unsupported(config, tp)
    if reason is not None:
        yield SizePlan(tp=tp, pp=pp, reason=reason)
        return
    stages = split_layers(config.num_layers, pp)
    pp_layers = whole_stages(config, stages)
    if pp_layers == stages:
        pp_layers = None
    plain = EngineConfig(
        model=model,
        tp=tp,
        pp=pp,
        pp_layers=pp_layers,
        dtype=config.dtype,
        device="cuda",
        num_blocks=2,
        speculative=drafts,
    )
    room = int(GPU_GB[gpu] * 10**9 * USED_SHARE)
    weights: list[int] | None = None
    for dcp in dict.fromkeys((1, valid_dcp_sizes(config, tp)[-1])):
        engine = replace(plain, dcp=dcp)
        why = _why_not_drafted(engine, config)
        if why:
            yield SizePlan(tp=tp, pp=pp, pp_layers=pp_layers, dcp=dcp, reason=why)
            continue
        weights = weights or stage_weights(plain, config, keeps_fp8=gpu in MULTIPLIES_FP8)
        yield plan_size(engine, config, room, weights, tokens=tokens)


def _why_not_drafted(engine: EngineConfig, config: DecoderConfig) -> str:
    """Say why an engine of these sizes cannot draft as it is asked to; empty if it can."""
    if engine.speculative is None:
        return ""
    try:
        refuse_speculative(engine.speculative, engine, config)
        find_drafter(engine, config)
    except UserError as error:
        return error.problem
    except Unsupported as error:
        return error.reason
    return ""


def plan_size(
    engine: EngineConfig, config: DecoderConfig, room: int, weights: Sequence[int], *, tokens: int
) -> SizePlan:
    """Count what KV, the drafter's included, has room for beside the weights of each stage, in `room` bytes
    of every rank; requests are of `tokens`. The model must be able to have the engine's TP. Raises as
    find_drafter does."""
    drafter = find_drafter(engine, config)
    riders = None if drafter is None else unnamed_riders(drafter, engine)
    draft_tp = 1 if drafter is None else drafter.tp
    plan = plan_engine(engine, config, riders=riders, draft_tp=draft_tp)
    # One id is a block on every rank: the stage with the least room bounds them.
    blocks = [0] * engine.pp
    for rank in plan.ranks:
        stage = rank.shape.share(rank.rank).stage
        blocks[stage] = max(blocks[stage], rank.block_bytes)
    num_blocks = min(
        max(0, room - held) // block for held, block in zip(weights, blocks, strict=True) if block
    )
    if plan.scratch is not None:
        num_blocks = max(0, num_blocks - plan.scratch.num_blocks)
    request_blocks = _request_blocks(plan.groups, tokens)
    requests = num_blocks // request_blocks
    if max(weights) > room:
        reason = "the weights do not fit"
    elif not requests:
        reason = f"no room for a request of {tokens} tokens"
    else:
        why = why_shape_unsupported(config, engine)
        reason = "" if why is None else f"would fit, but {why}"
    return SizePlan(
        tp=engine.tp,
        pp=engine.pp,
        pp_layers=engine.pp_layers,
        dcp=engine.dcp,
        reason=reason,
        weight_bytes=max(weights),
        block_bytes=max(blocks),
        num_blocks=num_blocks,
        request_bytes=request_blocks * max(blocks),
        num_requests=requests,
        num_tokens=requests * tokens,
    )


def stage_weights(engine: EngineConfig, config: DecoderConfig, *, keeps_fp8: bool) -> list[int]:
    """Count the bytes of each stage's weights, on the rank that holds most, a drafter's among them. Raises as
    find_drafter does."""
    shape = engine_shape(engine, config.num_layers)
    # The last rank of a stage has the larger share of all that is dealt out unevenly
    # (parallel.shard.shard_range).
    last = engine.tp - 1
    ranks = (shape.rank_of(stage, last) for stage in range(engine.pp))
    drafter = find_drafter(engine, config)
    drafts = 0 if drafter is None else drafter_bytes(config, drafter, engine.tp, last)
    return [
        held_bytes(config, engine.tp, last, keeps_fp8=keeps_fp8, stage=shape.share(rank).layers) + drafts
        for rank in ranks
    ]


def _request_blocks(groups: Sequence[KVCacheGroup], tokens: int) -> int:
    """Count the blocks of a request of `tokens`, each group at its fullest and wherever its window begins."""
    return max(1, sum(max_live_blocks(g.spec, tokens) for g in tabled(groups)))

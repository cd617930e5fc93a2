"""Count what a step costs one rank: floating point operations, and bytes of weights and KV that it reads.
Weight products and attention over visible tokens count. Norms, rotations, recurrent scans and sampling, a few
percent of either, do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayk.costs.features import in_window
from rayk.engine.parts import parts_of
from rayk.engine.rank import EngineRank
from rayk.kernels.scaled_matmul import ScaledWeight
from rayk.models.layers.attention import Attention
from rayk.models.layers.linear import Linear, RowParallelLinear, Weight
from rayk.models.layers.mla import Mla
from rayk.models.layers.moe import Moe
from rayk.types.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class _ExpertShare:
    num_elements: int  # in the rank's share
    num_bytes: int
    num_chosen: int
    num_experts: int


@dataclass(frozen=True, slots=True)
class _Attending:
    window: int | None
    flops: int  # per pair of a token and one that it sees, over all of them
    kv_bytes: int  # per token, over all of them


class StepCosts:
    def __init__(self, rank: EngineRank) -> None:
        decoder = rank.decoder
        moes, linears = [], []
        for _, part in parts_of(decoder.layers):
            if isinstance(part, Moe):
                moes.append(part)
            elif isinstance(part, Linear | RowParallelLinear):
                linears.append(part.weight)
        itemsize = decoder.weight_itemsize
        self._experts = tuple(_share(m, itemsize) for m in moes)
        self._num_linear = sum(weight.numel() for weight in linears)
        self._linear_bytes = sum(_bytes_of(weight, itemsize) for weight in linears)
        self._num_head = decoder.num_head_weights
        self._head_bytes = self._num_head * itemsize
        self._attending = tuple(_attending(rank))
        # Of as many query heads as its run of ranks has, a rank computes this part of the keys.
        self._dcp = rank.comms.dcp.size

    def count(self, batch: ScheduledBatch) -> tuple[int, int]:
        """Count (floating point operations, bytes read) of a step."""
        num_tokens = num_logits = pairs = seen = 0
        for r in batch.requests:
            n, before = len(r.token_ids), r.num_computed_tokens
            num_tokens += n
            num_logits += r.num_logits + r.prompt_logits[1] - r.prompt_logits[0]
            pairs += n * before + n * (n + 1) // 2
            seen += before + n
        read = self._linear_bytes + (self._head_bytes if num_logits else 0)
        flops = 2 * (self._num_linear * num_tokens + self._num_head * num_logits)
        for e in self._experts:
            flops += 2 * e.num_elements * num_tokens * e.num_chosen // e.num_experts
            # As many experts as tokens may choose: few tokens leave most of them alone.
            read += min(e.num_bytes, e.num_bytes * num_tokens * e.num_chosen // e.num_experts)
        for a in self._attending:
            of = (pairs, seen) if a.window is None else in_window(batch, a.window)
            flops += a.flops * of[0]
            read += a.kv_bytes * of[1] // self._dcp
        return flops, read


def _share(moe: Moe, itemsize: int) -> _ExpertShare:
    weights = (moe.experts.gate_up, moe.experts.down)
    num_bytes = sum(_bytes_of(weight, itemsize) for weight in weights)
    return _ExpertShare(sum(weight.numel() for weight in weights), num_bytes, *moe.num_chosen)


def _bytes_of(weight: Weight, itemsize: int) -> int:
    """Count what a product reads of the weight, whose elements take `itemsize` bytes unless it is kept in
    fp8."""
    return weight.nbytes if isinstance(weight, ScaledWeight) else weight.numel() * itemsize


def _attending(rank: EngineRank) -> Iterator[_Attending]:
    """Group by window what the layers compute and read per token."""
    found: dict[int | None, list[int]] = {}
    geometry = rank.caches.geometry
    bytes_of = {
        layer: g.page_bytes // g.block_size
        for g in geometry.groups
        if g.group.spec.has_token_rows
        for layer in g.group.layers
    }
    for layer in (p for _, p in parts_of(rank.decoder.layers) if isinstance(p, Attention | Mla)):
        if isinstance(layer, Attention):
            sizes = layer.params.head_size_k + layer.params.head_size_v
        else:
            sizes = 2 * layer.params.latent_size + layer.params.rope_size
        config = rank.model_config.layers[layer.layer]
        source = layer.layer if config.kv_source is None else config.kv_source
        # A chunk is seen from its start: half of it on average, here counted as a window.
        sums = found.setdefault(config.window or config.chunk, [0, 0])
        sums[0] += 2 * layer.num_query_heads * sizes
        sums[1] += bytes_of.get(source, 0)
    for window, (flops, kv_bytes) in found.items():
        yield _Attending(window, flops, kv_bytes)

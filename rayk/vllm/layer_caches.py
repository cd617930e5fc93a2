"""What vLLM's layers keep, in rayk's terms: their specs, the units of this rank, and how to read them.

Attention is read through a map, learned from what its store kernel writes; Mamba states are read through the
tensors that their kernels are bound to. vLLM's classes are recognised by name, so vLLM is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rayk.kv.caches import TORCH_DTYPES, FieldView
from rayk.kv.specs import ChunkedLocalSpec, FullAttentionSpec, KVCacheSpec, Mamba2Spec, SlidingWindowSpec
from rayk.types.errors import Unsupported
from rayk.vllm.store_map import NOT_MEASURED, BlockMap, learn_block_map, store_of

Gather = Callable[[torch.Tensor], tuple[FieldView, ...]]
"""Copies of all fields in these manager blocks, int64 [blocks] in host memory: [blocks, units, rows,
elements]."""
BlockMaps = dict[object, BlockMap]
"""Those learned so far, by what they depend on."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What a worker knows of its engine."""

    tp_rank: int
    tp_size: int
    num_blocks: int
    """The manager's."""
    total_kv_heads: int
    """The model's, before tensor parallelism."""
    num_layers: int


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One cache that a layer owns."""

    layer: int
    vllm_group: int
    """Which of a request's lists of block ids is its own."""
    spec: KVCacheSpec
    gather: Gather
    layout: str
    """How it lies in memory, for people."""


def read_layers(
    layers: Mapping[str, Any], kv_cache_config: Any, kv_caches: Mapping[str, Any], rank: Rank
) -> list[LayerCache]:
    """List every cache that a layer of this rank owns. `layers`: vLLM's, by name, with caches bound. Raises
    Unsupported, naming the layer."""
    maps: BlockMaps = {}
    found = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            layer = layers[name]
            if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
                continue  # It reads another layer's.
            assert name in kv_caches, f"{name}: the connector was given no cache of it"
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            try:
                read = _reader(spec)
                found.append(
                    LayerCache(layer_number(name, rank.num_layers), index, *read(spec, layer, rank, maps))
                )
            except Unsupported as error:
                raise Unsupported(f"{name}: {error.reason}") from error
    return found


def layer_number(name: str, num_layers: int) -> int:
    """Read the layer's number in the model: the only number among the parts of its name. Where layers have
    both attention and a mixer, vLLM numbers the mixers from behind the last attention."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise Unsupported(f"{len(numbers)} numbers in the name, of which rayk takes the layer's")
    return numbers[0] % num_layers


def _read_attention(
    spec: Any, layer: Any, rank: Rank, maps: BlockMaps
) -> tuple[FullAttentionSpec, Gather, str]:
    """Read a cache by the map of the layer's store kernel, which layers of one kind share."""
    ours = _attention_spec(spec, layer, rank)
    cache: torch.Tensor = layer.kv_cache
    ratio, rest = divmod(len(cache), rank.num_blocks)
    if rest:
        raise Unsupported(f"{len(cache)} kernel blocks of {rank.num_blocks} blocks: rayk proves whole ones")
    sizes = ours.head_size_k, ours.head_size_v
    backend = layer.attn_backend.get_name()
    key = (backend, getattr(layer, "isa", None), cache.dtype, cache.shape[1:], cache.stride(), sizes)
    if key not in maps:
        maps[key] = learn_block_map(store_of(layer), cache, spec.num_kv_heads, sizes, layer.dtype)
    sides = (maps[key].keys, maps[key].values)
    units = [field.shard(rank.tp_size, rank.tp_rank) for field in ours.fields()]

    def gather(ids: torch.Tensor) -> tuple[FieldView, ...]:
        kernel_ids = (ids[:, None] * ratio + torch.arange(ratio)).reshape(-1).to(cache.device)
        blocks = cache[kernel_ids].flatten(1).contiguous()
        fields = zip(ours.fields(), sides, units, strict=True)
        return tuple(
            FieldView(f.name, side.read(blocks).view(TORCH_DTYPES[f.dtype]), unit) for f, side, unit in fields
        )

    places = "; ".join(f"{f.name} {side}" for f, side in zip(ours.fields(), sides, strict=True))
    told = f"{backend}{' (not measured)' if backend in NOT_MEASURED else ''}"
    return ours, gather, f"{told}, {cache.shape[2]} tokens: {places}"


def _attention_spec(spec: Any, layer: Any, rank: Rank) -> FullAttentionSpec:
    """Describe an attention layer of the whole model. A layer that keeps all rows, but sees a window of them,
    counts as one that keeps the window: no other row is read again."""
    is_quantised = int(spec.kv_quant_mode) != 0
    if is_quantised and layer.kv_cache_dtype not in _FP8:
        raise Unsupported(
            f"a KV cache of {layer.kv_cache_dtype}: rayk reads plain elements and {', '.join(_FP8)}; set "
            "kv_cache_dtype"
        )
    if spec.tokens_per_state != 1:
        raise Unsupported(f"{spec.tokens_per_state} tokens per stored state: rayk proves a row per token")
    # With fewer KV heads than ranks, ranks share heads: QKVParallelLinear gives each at least one.
    if spec.num_kv_heads != max(1, rank.total_kv_heads // rank.tp_size):
        raise Unsupported(
            f"{spec.num_kv_heads} KV heads on a rank of {rank.tp_size}, where the model has "
            f"{rank.total_kv_heads}: rayk cannot tell which they are if layers differ"
        )
    heads = rank.total_kv_heads, spec.head_size, spec.head_size_v
    dtype = "fp8_e4m3" if is_quantised else _name(spec.dtype)
    common = (spec.block_size, *heads, dtype, layer.num_heads * rank.tp_size)
    # The layer's own window: a group's spec may have one that only some of its layers have.
    window = getattr(layer, "sliding_window", None)
    chunk = getattr(layer, "attention_chunk_size", None)
    if window is not None:
        return SlidingWindowSpec(*common, window=window)
    if chunk is not None:
        return ChunkedLocalSpec(*common, chunk=chunk)
    return FullAttentionSpec(*common)


def _read_mamba2(spec: Any, layer: Any, rank: Rank, _maps: BlockMaps) -> tuple[Mamba2Spec, Gather, str]:
    """Read the states that a mixer's kernels are bound to. The function with which the mixer splits channels
    tells which are x, B and C."""
    ours = _mamba2_spec(spec, layer)
    conv, ssm = layer.kv_cache
    fields, taps = ours.fields(), ours.conv_width - 1
    units = [field.shard(rank.tp_size, rank.tp_rank) for field in fields]
    sizes = [f.row_bytes // taps // conv.element_size() for f in fields if f.taps]
    channels = [len(unit) * size for unit, size in zip(units, sizes, strict=False)]
    orders = {(sum(channels), taps): "DS", (taps, sum(channels)): "SD"}
    order = orders.get(tuple(conv.shape[1:]))
    parts = layer.split_hidden_states_B_C_fn(torch.arange(conv.shape[1:].numel() // taps)[None])
    if order is None or [part.shape[1] for part in parts] != channels:
        raise Unsupported(
            f"convolution states of {tuple(conv.shape[1:])}, split by {[p.shape[1] for p in parts]}: rayk "
            f"expects {channels} channels of x, B and C, and {taps} taps"
        )
    of_part = [part[0].to(conv.device) for part in parts]

    def gather(ids: torch.Tensor) -> tuple[FieldView, ...]:
        here = ids.to(conv.device)
        state = conv[here] if order == "DS" else conv[here].transpose(1, 2)
        contents = [*(state[:, part] for part in of_part), ssm[here]]
        return tuple(
            FieldView(f.name, content.reshape(len(here), len(u), 1, f.row_bytes // content.element_size()), u)
            for f, content, u in zip(fields, contents, units, strict=True)
        )

    return ours, gather, f"convolution {order}, channels of x, B, C: {channels}"


def _mamba2_spec(spec: Any, layer: Any) -> Mamba2Spec:
    """Global terms of a Mamba2 mixer. `layer.n_groups` is padded to one group a rank, its norm's is not."""
    if spec.mamba_type.name != "MAMBA2":
        raise Unsupported(f"states of {spec.mamba_type.name}: rayk proves those of MAMBA2")
    if len(spec.shapes) != 2 or spec.num_speculative_blocks:
        raise Unsupported("rings of inputs or drafts beside the state: turn use_replayssm off")
    conv_dtype, state_dtype = map(_name, spec.dtypes)
    sizes = layer.num_heads, layer.head_dim, layer.norm.n_groups, layer.ssm_state_size
    return Mamba2Spec(spec.block_size, conv_dtype, layer.conv_kernel_size, *sizes, state_dtype=state_dtype)


def _reader(spec: Any) -> Callable[[Any, Any, Rank, BlockMaps], tuple[KVCacheSpec, Gather, str]]:
    """Choose by the class itself: a spec derived from full attention may keep something else."""
    name = type(spec).__name__
    if name not in _READERS:
        raise Unsupported(f"vLLM's {name}: rayk proves {', '.join(_READERS)}")
    return _READERS[name]


_FP8 = ("fp8", "fp8_e4m3")
"""vLLM's names of kv.formats' fp8_e4m3. Scales are the layer's, for K and for V: no bytes of the cache."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_READERS: Mapping[str, Callable[[Any, Any, Rank, BlockMaps], tuple[KVCacheSpec, Gather, str]]] = {
    "FullAttentionSpec": _read_attention,
    "SlidingWindowSpec": _read_attention,
    "ChunkedLocalAttentionSpec": _read_attention,
    "MambaSpec": _read_mamba2,
}

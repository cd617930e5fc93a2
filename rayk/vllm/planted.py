"""Bugs to plant in D of a vLLM pair, to see that the proof finds them. No file of vLLM is changed. A bug
either spoils in place what the inner connector brought, by vLLM's own store kernel, or makes it read other
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch

from rayk.transfer.layer_view import LayerView
from rayk.types.errors import Unsupported
from rayk.vllm.caches import BlockIds, ProvenCaches
from rayk.vllm.layer_caches import layer_number
from rayk.vllm.store_map import store_of

PLANTED: Mapping[str, str] = MappingProxyType(
    {
        "heads_shifted": "every KV head holds the one before it",
        "kv_swapped": "keys lie where values belong, and values where keys do",
        "last_block_dropped": "the last block of a request does not arrive",
        "stale_block_ids": "the blocks of the request before are read",
        "state_columns_shifted": "every channel of a convolution state holds the one before it",
    }
)


class PlantedAtScheduler:
    """Misleads the inner connector's scheduler half."""

    def __init__(self, name: str | None) -> None:
        self._is_stale = name == "stale_block_ids"
        self._last: list[list[int]] | None = None

    def mislead(self, params: dict[str, Any] | None) -> None:
        """Have a request read the blocks of the one before it, as many as are its own."""
        if not self._is_stale or not params or not params.get("do_remote_prefill"):
            return
        own = [list(ids) for ids in params.get("remote_block_ids") or ()]
        before, self._last = self._last, own
        if before is not None and len(before) == len(own):
            pairs = zip(before, own, strict=True)
            params["remote_block_ids"] = [theirs[: len(ids)] + ids[len(theirs) :] for theirs, ids in pairs]


class PlantedAtWorker(Protocol):
    """Spoils what arrived in a worker's caches."""

    def before_load(self, request_id: str, block_ids: BlockIds) -> None:
        """A request's blocks are about to be loaded into."""
        ...

    def after_load(self, request_id: str, block_ids: BlockIds, num_tokens: int, first_row: int) -> None:
        """A request's tokens from `first_row` on have been loaded. Those before were there already, perhaps
        for others, too."""
        ...


def plant_at_worker(
    name: str | None, vllm_config: Any, kv_cache_config: Any, caches: ProvenCaches
) -> PlantedAtWorker | None:
    """Return the worker's half of a planted bug, if it has one. Raises Unsupported where it has nothing to
    spoil."""
    layers = vllm_config.compilation_config.static_forward_context
    num_layers = vllm_config.model_config.get_total_num_hidden_layers()
    attention: dict[int, tuple[int, Any]] = {}
    states: dict[int, tuple[int, Any]] = {}
    for group_index, group in enumerate(kv_cache_config.kv_cache_groups):
        for layer_name in group.layer_names:
            layer = layers[layer_name]
            if getattr(layer, "kv_sharing_target_layer_name", None) is None:
                kept = states if isinstance(layer.kv_cache, tuple | list) else attention
                kept[layer_number(layer_name, num_layers)] = group_index, layer
    num_blocks = kv_cache_config.num_blocks
    if name in ("heads_shifted", "kv_swapped"):
        return _Restored(caches, attention, _shift_heads if name == "heads_shifted" else _swap_kv)
    if name == "last_block_dropped":
        return _LastBlockDropped([(g, layer.kv_cache) for g, layer in attention.values()], num_blocks)
    if name == "state_columns_shifted":
        if not states:
            raise Unsupported("planted state_columns_shifted: the model keeps no state")
        return _ColumnsShifted(list(states.values()))
    return None


Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(keys, values), each [tokens, heads, elements] -> what is stored in their place."""


def _shift_heads(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if keys.shape[1] < 2:
        raise Unsupported("planted heads_shifted: this rank has one KV head; lower D's tensor parallelism")
    return keys.roll(1, dims=1), values.roll(1, dims=1)


def _swap_kv(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if keys.shape != values.shape:
        raise Unsupported("planted kv_swapped: keys and values are of unlike sizes")
    return values, keys


class _Restored:
    """Reads what arrived, changes it, and stores it again through vLLM's kernel."""

    def __init__(self, caches: ProvenCaches, layers: Mapping[int, tuple[int, Any]], change: Change) -> None:
        self._caches, self._layers, self._change = caches, layers, change

    def before_load(self, request_id: str, block_ids: BlockIds) -> None:
        pass

    def after_load(self, request_id: str, block_ids: BlockIds, num_tokens: int, first_row: int) -> None:
        for view in self._caches.views(block_ids):
            if view.group.spec.has_token_rows:
                group, layer = self._layers[view.layer]
                self._store(view, layer, block_ids[group], range(first_row, num_tokens))

    def _store(self, view: LayerView, layer: Any, block_ids: Sequence[int], tokens: range) -> None:
        blocks, rows, positions = view.places(range(len(block_ids)), tokens.stop, tokens.start)
        keys, values = (f.view[blocks, :, rows].contiguous() for f in view.fields)
        size = view.group.spec.block_size
        ids = torch.tensor(list(block_ids), dtype=torch.int64, device=positions.device)
        slots = ids[positions // size] * size + positions % size
        keys, values = (each.contiguous() for each in self._change(keys, values))
        store_of(layer)(keys, values, layer.kv_cache, slots)


class _LastBlockDropped:
    """Puts back what lay in the last block before."""

    def __init__(self, caches: list[tuple[int, torch.Tensor]], num_blocks: int) -> None:
        self._caches, self._num_blocks = caches, num_blocks
        self._before: dict[str, list[torch.Tensor]] = {}

    def before_load(self, request_id: str, block_ids: BlockIds) -> None:
        self._before[request_id] = [self._last(c, block_ids[group]).clone() for group, c in self._caches]

    def after_load(self, request_id: str, block_ids: BlockIds, num_tokens: int, first_row: int) -> None:
        for (group, cache), before in zip(self._caches, self._before.pop(request_id, ()), strict=False):
            self._last(cache, block_ids[group]).copy_(before)

    def _last(self, cache: torch.Tensor, block_ids: Sequence[int]) -> torch.Tensor:
        ratio = len(cache) // self._num_blocks
        return cache[block_ids[-1] * ratio : (block_ids[-1] + 1) * ratio]


class _ColumnsShifted:
    """Rolls the channels of the last state of each layer by one."""

    def __init__(self, layers: list[tuple[int, Any]]) -> None:
        self._layers = layers

    def before_load(self, request_id: str, block_ids: BlockIds) -> None:
        pass

    def after_load(self, request_id: str, block_ids: BlockIds, num_tokens: int, first_row: int) -> None:
        for group, layer in self._layers:
            state = layer.kv_cache[0][block_ids[group][-1]]
            channels = max(range(2), key=lambda axis: state.shape[axis])
            state.copy_(state.roll(1, dims=channels))

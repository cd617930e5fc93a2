"""Stand-ins of a vLLM worker: its configuration, layers and caches, with stores that lay a block out in ways
of their own. Specs bear the names of vLLM's classes, by which rayk knows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rayk.vllm.caches import ProvenCaches

Key = tuple[int, str]
"""(layer, field): of a model's logical values."""


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    kv_quant_mode: int = 0
    tokens_per_state: int = 1
    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_type: Any = field(default_factory=lambda: SimpleNamespace(name="MAMBA2"))
    num_speculative_blocks: int = 0


Places = Callable[[int, int, int, int], torch.Tensor]
"""(heads, tokens, elements of K, of V) -> where a block's K and V lie among its elements in the cache's own
order: int64 [heads, tokens, elements of K and V]."""


def side_by_side(heads: int, tokens: int, size_k: int, size_v: int) -> torch.Tensor:
    """K | V in each (head, token), as vLLM's GPU backends write it."""
    return torch.arange(heads * tokens * (size_k + size_v)).view(heads, tokens, -1)


def keys_transposed(heads: int, tokens: int, size_k: int, size_v: int) -> torch.Tensor:
    """In each head all K, token last, then all V: as vLLM's CPU backend writes it."""
    head = torch.arange(heads).view(-1, 1, 1) * tokens * (size_k + size_v)
    token = torch.arange(tokens).view(1, -1, 1)
    keys = head + token + torch.arange(size_k) * tokens
    values = head + tokens * size_k + token * size_v + torch.arange(size_v)
    return torch.cat([keys, values], dim=2)


def shuffled(heads: int, tokens: int, size_k: int, size_v: int) -> torch.Tensor:
    """In no order at all: only a table can tell."""
    generator = torch.Generator().manual_seed(heads * tokens)
    order = torch.randperm(heads * tokens * (size_k + size_v), generator=generator)
    return order.view(heads, tokens, -1)


SCALE = 0.5
"""Of a cache of fp8."""


class AttentionImpl:
    """Stores as `places` say, whatever the strides of the cache."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        _, heads, tokens, content = cache.shape
        places = self.places(heads, tokens, key.shape[2], value.shape[2])
        at = places[:, slots % tokens].transpose(0, 1)  # [tokens stored, heads, elements]
        head, row, element = at // (tokens * content), at // content % tokens, at % content
        content_stored = torch.cat([key, value], dim=2)
        if cache.dtype == torch.uint8:
            content_stored = (content_stored / SCALE).to(torch.float8_e4m3fn).view(torch.uint8)
        cache[(slots // tokens)[:, None, None], head, row, element] = content_stored


@dataclass(frozen=True)
class Model:
    """Layer 0: full attention; 1: a window; 2: chunks; 3: full attention, and a Mamba2 mixer that vLLM would
    call number 7."""

    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    query_heads: int = 4
    kv_heads: int = 2
    size_k: int = 8
    size_v: int = 4
    window: int = 24
    chunk: int = 16
    mamba_heads: int = 4
    mamba_groups: int = 1
    mamba_head_size: int = 3
    state_size: int = 5
    conv_width: int = 4

    def values(self, num_tokens: int, seed: int = 0) -> dict[Key, torch.Tensor]:
        """Logical values of a request: k, v [tokens, heads, elements]; conv_x, conv_b, conv_c [units,
        channels, taps]; ssm [heads, head size, state size]."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        found: dict[Key, torch.Tensor] = {}
        for layer in range(4):
            found[layer, "k"] = random(num_tokens, self.kv_heads, self.size_k)
            found[layer, "v"] = random(num_tokens, self.kv_heads, self.size_v)
        taps = self.conv_width - 1
        found[3, "conv_x"] = random(self.mamba_heads, self.mamba_head_size, taps)
        found[3, "conv_b"] = random(self.mamba_groups, self.state_size, taps)
        found[3, "conv_c"] = random(self.mamba_groups, self.state_size, taps)
        found[3, "ssm"] = random(self.mamba_heads, self.mamba_head_size, self.state_size).to(self.state_dtype)
        return found


class Worker:
    """One rank: its caches, and a request's values written into them as vLLM cuts them."""

    def __init__(
        self,
        model: Model,
        tp: tuple[int, int] = (0, 1),
        block_size: int = 16,
        places: Places = side_by_side,
        order: str = "BHNC",
        conv: str = "DS",
        kernel_block_size: int | None = None,
        num_blocks: int = 24,
        is_fp8: bool = False,
    ) -> None:
        self.model, self.block_size, self.num_blocks = model, block_size, num_blocks
        self.tp_rank, self.tp_size = tp
        self._per_head = model.query_heads // model.kv_heads
        queries = model.query_heads // self.tp_size
        self.heads = sorted({q // self._per_head for q in range(tp[0] * queries, (tp[0] + 1) * queries)})
        common: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": len(self.heads),
            "head_size": model.size_k,
            "head_size_v": model.size_v,
            "dtype": torch.uint8 if is_fp8 else model.dtype,
            "kv_quant_mode": int(is_fp8),
        }
        full = FullAttentionSpec(**common)
        specs = {
            "model.layers.1.self_attn.attn": SlidingWindowSpec(**{**common, "sliding_window": model.window}),
            "model.layers.0.self_attn.attn": full,
            "model.layers.2.self_attn.attn": ChunkedLocalAttentionSpec(
                **common, attention_chunk_size=model.chunk
            ),
            "model.layers.3.self_attn.attn": full,
            "model.7.mixer": self._mamba_spec(conv),
        }
        kernel_size = kernel_block_size or block_size
        self.layers: dict[str, Any] = {
            name: SimpleNamespace(
                impl=AttentionImpl(places),
                attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"),
                num_heads=queries,
                dtype=model.dtype,
                kv_cache_dtype="fp8" if is_fp8 else "auto",
                sliding_window=getattr(spec, "sliding_window", None),
                attention_chunk_size=getattr(spec, "attention_chunk_size", None),
                kv_cache=self._attention_cache(order, kernel_size, spec.dtype),
            )
            for name, spec in specs.items()
            if not name.endswith("mixer")
        }
        self.layers["model.7.mixer"] = self._mixer(specs["model.7.mixer"])
        groups = [
            (["model.layers.0.self_attn.attn", "model.layers.3.self_attn.attn"], full),
            *(([name], specs[name]) for name in sorted(specs) if specs[name] is not full),
        ]
        self.kv_cache_config = SimpleNamespace(
            num_blocks=num_blocks,
            kv_cache_groups=[SimpleNamespace(layer_names=n, kv_cache_spec=s) for n, s in groups],
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1),
            model_config=SimpleNamespace(
                get_total_num_kv_heads=lambda: model.kv_heads, get_total_num_hidden_layers=lambda: 4
            ),
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
            speculative_config=None,
        )

    def prove(self) -> ProvenCaches:
        return ProvenCaches(self.vllm_config, self.kv_cache_config, self.layers, self.tp_rank, self.tp_size)

    def block_ids(self, num_tokens: int, seed: int = 0) -> list[list[int]]:
        """Blocks of a request, out of order, per group."""
        order = np.random.default_rng(seed).permutation(np.arange(1, self.num_blocks)).tolist()
        need = -(-num_tokens // self.block_size)
        found = []
        for group in self.kv_cache_config.kv_cache_groups:
            count = 1 if isinstance(group.kv_cache_spec, MambaSpec) else need
            found.append([order.pop() for _ in range(count)])
        return found

    def write(self, values: Mapping[Key, torch.Tensor], block_ids: Sequence[Sequence[int]]) -> None:
        """Store a request's values as the layers' kernels would."""
        for group, ids in zip(self.kv_cache_config.kv_cache_groups, block_ids, strict=True):
            for name in group.layer_names:
                number = next(int(part) for part in name.split(".") if part.isdecimal()) % 4
                if isinstance(group.kv_cache_spec, MambaSpec):
                    self._write_states(self.layers[name], number, values, ids[0])
                    continue
                layer = self.layers[name]
                keys, stored = (values[number, side][:, self.heads] for side in ("k", "v"))
                positions = torch.arange(len(keys))
                blocks = torch.tensor(ids)[positions // self.block_size]
                slots = blocks * self.block_size + positions % self.block_size
                layer.impl.do_kv_cache_update(layer, keys, stored, layer.kv_cache, slots)

    def _attention_cache(self, order: str, kernel_size: int, dtype: torch.dtype) -> torch.Tensor:
        """[B, H, N, C] with the axes in memory in the given order."""
        sizes = {
            "B": self.num_blocks * self.block_size // kernel_size,
            "H": len(self.heads),
            "N": kernel_size,
            "C": self.model.size_k + self.model.size_v,
        }
        memory = torch.full([sizes[axis] for axis in order], 7, dtype=dtype)
        return memory.permute([order.index(axis) for axis in "BHNC"])

    def _mamba_spec(self, conv: str) -> MambaSpec:
        m = self.model
        # vLLM pads groups to one a rank (MambaStateShapeCalculator.extra_groups_for_head_shards).
        self.padded_groups = m.mamba_groups if m.mamba_groups % self.tp_size == 0 else self.tp_size
        channels = m.mamba_heads * m.mamba_head_size + 2 * self.padded_groups * m.state_size
        shape = (channels // self.tp_size, m.conv_width - 1)
        state = (m.mamba_heads // self.tp_size, m.mamba_head_size, m.state_size)
        return MambaSpec(
            block_size=4096,
            shapes=(shape if conv == "DS" else shape[::-1], state),
            dtypes=(m.dtype, m.state_dtype),
        )

    def _mixer(self, spec: MambaSpec) -> SimpleNamespace:
        m = self.model
        group_channels = self.padded_groups * m.state_size // self.tp_size
        sizes = [m.mamba_heads * m.mamba_head_size // self.tp_size, group_channels, group_channels]
        pages = torch.full((self.num_blocks, sum(math.prod(s) * 4 for s in spec.shapes)), 7, dtype=torch.int8)
        split = math.prod(spec.shapes[0]) * m.dtype.itemsize
        end = split + math.prod(spec.shapes[1]) * m.state_dtype.itemsize
        return SimpleNamespace(
            kv_cache=(
                pages[:, :split].view(m.dtype).view(-1, *spec.shapes[0]),
                pages[:, split:end].view(m.state_dtype).view(-1, *spec.shapes[1]),
            ),
            num_heads=m.mamba_heads,
            head_dim=m.mamba_head_size,
            n_groups=self.padded_groups,
            norm=SimpleNamespace(n_groups=m.mamba_groups),
            ssm_state_size=m.state_size,
            conv_kernel_size=m.conv_width,
            split_hidden_states_B_C_fn=lambda t: torch.split(t, sizes, dim=-1),
        )

    def _write_states(self, layer: Any, number: int, values: Mapping[Key, torch.Tensor], block: int) -> None:
        """As vLLM's weight loader cuts channels: heads evenly, groups evenly, or the only group to all."""
        m, conv = self.model, layer.kv_cache[0]
        heads = torch.arange(m.mamba_heads).chunk(self.tp_size)[self.tp_rank]
        groups = torch.arange(m.mamba_groups)
        if m.mamba_groups % self.tp_size == 0:
            groups = groups.chunk(self.tp_size)[self.tp_rank]
        units = {"conv_x": heads, "conv_b": groups, "conv_c": groups}
        channels = torch.cat([values[number, f][u].flatten(0, 1) for f, u in units.items()])
        conv[block] = channels if conv.shape[1] == len(channels) else channels.T
        layer.kv_cache[1][block] = values[number, "ssm"][heads]

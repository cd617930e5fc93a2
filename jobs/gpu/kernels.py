"""Kernels at production shapes, each beside the bytes and FLOP that its work needs once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jobs.gpu.rows import Row
from jobs.gpu.stages import Bench, Stage
from rayk.engine.filters import Row as DrawnRow
from rayk.engine.sampling import draw
from rayk.kernels.causal_conv1d import causal_conv1d
from rayk.kernels.copy_runs import copy_runs, make_run_table
from rayk.kernels.digest import DigestedView, DigestedViews, RowPlaces, digest_views
from rayk.kernels.gated_delta_rule import gated_delta_rule
from rayk.kernels.grouped_matmul import grouped_matmul
from rayk.kernels.mla_attention import mla_attention
from rayk.kernels.paged_attention import head_groups, paged_attention
from rayk.kernels.quantise import dequantise, quantise, quantised_kv
from rayk.kernels.scaled_matmul import ScaledWeight, scaled_matmul
from rayk.kernels.segments import Segments
from rayk.kernels.selective_scan import selective_scan
from rayk.kernels.ssd_scan import ssd_scan
from rayk.kernels.store_kv import store_kv
from rayk.kv.caches import allocate
from rayk.kv.formats import FORMATS
from rayk.kv.geometry import plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec
from rayk.offload.outbox import Outbox
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.types.request import SamplingParams

SLOTS = 16
"""Tokens of a block of keys and values."""
IMPL = "triton"


@dataclass(frozen=True)
class Work:
    """A call to time, and what it cannot do without."""

    shape: str
    call: Callable[[], object]
    num_bytes: float
    flop: float = 0
    fits_graph: bool = True
    """Whether a CUDA graph can hold it: it copies nothing from the host."""


class Drawn:
    """Draws operands in one dtype on one device."""

    def __init__(self, bench: Bench) -> None:
        self.device, self.dtype, self.is_small = bench.device, bench.dtype, bench.is_small
        torch.manual_seed(0)

    def size(self, whole: int, small: int) -> int:
        return small if self.is_small else whole

    def rows(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def exact(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device)

    def segments(self, num_requests: int, num_tokens: int) -> Segments:
        """Requests of as many tokens each that go on from a state, and write another."""
        return Segments.from_host(
            query_lens=[num_tokens] * num_requests,
            read_slots=list(range(num_requests)),
            ends=[[num_tokens]] * num_requests,
            write_slots=[[num_requests + i] for i in range(num_requests)],
            device=self.device,
        )

    def pages(self, num_requests: int, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Block table in no order, query starts of one token a request, lengths."""
        columns = -(-num_tokens // SLOTS)
        ids = torch.randperm(num_requests * columns, device=self.device, dtype=torch.int32) + 1
        starts = torch.arange(num_requests + 1, device=self.device, dtype=torch.int32)
        lengths = torch.full((num_requests,), num_tokens, device=self.device, dtype=torch.int32)
        return ids.view(num_requests, columns), starts, lengths


def _of(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def latents(drawn: Drawn, num_heads: int, num_requests: int, num_tokens: int, queries: int) -> Work:
    """DeepSeek's: a latent of 512 beside a rotated key of 64."""
    table, starts, lengths = drawn.pages(num_requests, num_tokens)
    cache = drawn.rows(table.numel() + 1, SLOTS, 576)
    q = drawn.rows(num_requests * queries, num_heads, 576)
    seen = num_requests * (queries * num_tokens - queries * (queries - 1) // 2)
    return Work(
        f"{num_requests} x {queries} of {num_tokens}, {num_heads} heads, (512, 64)",
        lambda: mla_attention(
            q, cache, table, starts * queries, lengths, scale=0.1, latent_size=512, impl=IMPL
        ),
        num_requests * num_tokens * 576 * 2 + _of(q) * 2,
        2 * seen * num_heads * (576 + 512),
    )


def ssd(drawn: Drawn, num_requests: int, num_tokens: int) -> Work:
    """Mamba2's: 64 heads of 64 with states of 128, 8 groups."""
    heads, groups, total = drawn.size(64, 2), drawn.size(8, 1), num_requests * num_tokens
    x, dt, b, c = (drawn.rows(total, *s) for s in ((heads, 64), (heads,), (groups, 128), (groups, 128)))
    a, d, bias = -drawn.exact(heads).exp(), drawn.exact(heads), drawn.exact(heads)
    index = torch.arange(heads, device=drawn.device) // (heads // groups)
    state = drawn.exact(2 * num_requests, heads, 64, 128)
    segments = drawn.segments(num_requests, num_tokens)
    return Work(
        f"{num_requests} x {num_tokens}, {heads} heads of 64, state 128",
        lambda: ssd_scan(x, dt, a, b, c, d, bias, index, state, segments, impl=IMPL),
        _of(x, x, dt, b, c, state),
        total * heads * 64 * 128 * 6,
    )


def delta(drawn: Drawn, num_requests: int, num_tokens: int) -> Work:
    """Qwen3-Next's: 16 key heads and 32 value heads of 128."""
    keys, values, total = drawn.size(16, 1), drawn.size(32, 2), num_requests * num_tokens
    q, k, v = drawn.rows(total, keys, 128), drawn.rows(total, keys, 128), drawn.rows(total, values, 128)
    g, beta = -drawn.exact(total, values).abs(), torch.rand(total, values, device=drawn.device)
    index = torch.arange(values, device=drawn.device) // (values // keys)
    state = drawn.exact(2 * num_requests, values, 128, 128)
    segments = drawn.segments(num_requests, num_tokens)
    return Work(
        f"{num_requests} x {num_tokens}, {values} heads of 128",
        lambda: gated_delta_rule(q, k, v, g, beta, index, state, segments, scale=0.1, impl=IMPL),
        _of(q, k, v, v, g, beta, state),
        total * values * 128 * 128 * 8,
    )


def scan(drawn: Drawn, num_requests: int, num_tokens: int) -> Work:
    """Mamba's: 8192 channels with states of 16."""
    channels, total = drawn.size(8192, 64), num_requests * num_tokens
    x, dt, z = (drawn.rows(total, channels) for _ in range(3))
    b, c = drawn.rows(total, 16), drawn.rows(total, 16)
    a, d, bias = -drawn.exact(channels, 16).exp(), drawn.exact(channels), drawn.exact(channels)
    state = drawn.exact(2 * num_requests, 1, channels, 16)
    segments = drawn.segments(num_requests, num_tokens)
    return Work(
        f"{num_requests} x {num_tokens}, {channels} channels, state 16",
        lambda: selective_scan(x, dt, a, b, c, d, bias, z, state, segments, impl=IMPL),
        _of(x, x, dt, z, b, c, state),
    )


def conv(drawn: Drawn, num_requests: int, num_tokens: int) -> Work:
    """Four taps over 8192 channels."""
    channels = drawn.size(8192, 64)
    x, weight, bias = (
        drawn.rows(num_requests * num_tokens, channels),
        drawn.rows(channels, 4),
        drawn.rows(channels),
    )
    state = drawn.rows(2 * num_requests, 1, channels, 3)
    segments = drawn.segments(num_requests, num_tokens)
    return Work(
        f"{num_requests} x {num_tokens}, {channels} channels",
        lambda: causal_conv1d(x, weight, bias, state, segments, impl=IMPL),
        _of(x, x, weight, state),
    )


def quantised_cache(drawn: Drawn, name: str, blocks: int, heads: int) -> tuple[Any, float]:
    """A cache whose bytes are those of drawn values, and the bytes of a (head, token) in it."""
    sizes = drawn.size(128, 32), drawn.size(128, 32)
    widths: dict[str, int] = {}
    for field in FORMATS[name].fields(*sizes):
        widths[field.bundle] = widths.get(field.bundle, 0) + field.row_bytes
    bundles = {
        bundle: torch.zeros(blocks, heads, SLOTS, width, dtype=torch.uint8, device=drawn.device)
        for bundle, width in widths.items()
    }
    view: Any = bundles
    if set(bundles) == {"kv"}:
        view = bundles["kv"]
        view = view.view(torch.float8_e4m3fn) if name == "fp8_e4m3" else view
    cache = quantised_kv(view, *sizes)
    k, v = (drawn.rows(blocks * SLOTS, heads, n) for n in sizes)
    store_kv(k, v, cache, torch.arange(blocks * SLOTS, device=drawn.device), impl=IMPL)  # type: ignore[arg-type]
    return cache, sum(widths.values())


def quantised_decode(drawn: Drawn, name: str) -> Work:
    """Eight query heads to each of eight KV heads of 128."""
    requests, tokens = drawn.size(64, 2), drawn.size(4096, 40)
    heads, group, size = drawn.size(8, 2), 8, drawn.size(128, 32)
    table, starts, lengths = drawn.pages(requests, tokens)
    cache, row_bytes = quantised_cache(drawn, name, table.numel() + 1, heads)
    q = drawn.rows(requests, heads * group, size)
    index = torch.arange(heads * group, device=drawn.device) // group
    constants: dict[str, Any] = {
        "scale": 0.1,
        "window": None,
        "head_size_k": size,
        "groups": head_groups(index),
    }
    return Work(
        f"{requests} x 1 of {tokens}, {name}",
        lambda: paged_attention(q, cache, table, starts, lengths, index, impl=IMPL, **constants),
        requests * tokens * heads * row_bytes + _of(q) * 2,
        4 * requests * tokens * heads * group * size,
    )


def quantised_store(drawn: Drawn, name: str) -> Work:
    tokens, heads, size = drawn.size(8192, 32), drawn.size(8, 2), drawn.size(128, 32)
    cache, row_bytes = quantised_cache(drawn, name, tokens // SLOTS + 1, heads)
    k, v = drawn.rows(tokens, heads, size), drawn.rows(tokens, heads, size)
    slots = torch.randperm(tokens, device=drawn.device)
    return Work(
        f"{tokens} tokens, {name}",
        lambda: store_kv(k, v, cache, slots, impl=IMPL),
        _of(k, v) + tokens * heads * row_bytes,
    )


def plain_store(drawn: Drawn) -> Work:
    tokens, heads, size = drawn.size(8192, 32), drawn.size(8, 2), drawn.size(128, 32)
    k, v = drawn.rows(tokens, heads, size), drawn.rows(tokens, heads, size)
    cache = drawn.rows(tokens // SLOTS + 1, heads, SLOTS, 2 * size)
    slots = torch.randperm(tokens, device=drawn.device)
    return Work(f"{tokens} tokens", lambda: store_kv(k, v, cache, slots, impl=IMPL), 2 * _of(k, v))


def convert(drawn: Drawn, name: str, *, back: bool) -> Work:
    values, kv_format = drawn.rows(drawn.size(1 << 17, 8), 8, 128), FORMATS[name]
    stored = quantise(values, kv_format, impl=IMPL)

    def there() -> object:
        return quantise(values, kv_format, impl=IMPL)

    def and_back() -> object:
        return dequantise(stored, kv_format, dtype=drawn.dtype, impl=IMPL)

    num_bytes = _of(values, *(part for part in stored if part is not None))
    return Work(f"{len(values)} x 8 x 128, {name}", and_back if back else there, num_bytes)


def scaled(drawn: Drawn, num_rows: int) -> Work:
    """A projection of DeepSeek-V3, kept in e4m3 with scales of blocks; inputs are quantised beside."""
    num_out, num_in = drawn.size(7168, 256), drawn.size(16384, 512)
    weight = ScaledWeight(
        drawn.exact(num_out, num_in).to(torch.float8_e4m3fn),
        drawn.exact(num_out // 128, num_in // 128).abs(),
        (128, 128),
        "group",
    )
    x = drawn.rows(num_rows, num_in)
    return Work(
        f"{num_rows} x {num_in} to {num_out}, blocks of 128 x 128",
        lambda: scaled_matmul(x, weight, impl=IMPL),
        _of(x, weight.values, weight.scales) + num_rows * num_out * x.element_size(),
        2 * num_rows * num_out * num_in,
    )


def experts(drawn: Drawn, num_tokens: int) -> Work:
    """Qwen3-30B-A3B's products into 128 experts, of which each token takes 8, as an engine multiplies."""
    num_experts, num_in, num_out = 128, drawn.size(2048, 64), drawn.size(1536, 32)
    chosen = torch.randint(num_experts, (8 * num_tokens,), device=drawn.device)
    counts = torch.bincount(chosen, minlength=num_experts)
    ends = counts.cumsum(0).to(torch.int32)
    x, weights = drawn.rows(8 * num_tokens, num_in), drawn.rows(num_experts, num_out, num_in).mT
    num_read = int((counts > 0).sum())
    return Work(
        f"{num_tokens} x 8 of 128 experts, {num_in} to {num_out}",
        lambda: grouped_matmul(x, weights, ends, impl=IMPL if drawn.is_small else None),
        _of(x, weights[:num_read]) + len(x) * num_out * x.element_size(),
        2 * len(x) * num_in * num_out,
    )


def drawing(drawn: Drawn, **filters: Any) -> Work:
    """A step of 64 requests with the vocabulary of Qwen2.5, from logits to tokens."""
    scores = drawn.exact(drawn.size(64, 4), drawn.size(152_000, 3000))
    rows = [DrawnRow(SamplingParams(temperature=0.8, seed=i, **filters), (), ()) for i in range(len(scores))]
    shape = f"{len(scores)} x {scores.shape[1]}"
    return Work(shape, lambda: draw(rows, scores, narrow=False), _of(scores), fits_graph=False)


def copies(drawn: Drawn, each: int) -> Work:
    """256 MiB in runs of 64 blocks, as out of a staging buffer."""
    total, blocks = drawn.size(256 << 20, 16 << 10), drawn.size(64, 4)
    source = torch.randint(-128, 128, (total,), dtype=torch.int8, device=drawn.device)
    target = torch.empty_like(source)
    order = np.random.default_rng(0).permutation(blocks).astype(np.int64)
    starts = np.arange(0, total // blocks, each, dtype=np.int64)
    wide, lengths = np.full(len(starts), total // blocks), np.full(len(starts), each)
    table = make_run_table(starts, starts, lengths, wide, wide, torch.device(drawn.device))
    return Work(
        f"{total >> 10} KiB in runs of {each}",
        lambda: copy_runs(source, target, table, order, order, impl=IMPL),
        2 * total,
        fits_graph=False,
    )


def outbox(drawn: Drawn, layout: str) -> Work:
    """Scattered blocks of 32 layers of 8 KV heads of 128 into pinned memory, as a rank stores them."""
    layers, num_blocks = drawn.size(32, 2), drawn.size(128, 4)
    spec = FullAttentionSpec(SLOTS, 8, *[drawn.size(128, 16)] * 2, "bfloat16", 32)
    groups = group_layers({(layer, "attention"): spec for layer in range(layers)})
    geometry = plan_rank(groups, LAYOUTS[layout], num_blocks=2 * num_blocks)
    caches = allocate(geometry, torch.device(drawn.device))
    box = Outbox(LocalAgent("outbox", LocalNetwork()), caches, (num_blocks + 1) * geometry.block_bytes)
    own = np.random.default_rng(0).permutation(np.arange(1, 2 * num_blocks))[:num_blocks].tolist()
    to = list(range(1, num_blocks + 1))

    def store() -> None:
        with box.copying([own], [to]):
            pass

    num_bytes = num_blocks * geometry.block_bytes
    return Work(f"{num_blocks} blocks, {num_bytes >> 10} KiB, {layout}", store, num_bytes, fits_graph=False)


def digest(drawn: Drawn) -> Work:
    """A request of 8192 tokens in 32 layers of 8 KV heads of 128."""
    layers, tokens, heads, size = (
        drawn.size(32, 2),
        drawn.size(8192, 32),
        drawn.size(8, 2),
        drawn.size(128, 16),
    )
    rows = torch.arange(tokens).numpy()
    places = RowPlaces(rows // SLOTS, rows % SLOTS, rows, 0, -(-tokens // 256))
    fields = ((0, 0, size), (1, size, size))
    views = tuple(
        DigestedView(drawn.rows(tokens // SLOTS, heads, SLOTS, 2 * size), layer, tuple(range(heads)), fields)
        for layer in range(layers)
    )
    digested = DigestedViews(views, (0,) * layers)
    return Work(
        f"{tokens} tokens, {layers} layers",
        lambda: digest_views(digested, [places], rows_per_group=256, impl=IMPL),
        sum(_of(view.kv_cache) for view in views),
        fits_graph=False,
    )


QUANTISED = ("fp8_e4m3", "fp8_e4m3_token_head", "nvfp4")
MAKE: dict[str, Callable[[Drawn], Work]] = {
    "MLA decode, 128 heads": lambda d: latents(d, d.size(128, 16), d.size(64, 2), d.size(4096, 40), 1),
    "MLA decode, 16 heads": lambda d: latents(d, 16, d.size(64, 2), d.size(4096, 40), 1),
    "MLA prefill, 16 heads": lambda d: latents(d, 16, 1, d.size(4096, 24), d.size(4096, 24)),
    "SSD prefill": lambda d: ssd(d, 1, d.size(8192, 40)),
    "SSD step": lambda d: ssd(d, d.size(64, 2), 1),
    "gated delta rule prefill": lambda d: delta(d, 1, d.size(8192, 40)),
    "gated delta rule step": lambda d: delta(d, d.size(64, 2), 1),
    "selective scan prefill": lambda d: scan(d, 1, d.size(8192, 20)),
    "selective scan step": lambda d: scan(d, d.size(64, 2), 1),
    "convolution prefill": lambda d: conv(d, 1, d.size(8192, 40)),
    "convolution step": lambda d: conv(d, d.size(64, 2), 1),
    **{f"decode, {name}": lambda d, name=name: quantised_decode(d, name) for name in QUANTISED},  # type: ignore[misc]
    **{f"store, {name}": lambda d, name=name: quantised_store(d, name) for name in QUANTISED},  # type: ignore[misc]
    "store": plain_store,
    **{f"quantise, {name}": lambda d, name=name: convert(d, name, back=False) for name in QUANTISED},  # type: ignore[misc]
    **{f"dequantise, {name}": lambda d, name=name: convert(d, name, back=True) for name in QUANTISED},  # type: ignore[misc]
    "fp8 product, 1 row": lambda d: scaled(d, 1),
    "fp8 product, 64 rows": lambda d: scaled(d, 64),
    "fp8 product, 8192 rows": lambda d: scaled(d, d.size(8192, 40)),
    "experts, 64 tokens": lambda d: experts(d, d.size(64, 4)),
    "experts, 8192 tokens": lambda d: experts(d, d.size(8192, 40)),
    "draw, top-p": lambda d: drawing(d, top_p=0.95),
    "draw, top-k and top-p": lambda d: drawing(d, top_k=50, top_p=0.95),
    "copy_runs, 16 KiB": lambda d: copies(d, d.size(16 << 10, 1 << 10)),
    "copy_runs, 2 KiB": lambda d: copies(d, d.size(2 << 10, 256)),
    "outbox, LBNHC": lambda d: outbox(d, "LBNHC"),
    "outbox, BHLNC": lambda d: outbox(d, "BHLNC"),
    "digest": digest,
}
STAND_IN = (
    "MLA decode, 16 heads",
    "SSD prefill",
    "decode, fp8_e4m3",
    "quantise, nvfp4",
    "fp8 product, 1 row",
    "experts, 64 tokens",
    "draw, top-p",
    "copy_runs, 2 KiB",
    "outbox, LBNHC",
    "digest",
)


def _items(device: str) -> Sequence[str]:
    return STAND_IN if device == "cpu" else tuple(MAKE)


def _measure(item: str, bench: Bench) -> Iterator[Row]:
    work = MAKE[item](Drawn(bench))
    ms = bench.milliseconds(work.call, graph=work.fits_graph)
    yield Row(kernel=item, shape=work.shape, **bench.rates(ms, num_bytes=work.num_bytes, flop=work.flop))


STAGE = Stage(name="kernels", about="kernels at production shapes", items=_items, measure=_measure)

"""Latent attention against float64 and transformers' own layer; which rows are read, exactly."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rayk.kernels.mla_attention import mla_attention
from rayk.kernels.paged_attention.tiles import Tiles
from rayk.kernels.quantise import QuantisedKV
from tests.each import each
from tests.helpers import assert_matches
from tests.kernels.cases import AXIS_ORDERS, Batch, make_batch
from tests.markers import gpu, interpreted

IMPLS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("torch", "cpu", id="torch"),
    pytest.param("triton", "cpu", marks=interpreted, id="interpreter"),
    pytest.param("triton", "cuda", marks=gpu, id="gpu"),
]
each_impl = pytest.mark.parametrize(("impl", "device"), IMPLS)
each_device = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted, id="interpreter"), pytest.param("cuda", marks=gpu, id="gpu")],
)
NARROW = Tiles(16, 16, 4, 1)
"""Small tiles: many of them, also in short sequences."""
MIXED = ((1, 1), (1, 38), (7, 7), (9, 40), (1, 64))
DECODES = ((1, 1), (1, 100), (1, 64))


@dataclass
class Latents:
    """A batch over one head whose "keys" are the latents and "values" the rotated keys."""

    batch: Batch
    q: Tensor
    """[T, Q, R + Dr]"""
    scale: float

    @property
    def latent_size(self) -> int:
        return self.batch.head_size_k

    @property
    def rows(self) -> list[Tensor]:
        """Per request [tokens, R + Dr]."""
        pairs = zip(self.batch.keys, self.batch.values, strict=True)
        return [torch.cat(pair, -1).squeeze(1) for pair in pairs]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[T, Q, R] by plain eager torch in `dtype`, from the dense rows."""
        outs, start = [], 0
        for (num_queries, total), rows in zip(self.batch.requests, self.rows, strict=True):
            q = self.q[start : start + num_queries].to(dtype)
            scores = torch.einsum("tqc,kc->tqk", q, rows.to(dtype)) * self.scale
            hidden = torch.ones(num_queries, total, dtype=torch.bool).triu(total - num_queries + 1)
            weights = scores.masked_fill(hidden.unsqueeze(1), float("-inf")).softmax(-1)
            outs.append(weights @ rows.to(dtype)[:, : self.latent_size])
            start += num_queries
        return torch.cat(outs)

    def run(
        self, impl: str, device: str = "cpu", cache: QuantisedKV | None = None, **options: object
    ) -> Tensor:
        """The cache's storage is moved as it lies, but another one, on the device; options are the
        launcher's."""
        if cache is None:
            own = self.batch.cache[:, 0]
            storage = torch.tensor([], dtype=own.dtype).set_(own.untyped_storage()).to(device)
            cache = storage.as_strided(own.shape, own.stride(), own.storage_offset())
        _, _, *rest, _ = self.batch.arguments()
        arguments = (self.q.to(device), cache, *(t.to(device) for t in rest))
        if not options:
            return mla_attention(*arguments, scale=self.scale, latent_size=self.latent_size, impl=impl).cpu()
        from rayk.kernels.mla_attention.launch import mla_attention_triton

        return mla_attention_triton(
            *arguments, scale=self.scale, latent_size=self.latent_size, **options
        ).cpu()

    def check(self, actual: Tensor, what: str, *, tight: bool = False) -> None:
        exact, eager = self.dense(torch.float64), self.dense(self.q.dtype)
        assert_matches(actual, exact, eager, what=what, tight=tight)


def make_latents(
    requests: tuple[tuple[int, int], ...], *, num_heads: int = 3, latent: int = 32, rope: int = 8, **options
) -> Latents:
    batch = make_batch(requests, kv_heads=1, kv_index=(0,), head_size_k=latent, head_size_v=rope, **options)
    generator = torch.Generator().manual_seed(7)
    q = torch.randn(len(batch.q), num_heads, latent + rope, generator=generator).to(batch.q.dtype)
    return Latents(batch, q, (latent + rope) ** -0.5)


def mark(latents: Latents) -> None:
    """q = 0, and one-hot latents: a weight's worth of each mark is how many rows with it were seen."""
    batch, size = latents.batch, latents.latent_size
    latents.q.zero_()
    for r, keys in enumerate(batch.keys):
        for position in range(len(keys)):
            keys[position] = torch.nn.functional.one_hot(torch.tensor(position * 5 % size), size)
            block, slot = (
                batch.block_table[r, position // batch.cache.shape[2]],
                position % batch.cache.shape[2],
            )
            batch.cache[block, 0, slot, :size] = keys[position]


def counts(latents: Latents) -> tuple[Tensor, Tensor]:
    """How many rows a token sees [T, 1, 1], and how many of them with each mark [T, 1, R]."""
    seen, marks = [], []
    for (num_queries, total), keys in zip(latents.batch.requests, latents.batch.keys, strict=True):
        for end in range(total - num_queries + 1, total + 1):
            seen.append(end)
            marks.append(keys[:end, 0].sum(0))
    return torch.tensor(seen).view(-1, 1, 1), torch.stack(marks).unsqueeze(1).long()


@each_impl
@each(
    ("order", "block_size", "kernel_block_size"),
    [(order, 16, 16) for order in AXIS_ORDERS] + [("BLHNC", 12, 4), ("LBNHC", 16, 1), ("BHLNC", 5, 5)],
)
def test_every_visible_row_counts_once(
    impl: str, device: str, order: str, block_size: int, kernel_block_size: int
) -> None:
    """In every layout, with kernel blocks of another size; whatever nobody sees is NaN."""
    latents = make_latents(MIXED, order=order, block_size=block_size, kernel_block_size=kernel_block_size)
    mark(latents)
    seen, expected = counts(latents)
    found = (latents.run(impl, device) * seen).round().long()
    assert torch.equal(found, expected.expand_as(found))


@each_impl
@each("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("requests", "num_heads", "latent", "rope"),
    [(MIXED, 3, 32, 8), (DECODES, 17, 40, 6), (((20, 20),), 2, 64, 16)],
    ids=["mixed", "decode", "prefill"],
)
def test_numbers_match_float64(
    impl: str,
    device: str,
    requests: tuple[tuple[int, int], ...],
    num_heads: int,
    latent: int,
    rope: int,
    dtype: torch.dtype,
    poisoned_empty: None,
) -> None:
    """Sizes that are no powers of two among them."""
    latents = make_latents(requests, num_heads=num_heads, latent=latent, rope=rope, dtype=dtype)
    latents.check(latents.run(impl, device), impl, tight=device == "cpu")


@each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("requests", [MIXED, DECODES], ids=["mixed", "decode"])
def test_many_small_tiles(
    device: str, requests: tuple[tuple[int, int], ...], dtype: torch.dtype, poisoned_empty: None
) -> None:
    """Tiles that begin and end inside a token's heads."""
    latents = make_latents(requests, num_heads=5, dtype=dtype)
    latents.check(latents.run("triton", device, tiles=NARROW, num_splits=1), "tiles", tight=device == "cpu")


@each_device
@pytest.mark.parametrize("num_splits", [2, 7, 9])
def test_split_decode_counts_every_row_once(device: str, num_splits: int, poisoned_empty: None) -> None:
    """More splits than keys and than the combining kernel takes at once; what some leave unwritten is NaN."""
    latents = make_latents(DECODES, num_heads=2)
    mark(latents)
    seen, expected = counts(latents)
    found = (latents.run("triton", device, tiles=NARROW, num_splits=num_splits) * seen).round().long()
    assert torch.equal(found, expected.expand_as(found))


@each_device
def test_split_decode_matches_float64(device: str) -> None:
    latents = make_latents(DECODES, num_heads=20, dtype=torch.float16)
    actual = latents.run("triton", device, tiles=NARROW, num_splits=3)
    latents.check(actual, "splits", tight=device == "cpu")


@each_impl
def test_a_prompt_may_be_cut_anywhere(impl: str, device: str) -> None:
    """What comes after the cut gets what the whole prompt at once gives it."""
    whole = make_latents(((19, 19),))
    exact, eager = whole.dense(torch.float64), whole.dense(torch.float32)
    for first in (1, 5, 18):
        rest = make_latents(((19 - first, 19),))
        rest.q = whole.q[first:]
        rest.batch.cache, rest.batch.block_table = whole.batch.cache, whole.batch.block_table
        assert_matches(rest.run(impl, device), exact[first:], eager[first:], what=f"from {first}")


@each_device
def test_block_ids_that_do_not_exist_are_not_followed(device: str) -> None:
    """The rows that would see such a block are NaN, the others as they were."""
    latents = make_latents(((1, 20), (3, 20)), num_heads=2)
    expected = latents.run("triton", device)
    latents.batch.block_table[0, 1] = 2**30
    actual = latents.run("triton", device)
    assert actual[0].isnan().all()
    assert torch.equal(actual[1:], expected[1:])


@interpreted
def test_caches_beyond_32_bits() -> None:
    """Block 2 starts at element 2^31 of a cache whose strides fit 32 bits."""
    rows = torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(0))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    storage = torch.frombuffer(mmap.mmap(-1, 4 * (2**31 + 2**16), flags=flags), dtype=torch.float32)
    far = storage.as_strided(rows.shape, (2**30, 24, 1))
    far.copy_(rows)
    table, starts = torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    lens, q = torch.tensor([7], dtype=torch.int32), torch.randn(1, 2, 24)
    near, beyond = (
        mla_attention(q, cache, table, starts, lens, scale=0.2, latent_size=16, impl="triton")
        for cache in (rows, far)
    )
    assert torch.equal(near, beyond)


@each_impl
def test_absorbed_heads_are_transformers_expanded_heads(impl: str, device: str) -> None:
    """A DeepSeek layer, whose keys and values transformers expands from the latents for every head."""
    from transformers.models.deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Attention,
        eager_attention_forward,
    )

    config = DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=3,
        num_key_value_heads=3,
        kv_lora_rank=32,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
    )
    torch.manual_seed(0)
    layer = DeepseekV3Attention(config, 0)
    latents = make_latents(((6, 6), (1, 21)), num_heads=3)
    heads = layer.kv_b_proj.weight.detach().mul_(10).view(3, 22, 32)
    q = torch.randn(7, 3, 20)
    absorbed = torch.einsum("tqd,qdr->tqr", q[..., :12].double(), heads[:, :12].double())
    latents.q, latents.scale = torch.cat([absorbed, q[..., 12:].double()], -1).float(), layer.scaling
    actual = torch.einsum("tqr,qdr->tqd", latents.run(impl, device).double(), heads[:, 12:].double())
    expected = {dtype: [] for dtype in (torch.float32, torch.float64)}
    for dtype, outs in expected.items():
        layer.to(dtype)
        for own, rows in zip(q.to(dtype).split([6, 1]), latents.rows, strict=True):
            keys, values = layer.expand_kv(
                rows.to(dtype)[None, None, :, :32], rows.to(dtype)[None, None, :, 32:]
            )
            hidden = torch.ones(len(own), len(rows)).triu(len(rows) - len(own) + 1).bool()
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, float("-inf"))
            per_head = own.transpose(0, 1).unsqueeze(0)
            outs.append(eager_attention_forward(layer, per_head, keys, values, mask, layer.scaling)[0][0])
    exact, eager = (torch.cat(expected[dtype]).detach() for dtype in (torch.float64, torch.float32))
    assert_matches(actual.float(), exact, eager, what="absorbed")


def test_mistakes_are_refused() -> None:
    latents = make_latents(((1, 3),))
    with pytest.raises(AssertionError, match="unknown"):
        latents.run("cuda")
    latents.q = latents.q[..., 1:]
    with pytest.raises(AssertionError, match="as wide as"):
        latents.run("torch")

"""The digest: against byte-by-byte Python, unmoved by where values lie, moved by anything they are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rayk.kernels import digest as digest_module
from rayk.kernels.digest import native_digest
from tests.each import each
from tests.kernels.cases import AXIS_ORDERS, layer_view
from tests.markers import gpu

MASK = (1 << 64) - 1
TOKENS, HEADS, DK, DV = 23, 4, 12, 20
LAYER, FIELD_K, FIELD_V = 5, 0, 1


def splitmix(x: int) -> int:
    """splitmix64's output function, from its published definition."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def brute_digest(
    content: Tensor, *, rows: Sequence[int], layer: int, units: Sequence[int], per_group: int
) -> dict[tuple[int, int, int], int]:
    """(field, unit, row group) -> digest, taking content [tokens, H, C] apart byte by byte."""
    golden = 0x9E3779B97F4A7C15
    raw = content.contiguous().view(torch.uint8).numpy()
    size = content.element_size()
    totals: dict[tuple[int, int, int], int] = {}
    for (field, start, count), (h, unit), (i, row) in itertools.product(
        ((FIELD_K, 0, DK), (FIELD_V, DK, DV)), enumerate(units), enumerate(rows)
    ):
        row_bytes = raw[i, h, start * size : (start + count) * size].tobytes()
        width = next(w for w in (8, 4, 2, 1) if len(row_bytes) % w == 0)
        key = 0x7261796B64696765
        for part in (layer, field, unit, row):
            key = splitmix(((key + golden) & MASK) ^ part)
        total = 0
        for index in range(len(row_bytes) // width):
            word = int.from_bytes(row_bytes[index * width : (index + 1) * width], "little", signed=True)
            place = (key + splitmix((~golden & MASK) ^ index)) & MASK
            total += splitmix((word & MASK) ^ place)
        group = (field, unit, row // per_group)
        totals[group] = (totals.get(group, 0) + total) & MASK
    return totals


class Cached:
    """Content [tokens, H, C] written into shuffled slots of a cache, and its digest."""

    def __init__(
        self, content: Tensor, *, order: str = "LBNHC", block_size: int = 8, first_row: int = 0
    ) -> None:
        blocks = 3 + (first_row + len(content)) // block_size
        self.view = layer_view(
            order,
            blocks=blocks,
            heads=content.shape[1],
            slots=block_size,
            content=content.shape[2],
            dtype=content.dtype,
        )
        self.rows = torch.arange(first_row, first_row + len(content))
        shuffled = 1 + torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(block_size))
        self.block_ids, self.slots = shuffled[self.rows // block_size], self.rows % block_size
        for i in range(len(content)):
            self.view[self.block_ids[i], :, self.slots[i]] = content[i]

    def digest(
        self, units: Sequence[int], *, layer: int = LAYER, groups: tuple[int, int, int] = (10, 0, 3)
    ) -> Tensor:
        per_group, first, count = groups
        return digest_module.digest_rows(
            self.view,
            self.block_ids,
            self.slots,
            self.rows,
            layer=layer,
            units=units,
            fields=((FIELD_K, 0, DK), (FIELD_V, DK, self.view.shape[-1] - DK)),
            rows_per_group=per_group,
            first_group=first,
            num_groups=count,
        )


def make_content(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, HEADS, DK + DV, generator=generator).to(dtype)


UNITS = (6, 7, 8, 9)


@pytest.fixture(
    params=[
        "reference",
        "triton",
        pytest.param("native", marks=pytest.mark.skipif(native_digest() is None, reason="no compiler")),
    ],
    autouse=True,
)
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with all implementations."""
    chosen = functools.partial(digest_module.digest_rows, impl=request.param)
    monkeypatch.setattr(digest_module, "digest_rows", chosen)
    return str(request.param)


@each("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8], ids=str)
@each("first_row", [0, 17])
def test_equals_the_bytes_taken_one_by_one(dtype: torch.dtype, first_row: int) -> None:
    content = make_content(dtype)
    if dtype == torch.int8:  # an odd number of bytes: words of one byte
        content = torch.randint(-128, 128, (TOKENS, HEADS, DK + DV), dtype=torch.int8)
    cached = Cached(content, first_row=first_row)
    first, count = first_row // 10, 5
    got = cached.digest(UNITS, groups=(10, first, count)).numpy().view(np.uint64)
    expected = brute_digest(content, rows=cached.rows.tolist(), layer=LAYER, units=UNITS, per_group=10)
    for f, h, g in itertools.product(range(2), range(HEADS), range(count)):
        assert int(got[f, h, g]) == expected.get((f, UNITS[h], first + g), 0)


@each("num_elems", [1, 2, 3, 4, 7, 8])
def test_words_narrow_with_the_fields_bytes(num_elems: int) -> None:
    """int8 fields of 1 .. 8 bytes use words of 1, 2, 4 or 8 bytes; every byte counts."""
    content = torch.randint(-128, 128, (3, 2, num_elems), dtype=torch.int8)

    def digest(values: Tensor) -> list[int]:
        cached = Cached(values)
        return (
            digest_module.digest_rows(
                cached.view,
                cached.block_ids,
                cached.slots,
                cached.rows,
                layer=0,
                units=(0, 1),
                fields=((0, 0, num_elems),),
                rows_per_group=8,
                first_group=0,
                num_groups=1,
            )
            .flatten()
            .tolist()
        )

    for c in range(num_elems):
        changed = content.clone()
        changed[1, 1, c] ^= 1
        before, after = digest(content), digest(changed)
        assert before[0] == after[0], "another head's digest moved"
        assert before[1] != after[1]


@each("block_size", [1, 4, 16])
@each("order", AXIS_ORDERS)
def test_layout_and_block_size_do_not_matter(order: str, block_size: int) -> None:
    content = make_content()
    expected = Cached(content).digest(UNITS)
    assert torch.equal(Cached(content, order=order, block_size=block_size).digest(UNITS), expected)


@pytest.mark.parametrize("tp", [2, 4])
def test_partition_of_heads_over_ranks_does_not_matter(tp: int) -> None:
    content = make_content()
    whole = Cached(content).digest(UNITS)
    share = HEADS // tp
    parts = [
        Cached(content[:, r * share : (r + 1) * share]).digest(UNITS[r * share : (r + 1) * share])
        for r in range(tp)
    ]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_partition_of_rows_adds_up() -> None:
    content = make_content()
    whole = Cached(content).digest(UNITS)
    parts = [Cached(content[:9]).digest(UNITS), Cached(content[9:], first_row=9).digest(UNITS)]
    assert torch.equal(parts[0] + parts[1], whole)
    one_group = Cached(content).digest(UNITS, groups=(1000, 0, 1))
    assert torch.equal(one_group.squeeze(2), whole.sum(2))


def test_order_of_rows_does_not_matter() -> None:
    cached = Cached(make_content())
    expected = cached.digest(UNITS)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(3))
    cached.rows, cached.slots, cached.block_ids = (
        cached.rows[order], cached.slots[order], cached.block_ids[order]
    )  # fmt: skip
    assert torch.equal(cached.digest(UNITS), expected)


def swap_tokens(content: Tensor) -> Tensor:
    order = torch.arange(TOKENS)
    order[[3, 4]] = order[[4, 3]]
    return content[order]


def swap_elements(content: Tensor) -> Tensor:
    content[7, 2, [1, 2]] = content[7, 2, [2, 1]]
    return content


def swap_keys_with_values(content: Tensor) -> Tensor:
    content[..., :DK], content[..., DK : 2 * DK] = (
        content[..., DK : 2 * DK].clone(),
        content[..., :DK].clone(),
    )
    return content


CORRUPTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "two tokens swapped": swap_tokens,
    "rows shifted": lambda content: content.roll(1, 0),
    "heads shifted": lambda content: content.roll(1, 1),
    "elements shifted": lambda content: content.roll(1, 2),
    "two elements swapped": swap_elements,
    "keys and values swapped": swap_keys_with_values,
    "one value of one token zeroed": lambda content: content.index_put(
        (torch.tensor(22), torch.tensor(3), torch.tensor(31)), torch.tensor(0.0)
    ),
}


@each("name", CORRUPTIONS)
def test_corruption_changes_the_digest(name: str) -> None:
    good = Cached(make_content()).digest(UNITS)
    bad = Cached(CORRUPTIONS[name](make_content())).digest(UNITS)
    assert not torch.equal(good, bad)
    assert not torch.equal(good.sum((0, 1, 2)), bad.sum((0, 1, 2))), "nor does it hide in the total"


@pytest.mark.parametrize("bit", [0, 1, 13, 30, 31])
def test_one_flipped_bit_changes_exactly_its_own_digest(bit: int) -> None:
    good = Cached(make_content()).digest(UNITS)
    for token, head, element in ((0, 0, 0), (9, 1, DK - 1), (10, 2, DK), (22, 3, DK + DV - 1)):
        content = make_content()
        raw = content.view(torch.int32)
        raw[token, head, element] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
        moved = (Cached(content).digest(UNITS) != good).nonzero().tolist()
        assert moved == [[int(element >= DK), head, token // 10]]


def test_coordinates_count() -> None:
    """The same bytes under another layer, unit or row have other digests."""
    content = torch.zeros(TOKENS, HEADS, DK + DV)
    base = Cached(content)
    digests = [
        base.digest(UNITS),
        base.digest(UNITS, layer=LAYER + 1),
        base.digest((7, 8, 9, 10)),
        Cached(content, first_row=30).digest(UNITS, groups=(10, 3, 3)),
    ]
    for a, b in itertools.combinations(digests, 2):
        assert (a != b).all()
    every = base.digest(UNITS).flatten().tolist()
    assert len(set(every)) == len(every)


def test_poison_beside_the_rows_is_not_read() -> None:
    """Slots that no row names hold 0xFF; changing them changes nothing."""
    cached = Cached(make_content())
    before = cached.digest(UNITS)
    touched = torch.zeros(cached.view.shape[0], cached.view.shape[2], dtype=torch.bool)
    touched[cached.block_ids, cached.slots] = True
    cached.view.permute(0, 2, 1, 3)[~touched] = 1.0
    assert torch.equal(cached.digest(UNITS), before)


def test_a_row_outside_the_groups_is_an_error() -> None:
    cached = Cached(make_content())
    with pytest.raises(AssertionError):
        cached.digest(UNITS, groups=(10, 0, 2))
    with pytest.raises(AssertionError):
        cached.digest(UNITS, groups=(10, 1, 3))


def test_no_rows_digest_to_zero() -> None:
    cached = Cached(make_content()[:0])
    assert (cached.digest(UNITS) == 0).all()


@pytest.mark.parametrize(
    "strides", [(1000, 96, 96), (96, 700, 7), (5000, 1, 3)], ids=["page", "head-outermost", "overlapping"]
)
@each("units", [(0,), tuple(range(100, 612, 23))], ids=len)
def test_a_state_is_read_at_any_strides(strides: tuple[int, int, int], units: tuple[int, ...]) -> None:
    """One row of a block, many units, wherever they lie: the digest of a dense copy, and of the bytes."""
    memory = torch.randn(120_000, generator=torch.Generator().manual_seed(1))
    view = torch.as_strided(memory, (3, len(units), 1, 90), (*strides, 1), 11)
    block, slot, row = torch.tensor([2]), torch.tensor([0]), torch.tensor([299])

    def digest(kv_cache: Tensor) -> Tensor:
        return digest_module.digest_rows(
            kv_cache,
            block,
            slot,
            row,
            layer=LAYER,
            units=units,
            fields=((FIELD_K, 0, DK), (FIELD_V, DK, DV)),
            rows_per_group=256,
            first_group=1,
            num_groups=1,
        )

    got = digest(view)
    assert torch.equal(got, digest(view.clone(memory_format=torch.contiguous_format)))
    expected = brute_digest(view[2, :, 0][None], rows=[299], layer=LAYER, units=units, per_group=256)
    for f, (u, unit) in itertools.product(range(2), enumerate(units)):
        assert int(got.numpy().view(np.uint64)[f, u, 0]) == expected[f, unit, 1]


@pytest.mark.parametrize(("tokens", "content"), [(700, 36), (3, 5000)], ids=["many rows", "long rows"])
def test_many_tiles_are_one_digest(tokens: int, content: int) -> None:
    """More rows, and longer ones, than one program of the GPU's kernel takes."""
    values = torch.randn(tokens, 2, content, generator=torch.Generator().manual_seed(5))
    cached = Cached(values, first_row=77)
    args = (cached.view, cached.block_ids, cached.slots, cached.rows)
    settings: dict[str, Any] = {"layer": 3, "units": (4, 9), "fields": ((0, 0, 12), (1, 12, content - 12))}
    settings |= {"rows_per_group": 64, "first_group": 1, "num_groups": 14}
    got = digest_module.digest_rows(*args, **settings)
    assert torch.equal(got, digest_module.digest_rows(*args, **settings, impl="reference"))


@gpu
def test_a_gpu_finds_the_same_integers(impl: str) -> None:
    """The kernel that runs on the device, for every width of load."""
    if impl != "triton":
        pytest.skip("the others run on a CPU")
    for dtype, head in ((torch.bfloat16, 64), (torch.float32, 5), (torch.float8_e4m3fn, 7), (torch.int8, 12)):
        values = torch.randn(300, 3, 2 * head, generator=torch.Generator().manual_seed(6)).to(dtype)
        cached = Cached(values, first_row=77)
        settings: dict[str, Any] = {
            "layer": 3,
            "units": (4, 9, 11),
            "fields": ((0, 0, head), (1, head, head)),
        }
        settings |= {"rows_per_group": 64, "first_group": 1, "num_groups": 6}
        args = (cached.view, cached.block_ids, cached.slots, cached.rows)
        got = digest_module.digest_rows(*(a.cuda() for a in args), **settings)
        assert torch.equal(got.cpu(), digest_module.digest_rows(*args, **settings, impl="reference"))

"""Every backend through every transform and composition, against dense attention under an explicit mask.

Caches hold NaN wherever no token of the step sees a row, block tables the null block where all of a block's
rows are such: what is read outside shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayk.attention import (
    AttentionGroups,
    AttentionLayer,
    AttentionParams,
    AttentionView,
    CommonAttentionMetadata,
    get_backend,
)
from rayk.kv.specs import FullAttentionSpec
from tests.attention.brute import Asked, make_common, requests_of_a_step, seen_keys, wanted_tokens
from tests.each import each
from tests.helpers import assert_matches
from tests.kernels.cases import layer_view
from tests.markers import interpreted

BACKENDS = ("cpu", "cpu-torch", "reference", pytest.param("triton", marks=interpreted))
KV_INDEX, KV_HEADS, HEAD, SCALE = (0, 0, 0, 0, 1, 1, 1, 1), 2, 64, 0.06
VIEWS = {
    "window": AttentionView(kv_group=0, window=8),
    "window of no blocks": AttentionView(kv_group=0, window=7),
    "chunk": AttentionView(kv_group=0, chunk=8),
    "chunk of one block": AttentionView(kv_group=0, chunk=4),
    "odd chunk": AttentionView(kv_group=0, chunk=9),
    "window in chunk": AttentionView(kv_group=0, window=5, chunk=8),
    "fast": AttentionView(kv_group=0, fast_prefill=True),
    "fast window": AttentionView(kv_group=0, window=7, fast_prefill=True),
    "fast chunk": AttentionView(kv_group=0, chunk=8, fast_prefill=True),
    "fast window in chunk": AttentionView(kv_group=0, window=5, chunk=8, fast_prefill=True),
}
STEPS = {
    "mixed": (
        Asked(0, 19, 1),  # a prompt
        Asked(13, 6, 0),  # one that is not done with this step
        Asked(23, 1, 1),  # the last position of a chunk
        Asked(24, 1, 1),  # the first
        Asked(0, 3, 1),
        Asked(12, 7, 5),  # wanted tokens on both sides of a chunk's border
    ),
    "decode": tuple(Asked(computed, 1, 1) for computed in (23, 24, 2, 29, 7, 8)),
    "short": (Asked(0, 6, 1), Asked(2, 1, 1), Asked(3, 5, 1)),
}
CASES = [
    *((view, "mixed", 3 if view == "odd chunk" else 4) for view in VIEWS),
    *((view, "decode", 4) for view in ("window", "chunk", "fast chunk")),
    ("chunk", "short", 4),
]
"""(view, step, slots of a kernel block)"""


@dataclass
class Step:
    """A step's tokens, and what each layer that sees it so must compute."""

    common: CommonAttentionMetadata
    wanted: np.ndarray
    cache: Tensor
    q: Tensor
    """[M, Q, D], of the tokens that are computed."""
    k: Tensor
    """[T, H, D], of all tokens of the step."""
    v: Tensor
    keys: Tensor
    """[all tokens of all requests, H, D]"""
    values: Tensor
    mask: Tensor
    """[M, all tokens]: True where seen."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[M, Q, D] by eager torch in `dtype`."""
        index = torch.tensor(KV_INDEX)
        keys, values = (rows.to(dtype)[:, index].transpose(0, 1) for rows in (self.keys, self.values))
        scores = self.q.to(dtype).transpose(0, 1) @ keys.mT * SCALE
        weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return (weights @ values).transpose(0, 1)


def make_step(
    requests: Sequence[Asked],
    view: AttentionView,
    size: int,
    *,
    stored: bool,
    marks: bool = False,
    seed: int = 0,
) -> Step:
    """`stored`: this step's keys are in the cache already; else they are for the backend to store.

    With `marks`, q = 0 and values are one-hot, so that outputs count the tokens seen.
    """
    generator = torch.Generator().manual_seed(seed)
    rules = {"window": view.window, "chunk": view.chunk}
    live = set().union(*seen_keys(requests, **rules))
    common = make_common(requests, size, live)
    expected = seen_keys(requests, **rules, fast=view.fast_prefill)
    rows = [(r, position) for r, request in enumerate(requests) for position in range(request.total)]
    shape = (len(rows), KV_HEADS, HEAD)
    keys, values = torch.randn(2, *shape, generator=generator)
    q = torch.randn(len(expected), len(KV_INDEX), HEAD, generator=generator)
    if marks:
        buckets = torch.randint(HEAD, shape[:2], generator=generator)
        q, values = torch.zeros_like(q), torch.nn.functional.one_hot(buckets, HEAD).float()
    new = [r for r, (request, position) in enumerate(rows) if position >= requests[request].computed]
    table, ids = renumbered(common.block_table)
    cache = layer_view(
        "BHLNC", blocks=len(ids) + 1, heads=KV_HEADS, slots=size, content=2 * HEAD, dtype=torch.float32
    )
    for row, (request, position) in enumerate(rows):
        if (request, position) in live and (stored or position < requests[request].computed):
            block = int(table[request, position // size])
            cache[block, :, position % size] = torch.cat([keys[row], values[row]], dim=-1)
    slots = [ids[int(slot) // size] * size + int(slot) % size for slot in common.slot_mapping]
    common = CommonAttentionMetadata.from_host(
        query_lens=[request.num_queries for request in requests],
        seq_lens=[request.total for request in requests],
        block_table=table,
        slot_mapping=torch.tensor(slots),
        block_size=size,
    )
    mask = torch.tensor([[row in seen for row in rows] for seen in expected])
    wanted = np.array(wanted_tokens(requests), dtype=np.int64)
    return Step(common, wanted, cache, q, keys[new], values[new], keys, values, mask)


def renumbered(table: Tensor) -> tuple[Tensor, dict[int, int]]:
    """The table with block ids 1, 2, ... in a mixed order and the null block for nobody's; new ids by old."""
    old = sorted(block for block in set(table.flatten().tolist()) if block > 0)
    order = torch.randperm(len(old), generator=torch.Generator().manual_seed(1)).tolist()
    ids = {block: 1 + i for block, i in zip(old, order, strict=True)}
    new = [[ids.get(block, 0) for block in row] for row in table.tolist()]
    return torch.tensor(new, dtype=torch.int32), ids


def attend(name: str, step: Step, view: AttentionView, *, shares: bool) -> Tensor:
    """Through an attention group, as the decoder does. `shares`: keys and values are another layer's."""
    backend, groups = get_backend(name, "cpu"), AttentionGroups()
    spec = FullAttentionSpec(step.common.block_size, KV_HEADS, HEAD, HEAD, "float32", len(KV_INDEX))
    layer = AttentionLayer(layer=7, backend=backend, spec=spec, num_query_heads=len(KV_INDEX), view=view)
    groups.initialise([layer])
    metadata = groups.build(groups.see({0: step.common}, step.wanted))[7]
    params = AttentionParams(SCALE, view.window, torch.tensor(KV_INDEX), HEAD, HEAD, chunk=view.chunk)
    new = (None, None) if shares else (step.k, step.v)
    return backend.forward(step.q, *new, step.cache, metadata, params)


@pytest.mark.parametrize("name", BACKENDS)
@each(("view", "step", "size"), CASES)
def test_numbers_match_masked_attention(name: str, view: str, step: str, size: int) -> None:
    """What layers share is in the cache already, and stays as it is to the byte."""
    made = make_step(STEPS[step], VIEWS[view], size, stored=True)
    before = made.cache.clone().view(torch.int32)
    out = attend(name, made, VIEWS[view], shares=True)
    assert_matches(out, made.dense(torch.float64), made.dense(torch.float32), what=f"{name} {view}")
    assert torch.equal(made.cache.view(torch.int32), before), "a layer without keys of its own stored some"


@pytest.mark.parametrize("name", BACKENDS)
@each("view", ["window", "chunk", "window in chunk", "fast", "fast chunk", "fast window in chunk"])
def test_exactly_the_keys_of_the_definition_are_counted(name: str, view: str) -> None:
    check_counts([name], STEPS["mixed"], VIEWS[view], 4)


def check_counts(names: Sequence[str], requests: Sequence[Asked], view: AttentionView, size: int) -> None:
    made = make_step(requests, view, size, stored=True, marks=True)
    num_seen = made.mask.sum(-1).view(-1, 1, 1)
    expected = torch.einsum("ms,sqd->mqd", made.mask.float(), made.values[:, list(KV_INDEX)])
    for name in names:
        out = attend(name, made, view, shares=True)
        assert torch.equal(torch.round(out * num_seen), expected), name


random_steps = given(
    requests=requests_of_a_step.filter(lambda requests: any(r.num_wanted for r in requests)),
    size=st.integers(1, 8),
    blocks_per_chunk=st.none() | st.integers(1, 4),
    window=st.none() | st.integers(1, 30),
    fast=st.booleans(),
)


def random_view(size: int, blocks_per_chunk: int | None, window: int | None, fast: bool) -> AttentionView:
    chunk = None if blocks_per_chunk is None else blocks_per_chunk * size
    return AttentionView(kv_group=0, window=window, chunk=chunk, fast_prefill=fast)


@settings(max_examples=25, deadline=None)
@random_steps
def test_random_steps_on_the_host(requests: list[Asked], size: int, **kinds: Any) -> None:
    check_counts(("cpu", "cpu-torch", "reference"), requests, random_view(size, **kinds), size)


@pytest.mark.slow
@interpreted
@settings(max_examples=40, deadline=None)
@random_steps
def test_random_steps_in_triton(requests: list[Asked], size: int, **kinds: Any) -> None:
    check_counts(("triton",), requests, random_view(size, **kinds), size)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("view", ["window", "chunk", "window in chunk"])
def test_layers_with_keys_of_their_own_store_them_in_every_view(name: str, view: str) -> None:
    made = make_step(STEPS["mixed"], VIEWS[view], 4, stored=False)
    full = make_step(STEPS["mixed"], VIEWS[view], 4, stored=True)
    out = attend(name, made, VIEWS[view], shares=False)
    assert_matches(out, made.dense(torch.float64), made.dense(torch.float32), what=f"{name} {view}")
    assert torch.equal(made.cache.view(torch.int32), full.cache.view(torch.int32))

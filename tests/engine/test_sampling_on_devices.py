"""Drawing over a large vocabulary: as by a sort in float64, without either and without a wait."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayk.engine import filters, noise
from rayk.engine import sampling as sampling_module
from rayk.engine.filters import NEVER, DrawNumbers, Row, candidates, forbid
from rayk.engine.noise import gumbel, near_gumbel
from rayk.engine.sampling import sample, score_tokens
from rayk.kernels import uploads
from rayk.types.request import SamplingParams
from tests.engine.test_noise import keys
from tests.markers import thorough

EDGE = 1e-6
"""Shares of the probability that float32 does not tell apart."""


def sorted_in_float64(logits: torch.Tensor, p: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [V] that are left of one row, and which tokens' stay is a matter of rounding."""
    scores = (logits.double() - logits.double().max()) / p.temperature
    doubtful = torch.zeros_like(scores, dtype=torch.bool)
    if p.top_k is not None:
        last = scores.topk(min(p.top_k, len(scores))).values[-1]
        scores = scores.masked_fill(scores < last, NEVER)
    if p.top_p < 1:
        order = scores.sort(descending=True, stable=True).indices.flip(0)
        cumulative = scores[order].softmax(-1).cumsum(-1)
        removed = cumulative <= 1 - p.top_p
        removed[-1] = False
        doubtful[order] |= (cumulative - (1 - p.top_p)).abs() < EDGE
        scores = scores.masked_fill(torch.empty_like(removed).scatter_(0, order, removed), NEVER)
    if p.min_p > 0:
        doubtful |= (scores.exp() - p.min_p).abs() < EDGE
        scores = scores.masked_fill(scores.exp() < p.min_p, NEVER)
    return scores, doubtful


def left_over(logits: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates as on a device: no row has a short list."""
    numbers = DrawNumbers.sent(params, [0] * len(params), logits.shape[1], logits.device)
    return candidates(logits, params, numbers, narrow=False)


def some_logits(kind: str, num_rows: int, size: int) -> torch.Tensor:
    """float32 [R, V]"""
    generator = torch.Generator().manual_seed(size)
    smooth = 4 * torch.randn(num_rows, size, generator=generator)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "smooth": lambda: smooth,
        "bfloat16": lambda: smooth.bfloat16().float(),
        "equal": lambda: torch.full_like(smooth, 3.25),
        "two values": lambda: (smooth > 3).float() * 2,
        "zeros of both signs": lambda: torch.where(smooth > 0, 0.0, -0.0),
        "mostly never": lambda: smooth.masked_fill(smooth < 6, NEVER),
        "steep": lambda: smooth * 1e4,
        "tiny": lambda: smooth * 1e-42,
    }
    return made[kind]()


KINDS = ("smooth", "bfloat16", "equal", "two values", "zeros of both signs", "mostly never", "steep", "tiny")
FILTERS: list[dict[str, Any]] = [
    {"top_k": k, "top_p": p, "min_p": m}
    for k, p, m in itertools.product((None, 1, 50, 5000), (1.0, 0.95, 0.5, 1e-12, 1e-20), (0.0, 0.05, 1.0))
]


@pytest.mark.parametrize(
    "kind", ["bfloat16", *(pytest.param(k, marks=thorough) for k in KINDS if k != "bfloat16")]
)
def test_what_is_left_and_drawn_is_that_of_a_sort_in_float64(kind: str) -> None:
    """Every filter and their combinations, also a top_k above the vocabulary's 3,000 tokens."""
    for number, temperature in enumerate((1.0, 0.6, 1.9)):
        rows = [
            Row(SamplingParams(temperature=temperature, seed=i, **kept), (), (0,) * number)
            for i, kept in enumerate(FILTERS)
        ]
        logits = some_logits(kind, len(rows), 3000)
        left, _ = left_over(logits, [row.params for row in rows])
        drawn = sample(rows, logits)
        assert bool((left > NEVER).any(-1).all()), "the best token stays"
        for i, row in enumerate(rows):
            expected, doubtful = sorted_in_float64(logits[i], row.params)
            assert not bool((((left[i] > NEVER) != (expected > NEVER)) & ~doubtful).any()), row
            assert row.params.seed is not None
            noise_of_row = gumbel(keys((row.params.seed, number)), torch.arange(3000))[0]
            if not doubtful.any():
                assert drawn[i] == int((expected + noise_of_row).argmax()), row


def test_of_equal_tokens_the_lowest_ids_stay() -> None:
    """More of them than fit into any short list, at shares that integers divide exactly."""
    logits = torch.zeros(2, 1 << 14)
    params = [SamplingParams(temperature=1.0, top_p=p) for p in (0.5, 0.25)]
    left, ids = left_over(logits, params)
    assert [ids[row > NEVER].tolist() for row in left] == [list(range(1 << 13)), list(range(1 << 12))]


def test_scores_that_differ_in_their_last_bit_are_told_apart() -> None:
    """The best of two is half of all, and the other one must go, though its id is lower."""
    logits = torch.tensor([[1.0, 1.0], [-2.0, -2.0]])
    logits[0, 1] = logits[0, 1].nextafter(torch.tensor(9.0))
    logits[1, 0] = logits[1, 0].nextafter(torch.tensor(-9.0))
    left, _ = left_over(logits, [SamplingParams(temperature=1.0, top_p=0.5)] * 2)
    assert (left > NEVER).tolist() == [[False, True]] * 2


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    left, _ = left_over(logits, [SamplingParams(temperature=1.0, top_p=0.5)])
    assert (left > NEVER).tolist() == [[True, True, False, False]]


def test_near_noise_is_the_noise() -> None:
    states, ids = keys(*((seed, 3) for seed in range(20))), torch.arange(10_000)
    assert float((near_gumbel(states, ids).double() - gumbel(states, ids)).abs().max()) < 1e-5


def test_tokens_that_float32_does_not_tell_apart_are_compared_in_float64() -> None:
    """Noise makes all of them as good as each other, but for the rounding of their logits."""
    ids = torch.arange(6)
    found, expected = [], []
    for seed in range(50):
        noise_of_row = gumbel(keys((seed, 0)), ids)
        logits = noise_of_row.neg().float()
        found += sample([Row(SamplingParams(temperature=1.0, seed=seed), (), ())], logits)
        expected.append(int((logits.double() - logits.max() + noise_of_row).argmax()))
    assert found == expected


@pytest.mark.parametrize("bits", [0, -1, -(2**63), 2**63 - 1, 1 << 40, -(1 << 40)])
def test_near_noise_at_the_ends_of_the_generator(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "random_bits", lambda keys, ids: torch.full((1, 1), bits))
    state, ids = torch.zeros(1, dtype=torch.int64), torch.arange(1)
    assert abs(float(near_gumbel(state, ids)) - float(gumbel(state, ids))) < 1e-5


class Operators(TorchDispatchMode):
    """Counts operators, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.total_bytes = 0
        self.wide_float64: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        if name not in ("view", "select", "slice", "unsqueeze", "expand", "as_strided", "detach"):
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            tensors = read + [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            # What an operator writes over what it reads goes both ways too.
            self.total_bytes += sum(t.numel() * t.element_size() for t in tensors)
            self.wide_float64 += [name for t in tensors if t.dtype == torch.float64 and t.numel() > 10_000]
        return out


WAITS = {"_local_scalar_dense", "nonzero", "item", "equal", "masked_select", "_unique2", "is_nonzero"}
NUM_ROWS, VOCABULARY = 64, 152_000


def count_operators(params: Sequence[SamplingParams]) -> Operators:
    """Of drawing once for `params`, on a device that is not there: waiting for it raises."""
    rows = [Row(p, (1, 2, 3), (4, 4)) for p in params]
    with FakeTensorMode(), Operators() as operators:
        sampling_module._sample(rows, torch.empty(len(rows), VOCABULARY, device="cuda"))
    return operators


@pytest.mark.parametrize(
    ("settings", "most_bytes"),
    [
        ({}, 500),
        ({"top_k": 50}, 520),
        ({"top_p": 0.95}, 920),
        ({"top_k": 50, "top_p": 0.95, "min_p": 0.01}, 950),
        ({"repetition_penalty": 1.1, "frequency_penalty": 0.5}, 720),
    ],
    ids=str,
)
def test_a_device_draws_without_waits_float64_or_a_sort(
    settings: dict[str, Any], most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 rows of 152,000 tokens; bytes are counted per token and row."""
    monkeypatch.setattr(uploads, "pinned", lambda host: host)
    params = [SamplingParams(temperature=0.8, seed=i, **settings) for i in range(NUM_ROWS - 1)]
    operators = count_operators([*params, SamplingParams()])
    assert not WAITS & set(operators.calls), operators.calls
    assert operators.wide_float64 == []
    sorts = operators.calls["sort"] + operators.calls["argsort"]
    parts = -(-NUM_ROWS * VOCABULARY // sampling_module.MAX_ELEMENTS)
    assert sorts <= parts + 1, "the contenders' places only"
    assert operators.total_bytes / (NUM_ROWS * VOCABULARY) < most_bytes


def test_log_probabilities_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: (waits.append(1), tolist(tensor))[1])
    logits = some_logits("smooth", 3, 3000)
    told = score_tokens(logits, [5, 6, 7], [2, 0, 4])
    assert waits == [1]
    assert [(t.token_id, len(t.top)) for t in told] == [(5, 2), (6, 0), (7, 4)]
    assert all(type(i) is int for t in told for i in (t.rank, *(token for token, _ in t.top)))


def test_a_device_forbids_tokens_without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the rows have a mask, which goes there as bits."""
    monkeypatch.setattr(uploads, "pinned", lambda host: host)
    # What numpy has is no fake.
    fake = lambda host, device: torch.empty(host.shape, dtype=host.dtype, device=device)  # noqa: E731
    monkeypatch.setattr(filters, "sent", fake)
    masks = [np.full(VOCABULARY // 32, -1, np.int32)] * (NUM_ROWS // 2)
    with FakeTensorMode(), Operators() as operators:
        logits = torch.empty(NUM_ROWS, VOCABULARY, device="cuda")
        forbid(logits, range(0, NUM_ROWS, 2), masks)
    assert not WAITS & set(operators.calls), operators.calls
    assert operators.total_bytes / (len(masks) * VOCABULARY) < 60

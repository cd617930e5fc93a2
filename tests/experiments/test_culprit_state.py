"""Which part of a recurrent layer went wrong: each mistake is made here by hand and named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from rayk.experiments.culprit import name_culprit
from rayk.experiments.wrong_layer import WrongLayer
from rayk.kv.specs import Mamba2Spec
from rayk.models.config import DecoderConfig, Mamba2Config
from tests.specs.models import decoder

HEADS, GROUPS, SIZE, STATE, TAPS, TOKENS = 4, 2, 8, 8, 3, 37
LIMIT = 2e-3
MAMBA = Mamba2Config(
    num_heads=HEADS,
    head_size=SIZE,
    num_groups=GROUPS,
    state_size=STATE,
    conv_width=TAPS + 1,
    conv_bias=True,
    proj_bias=False,
    gate="gate_norm",
    norm_eps=1e-5,
)
Fields = dict[str, torch.Tensor]


def model() -> DecoderConfig:
    config = decoder()
    layers = tuple(replace(layer, mixer="mamba2") for layer in config.layers)
    return replace(config, layers=layers, mamba2=MAMBA)


def draw(seed: int) -> Fields:
    """What a layer keeps, [U, 1, E] by field."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "conv_x": (HEADS, SIZE * TAPS),
        "conv_b": (GROUPS, STATE * TAPS),
        "conv_c": (GROUPS, STATE * TAPS),
        "ssm": (HEADS, SIZE * STATE),
    }
    return {n: torch.randn(u, 1, e, generator=generator).double() for n, (u, e) in shapes.items()}


def named(
    found: Fields,
    truth: Fields,
    others: Mapping[int, Fields],
    dtype: str = "float32",
    ends: Mapping[int, Fields] | None = None,
) -> str:
    by_unit = {(n, u): t[u] for n, t in found.items() for u in range(len(t))}
    wrong = {
        (n, u): ((rows - truth[n][u]).abs() > LIMIT).any(-1) | rows.isnan().any(-1)
        for (n, u), rows in by_unit.items()
    }
    spec = Mamba2Spec(64, dtype, TAPS + 1, HEADS, SIZE, GROUPS, STATE)
    limits = dict.fromkeys(truth, LIMIT)
    layer = WrongLayer(1, TOKENS - 1, by_unit, truth, wrong, limits, model(), spec)
    return name_culprit(layer, others, ends or {})


def moved(taps: torch.Tensor, by: int) -> torch.Tensor:
    """Each channel's taps, `by` places on; the places at the edge hold junk."""
    rows = taps.unflatten(-1, (-1, TAPS)).roll(by, -1)
    rows[..., :by] = 9.0
    return rows.flatten(-2)


def as_other_dtype(values: torch.Tensor, written: torch.dtype, read: torch.dtype) -> torch.Tensor:
    """`values` written as one dtype over zeros and read as another."""
    out = torch.zeros_like(values, dtype=read)
    for unit, rows in zip(out, values, strict=True):
        raw = rows.to(written).flatten().view(torch.uint8)
        target = unit.view(torch.uint8).flatten()
        count = min(len(raw), len(target))
        target[:count] = raw[:count]
    return out.double()


def swapped(f: Fields, before: Fields) -> Fields:
    return f | {"conv_b": f["conv_c"], "conv_c": f["conv_b"]}


MISTAKES: dict[str, tuple[Callable[[Fields, Fields], Fields], str]] = {
    "swapped": (swapped, "store: conv_b holds conv_c"),
    "neighbour": (
        lambda f, b: f | {"ssm": torch.cat([f["ssm"][:1], f["ssm"][:-1]])},
        "store: unit u of ssm holds unit u-1",
    ),
    "later-taps": (
        lambda f, b: f | {n: moved(f[n], 1) for n in ("conv_x", "conv_b", "conv_c")},
        "taps: tap j of conv_b, conv_c, conv_x holds tap j-1",
    ),
    "half": (
        lambda f, b: f | {"ssm": as_other_dtype(f["ssm"], torch.bfloat16, torch.float32)},
        "dtype: ssm holds bfloat16 values, and is read as float32",
    ),
    "left-over": (
        lambda f, b: f | {"ssm": f["ssm"] + torch.rand(HEADS, 1, 1).double() * b["ssm"]},
        "left over: the state began with that of request 3 instead of zeros",
    ),
    "other-request": (lambda f, b: dict(b), "left over: the state began with that of request 3"),
    "empty": (lambda f, b: {n: torch.zeros_like(t) for n, t in f.items()}, "12 units were never written"),
    "decay": (
        lambda f, b: f | {"ssm": 1.01 * f["ssm"]},
        "4 units of ssm hold other values, the taps are right: the scan",
    ),
    "input": (
        lambda f, b: {n: t + 0.1 * torch.randn_like(t) for n, t in f.items()},
        "a wrong input from layer 0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_state_is_explained(mistake: str) -> None:
    torch.manual_seed(0)
    make, text = MISTAKES[mistake]
    truth, before, unrelated = draw(1), draw(2), draw(3)
    assert text in named(make(dict(truth), before), truth, {0: unrelated, 3: before})


def test_a_state_of_halves_read_as_the_other_halves() -> None:
    truth = draw(1)
    taps = as_other_dtype(truth["conv_x"], torch.float16, torch.bfloat16)
    text = named(truth | {"conv_x": taps}, truth, {}, dtype="bfloat16")
    assert text == "dtype: conv_x holds float16 values, and is read as bfloat16"


def test_an_unrelated_state_is_nobody_elses() -> None:
    truth = draw(1)
    found = truth | {"ssm": truth["ssm"] + 0.2 * draw(7)["ssm"]}
    assert "left over" not in named(found, truth, {0: draw(2), 1: draw(3)})


def test_a_state_that_went_on_before_its_page_was_reused_is_known() -> None:
    truth, prompt, end = draw(1), draw(2), draw(3)
    found = truth | {"ssm": truth["ssm"] + 0.5 * end["ssm"]}
    assert "left over" not in named(found, truth, {2: prompt})
    text = named(found, truth, {2: prompt}, ends={2: end})
    assert text.startswith("left over: the state began with that of request 2")

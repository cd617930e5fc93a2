"""Which part went wrong, told from one layer's rows: each mistake is made here with plain loops and named."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rayk.experiments.culprit import misplaced, name_culprit
from rayk.experiments.wrong_layer import WrongLayer
from rayk.models.config import DecoderConfig, RopeConfig
from tests.specs.models import decoder
from tests.vllm.cpu_store import cut_to_e4m3

HEADS, TOKENS, SIZE, FIRST = 2, 40, 16, 7
ROPE = RopeConfig(kind="default", theta=10000.0, rotary_size=SIZE)
PARTIAL = RopeConfig(kind="default", theta=10000.0, rotary_size=12)
INTERLEAVED = RopeConfig(kind="default", theta=10000.0, rotary_size=SIZE, pairing="interleaved")


def turned(
    keys: torch.Tensor,
    rope: RopeConfig,
    *,
    shift: float = 0,
    theta: float | None = None,
    scale: float = 1.0,
    pairing: str | None = None,
) -> torch.Tensor:
    """Keys [H, T, D] rotated at positions FIRST.., pair by pair."""
    out = keys.clone()
    half = rope.rotary_size // 2
    for pair in range(half):
        a, b = (pair, pair + half) if (pairing or rope.pairing) == "half" else (2 * pair, 2 * pair + 1)
        speed = scale * (theta or rope.theta) ** (-2 * pair / rope.rotary_size)
        for t in range(keys.shape[1]):
            angle = (FIRST + t + shift) * speed
            x, y = keys[:, t, a], keys[:, t, b]
            out[:, t, a] = x * math.cos(angle) - y * math.sin(angle)
            out[:, t, b] = y * math.cos(angle) + x * math.sin(angle)
    return out


def model_with(rope: RopeConfig | None, other: RopeConfig | None = None) -> DecoderConfig:
    config = replace(decoder(), qk_norm=True)
    layers = [replace(layer, rope=rope) for layer in config.layers]
    return replace(config, layers=(*layers[:-1], replace(layers[-1], rope=other or rope)))


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    """Keys before the rotation, and values."""
    torch.manual_seed(3)
    return torch.randn(HEADS, TOKENS, SIZE).double(), torch.randn(HEADS, TOKENS, SIZE).double()


def named(
    found_k: torch.Tensor,
    found_v: torch.Tensor,
    truth: tuple[torch.Tensor, torch.Tensor],
    model: DecoderConfig | None,
    limit: float = 2e-3,
) -> str:
    found = {(n, h): t[h] for n, t in (("k", found_k), ("v", found_v)) for h in range(HEADS)}
    right = dict(zip("kv", truth, strict=True))
    wrong = {(n, h): ((rows - right[n][h]).abs() > limit).any(-1) for (n, h), rows in found.items()}
    return name_culprit(WrongLayer(0, FIRST, found, right, wrong, {"k": limit, "v": limit}, model))


NORM = torch.rand(SIZE, generator=torch.Generator().manual_seed(5)).double() + 0.5
PER_TOKEN = torch.rand(HEADS, TOKENS, 1, generator=torch.Generator().manual_seed(6)).double() + 0.5

KEY_MISTAKES: dict[str, tuple[Callable[[torch.Tensor, RopeConfig], torch.Tensor], str]] = {
    "shift": (lambda k, rope: turned(k, rope, shift=1), "rope: positions are off by +1 (tokens 7 to 46"),
    "back": (lambda k, rope: turned(k, rope, shift=-16), "rope: positions are off by -16"),
    "theta": (lambda k, rope: turned(k, rope, theta=500.0), "keys turn as with theta 500 instead of 10000"),
    "factor": (lambda k, rope: turned(k, rope, scale=0.25), "every angle is 0.25 times what it should be"),
    "backwards": (lambda k, rope: turned(k, rope, scale=-1), "every angle is -1 times what it should be"),
    "none": (lambda k, rope: k, "rope: keys are not rotated"),
    "pairing": (
        lambda k, rope: turned(k, rope, pairing={"half": "interleaved"}.get(rope.pairing, "half")),
        "pairs are rotated, not",
    ),
    "weight": (
        lambda k, rope: turned(k / NORM * NORM.roll(1), rope),
        "k-norm weight: un-rotated keys are off by one factor per channel",
    ),
    "scale": (lambda k, rope: turned(k * 1.25, rope), "k-norm: all keys are 1.25 times what they should be"),
    "statistics": (lambda k, rope: turned(k * PER_TOKEN, rope), "k-norm statistics: keys are off by one"),
    "junk": (lambda k, rope: k.flip(1) * 3 + 1, "keys alone are wrong, tokens 7 to 46 of heads 0, 1"),
}


@pytest.mark.parametrize("rope", [ROPE, PARTIAL, INTERLEAVED], ids=["half", "partial", "interleaved"])
@pytest.mark.parametrize("mistake", KEY_MISTAKES)
def test_mistakes_in_keys(mistake: str, rope: RopeConfig) -> None:
    make, expected = KEY_MISTAKES[mistake]
    keys, values = draw()
    truth = turned(keys, rope), values
    assert expected in named(make(keys, rope), values, truth, model_with(rope))


@pytest.mark.parametrize("mistake", [m for m in KEY_MISTAKES if m not in ("junk", "factor")])
def test_mistakes_in_keys_under_the_noise_of_bfloat16(mistake: str) -> None:
    """Both sides off by rounding, and a bound of that size."""
    make, expected = KEY_MISTAKES[mistake]
    keys, values = draw()
    truth = turned(keys, ROPE)
    found = make(keys, ROPE) + 0.02 * torch.randn(truth.shape).clamp(-3, 3)
    kind = expected.partition(" (")[0].partition(" 1.25")[0].partition(" 500")[0].partition("every")[0]
    assert kind in named(found, values, (truth, values), model_with(ROPE), limit=0.1)


def test_only_the_wrong_head_and_tokens_are_looked_at() -> None:
    keys, values = draw()
    truth = turned(keys, ROPE)
    found = truth.clone()
    found[1, 10:] = turned(keys, ROPE, shift=2)[1, 10:]
    why = named(found, values, (truth, values), model_with(ROPE))
    assert why == "rope: positions are off by +2 (tokens 17 to 46 of head 1)"


def test_another_layers_rotation_and_one_where_there_is_none() -> None:
    keys, values = draw()
    local = replace(ROPE, theta=333.0)
    found = turned(keys, local)
    truth = turned(keys, ROPE)
    assert "rotated as in other layers (theta 333" in named(
        found, values, (truth, values), model_with(ROPE, local)
    )
    assert "the layer has no positions" in named(found, values, (keys, values), model_with(None, local))


def test_without_a_k_norm_its_weight_is_not_blamed() -> None:
    keys, values = draw()
    truth = turned(keys, ROPE)
    model = replace(model_with(ROPE), qk_norm=False)
    why = named(turned(keys / NORM * NORM.roll(1), ROPE), values, (truth, values), model)
    assert "k projection (the model has no k-norm)" in why


@pytest.mark.parametrize(
    ("eps", "name"),
    [(1e-5, "k-norm statistics"), (None, "k projection (the model has no k-norm): statistics")],
)
def test_a_norm_behind_the_rotation_has_statistics(eps: float | None, name: str) -> None:
    keys, values = draw()
    truth = turned(keys, ROPE)
    model = replace(model_with(ROPE), qk_norm=False, turned_norm_eps=eps)
    assert named(truth * PER_TOKEN, values, (truth, values), model).startswith(name)


def test_rows_in_the_wrong_slots() -> None:
    keys, values = draw()
    truth = turned(keys, ROPE), values
    # Blocks of 16 slots, each token one slot late, the last around to the first.
    slots = [(FIRST + t) // 16 * 16 + (FIRST + t + 1) % 16 - FIRST for t in range(TOKENS)]
    found = [torch.full_like(t, 9e9) for t in truth]
    for t, slot in enumerate(slots):
        if 0 <= slot < TOKENS:
            for rows, right in zip(found, truth, strict=True):
                rows[:, slot] = right[:, t]
    why = named(found[0], found[1], truth, model_with(ROPE))
    assert why == "store_kv: token t holds token t-1 (3 of 40 wrong tokens hold something else)"


def cut_layer(astray: int = 0, scale: float = 0.5) -> str:
    """What is said of a layer in fp8 whose numbers were cut, and `astray` of them doubled."""
    sides = dict(zip("kv", draw(), strict=True))
    right = {n: (x / scale).float().to(torch.float8_e4m3fn).double() * scale for n, x in sides.items()}
    found = {
        (n, h): cut_to_e4m3(x[h] / scale).double() * scale for n, x in sides.items() for h in range(HEADS)
    }
    found["k", 0].flatten()[:astray] *= 2
    everywhere = dict.fromkeys(found, torch.ones(TOKENS, dtype=torch.bool))
    limit, scales = {"k": 0.5, "v": 0.5}, {"k": scale, "v": scale}
    wrong = WrongLayer(0, FIRST, found, right, everywhere, limit, model_with(ROPE), e4m3_scales=scales)
    return name_culprit(wrong)


def test_numbers_of_fp8_that_were_cut_are_told_from_other_values() -> None:
    said = re.fullmatch(
        r"store_kv: fp8 rounded toward zero, not to nearest: (\d+) of 2560 numbers are one step smaller than "
        r"the reference's, 5 differ otherwise",
        cut_layer(astray=5),
    )
    assert said is not None
    assert 1000 < int(said[1]) < 1500, "half of the numbers lie nearer to the step above"
    assert "fp8" not in cut_layer(astray=500)


def test_values_and_inputs() -> None:
    keys, values = draw()
    truth = turned(keys, ROPE), values
    model = model_with(ROPE)
    assert "values alone are wrong: 40 tokens" in named(truth[0], values * 2 + 1, truth, model)
    assert "a wrong input" in named(truth[0] * 2 + 1, values * 2 + 1, truth, model)
    assert named(truth[0].roll(1, 0), values.roll(1, 0), truth, model) == "store_kv: head 0 holds head 1"
    assert named(values, truth[0], truth, model) == "store_kv: K holds V of head 0"
    assert "values alone" not in named(truth[0], values.roll(1, 0), truth, model)


@pytest.mark.parametrize(
    ("sources", "last", "others"),
    [
        ((None, None, None, None), "layer 2", ""),
        ((None, None, 1, None), "layer 1", ", or layer 2 (it keeps none)"),
        ((None, 0, 0, None), "layer 0", ", or layers 1 to 2 (they keep none)"),
    ],
)
def test_a_wrong_input_comes_from_what_was_computed_since_the_last_cache(
    sources: tuple[int | None, ...], last: str, others: str
) -> None:
    """Layers that share another's keys and values keep nothing that could have told."""
    config = decoder((None,) * 4)
    layers = tuple(replace(layer, kv_source=s) for layer, s in zip(config.layers, sources, strict=True))
    keys, values = draw()
    found = {(n, h): t[h] * 2 + 1 for n, t in (("k", keys), ("v", values)) for h in range(HEADS)}
    everywhere = dict.fromkeys(found, torch.ones(TOKENS, dtype=torch.bool))
    limit = {"k": 2e-3, "v": 2e-3}
    model = replace(config, layers=layers)
    truth = {"k": keys, "v": values}
    text = name_culprit(WrongLayer(3, FIRST, found, truth, everywhere, limit, model))
    assert text.endswith(f"from {last} after its own keys and values (attention, feed-forward){others}")


def test_misplaced_rows_are_told_from_flipped_routes() -> None:
    """Any row that holds nothing, or three that hold others of the layer; not rows that are merely wrong."""
    keys, values = draw()
    truth = {"k": turned(keys, ROPE), "v": values}
    found = truth["k"][0].clone()
    found[5:9] += torch.randn(4, SIZE)
    wrong = ((found - truth["k"][0]).abs() > 0.1).any(-1)
    assert wrong.sum() == 4
    assert not misplaced(found, truth, wrong, 0.1).any()
    found[20], found[21] = truth["k"][1, 3], truth["v"][0, 20]
    wrong[20:22] = True
    assert not misplaced(found, truth, wrong, 0.1).any(), "two may be chance"
    found[22], wrong[22] = truth["k"][0, 23] + 0.05, True
    assert misplaced(found, truth, wrong, 0.1).nonzero()[:, 0].tolist() == [20, 21, 22]
    found[5], found[6] = 0.0, float("nan")
    assert misplaced(found, truth, wrong, 0.1).nonzero()[:, 0].tolist() == [5, 6, 20, 21, 22]

"""Name the part of a prefill engine that wrote wrong keys or values, told from what its first wrong layer
holds.

Later layers are computed from that one and say nothing of their own; its own rows come from right inputs.
Hypotheses are put in this order, and each is checked on all wrong rows before it is named:

store_kv    the rows hold another token, another head, K for V, or were never written; or numbers of fp8 that
            were rounded toward zero
rope        values are right, keys keep the length of every rotation pair and have another angle
k-norm      values are right, un-rotated keys are off by one factor per channel, or one per token
inputs      keys and values are both wrong and none of the reference's: the layer before gave a wrong input

Legend: H KV heads, T live rows, D head size, P rotation pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rayk.experiments.culprit_state import LayerState, name_state_culprit
from rayk.experiments.wrong_layer import SLACK, WrongLayer
from rayk.models.config import RopeConfig
from rayk.models.layers.rope import inverse_frequencies

MAX_SHIFT = 64  # shifts of tokens and of positions that are looked for
MAX_SUSPECTS = 256
MIN_ROWS = 3  # fewer rows than this are explained by any factor per channel
# a pair must turn so many radians from the first to the last wrong key for its speed to be known
MIN_TURNED = 4.0
ALIKE = 0.02  # relative difference of two speeds or factors that are the same
# of numbers that were cut, half are a step smaller than the nearest; noise of their sums moves few of them
MIN_CUT, MAX_ASTRAY = 0.25, 0.01


def name_culprit(wrong: WrongLayer, *others: Mapping[int, LayerState]) -> str:
    """Name what most likely went wrong, e.g. `rope: positions are off by +1`. `others`: of a recurrent state,
    what the layer should hold of other requests, by prompt index; of several points in time."""
    if wrong.spec is not None and not wrong.spec.has_token_rows:
        return name_state_culprit(wrong, *others)
    for explain in (_never_written, _cut, _other_rows, _latent_alone, _keys_alone, _values_alone):
        text = explain(wrong)
        if text is not None:
            return text
    num_rows = len(wrong.rows(wrong.first))
    return f"{num_rows} tokens hold other values, keys and values alike: a wrong input, from {_before(wrong)}"


def _before(wrong: WrongLayer) -> str:
    """Say what a wrong input may come from: all that was computed since the last cache that was right."""
    last = wrong.layer - 1
    while wrong.model is not None and last >= 0 and not wrong.model.layers[last].parts:
        last -= 1
    source = f"layer {last} after its own keys and values (attention, feed-forward)"
    if last < 0:
        source = "the embedding or the layer's own input norm"
    silent = range(last + 1, wrong.layer)
    if not silent:
        return source
    which = f"layer {silent[0]}" if len(silent) == 1 else f"layers {silent[0]} to {silent[-1]}"
    return f"{source}, or {which} ({'it keeps' if len(silent) == 1 else 'they keep'} none)"


def misplaced(
    found: torch.Tensor, truth: Mapping[str, torch.Tensor], wrong: torch.Tensor, limit: float
) -> torch.Tensor:
    """Find wrong rows [T, D] that hold nothing, or (MIN_ROWS of them) another row of the layer, as bool [T].
    Rounding never does that, so it tells wrong addresses from flipped routes. `limit` is the error of most
    right rows. Of many wrong rows, the first are looked at."""
    suspects = wrong.nonzero()[:MAX_SUSPECTS, 0]
    rows = found[suspects]
    is_empty = ~rows.isfinite().all(-1) | (rows == rows[:, :1]).all(-1)
    others = [t.flatten(0, 1) for t in truth.values() if t.shape[2] == found.shape[1]]
    nearest = torch.cdist(rows.nan_to_num(), torch.cat(others), p=math.inf).amin(-1)
    is_other = ~is_empty & (nearest <= limit)
    result = torch.zeros_like(wrong)
    result[suspects] = is_empty | is_other if int(is_other.sum()) >= MIN_ROWS else is_empty
    return result


# --- store_kv: rows in the wrong place -------------------------------------------------------------


def _never_written(wrong: WrongLayer) -> str | None:
    rows = wrong.rows(wrong.first)
    values = wrong.found[wrong.first][rows].flatten()
    if bool((values == values[0]).all()):
        return f"store_kv: {len(rows)} tokens were never written"
    return None


def _cut(wrong: WrongLayer) -> str | None:
    """Test whether every number of an fp8 cache is the reference's or a step nearer to zero: what found
    no room was cut, where the reference, CUDA and PyTorch round to the nearest."""
    steps = [
        torch.where(right < 0, -1, 1) * (_e4m3(right, scale) - _e4m3(wrong.found[name, head], scale))
        for name, scale in wrong.e4m3_scales.items()
        for head, right in enumerate(wrong.truth[name])
        if bool(wrong.wrong[name, head].any())
    ]
    if not steps:
        return None
    every = torch.cat(steps).flatten()
    num_cut, num_astray = int((every == 1).sum()), int(((every != 1) & (every != 0)).sum())
    if num_cut < MIN_CUT * len(every) or num_astray > MAX_ASTRAY * len(every):
        return None
    return (
        f"store_kv: fp8 rounded toward zero, not to nearest: {num_cut} of {len(every)} numbers are one step "
        f"smaller than the reference's, {num_astray} differ otherwise"
    )


def _e4m3(values: torch.Tensor, scale: float) -> torch.Tensor:
    """Count the steps of fp8_e4m3 from zero to each value, negative for those below."""
    size = (values.abs() / scale).float().to(torch.float8_e4m3fn).view(torch.uint8).int()
    return torch.where(values < 0, -size, size)


def _other_rows(wrong: WrongLayer) -> str | None:
    """Test for another head's, field's or token's rows of the same layer."""
    name, head = wrong.first
    rows = wrong.rows(wrong.first)
    found = wrong.found[wrong.first][rows]
    for other_name, tensor in wrong.truth.items():
        if tensor.shape[2] != found.shape[1]:
            continue
        for other in range(tensor.shape[0]):
            if (other_name, other) != (name, head) and bool(
                wrong.fits(name, found, tensor[other, rows]).all()
            ):
                if other_name != name:
                    return f"store_kv: {name.upper()} holds {other_name.upper()} of head {other}"
                return f"store_kv: head {head} holds head {other}"
    return _other_tokens(wrong, found, rows)


def _other_tokens(wrong: WrongLayer, found: torch.Tensor, rows: torch.Tensor) -> str | None:
    """Test for a constant shift that most rows show: where blocks and the sequence end, some cannot."""
    name, head = wrong.first
    own = wrong.truth[name][head]
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs):
        inside = (rows + shift >= 0) & (rows + shift < len(own))
        num_fitting = int(wrong.fits(name, found[inside], own[rows[inside] + shift]).sum())
        if shift and num_fitting * 2 > len(rows):
            rest = len(rows) - num_fitting
            others = f" ({rest} of {len(rows)} wrong tokens hold something else)" if rest else ""
            return f"store_kv: token t holds token t{shift:+d}{others}"
    return None


# --- keys alone: rope, k-norm ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Keys:
    """The wrong keys of all heads, between the first and the last wrong token."""

    layer: WrongLayer
    tokens: torch.Tensor  # [T] positions
    found: torch.Tensor  # [H', T, D], the heads that have wrong keys
    truth: torch.Tensor

    def explained_by(self, expected: torch.Tensor) -> bool:
        """Tell whether the found keys are these, [H', T, D]."""
        return bool(self.layer.fits("k", self.found, expected).all())


def _keys_alone(wrong: WrongLayer) -> str | None:
    heads = sorted(h for (name, h), rows in wrong.wrong.items() if name == "k" and bool(rows.any()))
    if not heads or any(bool(rows.any()) for (name, _), rows in wrong.wrong.items() if name == "v"):
        return None
    any_head = torch.stack([wrong.wrong["k", h] for h in heads]).any(0).nonzero()[:, 0]
    rows = torch.arange(int(any_head[0]), int(any_head[-1]) + 1)
    keys = _Keys(
        layer=wrong,
        tokens=rows + wrong.first_token,
        found=torch.stack([wrong.found["k", h][rows] for h in heads]),
        truth=torch.stack([wrong.truth["k"][h, rows] for h in heads]),
    )
    explain = (_rotation, _norm_weight, _norm_statistics)
    found = next((text for text in (e(keys) for e in explain) if text is not None), None)
    first, last = int(keys.tokens[0]), int(keys.tokens[-1])
    where = f"tokens {first} to {last} of head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"
    return f"{found} ({where})" if found else f"keys alone are wrong, {where}: other values (k projection?)"


def _latent_alone(wrong: WrongLayer) -> str | None:
    """Test whether, in latent attention, only the latents or only the rotated keys are wrong."""
    names = {name for (name, _), rows in wrong.wrong.items() if bool(rows.any())}
    rows = wrong.rows(wrong.first)
    if names == {"latent"}:
        return f"latents alone are wrong: {len(rows)} tokens hold other values (kv_a projection or its norm?)"
    if names != {"rope"}:
        return None
    rope = wrong.model.layers[wrong.layer].rope if wrong.model is not None else None
    found, truth = wrong.found["rope", 0][rows], wrong.truth["rope"][:, rows]
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs) if rope is not None else ():
        assert rope is not None
        # Rotated pairs are stored as halves, whatever the weights pair.
        turned = _turn(truth, rope, torch.full_like(rows, shift), "half")[0]
        if shift and bool(wrong.fits("rope", found, turned).all()):
            return f"rope: positions are off by {shift:+d}"
    return f"rotated keys alone are wrong: {len(rows)} tokens (rope, or the kv_a projection's last rows?)"


def _values_alone(wrong: WrongLayer) -> str | None:
    if "v" not in wrong.truth or any(
        bool(rows.any()) for (name, _), rows in wrong.wrong.items() if name == "k"
    ):
        return None
    num_rows = len(wrong.rows(wrong.first))
    return f"values alone are wrong: {num_rows} tokens hold other values (v projection?)"


def _rope(keys: _Keys) -> RopeConfig | None:
    model = keys.layer.model
    return model.layers[keys.layer.layer].rope if model is not None else None


def _rotation(keys: _Keys) -> str | None:
    model, rope = keys.layer.model, _rope(keys)
    if model is None:
        return None
    others = dict.fromkeys(layer.rope for layer in model.layers if layer.rope not in (None, rope))
    for other in others:
        assert other is not None
        if keys.explained_by(_turn(_unrotated(keys), other, keys.tokens)):
            if rope is None:
                return "rope: keys are rotated, but the layer has no positions"
            return f"rope: keys are rotated as in other layers (theta {other.theta:g}, {other.kind})"
    if rope is None:
        return None
    for pairing in {"half", "interleaved"} - {rope.pairing}:
        if keys.explained_by(_turn(_unrotated(keys), rope, keys.tokens, pairing)):
            return f"rope: {pairing} pairs are rotated, not {rope.pairing} ones"
    for shift in sorted(range(-MAX_SHIFT, MAX_SHIFT + 1), key=abs):
        if shift and keys.explained_by(_turn(keys.truth, rope, torch.full_like(keys.tokens, shift))):
            return f"rope: positions are off by {shift:+d}"
    return _other_frequencies(keys, rope)


def _other_frequencies(keys: _Keys, rope: RopeConfig) -> str | None:
    """Test for pairs of the right length that turn at another speed."""
    found, truth = _pairs(keys.found, rope), _pairs(keys.truth, rope)
    if bool(((found.abs() - truth.abs()).abs() > SLACK * keys.layer.limit["k"]).any()):
        return None
    right = inverse_frequencies(rope).double()
    turned = (found * truth.conj()).sum(0)  # [T, P]: the angle between them, long pairs counting more
    speeds = right + _speed(turned)
    speeds = torch.remainder(speeds + math.pi, 2 * math.pi) - math.pi
    ratio = speeds / right
    # Slow pairs turn too little to be timed.
    sure = right * len(keys.tokens) > MIN_TURNED
    if int(sure.sum()) >= 2 and bool(((ratio - ratio[0]).abs()[sure] < ALIKE).all()):
        if abs(float(ratio[0])) < ALIKE:
            return "rope: keys are not rotated"
        if abs(float(ratio[0]) - 1) < ALIKE:
            return "rope: keys are turned by another constant angle"
        return f"rope: every angle is {float(ratio[0]):.4g} times what it should be"
    theta = _theta(speeds, sure, rope)
    if theta is not None:
        return f"rope: keys turn as with theta {theta:.4g} instead of {rope.theta:g}"
    pair = int((ratio - 1).abs().masked_fill(~sure, 0).argmax()) if bool(sure.any()) else 0
    return (
        f"rope: keys keep their length but turn by other angles (pair {pair}: {float(speeds[pair]):.4g} "
        f"radians per token instead of {float(right[pair]):.4g})"
    )


def _speed(turned: torch.Tensor) -> torch.Tensor:
    """Measure radians per token of each pair, [P], from complex [T, P]: coarsely from neighbours, then finer
    over longer distances, whose angle is known but for whole turns."""
    speed = torch.zeros(turned.shape[1], dtype=torch.float64)
    step = 1
    while step < len(turned):
        over = (turned[step:] * turned[:-step].conj()).sum(0).angle()
        turns = torch.round((speed * step - over) / (2 * math.pi))
        speed = (over + 2 * math.pi * turns) / step
        step *= 2
    return speed


def _theta(speeds: torch.Tensor, sure: torch.Tensor, rope: RopeConfig) -> float | None:
    """Find the theta whose plain frequencies these speeds are."""
    if rope.kind != "default" or bool((speeds[sure] <= 0).any()):
        return None
    share = torch.arange(0, rope.rotary_size, 2, dtype=torch.float64) / rope.rotary_size
    use = sure & (share > 0)
    if not bool(use.any()):
        return None
    log_theta = -(speeds[use].log() * share[use]).sum() / share[use].square().sum()
    predicted = (-log_theta * share).exp()
    return float(log_theta.exp()) if bool(((speeds / predicted - 1).abs()[sure] < ALIKE).all()) else None


def _norm_weight(keys: _Keys) -> str | None:
    """Test for one factor per channel for all tokens and heads."""
    found, truth = _unrotated(keys, keys.found), _unrotated(keys)
    if found.shape[0] * found.shape[1] < MIN_ROWS:
        return None
    factors = (found * truth).sum((0, 1)) / truth.square().sum((0, 1))
    expected = truth * factors
    if not bool(keys.layer.fits("k", found, expected).all()):
        return None
    low, high = float(factors.min()), float(factors.max())
    if high - low < ALIKE * max(abs(low), abs(high)):
        name = _norm_name(keys).removesuffix(":")
        return f"{name}: all keys are {float(factors.mean()):.4g} times what they should be"
    channel = int((factors - 1).abs().argmax())
    return (
        f"{_norm_name(keys)} weight: un-rotated keys are off by one factor per channel, "
        f"{low:.3g} to {high:.3g}, {float(factors[channel]):.3g} in channel {channel}"
    )


def _norm_statistics(keys: _Keys) -> str | None:
    """Test for one factor per token and head for all channels."""
    factors = (keys.found * keys.truth).sum(2) / keys.truth.square().sum(2)
    if not keys.explained_by(keys.truth * factors[..., None]):
        return None
    low, high = float(factors.min()), float(factors.max())
    model = keys.layer.model
    turned = model is not None and model.turned_norm_eps is not None and _rope(keys) is not None
    name = "k-norm" if turned else _norm_name(keys)
    return f"{name} statistics: keys are off by one factor per token, {low:.3g} to {high:.3g}"


def _norm_name(keys: _Keys) -> str:
    model = keys.layer.model
    return "k-norm" if model is None or model.qk_norm else "k projection (the model has no k-norm):"


# --- rotation --------------------------------------------------------------------------------------


def _unrotated(keys: _Keys, values: torch.Tensor | None = None) -> torch.Tensor:
    """Undo the layer's rotation of keys (its constant factor on cos and sin stays)."""
    rope = _rope(keys)
    values = keys.truth if values is None else values
    return values if rope is None else _turn(values, rope, -keys.tokens)


def _turn(
    x: torch.Tensor, rope: RopeConfig, positions: torch.Tensor, pairing: str | None = None
) -> torch.Tensor:
    """Turn [H, T, D] by the angles of `positions` [T]."""
    angles = positions.double()[:, None] * inverse_frequencies(rope).double()
    turned = _pairs(x, rope, pairing) * torch.polar(torch.ones_like(angles), angles)
    size = rope.rotary_size
    if (pairing or rope.pairing) == "half":
        rotated = torch.cat([turned.real, turned.imag], -1)
    else:
        rotated = torch.view_as_real(turned).flatten(-2)
    return torch.cat([rotated, x[..., size:]], -1)


def _pairs(x: torch.Tensor, rope: RopeConfig, pairing: str | None = None) -> torch.Tensor:
    """Pair channels, [H, T, D] -> complex [H, T, P]."""
    first = x[..., : rope.rotary_size]
    if (pairing or rope.pairing) == "half":
        return torch.complex(*first.chunk(2, -1))
    return torch.complex(first[..., ::2], first[..., 1::2])

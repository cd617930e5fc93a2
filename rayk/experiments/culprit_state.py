"""Name the part of a prefill engine that wrote a wrong recurrent state, told from what its first wrong layer
holds.

A state has one row per unit (a head, a group, a run of channels); the sums in it cannot be taken apart as
keys of single tokens can. Hypotheses, in this order, each checked on all wrong units before it is named:

store       the units were never written, or hold another unit or another field (B for C)
taps        the convolution's taps are moved along
dtype       the bytes are the right values in another dtype
left over   the state is another request's, or started from it: the page was reused and not begun at zero
recurrence  taps are right, the state is not: the scan, its gates, or what it started from
inputs      taps are wrong and none of the above: the projection, or a wrong input to the layer

Legend: U units, E elements of a unit, J taps kept (convolution width - 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from rayk.experiments.wrong_layer import WrongLayer
from rayk.kv.caches import TORCH_DTYPES

MIN_COSINE = 0.5  # two unrelated states of so many elements are never this much alike
MIN_ELEMENTS = 32  # below this they may be
OTHER_DTYPES = ("float32", "bfloat16", "float16")
ROUNDING = 2.0**-7  # what a value loses in the coarsest dtype, bfloat16, relative

LayerState = Mapping[str, torch.Tensor]  # field -> [U, 1, E]


def name_state_culprit(wrong: WrongLayer, *others: Mapping[int, LayerState]) -> str:
    """Name what most likely went wrong. `others` holds what the layer should have of the other requests, by
    prompt index; of several points in time."""
    explanations: tuple[Callable[[WrongLayer], str | None], ...] = (
        _never_written,
        _other_unit,
        _moved_taps,
        _other_dtype,
        lambda w: _left_over(w, [item for states in others for item in sorted(states.items())]),
    )
    for explain in explanations:
        text = explain(wrong)
        if text is not None:
            return text
    names = sorted({name for name, _ in _wrong_units(wrong)})
    count = f"{len(_wrong_units(wrong))} units of {', '.join(names)} hold other values"
    if not any(wrong.fields[name].taps for name in names):
        return f"{count}, the taps are right: the scan, its gates, or the state it started from"
    before = "the embedding" if wrong.layer == 0 else f"layer {wrong.layer - 1}"
    return f"{count}: the input projection, the layer's norm, or a wrong input from {before}"


def _wrong_units(wrong: WrongLayer) -> list[tuple[str, int]]:
    return sorted(unit for unit, rows in wrong.wrong.items() if bool(rows.any()))


def _never_written(wrong: WrongLayer) -> str | None:
    units = [wrong.found[unit] for unit in _wrong_units(wrong)]
    if all(bool((h == h.flatten()[0]).all()) for h in units):
        return f"store: {len(units)} units were never written"
    return None


def _other_unit(wrong: WrongLayer) -> str | None:
    """Test whether every wrong unit of the first wrong field holds one other field's unit, or all the same
    neighbour's."""
    first, _ = wrong.first
    units = [unit for name, unit in _wrong_units(wrong) if name == first]
    for name, tensor in wrong.truth.items():
        if tensor.shape[2] != wrong.truth[first].shape[2]:
            continue
        for shift in range(-len(tensor) + 1, len(tensor)):
            sources = [unit + shift for unit in units]
            if (name == first and shift == 0) or min(sources) < 0 or max(sources) >= len(tensor):
                continue
            pairs = zip(units, sources, strict=True)
            if all(bool(wrong.fits(first, wrong.found[first, u], tensor[s]).all()) for u, s in pairs):
                if name != first:
                    return f"store: {first} holds {name}"
                return f"store: unit u of {first} holds unit u{shift:+d}"
    return None


def _moved_taps(wrong: WrongLayer) -> str | None:
    """Test whether each channel's taps stand one or more places off."""
    taps = [unit for unit in _wrong_units(wrong) if wrong.fields[unit[0]].taps]
    if not taps:
        return None
    # All of a layer's convolutions have the same width.
    num_taps = wrong.fields[taps[0][0]].taps
    for shift in sorted(range(1 - num_taps, num_taps), key=abs):
        if shift and all(_fits_moved(wrong, unit, num_taps, shift) for unit in taps):
            names = ", ".join(sorted({name for name, _ in taps}))
            return f"taps: tap j of {names} holds tap j{shift:+d}"
    return None


def _fits_moved(wrong: WrongLayer, unit: tuple[str, int], num_taps: int, shift: int) -> bool:
    found = wrong.found[unit].view(-1, num_taps)
    right = wrong.truth[unit[0]][unit[1]].view(-1, num_taps)
    here = slice(max(0, -shift), num_taps - max(0, shift))
    there = slice(max(0, shift), num_taps - max(0, -shift))
    return bool(wrong.fits(unit[0], found[:, here], right[:, there]).all())


def _other_dtype(wrong: WrongLayer) -> str | None:
    """Test whether the bytes, read as another dtype, are the right values as far as they go."""
    units = _wrong_units(wrong)
    name = units[0][0]
    own = wrong.fields[name].dtype
    same = [unit for unit in units if unit[0] == name]
    for other in OTHER_DTYPES:
        if other != own and all(_reads_right_as(wrong, unit, own, other) for unit in same):
            return f"dtype: {name} holds {other} values, and is read as {own}"
    return None


def _reads_right_as(wrong: WrongLayer, unit: tuple[str, int], own: str, other: str) -> bool:
    stored = wrong.found[unit].flatten().to(TORCH_DTYPES[own])
    num_bytes = stored.numel() * stored.element_size()
    usable = num_bytes - num_bytes % TORCH_DTYPES[other].itemsize
    read = stored.view(torch.uint8)[:usable].view(TORCH_DTYPES[other]).double()
    right = wrong.truth[unit[0]][unit[1]].flatten()
    count = min(len(read), len(right))
    error = (read[:count] - right[:count]).abs()
    allowed = ROUNDING * right[:count].abs() + wrong.limit[unit[0]]
    return bool((error <= allowed).all())


def _left_over(wrong: WrongLayer, others: Sequence[tuple[int, LayerState]]) -> str | None:
    """Test whether what the state has too much of points the way of another request's."""
    for prompt, other in others:
        likeness = []
        for name, unit in _wrong_units(wrong):
            before, found = other[name][unit].double(), wrong.found[name, unit]
            if bool(wrong.fits(name, found, before).all()):
                likeness.append(1.0)
            elif not wrong.fields[name].taps and before.numel() >= MIN_ELEMENTS:
                excess = found - wrong.truth[name][unit]
                likeness.append(float(torch.cosine_similarity(excess.flatten(), before.flatten(), dim=0)))
        # A state that forgot the other request long ago shows only rounding: most units must tell.
        if likeness and sorted(likeness)[len(likeness) // 2] > MIN_COSINE:
            return (
                f"left over: the state began with that of request {prompt} instead of zeros: "
                "its page was reused"
            )
    return None

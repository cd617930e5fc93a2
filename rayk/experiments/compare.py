"""Find differences between what a cell produced and what the reference says."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rayk.experiments.culprit import misplaced, name_culprit
from rayk.experiments.noise import ROUTED_ROWS, Bound, broken, broken_statistic, measure, rms
from rayk.experiments.references import LayerKV, References
from rayk.experiments.wrong_layer import Head, WrongLayer
from rayk.handover.commands import CapturedRows
from rayk.kv.caches import TORCH_DTYPES
from rayk.kv.fields import PageField
from rayk.kv.groups import KVCacheGroup
from rayk.models.config import DecoderConfig
from rayk.models.kv_specs import kv_cache_specs
from rayk.types.errors import KVMismatch
from rayk.types.request import SamplingParams
from rayk.types.rows import RequestRow

NEAR_TIE_LOGITS = 1e-3  # float32: two tokens whose reference logits are this close may swap
# smallest bound of a key's or value's difference, in RMS of its layer: what float32 keeps
KV_VALUES_RELATIVE = 2e-3


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """Compares one request's tokens with the reference's."""

    first_divergence: int | None  # index of the first token that differs; None when all are equal
    # a tie by the reference's own logits, and all later tokens are the reference's choice
    near_tie: bool = False
    reason: str = ""
    is_finite: bool = True  # whether the reference's logits are: else they say nothing

    @property
    def verdict(self) -> str:
        return "NEAR_TIE" if self.near_tie else "TOKEN_MISMATCH" if self.is_finite else "NOT_FINITE"


def gap_in_words(gap: float) -> str:
    """Say how far a token lies below the reference's best; NaN where its logits are not finite."""
    if math.isnan(gap):
        return "where the reference's own logits are NaN or infinite"
    return f"{gap:.3g} logits below the reference's best"


def compare_tokens(
    row: RequestRow,
    expected: Sequence[int],
    references: References,
    sampling: SamplingParams,
    tolerance: float = NEAR_TIE_LOGITS,
) -> TokenComparison:
    """Compare a finished request with the reference's greedy tokens.

    After a first difference the histories differ, so the rest is judged teacher-forced: at every step the
    chosen token must be within `tolerance` logits of the reference's best.
    """
    found = row.output_token_ids
    if found == list(expected):
        return TokenComparison(None)
    pairs = zip(found, expected, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(found), len(expected)))
    if first >= min(len(found), len(expected)):
        what = f"{len(found)} tokens, the reference has {len(expected)}"
        return TokenComparison(first, reason=f"request {row.prompt_index}: {what}")
    forced = references.forced(row.prompt_token_ids, found)
    gaps = [step.gap for step in forced[first:]]
    near = all(gap <= tolerance for gap in gaps) and len(found) <= sampling.max_tokens
    what = (
        f"request {row.prompt_index}, token {first}: {found[first]} instead of {expected[first]}, "
        f"{gap_in_words(gaps[0])}"
    )
    return TokenComparison(first, near, what, not any(map(math.isnan, gaps)))


@dataclass(frozen=True, slots=True)
class ValueComparison:
    num_values: int
    max_error: float  # largest absolute difference
    max_error_of_bound: float  # largest difference as a share of its layer's bound
    mismatch: KVMismatch | None
    # where a value is first NaN or infinite; no mismatch is looked for from that layer on
    not_finite: str = ""


UNBOUNDED = Bound(floor=math.inf, worst=math.inf, typical=0.0)  # cannot be judged: only NaN is wrong
# (layer, field) -> the largest error that each row (a head's token, or a unit's state) may have
KVBounds = Mapping[tuple[int, str], Bound]


def measure_values(
    references: References, prompts: Sequence[Sequence[int]], model: DecoderConfig
) -> KVBounds:
    """Measure what eager code in the cell's dtype gets wrong of these prompts' caches, layer by layer. Layers
    behind routed experts are bounded as `noise` says, but their states are not: a flipped route moves the sum
    over all tokens by any amount. float32 proves those."""
    errors: dict[tuple[int, str], list[torch.Tensor]] = {}
    rough_errors: dict[tuple[int, str], list[torch.Tensor]] = {}
    squares: dict[tuple[int, str], list[torch.Tensor]] = {}
    for prompt in prompts:
        exact = references.kv(prompt)
        _add_errors(errors, exact, references.eager_kv(prompt))
        _add_errors(rough_errors, exact, references.rough_kv(prompt))
        for layer, fields in enumerate(exact):
            for name, right in fields.items():
                squares.setdefault((layer, name), []).append(right.double().square().mean(-1).flatten())
    states = _states(model)
    bounds: dict[tuple[int, str], Bound] = {}
    for (layer, name), noise in errors.items():
        routed = references.routed and model.is_behind_experts(layer)
        if routed and (layer, name) in states:
            bounds[layer, name] = UNBOUNDED
            continue
        rough = rough_errors.get((layer, name)) if routed else None
        sizes = torch.cat(squares[layer, name])
        bounds[layer, name] = measure(
            torch.cat(noise),
            floor=KV_VALUES_RELATIVE * rms(sizes[sizes.isfinite()].sqrt()),
            routed=ROUTED_ROWS if routed else None,
            further=None if rough is None else torch.cat(rough),
        )
    return bounds


def _states(model: DecoderConfig) -> set[tuple[int, str]]:
    """List (layer, field) of what has one row for all tokens."""
    specs = kv_cache_specs(model, block_size=1, dtype="float32")
    return {
        (layer, field.name)
        for (layer, _), spec in specs.items()
        if not spec.has_token_rows
        for field in spec.fields()
    }


def _add_errors(
    errors: dict[tuple[int, str], list[torch.Tensor]], exact: LayerKV, found: LayerKV | None
) -> None:
    """Append one prompt's row errors, [U * T] of each layer and field."""
    for layer, (right, other) in enumerate(zip(exact, found, strict=True) if found is not None else ()):
        for name, values in right.items():
            error = row_errors(other[name].double(), values.double())
            errors.setdefault((layer, name), []).append(error.flatten())


def row_errors(found: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Find the largest absolute difference of each row, [..., D] -> [...]; infinite where a NaN is."""
    error = (found - right).abs()
    return torch.where(error.isnan(), torch.inf, error).amax(-1)


def compare_values(
    request_id: str,
    captured: Sequence[CapturedRows],
    reference: LayerKV,
    groups: Sequence[KVCacheGroup],
    num_tokens: int,
    *,
    bounds: KVBounds | None = None,
    model: DecoderConfig | None = None,
    others: Mapping[int, LayerKV] | None = None,
    ends: Mapping[int, LayerKV] | None = None,
    e4m3: Mapping[int, Mapping[str, float]] | None = None,
) -> ValueComparison:
    """Compare every rank's live rows with what the reference's cache holds, layer by layer.

    `captured` by rank. `bounds`: of `measure_values`; None: the fixed ones of float32. To name the culprit:
    `model`, and `others`, the reference's caches of the cell's other requests by prompt index, and `ends`,
    those after the last tokens that this engine computed of them; `e4m3`, the scales of fields stored as
    fp8_e4m3, by layer. The first difference in the order (layer,
    group, field, unit, token) is named.
    """
    num_values, max_error, max_share = 0, 0.0, 0.0
    mismatch: KVMismatch | None = None
    not_finite = ""
    owners = sorted((layer, g.index, g) for g in groups for layer in g.layers)
    for layer, _, group in owners:
        live = group.seen_by(layer).live_rows(num_tokens)
        if not live:
            continue  # the next token begins a chunk: it sees nothing that the layer holds
        fields = {field.name: field for field in group.spec.fields()}
        truth = {name: _live(reference[layer][name], live, num_tokens) for name in fields}
        found: dict[Head, torch.Tensor] = {}
        wrong: dict[Head, torch.Tensor] = {}
        limits = {name: _bound(bounds, layer, name, truth) for name in truth}
        for name, head, rows in _heads(captured, layer, fields):
            values = _values(rows, fields[name].dtype)
            errors = row_errors(values, truth[name][head])
            if errors.numel() and limits[name] != UNBOUNDED:
                num_values += values.numel()
                largest = max(errors[errors.isfinite()].tolist(), default=0.0)
                max_error = max(max_error, largest)
                max_share = max(max_share, _share(largest, limits[name].worst))
            is_wrong = broken(errors, limits[name]) | errors.isinf()
            if limits[name].quantiles and not bool(is_wrong.any()):
                usual = limits[name].quantiles[0].expected(len(errors))
                is_wrong = misplaced(values, truth, errors > limits[name].worst, 2 * usual)
            # Of replicas the first wrong one is looked at.
            if (name, head) not in wrong or not bool(wrong[name, head].any()):
                found[name, head], wrong[name, head] = values, is_wrong
        unseen = [(name, h) for name, t in truth.items() for h in range(len(t)) if (name, h) not in found]
        assert not unseen, f"no rank shows {unseen} of layer {layer}"
        not_finite = not_finite or _not_finite(layer, live.start, found, truth, fields)
        if mismatch is None and not not_finite and any(bool(rows.any()) for rows in wrong.values()):
            worst = {name: bound.worst for name, bound in limits.items()}
            scales = (e4m3 or {}).get(layer, {})
            layer_of = WrongLayer(layer, live.start, found, truth, wrong, worst, model, group.spec, scales)
            states = [
                {i: kv[layer] for i, kv in (request_states or {}).items()}
                for request_states in (others, ends)
            ]
            mismatch = _mismatch(request_id, group, layer_of, limits[layer_of.first[0]], states)
    return ValueComparison(num_values, max_error, max_share, mismatch, not_finite)


def _share(error: float, limit: float) -> float:
    """Divide an error by its bound, which is 0 where the reference holds nothing but zeros."""
    return error / limit if limit else math.inf if error else 0.0


def _not_finite(
    layer: int,
    first_token: int,
    found: Mapping[Head, torch.Tensor],
    truth: Mapping[str, torch.Tensor],
    fields: Mapping[str, PageField],
) -> str:
    """Find the first token of a layer whose row is not finite; empty if all are."""
    places = []
    for (name, head), rows in found.items():
        for whose, values in (("the prefill engine's", rows), ("the reference's", truth[name][head])):
            bad = (~values.isfinite().all(-1)).nonzero()
            if len(bad):
                places.append((first_token + int(bad[0, 0]), name, head, whose))
    if not places:
        return ""
    token, name, head, whose = min(places)
    where = f"layer {layer}, {name}, {fields[name].unit_name} {head}, token {token}"
    return f"{whose} cache is not finite (NaN or infinite), first at {where}"


def _bound(bounds: KVBounds | None, layer: int, name: str, truth: Mapping[str, torch.Tensor]) -> Bound:
    if bounds is not None:
        return bounds[layer, name]
    return measure(torch.zeros(1), floor=KV_VALUES_RELATIVE * rms(truth[name]))


def _live(values: torch.Tensor, live: range, num_tokens: int) -> torch.Tensor:
    """Take the live rows [U, live, D] of one field, in float64. A state has one row, which is always live."""
    if values.shape[1] == num_tokens:
        values = values[:, live.start : live.stop]
    assert values.shape[1] == len(live), (values.shape, live)
    return values.double()


def _heads(
    captured: Sequence[CapturedRows], layer: int, fields: Collection[str]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield (field, global unit, rows) of every rank, replicas of a unit one after the other."""
    parts = [
        (name, head, rank)
        for rank, layers in enumerate(captured)
        for name, head in layers[layer]
        if name in fields
    ]
    for name, head, rank in sorted(parts):
        yield name, head, captured[rank][layer][name, head]


def _mismatch(
    request_id: str,
    group: KVCacheGroup,
    wrong: WrongLayer,
    limit: Bound,
    others: Sequence[Mapping[int, Mapping[str, torch.Tensor]]],
) -> KVMismatch:
    name, head = wrong.first
    rows = wrong.rows(wrong.first)
    errors = row_errors(wrong.found[name, head], wrong.truth[name][head])
    return KVMismatch(
        request_id,
        wrong.layer,
        group.index,
        name,
        head,
        wrong.first_token + int(rows[0]),
        f"the prefill engine's cache differs from the reference's by {_how_far(errors, limit)}: "
        f"{name_culprit(wrong, *others)}",
        unit_name=wrong.fields[name].unit_name,
        draft_layer=group.draft_number(wrong.layer),
    )


def _how_far(errors: torch.Tensor, limit: Bound) -> str:
    """Say which bound a head's errors [T] break: that of each, or that of all together."""
    largest, over = float(errors.max()), broken_statistic(errors, limit)
    if over is None:
        return f"up to {largest:.3g} (bound {limit.worst:.3g})"
    return f"up to {largest:.3g}, their {over.name} {over.found:.3g} (bound {over.limit:.3g})"


def _values(rows: np.ndarray, dtype: str) -> torch.Tensor:
    """Convert uint8 [T, bytes] to float64 [T, D]."""
    return torch.from_numpy(np.array(rows)).view(TORCH_DTYPES[dtype]).double()

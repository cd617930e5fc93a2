"""Compile every Triton kernel for GPUs that need not be here; print what each uses of registers and memory.

    python jobs/benchmarks/kernels.py [--quick | --production] [--part K/N] [--out DIR]

The launchers are called as an engine calls them, with CPU tensors, and their launches compile. A second table
has the splits and waves of some batches' decode steps. Exit code 1 when a kernel spills registers or takes
more shared memory than its target has. Without TRITON_INTERPRET. --part takes every Nth case, from the Kth:
the whole list takes hours of one core.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, part, run
from jobs.benchmarks.kernel_cases import Case, all_cases, production_cases, quick_cases
from rayk.cli.guard import run_guarded
from rayk.kernels.paged_attention import head_groups
from rayk.kernels.quantise import QuantisedKV, quantised_kv
from rayk.kernels.segments import Segments
from rayk.kv.formats import FORMATS, LATENT_SIDES
from rayk.types.errors import UserError

SPLITS = 4
COLUMNS = ("kernel", "phase", "target", "dtype", "kv", "head", "group", "slots", "variant")
MEASURED = (
    "tile_rows",
    "tile_keys",
    "num_warps",
    "registers",
    "spills",
    "shared_bytes",
    "programs",
    "buffers",
    "copies",
    "byte_loads",
    "loops_ahead",
    "loops_waiting",
    "instruction",
)
BATCHES = ((1, 8, 8192), (16, 8, 8192), (64, 8, 8192), (64, 1, 8192), (256, 1, 2048), (1, 1, 131_072))
"""Requests, KV heads of the rank (latents: one), and most keys of a request, of the table of waves."""
WAVES = (
    "kernel",
    "target",
    "kv",
    "head",
    "requests",
    "kv_heads",
    "keys",
    "splits",
    "programs",
    "waves",
    "fill",
)


def build(case: Case) -> list[dict[str, Any]]:
    """Compile one case: a row per kernel launched."""
    # Here, so that a parent process does without Triton.
    from rayk.kernels.ahead import compiling
    from rayk.kernels.target import TARGETS as KNOWN

    with compiling(KNOWN[case.target]) as built:
        CALLS.get(case.phase.removesuffix("-step"), _attend)(case)
    about = asdict(case) | {"head": "/".join(map(str, dict.fromkeys(case.head)))}
    return [about | asdict(kernel) | {"problems": "; ".join(kernel.problems)} for kernel in built]


def _store(case: Case) -> None:
    from rayk.kernels.store_kv.triton import store_kv_triton

    head_k, head_v = case.head
    dtype = getattr(torch, case.dtype)
    k, v = torch.empty(32, 8, head_k, dtype=dtype), torch.empty(32, 8, head_v, dtype=dtype)
    store_kv_triton(k, v, _cache(case, 8), torch.empty(32, dtype=torch.int64))


def _digest(case: Case) -> None:
    """`head` is the sizes of two fields side by side: a layer's keys and values."""
    from rayk.kernels.digest import DigestedView, DigestedViews, RowPlaces
    from rayk.kernels.digest.triton import digest_views_triton

    rows = torch.arange(64).numpy()
    fields = ((0, 0, case.head[0]), (1, case.head[0], case.head[1]))
    view = DigestedView(_cache(case, 2), 0, (0, 1), fields)
    places = RowPlaces(rows // case.slots, rows % case.slots, rows, 0, 1)
    digest_views_triton(DigestedViews((view,), (0,)), [places], 256)


def _copy_runs(case: Case) -> None:
    """`head` is what divides every offset, and how many of it a run has."""
    from rayk.kernels.copy_runs.table import make_run_table
    from rayk.kernels.copy_runs.triton import copy_runs_triton

    unit, num_units = case.head
    length = unit * num_units
    offsets, lengths = np.arange(8) * length, np.full(8, length)
    runs = make_run_table(offsets, offsets, lengths, 8 * lengths, 8 * lengths, torch.device("cpu"))
    source, destination = torch.empty(2, 64 * length + 64, dtype=torch.int8).unbind()
    copy_runs_triton(source, destination, runs, torch.zeros(2, 8, dtype=torch.int64))


def _attend(case: Case) -> None:
    from rayk.kernels.paged_attention.launch import paged_attention_triton

    num_requests = 4
    num_tokens = 256 if case.phase == "prefill" else num_requests
    num_heads = case.group + (case.group + 1) // 2
    kv_index = torch.tensor([0] * case.group + [1] * (num_heads - case.group))
    paged_attention_triton(
        torch.empty(num_tokens, num_heads, case.head[0], dtype=getattr(torch, case.dtype)),
        _cache(case, 2),
        torch.empty(num_requests, 64, dtype=torch.int32),
        torch.empty(num_requests + 1, dtype=torch.int32),
        torch.empty(num_requests, dtype=torch.int32),
        groups=head_groups(kv_index),
        scale=0.1,
        window=100 if "window" in case.variant else None,
        head_size_k=case.head[0],
        sinks=torch.empty(num_heads) if "sinks" in case.variant else None,
        soft_cap=30.0 if "cap" in case.variant else None,
        num_splits=SPLITS if case.phase == "split" else 1,
    )


def _attend_parts(case: Case) -> None:
    """Query heads as in `_attend`, those of all ranks; in a step each token's keys are bounded by itself."""
    from rayk.kernels.paged_attention.launch import paged_attention_partial_triton

    num_heads = case.group + (case.group + 1) // 2
    kv_index = torch.tensor([0] * case.group + [1] * (num_heads - case.group))
    paged_attention_partial_triton(
        torch.empty(256, num_heads, case.head[0], dtype=getattr(torch, case.dtype)),
        _cache(case, 2),
        *_bounded_tokens(case),
        groups=head_groups(kv_index),
        scale=0.1,
        head_size_k=case.head[0],
        soft_cap=30.0 if "cap" in case.variant else None,
        num_splits=SPLITS,
    )


def _bounded_tokens(
    case: Case,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a launcher of partial attention takes of 256 tokens: their block table, where requests start,
    and their keys."""
    starts = None if case.phase.endswith("-step") else torch.empty(5, dtype=torch.int32)
    rows, first, end = torch.empty(3, 256, dtype=torch.int32)
    return torch.empty(4, 64, dtype=torch.int32), starts, rows, first, end


def _convolve(case: Case) -> None:
    """C channels of a wider projection; `head` is channels of a unit and taps kept."""
    from rayk.kernels.causal_conv1d.triton import causal_conv1d_triton

    (unit, taps), dtype, num_units = case.head, getattr(torch, case.dtype), 8
    segments = _segments(case)
    x = torch.empty(segments.num_tokens, 2 * num_units * unit, dtype=dtype)[:, : num_units * unit]
    weight, bias = (
        torch.empty(num_units * unit, taps + 1, dtype=dtype),
        torch.empty(num_units * unit, dtype=dtype),
    )
    state = torch.empty(8, num_units, unit, taps, dtype=dtype)
    causal_conv1d_triton(x, weight, bias, state, segments, activation="silu")


def _scan_channels(case: Case) -> None:
    """`head` is channels of a unit and size of their states."""
    from rayk.kernels.selective_scan.launch import selective_scan_triton

    (unit, state_size), dtype, num_units = case.head, getattr(torch, case.dtype), 8
    segments = _segments(case)
    rows = [torch.empty(segments.num_tokens, num_units * unit, dtype=dtype) for _ in range(3)]
    b, c = torch.empty(2, segments.num_tokens, state_size, dtype=dtype)
    a, (d, dt_bias) = torch.empty(num_units * unit, state_size), torch.empty(2, num_units * unit)
    state = torch.empty(8, num_units, unit, state_size)
    selective_scan_triton(rows[0], rows[1], a, b, c, d, dt_bias, rows[2], state, segments)


def _scan_heads(case: Case) -> None:
    """`head` is head size and state size."""
    from rayk.kernels.ssd_scan.launch import ssd_scan_triton

    (head_size, state_size), dtype = case.head, getattr(torch, case.dtype)
    num_heads, segments = 2 * case.group, _segments(case)
    x = torch.empty(segments.num_tokens, num_heads, head_size, dtype=dtype)
    b, c = torch.empty(2, segments.num_tokens, 2, state_size, dtype=dtype)
    a, d, dt_bias = torch.empty(3, num_heads)
    group_index = torch.arange(num_heads) // case.group
    state = torch.empty(8, num_heads, head_size, state_size)
    dt = torch.empty(segments.num_tokens, num_heads, dtype=dtype)
    ssd_scan_triton(x, dt, a, b, c, d, dt_bias, group_index, state, segments)


def _attend_latents(case: Case) -> None:
    """`head` is latent and rotated key, `group` the query heads."""
    from rayk.kernels.mla_attention.launch import mla_attention_triton

    num_requests, width, dtype = 4, sum(case.head), getattr(torch, case.dtype)
    is_step = case.phase.endswith("-step")
    mla_attention_triton(
        torch.empty(num_requests if is_step else 256, case.group, width, dtype=dtype),
        _cache(case, 1, LATENT_SIDES) if case.kv != "auto" else torch.empty(8, 16, width, dtype=dtype),
        torch.empty(num_requests, 64, dtype=torch.int32),
        torch.empty(num_requests + 1, dtype=torch.int32),
        torch.empty(num_requests, dtype=torch.int32),
        scale=0.1,
        latent_size=case.head[0],
        num_splits=SPLITS if is_step else None,
    )


def _attend_latent_parts(case: Case) -> None:
    from rayk.kernels.mla_attention.launch import mla_attention_partial_triton

    width, dtype = sum(case.head), getattr(torch, case.dtype)
    mla_attention_partial_triton(
        torch.empty(256, case.group, width, dtype=dtype),
        _cache(case, 1, LATENT_SIDES) if case.kv != "auto" else torch.empty(8, 16, width, dtype=dtype),
        *_bounded_tokens(case),
        scale=0.1,
        latent_size=case.head[0],
        num_splits=SPLITS,
    )


def _apply_delta_rule(case: Case) -> None:
    """`head` is key and value size, `group` the value heads of a key head."""
    from rayk.kernels.gated_delta_rule.launch import gated_delta_rule_triton

    (key_size, value_size), dtype, num_keys = case.head, getattr(torch, case.dtype), 2
    num_heads, segments = num_keys * case.group, _segments(case)
    q, k = torch.empty(2, segments.num_tokens, num_keys, key_size, dtype=dtype)
    v = torch.empty(segments.num_tokens, num_heads, value_size, dtype=dtype)
    g, beta = torch.empty(2, segments.num_tokens, num_heads)
    state = torch.empty(8, num_heads, key_size, value_size)
    key_index = torch.arange(num_heads) // case.group
    gated_delta_rule_triton(q, k, v, g, beta, key_index, state, segments, scale=0.1)


def _norm(case: Case) -> None:
    """Every form of a norm of rows of `head` elements."""
    from rayk.kernels.pointwise.triton import norm_triton

    size, dtype = case.head[0], getattr(torch, case.dtype)
    x, added = torch.empty(2, 32, size, dtype=dtype)
    for wide, kind in ((True, torch.float32), (False, dtype)):
        norm_triton(x, torch.empty(size, dtype=kind), eps=1e-6, wide=wide)
        norm_triton(x, torch.empty(size, dtype=kind), eps=1e-6, wide=wide, added=added)
    norm_triton(x, torch.empty(size), eps=1e-6, wide=True, centred=True)


def _rotate(case: Case) -> None:
    """`head` is a head's size, and how much of it turns."""
    from rayk.kernels.pointwise.triton import rotate_triton

    (size, turned), dtype = case.head, getattr(torch, case.dtype)
    x, (cos, sin) = torch.empty(32, 12, size, dtype=dtype), torch.empty(2, 32, 1, turned // 2, dtype=dtype)
    rotate_triton(x, cos, sin)
    rotate_triton(x, cos, sin, norm=(torch.empty(12, size, dtype=dtype), 1e-6, False))
    for into_halves in (False, True):
        rotate_triton(x, cos, sin, pairs=True, into_halves=into_halves)


def _gate(case: Case) -> None:
    """Gated activations, whose gates may be cut, and gated norms of groups of a quarter of a row."""
    from rayk.kernels.pointwise import GateThreshold
    from rayk.kernels.pointwise.triton import gate_sums_triton, gated_norm_triton, gated_triton

    size, dtype = case.head[0], getattr(torch, case.dtype)
    gate_up = torch.empty(32, 2 * size, dtype=dtype)
    for activation in ("silu", "gelu_tanh"):
        gated_triton(gate_up, activation)
    gated_triton(gate_up, "gelu_tanh", GateThreshold(gate_sums_triton(gate_up[:, :size]), size, 1.6))
    x, gate = torch.empty(2, 32, size, dtype=dtype)
    for order, weight in (
        ("gate_norm", torch.empty(size)),
        ("norm_gate", torch.empty(size // 4, dtype=dtype)),
    ):
        gated_norm_triton(
            x, gate, weight, group_size=size // 4, eps=1e-6, order=order, wide=weight.dtype == torch.float32
        )


def _choose(case: Case) -> None:
    """`head` is all experts and chosen ones."""
    from rayk.kernels.choose_experts import SCORINGS, ExpertChoice
    from rayk.kernels.choose_experts.triton import choose_experts_triton

    num_experts, num_chosen = case.head
    for scoring in SCORINGS:
        correction = torch.empty(num_experts) if scoring == "sigmoid" else None
        groups = (8, 4) if scoring == "sigmoid" else (1, 1)
        choice = ExpertChoice(num_chosen, scoring, True, 2.5, 0.0, *groups)
        logits = torch.empty(32, num_experts, dtype=getattr(torch, case.dtype))
        choose_experts_triton(logits, correction, choice)


def _multiply_groups(case: Case) -> None:
    """`head` is rows of an expert and its input."""
    from rayk.kernels.grouped_matmul.triton import grouped_matmul_triton

    (rows, size), dtype = case.head, getattr(torch, case.dtype)
    x, ends = torch.empty(32 * rows, size, dtype=dtype), torch.empty(32, dtype=torch.int32)
    weights = torch.empty(32, 2 * size, size, dtype=dtype)
    grouped_matmul_triton(x, weights.mT, ends, torch.empty(32, 2 * size, dtype=dtype))
    grouped_matmul_triton(x, weights.view(32, size, 2 * size), ends, None)


def _scaled_weight(num_matrices: int | None, num_in: int, variant: str) -> Any:
    from rayk.kernels.scaled_matmul import ScaledWeight

    before, num_out = () if num_matrices is None else (num_matrices,), 7168
    values = torch.empty(*before, num_out, num_in, dtype=torch.float8_e4m3fn)
    if variant == "rows":
        return ScaledWeight(values, torch.empty(*before, num_out, 1), (1, num_in), "token")
    return ScaledWeight(values, torch.empty(*before, num_out // 128, num_in // 128), (128, 128), "group")


def _multiply_scaled(case: Case) -> None:
    """`head` is rows and inputs; DeepSeek-V3's outputs, and so few that their columns are split."""
    from rayk.kernels.scaled_matmul import quantise_inputs
    from rayk.kernels.scaled_matmul.launch import scaled_matmul_triton

    (num_rows, num_in), dtype = case.head, getattr(torch, case.dtype)
    weight, x = _scaled_weight(None, num_in, case.variant), torch.empty(num_rows, num_in, dtype=dtype)
    inputs = quantise_inputs(x, weight, impl="triton")
    for splits, bias in ((1, torch.empty(weight.num_outputs, dtype=dtype)), (4, None)):
        scaled_matmul_triton(inputs, weight, bias, dtype, splits=splits)


def _multiply_scaled_groups(case: Case) -> None:
    """`head` is rows of an expert and its input."""
    from rayk.kernels.grouped_matmul.triton import grouped_matmul_triton

    rows, num_in = case.head
    weights, ends = _scaled_weight(32, num_in, case.variant), torch.empty(32, dtype=torch.int32)
    x = torch.empty(32 * rows, num_in, dtype=getattr(torch, case.dtype))
    grouped_matmul_triton(x, weights, ends, None)


def _update_streams(case: Case) -> None:
    """`head` is a stream's elements and how many streams there are."""
    from rayk.kernels.altup import StreamRouter
    from rayk.kernels.altup.triton import correct_triton, predict_triton

    (size, num), dtype = case.head, getattr(torch, case.dtype)
    streams, weight = torch.empty(num, 32, size, dtype=dtype), torch.empty(num, size, dtype=dtype)
    router = StreamRouter(norm=torch.empty(size), eps=1e-6, scale=0.01, weight=weight)
    predict_triton(streams, router, torch.empty(num * num, num, dtype=dtype), active=0)
    correct_triton(streams, streams[0], router, torch.empty(num, num, dtype=dtype), active=0)


def _move_rows(case: Case) -> None:
    """`head` is a row's elements and the copies of a token; all of them are the rank's own, or some."""
    from rayk.kernels.expert_rows.triton import combine_rows_triton, gather_rows_triton

    (size, num_copies), dtype = case.head, getattr(torch, case.dtype)
    x, shares = torch.empty(32, size, dtype=dtype), torch.empty(32, num_copies)
    order, num_rows = torch.empty(32 * num_copies, dtype=torch.int64), torch.empty(1, dtype=torch.int32)
    for some, before, after in ((None, None, shares), (num_rows, shares, None)):
        rows, places = gather_rows_triton(x, order, num_copies, before)
        combine_rows_triton(rows, places, after, num_copies, some)


CALLS = {
    "parts": _attend_parts,
    "mla-parts": _attend_latent_parts,
    "norm": _norm,
    "rotate": _rotate,
    "gate": _gate,
    "choose": _choose,
    "experts": _multiply_groups,
    "scaled": _multiply_scaled,
    "scaled-experts": _multiply_scaled_groups,
    "rows": _move_rows,
    "altup": _update_streams,
    "store": _store,
    "digest": _digest,
    "copy": _copy_runs,
    "conv": _convolve,
    "mamba1": _scan_channels,
    "ssd": _scan_heads,
    "mla": _attend_latents,
    "delta": _apply_delta_rule,
}
"""By phase, `-step` taken off; every other phase attends."""


def _segments(case: Case) -> Segments:
    """Four requests that each write one slot."""
    num_tokens = 1 if case.phase.endswith("-step") else 100
    return Segments.from_host(
        query_lens=[num_tokens] * 4,
        read_slots=[0, 1, 2, 3],
        ends=[[num_tokens]] * 4,
        write_slots=[[4], [5], [6], [7]],
    )


def _cache(case: Case, num_kv_heads: int, sides: tuple[str, str] = ("k", "v")) -> Any:
    if case.kv != "auto":
        return _quantised_cache(case, num_kv_heads, sides)
    return torch.empty(4, num_kv_heads, case.slots, sum(case.head), dtype=getattr(torch, case.dtype))


def _quantised_cache(case: Case, num_kv_heads: int, sides: tuple[str, str]) -> QuantisedKV | None:
    widths: dict[str, int] = {}
    for field in FORMATS[case.kv].fields(*case.head, sides):
        widths[field.bundle] = widths.get(field.bundle, 0) + field.row_bytes
    bundles = {
        name: torch.empty(4, num_kv_heads, case.slots, width, dtype=torch.uint8)
        for name, width in widths.items()
    }
    if set(bundles) != {"kv"}:
        return quantised_kv(bundles, *case.head, sides=sides)
    view = bundles["kv"]
    view = view.view(torch.float8_e4m3fn) if case.kv == "fp8_e4m3" else view
    return quantised_kv(view, *case.head, sides=sides)


def _waves(kernel: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of the second table, if `kernel` is that of a decode step of a bf16 model without frills."""
    from rayk.kernels.paged_attention.tiles import choose_num_splits, num_waves
    from rayk.kernels.target import TARGETS as KNOWN

    about = {name: kernel[name] for name in ("kernel", "target", "kv", "head")}
    is_plain = kernel["variant"] == "plain" and kernel["dtype"] == "bfloat16"
    if kernel["phase"] not in ("split", "mla-step") or not is_plain or kernel["tile_rows"] == 0:
        return
    target, resident = KNOWN[kernel["target"]], kernel["programs"]
    for requests, kv_heads, keys in BATCHES:
        if kernel["phase"] == "mla-step":
            kv_heads = -(-kernel["group"] // kernel["tile_rows"])
        splits = choose_num_splits(
            target,
            num_programs=requests * kv_heads,
            max_keys=keys,
            tile_keys=kernel["tile_keys"],
            programs_at_once=resident,
        )
        programs, at_once = requests * kv_heads * splits, target.num_multiprocessors * resident
        waves = num_waves(programs, at_once)
        counts = {"requests": requests, "kv_heads": kv_heads, "keys": keys, "splits": splits}
        counts |= {"programs": programs, "waves": waves, "fill": f"{programs / (waves * at_once):.2f}"}
        yield about | counts


def fill(options: argparse.Namespace, page: Page) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError(
            "TRITON_INTERPRET=1 is set: nothing would be compiled", mend="env -u TRITON_INTERPRET"
        )
    choose = quick_cases if options.quick else production_cases if options.production else all_cases
    number, of = options.part
    cases = list(choose())[number - 1 :: of]
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), get_context("spawn")) as pool:
        rows = [row for built in pool.map(build, cases, chunksize=4) for row in built]
    names = (*COLUMNS, *MEASURED, "problems")
    page.table(names, [[row[name] for name in names] for row in rows])
    waves = [row for kernel in rows for row in _waves(kernel)]
    if waves:
        page.say("", "Splits and waves of decode steps in production:", "")
        page.table(WAVES, [[row[name] for name in WAVES] for row in waves])
    page.tables = {"kernels": rows}
    page.wrong += [
        f"{row['kernel']} for {row['target']}: {row['problems']}" for row in rows if row["problems"]
    ]
    page.say("", f"{len(rows)} kernels, {len(page.wrong)} over a limit")


def main() -> int:
    quick = {"action": "store_true", "help": "only some cases"}
    production = {"action": "store_true", "help": "only what large models launch most"}
    some = {"type": part, "default": "1/1", "help": "only every Nth case, from the Kth: such as 3/10"}
    title = "What kernels use of each GPU"
    return run(fill, __file__, title=title, quick=quick, production=production, part=some)


if __name__ == "__main__":
    sys.exit(run_guarded(main))

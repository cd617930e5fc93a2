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
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, part, run
from rayk.cli.guard import run_guarded
from rayk.kernels.paged_attention import head_groups
from rayk.kernels.quantise import QuantisedKV, quantised_kv
from rayk.kernels.segments import Segments
from rayk.kv.formats import FORMATS, LATENT_SIDES
from rayk.types.errors import UserError

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
VARIANTS = ("plain", "window", "sinks+cap", "window+sinks+cap")
SPLITS = 4
COLUMNS = ("kernel", "phase", "target", "dtype", "kv", "head", "group", "slots", "variant")
QUANTISED = ("fp8_e4m3", "fp8_e4m3_token_head", "nvfp4")
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


@dataclass(frozen=True)
class Case:
    target: str
    phase: str
    """prefill, decode (one program a sequence), split (several), store; of state kernels, `op` for a mixed
    batch and `op-step` for one token a request."""
    dtype: str
    head: tuple[int, int]
    """Head sizes of keys and values; of a state, its two."""
    group: int = 4
    """Query heads a KV head; odd ones come with a smaller second group."""
    variant: str = "window+sinks+cap"
    slots: int = 16
    """Of a kernel block of keys and values."""
    kv: str = "auto"
    """Format of the cache: auto (the dtype), or a quantised one."""


def all_cases() -> Iterator[Case]:
    everything = VARIANTS[-1]
    yield from production_cases()
    for target in TARGETS:
        for phase in ("prefill", "split"):
            for head, group in ((64, 4), (80, 3), (128, 8), (192, 1), (256, 7)):
                for variant in VARIANTS:
                    yield Case(target, phase, "bfloat16", (head, head), group, variant)
            for head in (64, 128, 256):
                yield Case(target, phase, "float16", (head, head))
                for variant in ("plain", everything):
                    yield Case(target, phase, "float32", (head, head), 4, variant)
            yield Case(target, phase, "bfloat16", (192, 128), 16, everything)
            # What divides the runs of chunked local attention need not be a power of two.
            for slots in (1, 4, 12, 100):
                yield Case(target, phase, "bfloat16", (128, 128), 5, "plain", slots)
        for head in (64, 128, 256):
            yield Case(target, "decode", "bfloat16", (head, head))
            yield from _row_cases(target, head)
        yield from _copy_cases(target)
        yield from _layer_cases(target, ("float32", "float16", "bfloat16"))
        yield from _state_cases(target)
        yield from _latent_and_delta_cases(target)
        # Tiles of those are chosen for NVIDIA's registers; on AMD they run, and spill.
        if not target.startswith("gfx"):
            yield from _quantised_cases(target, (64, 128, 256), ("bfloat16", "float32"))
            yield from _quantised_latent_cases(target, ("bfloat16", "float16", "float32"), (2, 16, 24, 128))


def production_cases() -> Iterator[Case]:
    """What a large model's layers launch most, on GPUs with asynchronous copies."""
    for target in ("sm_80", "sm_90", "sm_100"):
        for head, group in ((64, 8), (128, 8), (256, 4)):
            for phase in ("split", "prefill"):
                yield Case(target, phase, "bfloat16", (head, head), group, "plain")
        for kv in QUANTISED:
            for phase in ("split", "prefill"):
                yield Case(target, phase, "bfloat16", (128, 128), 8, "plain", kv=kv)
            for phase, heads in (("mla-step", 16), ("mla", 128)):
                yield Case(target, phase, "bfloat16", (512, 64), heads, "plain", kv=kv)
        for phase, heads in (("mla-step", 16), ("mla-step", 128), ("mla", 128)):
            yield Case(target, phase, "bfloat16", (512, 64), heads, "plain")
        for phase, head, group in (("mamba1", (16, 16), 1), ("ssd", (64, 128), 64), ("delta", (128, 128), 2)):
            yield Case(target, phase, "bfloat16", head, group, "plain")


def _copy_cases(target: str) -> Iterator[Case]:
    for unit in (16, 8, 4, 2, 1):
        for num_units in (1, 15, 1023):
            yield Case(target, "copy", f"{unit} bytes", (unit, num_units), 1, "plain")


def _layer_cases(target: str, dtypes: Sequence[str], *, quick: bool = False) -> Iterator[Case]:
    """What stands between matrix products, and the products of experts with few rows and with many."""
    heads = ((128, 64),) if quick else ((128, 64), (64, 64), (128, 128), (256, 256), (80, 20))
    for dtype in dtypes:
        for width in (2880,) if quick else (64, 2880, 8192, 16384):
            yield Case(target, "norm", dtype, (width, width), 1, "plain")
            yield Case(target, "gate", dtype, (width, width), 1, "plain")
        for head in heads:
            yield Case(target, "rotate", dtype, head, 1, "plain")
        yield Case(target, "choose", dtype, (128, 4), 1, "plain")
        yield Case(target, "rows", dtype, (2880, 4), 1, "plain")
        yield Case(target, "altup", dtype, (2048, 4), 1, "plain")
        for rows in (1, 256) if quick else (1, 32, 64, 256):
            yield Case(target, "experts", dtype, (rows, 2880), 1, "plain")


def _quantised_cases(target: str, heads: Sequence[int], dtypes: Sequence[str]) -> Iterator[Case]:
    for kv, head, dtype in product(QUANTISED, heads, dtypes):
        for phase in ("prefill", "split"):
            yield Case(target, phase, dtype, (head, head), kv=kv)
        yield Case(target, "store", dtype, (head, head), 1, "plain", kv=kv)


def _quantised_latent_cases(target: str, dtypes: Sequence[str], heads: Sequence[int]) -> Iterator[Case]:
    for kv, dtype, group in product(QUANTISED, dtypes, heads):
        for phase in ("mla", "mla-step"):
            yield Case(target, phase, dtype, (512, 64), group, "plain", kv=kv)


def _row_cases(target: str, head: int) -> Iterator[Case]:
    """What writes a token's row, and what proves it."""
    for dtype in ("float32", "float16", "bfloat16"):
        yield Case(target, "store", dtype, (head, head), 1, "plain")
    for dtype in ("float32", "bfloat16", "float8_e4m3fn"):
        yield Case(target, "digest", dtype, (head, head), 1, "plain")


def _state_cases(target: str) -> Iterator[Case]:
    for dtype in ("float32", "float16", "bfloat16"):
        for phase in ("conv", "conv-step"):
            yield Case(target, phase, dtype, (128, 3), 1, "plain")
        for phase in ("mamba1", "mamba1-step"):
            yield Case(target, phase, dtype, (16, 16), 1, "plain")
        # Many heads have large tiles.
        yield Case(target, "ssd", dtype, (64, 128), 64, "plain")
        for head in ((64, 128), (128, 64), (64, 256), (16, 16), (16, 24)):
            for phase in ("ssd", "ssd-step"):
                yield Case(target, phase, dtype, head, 8, "plain")


def _latent_and_delta_cases(target: str) -> Iterator[Case]:
    """DeepSeek's latents with the query heads of several ranks; Qwen3-Next's heads and smaller ones."""
    for dtype in ("float32", "float16", "bfloat16"):
        for phase in ("mla", "mla-step"):
            for heads in (2, 16, 24, 128):
                yield Case(target, phase, dtype, (512, 64), heads, "plain")
            yield Case(target, phase, dtype, (256, 32), 16, "plain")
        for phase in ("delta", "delta-step"):
            for size in (16, 32, 64, 128, 256):
                yield Case(target, phase, dtype, (size, size), 2, "plain")
        # Many heads have large tiles.
        yield Case(target, "delta", dtype, (128, 128), 32, "plain")


def quick_cases() -> Iterator[Case]:
    for target in TARGETS:
        for head in (64, 128, 256):
            yield Case(target, "prefill", "bfloat16", (head, head))
        yield Case(target, "prefill", "bfloat16", (128, 128), 8, "plain")
        yield Case(target, "prefill", "float16", (80, 80), 3)
        yield Case(target, "prefill", "float32", (256, 256))
        yield Case(target, "split", "bfloat16", (128, 128))
        yield Case(target, "split", "float32", (256, 256), 4, "plain")
        yield Case(target, "decode", "float16", (256, 256), 7)
        yield Case(target, "store", "bfloat16", (128, 128), 1, "plain")
        yield Case(target, "digest", "bfloat16", (128, 128), 1, "plain")
        # Fields that start in the middle of a word.
        yield Case(target, "digest", "bfloat16", (6, 20), 1, "plain")
        yield Case(target, "copy", "16 bytes", (16, 16), 1, "plain")
        yield Case(target, "copy", "2 bytes", (2, 3), 1, "plain")
    for target in ("sm_90", "gfx942"):
        yield from _layer_cases(target, ("bfloat16",), quick=True)
    for phase in ("prefill", "split"):
        yield Case("sm_90", phase, "bfloat16", (128, 128), 5, "plain", slots=12)
    yield from _quantised_cases("sm_90", (128,), ("bfloat16",))
    yield from _quantised_latent_cases("sm_90", ("bfloat16",), (16, 128))
    for target in ("sm_90", "gfx942"):
        for phase in ("conv", "conv-step"):
            yield Case(target, phase, "bfloat16", (128, 3), 1, "plain")
        for phase in ("mamba1", "mamba1-step"):
            yield Case(target, phase, "bfloat16", (16, 16), 1, "plain")
        for group in (8, 64):
            yield Case(target, "ssd", "bfloat16", (64, 128), group, "plain")
        yield Case(target, "ssd", "bfloat16", (16, 24), 8, "plain")
        yield Case(target, "ssd-step", "bfloat16", (64, 128), 8, "plain")
        yield Case(target, "mla", "bfloat16", (512, 64), 16, "plain")
        yield Case(target, "mla", "float32", (512, 64), 16, "plain")
        yield Case(target, "mla-step", "bfloat16", (512, 64), 128, "plain")
        for group in (2, 32):
            yield Case(target, "delta", "bfloat16", (128, 128), group, "plain")
        yield Case(target, "delta-step", "bfloat16", (128, 128), 2, "plain")


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
    "norm": _norm,
    "rotate": _rotate,
    "gate": _gate,
    "choose": _choose,
    "experts": _multiply_groups,
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

"""The Triton kernels compile, from their real call sites, for GPUs that are not here, inside their limits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from rayk.kernels.ahead import (
    Built,
    count_buffers,
    count_loads,
    count_loops,
    find_miscompiled,
    find_unwritten,
    read_amd_use,
    untouched_stack,
)
from rayk.kernels.target import TARGETS
from tests.conftest import CHECKPOINTS
from tests.house import ROOT
from tests.markers import slow, thorough

Rows = list[dict[str, Any]]
LIMITS = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
"""Bytes of shared memory a program may have, from the vendors' documents."""

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux"),
    pytest.mark.timeout(600),  # a minute on two idle cores
]


def run_compiling(*arguments: str, limit_s: float) -> str:
    """Run Python and return what it printed. In a process of its own: Triton decides at import whether it
    interprets or compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(CHECKPOINTS / "triton-cache")},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def measured(option: str, out: Path) -> Rows:
    """What `make kernels` measures, of fewer cases."""
    run_compiling("jobs/benchmarks/kernels.py", option, "--out", str(out), limit_s=580)
    return pd.read_parquet(out / "kernels.parquet").to_dict("records")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return measured("--quick", tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def in_production(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return measured("--production", tmp_path_factory.mktemp("kernels"))


@thorough
def test_nothing_spills_and_shared_memory_fits(rows: Rows) -> None:
    for row in rows:
        assert not row["problems"], row
        assert row["shared_bytes"] <= LIMITS[row["target"]], row
        assert 0 < row["registers"] <= 512, row


@thorough
def test_every_kernel_was_compiled(rows: Rows) -> None:
    """Those of states and latents for one maker's GPU each; `make kernels` compiles all for all."""
    paged = {
        "store_kv_kernel",
        "copy_runs_kernel",
        "digest_kernel",
        "paged_attention_kernel",
        "paged_attention_decode_kernel",
        "combine_splits_kernel",
    }
    others = {
        "rms_norm_kernel",
        "rotate_kernel",
        "gated_kernel",
        "gated_norm_kernel",
        "choose_experts_kernel",
        "grouped_matmul_kernel",
        "scaled_matmul_kernel",
        "add_splits_kernel",
        "quantise_rows_kernel",
        "gate_sums_kernel",
        "predict_streams_kernel",
        "correct_streams_kernel",
        "gather_rows_kernel",
        "combine_rows_kernel",
        "causal_conv1d_kernel",
        "keep_taps_kernel",
        "causal_conv1d_step_kernel",
        "selective_scan_kernel",
        "selective_scan_chunk_kernel",
        "selective_scan_states_kernel",
        "ssd_decay_kernel",
        "ssd_states_kernel",
        "ssd_output_kernel",
        "ssd_walk_kernel",
        "mla_attention_kernel",
        "gated_delta_solve_kernel",
        "gated_delta_states_kernel",
        "gated_delta_output_kernel",
        "gated_delta_tokens_kernel",
    }
    for target in LIMITS:
        wanted = paged | others if target in ("sm_90", "gfx942") else paged
        wanted = wanted | {"store_quantised_kernel"} if target == "sm_90" else wanted
        # Those spilled there once.
        wanted = wanted | {"rotate_kernel", "rms_norm_kernel"} if target == "sm_100" else wanted
        assert {row["kernel"] for row in rows if row["target"] == target} == wanted
    # Triton once handed the binary of the first target to all of them.
    uses = {
        target: [row["registers"] for row in rows if row["target"] == target and row["kernel"] in paged]
        for target in LIMITS
    }
    assert len({tuple(registers) for registers in uses.values()}) == len(LIMITS)


@slow
def test_in_production_the_next_tile_is_copied_while_one_is_multiplied(in_production: Rows) -> None:
    """Keys and values each have two buffers or more; nothing spills, and codes are loaded many at once."""
    attention = [row for row in in_production if row["tile_rows"] > 0 and row["tile_keys"] > 0]
    assert {row["target"] for row in attention} == {"sm_80", "sm_90", "sm_100"}
    for row in attention:
        assert not row["problems"], row
        assert row["shared_bytes"] <= LIMITS[row["target"]], row
        assert row["buffers"] >= 2, row
        assert row["copies"] > 0, row
        assert row["byte_loads"] <= MOST_BYTE_LOADS, row
        assert row["programs"] >= 1, row


@slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_scans_copy_the_next_chunk_while_one_is_computed(in_production: Rows, target: str) -> None:
    """Every loop over chunks; those over parts of one, which Triton may lay out flat, copy too. On sm_80 some
    tiles are loaded into registers beside. (The output of the delta rule takes a chunk whole.)"""
    states = {"selective_scan_states_kernel", "ssd_states_kernel", "gated_delta_states_kernel"}
    wanted = states | {"ssd_output_kernel", "gated_delta_solve_kernel"}
    rows = [row for row in in_production if row["target"] == target and row["kernel"] in wanted]
    assert {row["kernel"] for row in rows} == wanted
    for row in rows:
        assert row["buffers"] >= 2, row
        assert row["copies"] > 0, row
        assert row["loops_ahead"] == 1 or row["kernel"] not in states, row
        assert row["loops_waiting"] == 0 or target == "sm_80", row
        assert row["spills"] == 0, row
        if (row["kernel"], target) == ("gated_delta_solve_kernel", "sm_100"):
            assert row["programs"] >= 2, row


@slow
@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_100"])
def test_products_in_fp8_copy_the_next_tile_while_one_is_multiplied(in_production: Rows, target: str) -> None:
    """Of single matrices and of experts, for one row and for many, which have wgmma's 64 rows or more."""
    kernels = {"scaled_matmul_kernel", "grouped_matmul_kernel"}
    rows = [row for row in in_production if row["target"] == target and row["kernel"] in kernels]
    assert {row["kernel"] for row in rows} == kernels
    for row in rows:
        assert not row["problems"], row
        assert row["buffers"] >= 2, row
        assert row["byte_loads"] == 0, row
        assert (row["loops_ahead"], row["loops_waiting"]) == (1, 0), row
        has_many = row["head"].startswith("1024")
        wanted = PREFILL_INSTRUCTION.get(target, "mma") if has_many else "mma"
        assert row["instruction"] == wanted, row


FORMS = """
import torch
from rayk.kernels.ahead import compiling
from rayk.kernels.compilations import compilations
from rayk.kernels.quantise import Quantised
from rayk.kernels.scaled_matmul import ScaledWeight
from rayk.kernels.scaled_matmul.launch import scaled_matmul_triton
from rayk.kernels.target import TARGETS

e4m3 = torch.float8_e4m3fn
weight = ScaledWeight(torch.empty(2112, 2048, dtype=e4m3), torch.empty(17, 16), (128, 128), "group")
with compiling(TARGETS["sm_90"]), compilations() as names:
    for rows in (1, 2, 5, 16, 20, 32, 33, 64, 65, 128, 200, 300, 3000, 8192):
        inputs = Quantised(torch.empty(rows, 2048, dtype=e4m3), torch.empty(rows, 16))
        scaled_matmul_triton(inputs, weight, None, torch.bfloat16)
print(sorted(names))
"""


@thorough
def test_products_in_fp8_have_no_more_forms_than_an_engine_meets_when_it_starts() -> None:
    """Prefills of powers of two have every tile, with columns split and not; other numbers of tokens and of
    splits compile nothing."""
    made = ["add_splits_kernel"] + ["scaled_matmul_kernel"] * 5
    assert run_compiling("-c", FORMS, limit_s=120).strip() == str(made)


MOST_BYTE_LOADS = 16
"""Of scales beside codes; each code by itself would be hundreds."""

PREFILL_INSTRUCTION = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}


@thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("target", LIMITS)
def test_prefills_use_the_tensor_cores_of_their_target(rows: Rows, target: str, dtype: str) -> None:
    """wgmma needs 64 rows. A decode has 16, for which mma.sync is right."""
    found = {
        (row["phase"], row["instruction"])
        for row in rows
        if row["target"] == target and row["dtype"] == dtype and "paged" in row["kernel"]
    }
    assert ("prefill", PREFILL_INSTRUCTION[target]) in found
    assert {name for phase, name in found if phase == "prefill"} == {PREFILL_INSTRUCTION[target]}
    assert {name for phase, name in found if phase != "prefill"} == {"mfma" if target == "gfx942" else "mma"}


def test_buffers_and_loads_are_counted() -> None:
    allocated = "%k = ttg.local_alloc : () -> !ttg.memdesc<{}x32x128xbf16, #shared, #smem, mutable>\n"
    ids = "%b = ttg.local_alloc : () -> !ttg.memdesc<1x64xi32, #shared1, #smem, mutable>\n"
    filled = "%q = ttg.local_alloc %x : (tensor<16x128xbf16>) -> !ttg.memdesc<16x128xbf16, #shared, #smem>\n"
    assert count_buffers(filled + ids) == 0
    assert count_buffers(allocated.format(3) + ids + allocated.format(2) + filled) == 2
    copy = "@%p1 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;\ncp.async.commit_group;\n"
    loads = (
        "@%p2 ld.global.b8 { %rs1 }, [ %rd2 + 0 ];\nld.global.v4.b32 { %r2 }, [ %rd3 ];\nld.shared.b8 %r3;\n"
    )
    assert count_loads(copy + loads + copy) == (2, 1)


NARROW = (
    "%s = tt.dot %p, %v, %a : tensor<16x{}xbf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {}}}>> * "
    "tensor<{}x256xbf16, #ttg.dot_op<{{opIdx = 1, parent = #mma, kWidth = 8}}>> -> tensor<16x256xf32, #mma>\n"
)
AHEAD = """    %q = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x64xf16, #shared, #smem, mutable>
    %q0 = ttg.memdesc_index %q[%c0] : !ttg.memdesc<{buffers}x64x64xf16>
    %q1 = ttg.memdesc_index %q[%c1] : !ttg.memdesc<{buffers}x64x64xf16>
    %r = scf.for %i = %a to %b step %c -> (f32) {{
      %qi = ttg.memdesc_index %q[%i] : !ttg.memdesc<{buffers}x64x64xf16>
      %qt = ttg.memdesc_trans %qi : !ttg.memdesc<64x64xf16>
      %x = ttg.local_load %qi : !ttg.memdesc<64x64xf16> -> tensor<64x64xf16, #blocked>
      %s = ttng.warp_group_dot %k, %qt, %zero {{isAsync = true}} : !ttg.memdesc<64x64xf16>
{more}      %w:2 = ttng.warp_group_dot_wait %s, %qi {{pendings = {pending} : i32}} : tensor<64x64xf32, #mma>
      %qn = ttg.memdesc_index %q[%n] : !ttg.memdesc<{buffers}x64x64xf16>
    }}
"""

ANOTHER = "      %t = ttng.warp_group_dot %k, %v, %s {isAsync = true} : !ttg.memdesc<64x64xf16>\n"


@pytest.mark.parametrize(
    ("ttgir", "found"),
    [
        (NARROW.format(16, 8, 16), ["a product over 16 values takes 8 in a row"]),
        (NARROW.format(32, 8, 32) + NARROW.format(16, 4, 16), []),
        (
            AHEAD.format(buffers=2, pending=1, more=""),
            ["2 buffers of %q while products read it and 2 copies"],
        ),
        (AHEAD.format(buffers=2, pending=1, more=ANOTHER), []),  # only the last product is under way
        (AHEAD.format(buffers=3, pending=1, more=""), []),
        (AHEAD.format(buffers=2, pending=0, more=""), []),
    ],
)
def test_what_gave_wrong_results_on_a_gpu_is_found_in_compiled_code(ttgir: str, found: list[str]) -> None:
    """Cut from kernels that an H100 ran: three of nvfp4 and of the delta rule, among 923 others."""
    problems = find_miscompiled(ttgir)
    assert len(problems) == len(found)
    assert all(map(str.startswith, problems, found))


DESCRIPTOR = """
        /*6000*/                   USGXT.U32 UR4, UR5, 0xe ;
        /*6020*/                   ULDC.64 UR10, c[0x0][0x218] ;
        /*6030*/                   UIMAD.WIDE.U32 UR20, UR4, UR{factor}, URZ ;
        /*6038*/                   UMOV UR22, UR21 ;
        /*6040*/              @!P6 LDS.64 R6, [UR10] ;
        /*6470*/                   UMOV UR6, UR4 ;
        /*6480*/                   UMOV UR7, 0xc0000010 ;
        /*6490*/                   HGMMA.64x16x16.F32 R56, R72, gdesc[UR4].tnspB, R56 ;
        /*64a0*/                   UIADD3 UR{low}, UP0, UR{base}, 0x20, URZ ;
        /*64b0*/                   UIADD3.X UR15, UR{high}, -0x3ffffff0, URZ, UP0, !UPT ;
        /*6500*/                   HGMMA.64x16x16.F32 R56, {tiles}, R56 ;
"""


@pytest.mark.parametrize(
    ("registers", "found"),
    [
        ({"base": 11, "high": 11}, []),  # a pair was loaded
        ({"base": 9, "high": 9}, [9]),
        ({"factor": 23}, [23]),  # not the first that it reads
        ({"low": 16}, [14]),  # B's descriptor
        ({"tiles": "gdesc[UR8]"}, [8, 9]),  # A's, in shared memory
    ],
)
def test_registers_that_are_read_and_never_written_are_found(
    registers: dict[str, Any], found: list[int]
) -> None:
    """Cut from what ptxas 12.8 made of ssd_output_kernel (the second case), whose sums an H100 got wrong."""
    right = {"low": 14, "base": 4, "high": 4, "factor": 5, "tiles": "R64, gdesc[UR12].tnspB"}
    written = "        /*5000*/                   UMOV UR5, 0x400 ;\n"
    sass = written + DESCRIPTOR.format(**right | registers)
    assert find_unwritten(sass) == [f"ptxas reads UR{x}, which nothing writes" for x in found]


def test_loops_that_copy_ahead_are_told_from_those_that_wait() -> None:
    wait = "      %x = tt.load %p : tensor<64x128x!tt.ptr<bf16>, #blocked>\n"
    row = "      %y = tt.load %q : tensor<64x!tt.ptr<f32>, #slice>\n"
    copy = "      %c = ttg.async_copy_global_to_local %p, %b : tensor<64x128x!tt.ptr<bf16>>\n"

    def loop(*body: str) -> str:
        return "    %r = scf.for %i = %a to %b step %c -> (f32) {\n" + "".join(body) + "    } {more}\n"

    assert count_loops(wait + loop(copy, row) + wait) == (1, 0)
    assert count_loops(loop(wait, row)) == (0, 1)
    assert count_loops(loop(copy, wait)) == (1, 1)
    assert count_loops(loop(row)) == (0, 0)
    indented = "".join("  " + line + "\n" for line in loop(copy).splitlines())
    assert count_loops(loop(wait, indented) + loop(copy)) == (2, 0), "only inner loops count"


@pytest.mark.parametrize(
    ("target", "registers", "shared_bytes", "num_warps", "programs"),
    [
        ("sm_90", 124, 38_700, 4, 4),  # registers: 16 warps of 128
        ("sm_90", 64, 74_000, 4, 3),  # shared memory, and a KiB of each program's own
        ("sm_90", 255, 1_000, 8, 1),
        ("sm_80", 32, 0, 4, 16),  # 2,048 threads
        ("sm_89", 32, 0, 4, 12),  # 1,536
        ("sm_90", 16, 0, 1, 32),
        ("gfx942", 128, 20_000, 4, 3),
        ("gfx942", 256, 0, 8, 1),
    ],
)
def test_programs_on_a_multiprocessor(
    target: str, registers: int, shared_bytes: int, num_warps: int, programs: int
) -> None:
    found = TARGETS[target].programs_at_once(
        registers=registers, shared_bytes=shared_bytes, num_warps=num_warps
    )
    assert found == programs


def test_stack_that_nothing_touches_is_no_spill() -> None:
    declared = "\t.local .align 1 .b8 \t__local_depot0[4];\n"
    assert untouched_stack(declared) == 8
    assert untouched_stack(declared + "\tst.local.u8 [%r1], %r2;\n") == 0
    assert untouched_stack("mov.u32 %r1, %r2;") == 0


@pytest.fixture
def fitting() -> Built:
    return Built("kernel", "gfx942", registers=100, spills=0, shared_bytes=65_536, instruction="mfma")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda b: b, None),
        (lambda b: replace(b, spills=3), "3 spilled"),
        (lambda b: replace(b, shared_bytes=65_537), "the limit is 65536"),
        (lambda b: replace(b, shared_bytes=65_537, target="sm_80"), None),
        (lambda b: replace(b, shared_bytes=166_913, target="sm_80"), "the limit is 166912"),
    ],
)
def test_a_kernel_over_a_limit_is_named(
    fitting: Built, change: Callable[[Built], Built], problem: str | None
) -> None:
    found = change(fitting).problems
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


@pytest.mark.parametrize("spilled", ["vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"])
def test_any_kind_of_amd_spill_counts(spilled: str) -> None:
    names = ("private_segment_fixed_size", "sgpr_count", "sgpr_spill_count", "vgpr_count", "vgpr_spill_count")
    values = dict.fromkeys(names, 0) | {"vgpr_count": 84, "sgpr_count": 50}
    as_metadata = "  - .agpr_count: 0\n" + "".join(f"    .{n}: {{{n}}}\n" for n in names)
    assert read_amd_use(as_metadata.format(**values)) == (84, 0)
    assert read_amd_use(as_metadata.format(**values | {spilled: 7})) == (84, 7)

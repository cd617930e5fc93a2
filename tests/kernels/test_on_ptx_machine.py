"""Kernels compiled for an H100 give what their references give on a machine that finds races (tests.ptx)."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.kernels.test_compile_ahead import run_compiling
from tests.markers import sweep, thorough
from tests.ptx.machine import run_ptx
from tests.ptx.text import PtxError

MODULE = """
.version 8.7
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(.param .u64 .ptr .global .align 1 source, .param .u64 .ptr .global .align 1 out)
.reqntid 64
{{
	.reg .pred %p<4>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<9>;
	mov.u32 %r1, %tid.x;
	ld.param.b64 %rd1, [source];
	ld.param.b64 %rd2, [out];
	mad.wide.u32 %rd3, %r1, 4, %rd1;
	mad.wide.u32 %rd4, %r1, 4, %rd2;
	mov.b32 %r2, global_smem;
	mad.lo.s32 %r3, %r1, 4, %r2;
	xor.b32 %r4, %r3, 128; // the same lane's place of the other warp
{body}
	st.global.b32 [%rd4], %r5;
	ret;
}}
"""
LOAD = "ld.global.b32 %r6, [%rd3];\nst.shared.b32 [%r3], %r6;\n"
COPY = "cp.async.ca.shared.global [%r3], [%rd3], 0x4;\ncp.async.commit_group;\n"
READ = "ld.shared.b32 %r5, [%r4];"
BARRIER = "bar.sync 0;\n"


def run(body: str, size: int = 64) -> torch.Tensor:
    """Run two warps, which swap 64 words; returns the words."""
    source, out = torch.arange(size, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    run_ptx(MODULE.format(body=body), (1,), [source, out], num_warps=2, shared_bytes=256)
    return out


@pytest.mark.parametrize("brought", [LOAD, COPY + "cp.async.wait_group 0;\n"])
def test_warps_swap_words_through_shared_memory(brought: str) -> None:
    assert run(brought + BARRIER + READ).tolist() == [*range(32, 64), *range(32)]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (LOAD + READ, "reads what another warp wrote"),
        (LOAD + BARRIER + READ + "not.b32 %r6, %r5;\nst.shared.b32 [%r3], %r6;", "another warp touched"),
        (COPY + BARRIER + READ, "has not brought yet"),
        (COPY + "cp.async.wait_group 0;\n" + READ, "reads what another warp wrote"),
        (LOAD + "add.s32 %r4, %r3, 2;\n" + READ, "out of alignment"),
        (LOAD + "add.s32 %r4, %r3, 256;\n" + READ, "outside of shared memory"),
        ("setp.lt.u32 %p1, %r1, 32;\n@%p1 bra $L;\n" + BARRIER + "$L:\nmov.b32 %r5, 0;", "not all threads"),
        ("frob.b32 %r5, %r1, %r1;", "not known to this machine: frob"),
    ],
)
def test_what_a_gpu_gets_wrong_only_sometimes_is_an_error(body: str, found: str) -> None:
    with pytest.raises(PtxError, match=found):
        run(body)


def test_an_access_outside_every_argument_is_an_error() -> None:
    with pytest.raises(PtxError, match="outside every argument: ld.global.b32"):
        run(LOAD + BARRIER + READ, size=63)


def test_threads_that_a_branch_divides_meet_again() -> None:
    body = """
	mov.b32 %r5, 0;
	and.b32 %r7, %r1, 3;
$AGAIN:
	setp.eq.s32 %p1, %r7, 0;
	@%p1 bra $DONE;
	add.s32 %r5, %r5, 10;
	add.s32 %r7, %r7, -1;
	bra.uni $AGAIN;
$DONE:
	bar.sync 0;
"""
    assert run(body).tolist() == [0, 10, 20, 30] * 16


@sweep(2)
@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ["mamba2", "delta_rule", "nvfp4"])
def test_compiled_kernels_give_what_references_give(case: str) -> None:
    assert float(run_compiling("-m", "tests.kernels.machine_cases", case, limit_s=280)) < 1e-3

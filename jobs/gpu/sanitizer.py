"""NVIDIA's compute-sanitizer over GPU tests whose kernels index what the host tells them: 0 errors each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jobs.gpu.rows import Row
from jobs.gpu.stages import ROOT, Bench, Lacking, Stage

TOOL = "compute-sanitizer"
CHECKS = ("memcheck", "racecheck")
ON_DEVICES, ON_GPU = "tests/kernels/test_on_devices.py", "tests/kernels/test_on_gpu.py"
STATES, DIGESTS = "tests/kernels/test_state_kernels.py", "tests/kernels/test_digest.py"
CASES = {
    "conv step": f"{STATES}::test_a_state_that_nobody_keeps_is_not_written[step-gpu-causal_conv1d]",
    "split decode": f"{ON_DEVICES}::test_split_decode_matches_float64[cuda-128-8-None-3000-torch.bfloat16]",
    "quantised decode": f"{ON_DEVICES}::test_quantised_attention_matches_float64"
    "[cuda-128-torch.bfloat16-nvfp4-decode]",
    "digest": f"{DIGESTS}::test_a_gpu_finds_the_same_integers[triton]",
    "GDN chunks": f"{ON_GPU}::test_states_of_released_sizes[torch.bfloat16-gated_delta_rule-4-128-128]",
    "SSD chunks": f"{ON_GPU}::test_states_of_released_sizes[torch.bfloat16-ssd_scan-8-64-128]",
    "run copies": f"{ON_DEVICES}::test_runs_are_copied_as_by_the_reference[cuda-16-900-True]",
}
"""Name -> the test of it, as pytest names it: that of one launch or few, for the tool takes long."""
LIMIT_S = 220
"""For one case: two of them in the time of a stage."""
KILLED = (137, -9)
"""The status of `timeout` whose command was ended: its own, or that of its own signal."""


def find_tool() -> str | None:
    return shutil.which(TOOL) or next(
        (str(path) for path in sorted(Path("/usr/local").glob(f"cuda*/bin/{TOOL}"))), None
    )


def _measure(item: str, bench: Bench) -> Iterator[Row]:
    tool = find_tool()
    if tool is None or bench.is_small:
        raise Lacking(TOOL if tool is None else "CUDA device")
    check, _, case = item.partition(" ")
    pytest_command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:benchmark",
        "-m",
        "gpu",
        CASES[case],
    ]
    # An allocation for each tensor: only then is what lies beyond it nobody's.
    environ = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    yield judged(
        case,
        check,
        *run_within(LIMIT_S, [tool, f"--tool={check}", "--print-limit=5", *pytest_command], environ),
    )


def run_within(limit_s: float, command: Sequence[str], environ: Mapping[str, str]) -> tuple[str, int]:
    """Output and status of a command; after so long it ends with what it started, which holds the GPU."""
    bounded = ["timeout", "--signal=KILL", f"{limit_s:g}", *command]
    ended = subprocess.run(bounded, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    late = f"\nnot done within {limit_s:g} s" if ended.returncode in KILLED else ""
    return ended.stdout + ended.stderr + late, ended.returncode


def judged(case: str, check: str, output: str, status: int) -> Row:
    """The row of a run's output. Without the tool's summary, or where the tests failed, it has failed."""
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    errors = None if summary is None else int(summary.group(1))
    has_run = re.search(r"\b\d+ passed", output) is not None
    is_clean = errors == 0 and status == 0 and has_run
    last = output.strip().splitlines()[-1:] if not is_clean else [""]
    if errors == 0 and not has_run:
        last = ["no test passed"]
    return Row(
        kernel=case,
        variant=check,
        status="passed" if is_clean else "failed",
        value=errors,
        unit="errors",
        note="".join(last)[:200],
    )


STAGE = Stage(
    name="sanitizer",
    about="compute-sanitizer over kernels' tests",
    items=lambda device: [f"{check} {case}" for check in CHECKS for case in CASES],
    measure=_measure,
)

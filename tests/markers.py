"""Markers as values: `from tests.markers import gpu`, then `@gpu` or `pytestmark = gpu`.

conftest.py skips what this machine cannot run; `make test` leaves out `thorough`, `slow` and `gpu`,
`make test-all` the last two.
"""

from __future__ import annotations

import os

import pytest

gpu = pytest.mark.gpu
"""Needs a CUDA device; run by `make test-gpu`."""

nixl = pytest.mark.nixl
"""Needs the NIXL library."""

needs_vllm = pytest.mark.needs_vllm
"""Runs vLLM in a process of its own, by the interpreter of the fixture `vllm_python`: `make vllm` makes its
environment, and `--vllm-python` names another's. `make test` leaves it to `make test-all`."""

ray = pytest.mark.ray
"""Starts or uses a Ray cluster."""

thorough = pytest.mark.thorough
"""Left to `make test-all`: what takes long, and has a cheaper test of its kind in `make test`."""

one_per = pytest.mark.one_per
"""`@one_per("cell.model")`: `make test` takes one case per model. Where nothing is named it takes one."""

sweep = pytest.mark.sweep
"""`@sweep(5, "cell.model")`: `make test-all` takes every fifth case, and the first with each model or with a
value that several cases share; `make test-slow` the others."""

real = pytest.mark.real
"""Runs a real model, of the fixture `real_model`, whose checkpoint `make real` writes."""

slow = pytest.mark.slow
"""Run by `make test-slow`: a sweep, or a test on Ray of what others on Ray have a part of."""

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs Triton kernels on CPU tensors"
)
"""Launches Triton kernels on CPU tensors, which only Triton's interpreter can."""

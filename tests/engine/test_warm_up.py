"""An engine's warm-up meets every form of every kernel that its steps launch, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.warm_up import WARM_UP_S, run_warm_up
from rayk.parallel.threads import ThreadComm
from tests.engine.stepped import Stepped
from tests.markers import sweep, thorough

ROOT = Path(__file__).resolve().parents[2]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"dtype": "bfloat16"},
    "gpt_oss": {"dtype": "bfloat16"},
    "gemma2": {"dtype": "float16"},
    "deepseek_v3": {"dtype": "bfloat16"},
    "qwen3_next": {"dtype": "bfloat16"},
    "mamba2": {"dtype": "bfloat16"},
    "jamba": {"dtype": "bfloat16"},
}


def kernel_forms(path: Path, **settings: Any) -> dict[str, list[str]]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, "-m", "tests.engine.kernel_forms", str(path), json.dumps(settings)]
    done = subprocess.run(script, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found | {"told": re.findall(r"^rank 0 of 1: .*", done.stderr, re.MULTILINE)}


@sweep(2)
@thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_no_step_compiles_after_the_warm_up(checkpoint: Callable[..., Path], family: str) -> None:
    found = kernel_forms(checkpoint(family), **FAMILIES[family])
    assert found["early"]
    assert found["late"] == []
    assert len(found["told"]) == 10
    first = "rank 0 of 1: compiling kernels, prefill of 127 tokens beside a decode (0 so far"
    assert found["told"][0].startswith(first)
    assert re.search(rf": {len(found['early'])} kernels ready in \d", found["told"][-1])


@thorough
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "nvfp4"])
def test_nor_of_a_quantised_cache(checkpoint: Callable[..., Path], kv_dtype: str) -> None:
    found = kernel_forms(checkpoint("qwen3"), dtype="bfloat16", kv_dtype=kv_dtype)
    assert found["early"]
    assert found["late"] == []


@sweep(3)
@thorough
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "mamba2", "jamba"])
def test_nor_of_steps_with_drafts(checkpoint: Callable[..., Path], family: str) -> None:
    found = kernel_forms(checkpoint(family), dtype="bfloat16", has_drafts=True)
    assert found["early"]
    assert found["late"] == []


def test_peers_are_waited_for_as_long_as_a_start_may_take() -> None:
    """Else a rank whose compiler is slower than another's would end the engine."""
    comm, _ = ThreadComm.make_group(2, 5.0)
    waited_s: list[float] = []
    run_warm_up([("a step", lambda: waited_s.append(comm.timeout_s))], comm)
    assert waited_s == [WARM_UP_S]
    assert comm.timeout_s == 5.0


def test_requests_after_it_find_the_engine_as_it_was(checkpoint: Callable[..., Path]) -> None:
    path, prompt = checkpoint("qwen3_next"), [7, 250, 3, 99, 42]
    plain, warm = (Stepped(path, max_batch_tokens=16) for _ in range(2))
    warm.rank.warm_up()
    for engine in (plain, warm):
        engine.add("r", prompt, 3)
        engine.finish()
    assert warm.rank.num_token_layers == plain.rank.num_token_layers
    assert all(a.equal(b) for a, b in zip(plain.logits["r"], warm.logits["r"], strict=True))

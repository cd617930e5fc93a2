"""The Triton kernels of recurrent states and of latents in recorded decode steps, in Triton's interpreter.

A step's slots reach them through tensors alone, as in a CUDA graph, where the host's are those of recording.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayk.engine.rank import EngineRank
from rayk.models.layers import causal_conv, gdn, mamba1, mamba2
from rayk.parallel.local import LocalComm
from rayk.types.config import EngineConfig
from tests.engine.stepped import run_greedy
from tests.engine.test_graphs import Again
from tests.markers import interpreted

pytestmark = interpreted

PROMPTS = [[17, 250, 3], [5]]
LENGTHS = [4, 2]

SHORT = {
    "mamba2": {"num_hidden_layers": 1},
    "jamba": {"num_hidden_layers": 2},
    "qwen3_next": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v3": {"num_hidden_layers": 1},
}
"""Few layers of each family: the interpreter takes its time."""


@pytest.mark.parametrize(
    "family",
    ["mamba2", "deepseek_v3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("jamba", "qwen3_next"))],
)
def test_recorded_steps_go_by_tensors(
    checkpoint: Callable[..., Path],
    reference: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    for module, kernel in (
        (causal_conv, "causal_conv1d"),
        (mamba1, "selective_scan"),
        (mamba2, "ssd_scan"),
        (gdn, "gated_delta_rule"),
    ):
        monkeypatch.setattr(module, kernel, functools.partial(getattr(module, kernel), impl="triton"))
    path = checkpoint(family, overrides=SHORT[family])
    expected = [list(o.token_ids) for o in reference(path).generate(PROMPTS, max(LENGTHS), ignore_eos=True)]
    config = EngineConfig(
        model=str(path),
        attention_backend="triton",
        num_blocks=40,
        max_seqs=2,
        state_block_size=2,
        layout="LBNHC",
    )
    recorder = Again()
    rank = EngineRank(config, LocalComm(), poison=-1, recorder=recorder)
    assert run_greedy(rank, PROMPTS, LENGTHS) == [e[:n] for e, n in zip(expected, LENGTHS, strict=True)]
    assert recorder.num_replays == max(LENGTHS) - 1

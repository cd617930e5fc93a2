"""Run as a process: which kernels an engine compiles for an sm_90 when it warms up, and which only later.

Launches compile, with CPU tensors, and compute nothing. Prints JSON: names of both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import rayk.attention.backends
from rayk.engine.rank import EngineRank
from rayk.kernels.ahead import _StandIn
from rayk.kernels.compilations import compilations
from rayk.kernels.target import TARGETS
from rayk.parallel.local import LocalComm
from rayk.types.batch import ScheduledBatch, ScheduledRequest
from rayk.types.config import EngineConfig
from rayk.types.speculative import SpeculativeConfig

STEPS = (
    [(0, 1)],
    [(0, 2)],
    [(0, 17), (0, 5)],
    [(3, 1)],
    [(16, 1), (5, 1)],
    [(70, 1), (0, 30), (40, 16)],
    [(31, 1), (32, 1), (33, 1)],
    [(100, 1)] * 4,
    [(0, 64)],
    [(0, 120), (7, 1)],
    [(64, 33)],
    [(15, 2)] * 3,
)
"""Of each request of a step: tokens computed before, tokens of this step."""
WITH_DRAFTS = ([(70, 3)], [(16, 3), (5, 3)], [(100, 2)] * 4, [(0, 64), (40, 3)])
"""The same, of engines that speculate: of few tokens all but the first are drafts."""
MOST_DRAFTS = 2


def compile_only() -> None:
    """Compile for another machine's GPU, and choose the kernels that a GPU would run."""
    driver.set_active(_StandIn(TARGETS["sm_90"]))
    run = JITFunction.run
    JITFunction.run = lambda kernel, *args, grid, warmup, **rest: run(
        kernel, *args, grid=grid, warmup=True, **rest
    )
    # Where torch has no grouped product, Triton's is launched.
    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    rayk.attention.backends._require_interpreter = lambda device: None
    for name, module in list(sys.modules.items()):
        if name.startswith("rayk.kernels.") and hasattr(module, "default_impl"):
            module.default_impl = lambda is_cuda: "triton"


def batches(
    rank: EngineRank, steps: Sequence[Sequence[tuple[int, int]]], *, has_drafts: bool = False
) -> Iterator[ScheduledBatch]:
    for number, step in enumerate(steps, start=1):
        requests = []
        for row, (computed, tokens) in enumerate(step):
            ids = tuple(
                (0, (2 + row,) * -(-(computed + tokens) // group.spec.block_size))
                for group in rank.plan.groups
            )
            requests.append(
                ScheduledRequest(
                    request_id=str(row),
                    row=row,
                    num_computed_tokens=computed,
                    token_ids=(5,) * tokens,
                    new_block_ids=ids,
                    needs_logits=row % 2 == 0 or has_drafts,
                    num_drafts=tokens - 1 if has_drafts and tokens <= 1 + MOST_DRAFTS else 0,
                )
            )
        yield ScheduledBatch(step=number, requests=tuple(requests))


def main(path: str, settings: dict[str, Any]) -> None:
    compile_only()
    if settings.pop("has_drafts", False):
        settings["speculative"] = SpeculativeConfig(method="ngram", num_tokens=MOST_DRAFTS)
    config = EngineConfig(
        model=path, num_blocks=16, max_seqs=4, max_batch_tokens=128, attention_backend="triton", **settings
    )
    rank = EngineRank(config, LocalComm(), poison=3)
    with compilations() as early:
        rank.warm_up()
    assert bool((rank.caches.buffer == 3).all()), "the cache is as it was allocated"
    with compilations() as late, torch.inference_mode():
        for batch in batches(rank, STEPS):
            rank.step(batch)
        if config.max_drafts:
            for batch in batches(rank, WITH_DRAFTS, has_drafts=True):
                rank.step(batch)
    print(json.dumps({"early": early, "late": late}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

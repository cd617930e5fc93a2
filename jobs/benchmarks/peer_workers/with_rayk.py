"""rayk, in the process of whoever asks."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads OpenMP

import torch

from jobs.benchmarks.peer_workers.contract import Job, Prompts, Run, serve
from rayk.engine.build import ThreadEngine
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams

BLOCK_SIZE = 32


class Rayk:
    name = "rayk"

    def __init__(self, engine: ThreadEngine) -> None:
        self._engine = engine
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        self._num_runs += 1
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        started = time.monotonic()
        streams = [
            self._engine.submit(
                Request(request_id=f"{self._num_runs}.{i}", prompt_token_ids=tuple(prompt), sampling=sampling)
            )
            for i, prompt in enumerate(prompts)
        ]
        tokens: list[list[int]] = []
        times: list[list[float]] = []
        for stream in streams:
            tokens.append([])
            times.append([])
            is_over = False
            while not is_over:
                event = stream.get(timeout=600)
                if event.error is not None:
                    raise event.error
                tokens[-1] += event.token_ids
                times[-1] += [event.time_ns / 1e9] * len(event.token_ids)
                is_over = event.is_last
        return Run(tokens, times, started, time.monotonic())


def settings(job: Job) -> EngineConfig:
    """An engine with room for the job, which takes all its prompts in one step."""
    return EngineConfig(
        model=job.model,
        dtype=job.dtype,
        block_size=BLOCK_SIZE,
        num_blocks=2 + job.max_requests * (job.max_length // BLOCK_SIZE + 2),
        max_batch_tokens=max(512, job.max_requests * job.max_prompt),
        max_seqs=job.max_requests,
    )


if __name__ == "__main__":
    with ExitStack() as stack:

        def load(job: Job) -> tuple[Rayk, str]:
            torch.set_num_threads(1)
            return Rayk(stack.enter_context(ThreadEngine(settings(job)))), f"torch {torch.__version__}"

        serve(load)

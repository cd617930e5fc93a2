"""transformers' generate."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before anything loads OpenMP

import torch
import transformers

from jobs.benchmarks.peer_workers.contract import Job, Prompts, Run, serve


class Generate:
    """transformers' generate, with a cache of its own choice."""

    name = "generate"

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        times: list[float] = []

        def note(*_: object, **__: object) -> torch.Tensor:
            times.append(time.monotonic())
            return torch.zeros(len(prompts), dtype=torch.bool)

        ids = torch.tensor(prompts)
        started = time.monotonic()
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([note]),
        )
        ended = time.monotonic()
        return Run(out[:, ids.shape[1] :].tolist(), [times] * len(prompts), started, ended)


def read_model(folder: str, dtype: str) -> Any:
    """The checkpoint, for inference."""
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def load(job: Job) -> tuple[Generate, str]:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    about = f"{transformers.__version__}, torch {torch.__version__}"
    return Generate(read_model(job.model, job.dtype)), about


if __name__ == "__main__":
    serve(load)

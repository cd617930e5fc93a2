"""No engine: the time of reading the weights once, which is the least that a decode step takes from memory.

numpy's `or` of 64-bit words read as fast as loops in C++ did, of one stream, of four, or with prefetches.
"""

from __future__ import annotations

import time

import numpy as np

from jobs.benchmarks.peer_workers.contract import Job, Prompts, Run, serve


class Memory:
    name = "memory"

    def __init__(self, num_bytes: int) -> None:
        self._words = np.arange(num_bytes // 8, dtype=np.int64)

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        """A token of every request whenever all words are read, and no work beside."""
        started = time.monotonic()
        times = []
        for _ in range(num_tokens):
            np.bitwise_or.reduce(self._words)
            times.append(time.monotonic())
        everybody = range(len(prompts))
        return Run([[0] * num_tokens for _ in everybody], [times for _ in everybody], started, times[-1])


def weight_bytes(job: Job) -> int:
    """Bytes of the matrices that a token is multiplied with; of the embedding it reads one row only."""
    config = job.config()
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = hidden * (heads * width + 3 * inner)
    elements = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    return elements * {"float32": 4, "bfloat16": 2}[job.dtype]


def load(job: Job) -> tuple[Memory, str]:
    return Memory(weight_bytes(job)), f"numpy {np.__version__}"


if __name__ == "__main__":
    serve(load)

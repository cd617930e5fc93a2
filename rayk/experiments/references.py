"""The reference's answers, each asked once per run (and kept on disk between runs)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rayk.oracle.reference import ForcedStep, Reference, ReferenceOutput
from rayk.types.request import SamplingParams


class References:
    """transformers in float32 on the CPU, for one checkpoint."""

    def __init__(self, model: str, cache_dir: Path | None) -> None:
        self._reference = Reference(model, "float32", cache_dir=cache_dir)
        self._kv: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}

    def outputs(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[ReferenceOutput]:
        """Greedy output of each prompt."""
        return self._reference.generate(
            prompts,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=sampling.stop_token_ids,
        )

    def forced(self, prompt: Sequence[int], output_ids: Sequence[int]) -> list[ForcedStep]:
        """What the reference thinks of somebody else's tokens."""
        return self._reference.teacher_force(prompt, output_ids)

    def kv(self, prompt: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Keys (after RoPE) and values per layer, [H, T, D] each."""
        key = tuple(prompt)
        if key not in self._kv:
            self._kv[key] = self._reference.kv_cache(prompt)
        return self._kv[key]

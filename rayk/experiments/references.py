"""Ask for the reference's answers once per run (and keep them on disk between runs). Free of torch where
they are kept."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rayk.oracle.cache import AnswerStore
from rayk.oracle.kv_scales import checkpoint_kv_scales
from rayk.oracle.reference import ForcedStep, Reference, ReferenceOutput, TextScores
from rayk.types.request import SamplingParams
from rayk.types.structured import StructuredOutputs

if TYPE_CHECKING:
    from torch import Tensor

    from rayk.oracle.following import Following, StoredKV
    from rayk.oracle.quantised import KVRounding

JITTER = 2.0**-14
"""Change of keys and values before they are quantised, to measure what flipped steps do. Sums in another
order change them by some 2^-20; this is more, so that flips are sure to be met."""
# per layer, by field: [U, T, elements] of every token, [U, 1, elements] of a state
LayerKV = Sequence[Mapping[str, "Tensor"]]


class References:
    """transformers on the CPU, for one checkpoint and the dtype of a cell's engines.

    Its answers are `exact`: float32 arithmetic on the weights as that dtype rounds them. What `eager` code in
    the dtype itself says of the same question measures how much rounding may change. Where a router chooses
    experts (`routed`), a flipped route does the same damage however rare it is in float16. In bfloat16 it is
    sure to be met: there is measured what float16's own few answers cannot tell, `rough`.
    """

    def __init__(
        self,
        model: str,
        answers: AnswerStore | None,
        dtype: str = "float32",
        *,
        routed: bool = False,
        rounding: KVRounding | None = None,
    ) -> None:
        """Take `rounding` of a quantised cache, with the checkpoint's scales. Eager code then rounds values
        that are off by JITTER, which shows how much changes where last bits push values over steps."""
        # layer -> (k, v), as the checkpoint has them
        self.kv_scales = checkpoint_kv_scales(Path(model)) if rounding is not None else {}
        rounding = rounding and rounding.scaled(self.kv_scales)
        self.dtype = dtype
        # errors are bounded as `noise` says of routed experts
        self.routed = routed and (dtype != "float32" or rounding is not None)
        self._exact = self._eager = Reference(
            model, "float32", weights_dtype=dtype, rounding=rounding, answers=answers
        )
        if dtype != "float32" or rounding is not None:
            other = rounding and rounding.jittered(JITTER)
            self._eager = Reference(model, dtype, rounding=other, answers=answers)
        self._rounding = rounding
        self._rough = self._eager
        if self.routed and dtype == "float16":
            self._rough = Reference(model, "bfloat16", answers=answers)
        self._kv: dict[tuple[int, ...], LayerKV] = {}
        self._form: StructuredOutputs | None = None

    def under(self, form: StructuredOutputs | None) -> References:
        """Return the same model, whose tokens are of a form."""
        formed = copy.copy(self)
        formed._form = form
        return formed

    @property
    def is_exact(self) -> bool:
        """Tell whether the engines compute as exactly as the reference: bounds are fixed, not measured."""
        return self._eager is self._exact

    @property
    def kept_since(self) -> str | None:
        """Tell when the earliest answer in use that an earlier run kept was computed; None: none is."""
        times = {self._exact.kept_since, self._eager.kept_since, self._rough.kept_since}
        return min(filter(None, times), default=None)

    @property
    def eager_dtype(self) -> str:
        kept = f" with a cache of {self._rounding.kv_dtype}" if self._rounding is not None else ""
        return f"{self._eager.dtype}{kept}"

    def outputs(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[ReferenceOutput]:
        return self._exact.generate(
            prompts,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=sampling.stop_token_ids,
            form=self._form,
        )

    def forced(self, prompt: Sequence[int], output_ids: Sequence[int]) -> list[ForcedStep]:
        """Judge somebody else's tokens."""
        return self._exact.teacher_force(prompt, output_ids, self._form)

    def scores(self, prompt: Sequence[int], output_ids: Sequence[int]) -> tuple[TextScores, TextScores]:
        """Score a prompt and somebody else's output: exact, and eager's; of further tokens the rough ones."""
        exact = self._exact.score(prompt, output_ids, self._form)
        if self.is_exact:
            return exact, exact
        further = self._rough.score(prompt, output_ids, self._form).further_logprobs
        eager = self._eager.score(prompt, output_ids, self._form)
        return exact, replace(eager, further_logprobs=further)

    @property
    def can_follow(self) -> bool:
        """Tell whether `follow` tells more than `scores`: float32 sums seldom flip a step, and no route."""
        return self._rounding is not None and self.dtype == "float32" and not self.routed

    def follow(
        self, prompt: Sequence[int], output_ids: Sequence[int], stored: StoredKV
    ) -> tuple[TextScores, Following]:
        """Score exactly, given what an engine stored of the prompt; see oracle.following."""
        return self._exact.follow(prompt, output_ids, stored, self._form)

    def kv(self, prompt: Sequence[int]) -> LayerKV:
        """Return the cache after the prompt."""
        key = tuple(prompt)
        if key not in self._kv:
            self._kv[key] = self._exact.caches(prompt)
        return self._kv[key]

    def keeps_kv(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Tell, without torch, whether answers to `kv`, `eager_kv` and `rough_kv` of these prompts are on
        disk."""
        asked = {id(reference): reference for reference in (self._exact, self._eager, self._rough)}
        return all(reference.keeps_caches(prompt) for reference in asked.values() for prompt in prompts)

    def eager_kv(self, prompt: Sequence[int]) -> LayerKV:
        """Return eager's cache. Not kept: it serves to measure, once."""
        return self.kv(prompt) if self.is_exact else self._eager.caches(prompt)

    def rough_kv(self, prompt: Sequence[int]) -> LayerKV | None:
        """Return the rough cache; None where eager's tells enough."""
        return None if self._rough is self._eager else self._rough.caches(prompt)

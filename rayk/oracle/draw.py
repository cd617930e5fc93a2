"""Random weights, and the search for a draw whose greedy output is worth comparing.

Every tensor is drawn: no norm weight is 1 and no bias 0, so that forgetting one shows. The gains
make attention peaked and its share of the residual stream large (dropping a cached token or mixing
up a head changes the output) and give logits a standard deviation of about 4. A draw is taken when
every greedy step leads by a margin far above float32 noise (1e-5 to 2e-4 between correct
implementations), so that a different token is a bug.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rayk.types.errors import UserError

NUM_OUTPUT_TOKENS = 24
"""Greedy tokens for which a checkpoint promises its margin."""

PROBE_LENGTHS = (5, 37, 300)
"""Prompt lengths for which a checkpoint promises its margin."""

MIN_MARGIN = 0.03
"""Logits between the best and the second-best token, at every step."""

MIN_DISTINCT_TOKENS = 16
"""Of the 24 output tokens of a prompt: greedy decoding wanders instead of repeating itself."""

MAX_TRIALS = 300
"""About 0.15 s each at the default size; one in five to ten is good enough."""

_LOGIT_STD = 4.0
_PROBE_SEED = 20260
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Greedy decoding of one prompt by the drawn model."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    margin: float
    """Smallest top-1 minus top-2 logit over the steps."""
    logit_std: float
    """Standard deviation over the vocabulary, mean over the steps."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The accepted draw."""

    trial: int
    probes: tuple[Probe, ...]

    @property
    def margin(self) -> float:
        """Smallest margin over all probes."""
        return min((p.margin for p in self.probes), default=float("inf"))


def probe_prompts(vocab_size: int, special_ids: Sequence[int], max_positions: int) -> list[tuple[int, ...]]:
    """The prompts of the promise: random ids without special ones, the same for every seed.

    Lengths whose output would not fit into the model's positions are left out.
    """
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    special = set(special_ids)
    usable = torch.tensor([i for i in range(vocab_size) if i not in special])
    return [
        tuple(usable[torch.randint(len(usable), (length,), generator=generator)].tolist())
        for length in PROBE_LENGTHS
        if length + NUM_OUTPUT_TOKENS <= max_positions
    ]


def search(
    model: Any, *, seed: int, dtype: torch.dtype, prompts: Sequence[tuple[int, ...]], eos_id: int
) -> Draw:
    """Draw the weights of `model` (float32, changed in place) until the promise holds.

    The weights are rounded through `dtype`, the one they will be saved in. The result depends on
    the model's config and the seed only. Raises UserError when no trial is good enough, as with
    very large vocabularies, whose top tokens lie closer together.
    """
    with _single_thread():
        for trial in range(MAX_TRIALS):
            draw_weights(model, seed=seed, trial=trial, dtype=dtype)
            probes = _probe_all(model, prompts, eos_id)
            if probes is not None:
                _log.debug("seed %d: trial %d taken", seed, trial)
                return Draw(trial=trial, probes=probes)
    raise UserError(
        f"none of {MAX_TRIALS} draws has greedy output that is free of near-ties and repetition",
        where=f"{model.config.model_type}, seed {seed}",
        mend="use another seed, a smaller vocabulary, or fewer layers",
    )


def draw_weights(model: Any, *, seed: int, trial: int, dtype: torch.dtype) -> None:
    """Fill every parameter of `model` in place; each tensor has a generator of its own."""
    tied = bool(model.config.tie_word_embeddings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # crc32 is the same in every process, which hash() is not.
            tensor_seed = zlib.crc32(f"{seed}/{trial}/{name}".encode())
            generator = torch.Generator().manual_seed(tensor_seed)
            values = _draw_tensor(name, tuple(parameter.shape), tied, generator)
            parameter.copy_(values.to(dtype))


def _draw_tensor(name: str, shape: tuple[int, ...], tied: bool, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        if "norm" in name:
            uniform = 0.5 + torch.rand(shape, generator=generator)
            return uniform * (1.8 if "q_norm" in name or "k_norm" in name else 1.0)
        return 0.2 * torch.randn(shape, generator=generator)
    return _matrix_std(name, shape[-1], tied) * torch.randn(shape, generator=generator)


def _matrix_std(name: str, fan_in: int, tied: bool) -> float:
    """Gains by what a matrix feeds; others keep the RMS of their input."""
    base = 1.0 / math.sqrt(fan_in)
    if "lm_head" in name or ("embed" in name and tied):
        return _LOGIT_STD * base
    if "embed" in name:
        return 1.0
    if "q_proj" in name or "k_proj" in name:
        return 1.8 * base
    # A tied model would repeat its input token, were the embedding not drowned by the layers.
    share = 3.0 if tied else 1.0
    if "o_proj" in name:
        return 3.0 * share * base
    if "down_proj" in name:
        return 2.4 * share * base
    return base


def _probe_all(model: Any, prompts: Sequence[tuple[int, ...]], eos_id: int) -> tuple[Probe, ...] | None:
    """None at the first prompt whose output is not good enough."""
    probes = []
    # The longest prompt costs most: last.
    for prompt in prompts:
        probe = _probe(model, prompt)
        distinct = len(set(probe.output))
        if probe.margin <= MIN_MARGIN or distinct < MIN_DISTINCT_TOKENS or eos_id in probe.output:
            return None
        probes.append(probe)
    return tuple(probes)


def _probe(model: Any, prompt: tuple[int, ...]) -> Probe:
    from transformers import DynamicCache

    cache = DynamicCache()
    token_ids = torch.tensor([prompt])
    output: list[int] = []
    margins: list[float] = []
    stds: list[float] = []
    with torch.inference_mode():
        for _ in range(NUM_OUTPUT_TOKENS):
            step = model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = step.logits[0, -1]
            top = logits.topk(2).values
            margins.append(float(top[0] - top[1]))
            if margins[-1] <= MIN_MARGIN:
                break
            stds.append(float(logits.std()))
            output.append(int(logits.argmax()))
            token_ids = torch.tensor([[output[-1]]])
    return Probe(
        prompt=prompt,
        output=tuple(output),
        margin=min(margins),
        logit_std=sum(stds) / max(len(stds), 1),
    )


@contextmanager
def _single_thread() -> Iterator[None]:
    """Tiny models run several times faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

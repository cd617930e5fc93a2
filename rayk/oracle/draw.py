"""The search for a draw of random weights whose greedy output is worth comparing.

A draw is taken when every greedy step leads by a margin far above float32 noise (1e-5 to 2e-4
between correct implementations) and no token of prompt or output is nearly sent to another expert,
so that a different token is a bug. What the tensors are drawn from is in gains.py.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rayk.oracle.gains import Gains
from rayk.types.errors import UserError

NUM_OUTPUT_TOKENS = 24
"""Greedy tokens for which a checkpoint promises its margin."""

PROBE_LENGTHS = (5, 37, 300)
"""Prompt lengths for which a checkpoint promises its margin."""

MIN_MARGIN = 0.03
"""Logits between the best and the second-best token, at every step."""

MIN_ROUTING_GAP = 1e-3
"""Router logits between the last expert chosen and the first one not, for every token and layer."""

MIN_DISTINCT_TOKENS = 16
"""Of the 24 output tokens of a prompt: greedy decoding wanders instead of repeating itself."""

MAX_TRIALS = 300
"""About 0.15 s each at the default size; one in five to ten is good enough."""

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
    routing_gap: float | None
    """Smallest over the layers with experts and the tokens read; None without experts."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The accepted draw."""

    trial: int
    probes: tuple[Probe, ...]

    @property
    def margin(self) -> float:
        """Smallest margin over all probes."""
        return min((p.margin for p in self.probes), default=float("inf"))

    @property
    def routing_gap(self) -> float | None:
        """Smallest gap over all probes; None without experts."""
        return min((p.routing_gap for p in self.probes if p.routing_gap is not None), default=None)


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
    gains = Gains.of(model.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # crc32 is the same in every process, which hash() is not.
            tensor_seed = zlib.crc32(f"{seed}/{trial}/{name}".encode())
            generator = torch.Generator().manual_seed(tensor_seed)
            values = gains.draw(name, tuple(parameter.shape), generator)
            parameter.copy_(values.to(dtype))


def _probe_all(model: Any, prompts: Sequence[tuple[int, ...]], eos_id: int) -> tuple[Probe, ...] | None:
    """None at the first prompt whose output is not good enough."""
    probes = []
    # The longest prompt costs most: last.
    for prompt in prompts:
        probe = _probe(model, prompt)
        distinct = len(set(probe.output))
        if probe.margin <= MIN_MARGIN or distinct < MIN_DISTINCT_TOKENS or eos_id in probe.output:
            return None
        if probe.routing_gap is not None and probe.routing_gap <= MIN_ROUTING_GAP:
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
    with torch.inference_mode(), _routing_gaps(model) as gaps:
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
        routing_gap=min(gaps, default=None),
    )


@contextmanager
def _routing_gaps(model: Any) -> Iterator[list[float]]:
    """A list that every forward pass extends by each router's smallest gap."""
    gaps: list[float] = []

    def record(router: Any, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        ranked = output[0].sort(dim=-1, descending=True).values
        gaps.append(float((ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min()))

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _single_thread() -> Iterator[None]:
    """Tiny models run several times faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

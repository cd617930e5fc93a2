"""The search for a draw of random weights whose greedy output is worth comparing.

A draw is accepted if every greedy step leads by a margin far above float32 noise (1e-5 to 2e-4 between
correct implementations) and no token of prompt or output is nearly sent to another expert, so that a
different token is a bug. gains.py holds the distributions.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from rayk.oracle.gains import Gains
from rayk.oracle.routing import routers, routing_gaps, settle_routers
from rayk.oracle.text import FedText
from rayk.types.errors import UserError

NUM_OUTPUT_TOKENS = 24
"""Greedy tokens for which a checkpoint promises its margin."""

PROBE_LENGTHS = (5, 37, 300)
"""Prompt lengths for which a checkpoint promises its margin."""

MIN_MARGIN = 0.03
"""Logits between the best and the second-best token, at every step."""

MIN_ROUTING_GAP = 1e-3
"""Between the last expert chosen and the first one not, for every token and layer; see oracle.routing."""

MIN_DISTINCT_TOKENS = 16
"""Distinct tokens among the 24 output tokens of a prompt, so that decoding does not just repeat itself."""

MAX_TRIALS = 300
"""Each takes about 0.15 s at the default size; one in five to ten is good enough."""

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
    """Standard deviation over the vocabulary, averaged over the steps."""
    routing_gap: float | None
    """Smallest gap over layers with experts and tokens read; None without experts."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The accepted draw."""

    trial: int
    probes: tuple[Probe, ...]

    @property
    def margin(self) -> float:
        return min((p.margin for p in self.probes), default=inf)

    @property
    def routing_gap(self) -> float | None:
        """Smallest gap over all probes; None without experts."""
        return min((p.routing_gap for p in self.probes if p.routing_gap is not None), default=None)


def probe_prompts(
    vocab_size: int, special_ids: Sequence[int], max_positions: int | None
) -> list[tuple[int, ...]]:
    """Return the prompts of the promise: random non-special ids, the same for every seed. Lengths whose
    output would exceed the model's positions (None: no limit) are left out."""
    generator = torch.Generator().manual_seed(_PROBE_SEED)
    special = set(special_ids)
    usable = torch.tensor([i for i in range(vocab_size) if i not in special])
    return [
        tuple(usable[torch.randint(len(usable), (length,), generator=generator)].tolist())
        for length in PROBE_LENGTHS
        if max_positions is None or length + NUM_OUTPUT_TOKENS <= max_positions
    ]


def search(
    model: Any,
    *,
    seed: int,
    dtype: torch.dtype,
    prompts: Sequence[tuple[int, ...]],
    eos_id: int,
    known: int | None = None,
    rounded: Callable[[Any], None] = lambda _: None,
) -> Draw:
    """Draw the weights of `model` (float32, changed in place) until the promise holds.

    `known` is a trial that an earlier search accepted; it is measured first, like any other. Weights are
    rounded through `dtype`, in which they will be saved, and then by `rounded`, in place. The result depends
    only on the model's config, the seed and these. Raises UserError if no trial is good enough, as with very
    large vocabularies, whose top tokens lie closer together.
    """
    with _single_thread():
        for trial in (*(() if known is None else (known,)), *range(MAX_TRIALS)):
            draw_weights(model, seed=seed, trial=trial, dtype=dtype)
            rounded(model)
            if not _settle(model, max(prompts, key=len, default=()), f"{seed}/{trial}", dtype):
                continue
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
    """Fill every parameter of `model` in place; each tensor has its own random generator."""
    gains = Gains.of(model)
    with torch.no_grad():
        for name, tensor in drawn_tensors(model):
            tensor.copy_(_draw(gains, name, tensor, f"{seed}/{trial}").to(dtype))


def drawn_tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return everything that a checkpoint of the model holds: parameters, and the one buffer among
    weights."""
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    return [*model.named_parameters(), *buffers]


def _draw(gains: Gains, name: str, tensor: torch.Tensor, seed: str) -> torch.Tensor:
    # Unlike hash(), crc32 is the same in every process.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return gains.draw(name, tuple(tensor.shape), generator)


def _settle(model: Any, prompt: tuple[int, ...], seed: str, dtype: torch.dtype) -> bool:
    """Redraw routers until they choose clearly on the prompt; False if that fails."""
    # gpt_oss succeeds without it, and so keeps its earlier weights.
    if not prompt or model.config.model_type == "gpt_oss" or not routers(model):
        return True
    gains = Gains.of(model)
    tensors = drawn_tensors(model)

    def redraw(router: str, attempt: int) -> None:
        for name, tensor in tensors:
            if name.startswith(f"{router}."):
                tensor.copy_(_draw(gains, name, tensor, f"{seed}/{attempt}").to(dtype))

    return settle_routers(model, prompt, min_gap=MIN_ROUTING_GAP, redraw=redraw)


def _probe_all(model: Any, prompts: Sequence[tuple[int, ...]], eos_id: int) -> tuple[Probe, ...] | None:
    """Return the probes of all prompts; None at the first whose output is not good enough."""
    probes = []
    # The longest prompt costs most and comes last.
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
    text = FedText(model)
    token_ids = prompt
    output: list[int] = []
    margins: list[float] = []
    stds: list[float] = []
    with routing_gaps(model) as gaps:
        for _ in range(NUM_OUTPUT_TOKENS):
            logits = text.feed(token_ids, logits_to_keep=1)[-1]
            top = logits.topk(2).values
            margins.append(float(top[0] - top[1]))
            if margins[-1] <= MIN_MARGIN or min(gaps, default=inf) <= MIN_ROUTING_GAP:
                break  # it is not good enough, whatever follows
            stds.append(float(logits.std()))
            output.append(int(logits.argmax()))
            token_ids = (output[-1],)
    return Probe(
        prompt=prompt,
        output=tuple(output),
        margin=min(margins),
        logit_std=sum(stds) / max(len(stds), 1),
        routing_gap=min(gaps, default=None),
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

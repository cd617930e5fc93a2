"""The check `logprobs`: what the engines thought of their own tokens against the reference, teacher-forced.

The reference is given the very tokens the engines chose (at any temperature), so that one token chosen
otherwise says nothing about the next. Compared are the log probabilities that the engines report: of every
output token, and of every prompt token but the first, which a wrong prefill anywhere in the prompt changes.
Engines with fast prefill tell nothing of prompts; then it is output tokens alone, and the cell's row says so.
At temperature 0 a chosen token must also be nearly as good as the reference's best.

Bounds come from `noise`: outside float32 they are measured, in float32 they are LOGPROB_FLOOR.

What it cannot see: an error that changes no chosen token's probability by more than rounding does (in
bfloat16 that of a few tiny weights; keys and queries turned by the same wrong angle), an error of the drawing
itself, and, outside float32 where experts are routed, one that leaves half of the tokens right or is no
larger than a few times rounding (see `noise`). `kv_values` looks at the cache itself, `tokens` in float32 at
every choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch

from rayk.experiments.noise import ROUTED_TOKENS, Bound, broken, broken_statistic, measure, rms
from rayk.experiments.references import References
from rayk.oracle.reference import TextScores
from rayk.types.request import SamplingParams
from rayk.types.rows import RequestRow

LOGPROB_FLOOR = 2e-3  # float32: largest error of a log probability; implementations differ by 1e-5 to 2e-4


@dataclass(slots=True)
class _Tokens:
    """Collects all tokens of one kind, prompt or output, over the cell's requests."""

    kind: str
    # (prompt index, index of the token in prompt or output)
    places: list[tuple[int, int]] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    eager: list[float] = field(default_factory=list)
    further: list[float] = field(default_factory=list)  # eager's errors of other tokens at the same steps
    # whether no quantisation step could be another up to here
    settled: list[bool] = field(default_factory=list)

    def add(
        self, request: int, found: Sequence[float], exact: TextScores, eager: TextScores, num_settled: int = 0
    ) -> None:
        """Add a request's tokens; the prompt's first has no log probability. `num_settled` of the fed tokens
        are settled."""
        is_prompt, first_output = self.kind == "prompt", len(exact.prompt_logprobs)
        steps = slice(0, first_output) if is_prompt else slice(first_output, None)
        right = exact.prompt_logprobs if is_prompt else exact.output_logprobs
        assert len(found) == len(right), f"request {request}: {self.kind} tokens without logprob"
        first = 0 if is_prompt else first_output
        self.settled += [first + i < num_settled for i in range(len(found))]
        self.places += [(request, int(is_prompt) + i) for i in range(len(found))]
        self.found += found
        self.exact += right
        self.eager += eager.prompt_logprobs if is_prompt else eager.output_logprobs
        for others, theirs in zip(exact.further_logprobs[steps], eager.further_logprobs[steps], strict=True):
            self.further += [b - a for a, b in zip(others, theirs, strict=True)]

    def errors(self) -> torch.Tensor:
        """Compute absolute errors, float64; a NaN is an infinite error."""
        error = (_tensor(self.found) - _tensor(self.exact)).abs()
        return torch.where(error.isnan(), torch.inf, error)

    def bound(self, *, routed: bool) -> Bound:
        noise = (_tensor(self.eager) - _tensor(self.exact)).abs()
        factors = ROUTED_TOKENS if routed else None
        return measure(noise, floor=LOGPROB_FLOOR, routed=factors, further=_tensor(self.further).abs())


@dataclass(frozen=True, slots=True)
class LogprobErrors:
    num_checked: int
    max_error: float
    typical_error: float  # RMS; the median where experts are routed
    bound: Bound
    num_settled: int = 0  # tokens that no flipped quantisation step could touch: LOGPROB_FLOOR holds for each
    max_settled_error: float = 0.0


@dataclass(frozen=True, slots=True)
class Followed:
    """Holds what the reference says of a request whose stored keys and values it was given."""

    scores: TextScores
    num_settled: int  # tokens before the first whose keys or values may be another step's


@dataclass(frozen=True, slots=True)
class LogprobComparison:
    output: LogprobErrors
    prompt: LogprobErrors
    reasons: tuple[str, ...]  # what is wrong; nothing if all is within the bounds
    not_finite: tuple[str, ...] = ()  # requests of which the reference can say nothing


def compare_logprobs(
    rows: Sequence[RequestRow],
    references: References,
    sampling: SamplingParams,
    followed: Sequence[Followed | None] = (),
) -> LogprobComparison:
    """Compare finished requests' log probabilities, all together.

    `followed`: of each row what the reference says of the keys and values that were stored, where it can:
    tokens that no flipped quantisation step could touch keep LOGPROB_FLOOR.
    """
    output, prompt = _Tokens("output"), _Tokens("prompt")
    gaps: list[float] = []
    not_finite: list[str] = []
    misfits: list[str] = []
    for row, own in zip_longest(rows, followed):
        exact, eager = references.scores(row.prompt_token_ids, row.output_token_ids)
        num_settled = 0
        if own is not None:
            # What rounding changes is still measured between the two that follow nobody.
            eager = _shifted(eager, exact, own.scores)
            exact, num_settled = own.scores, own.num_settled
        if sampling.structured_outputs is not None and math.inf in exact.output_gaps:
            token = exact.output_gaps.index(math.inf)
            misfits.append(
                f"logprobs: request {row.prompt_index}, token {token} is not of the form asked for"
            )
            continue
        if not all(map(math.isfinite, exact.prompt_logprobs + exact.output_logprobs)):
            not_finite.append(
                f"logprobs: request {row.prompt_index}: the reference's own are NaN or infinite"
            )
            continue
        assert row.output_logprobs is not None, f"request {row.prompt_index} reported no logprobs"
        output.add(row.prompt_index, row.output_logprobs, exact, eager, num_settled)
        gaps += exact.output_gaps
        if sampling.prompt_logprobs is not None:
            assert row.prompt_logprobs is not None, f"request {row.prompt_index} told nothing of its prompt"
        if row.prompt_logprobs is not None:
            found = [p for p in row.prompt_logprobs if p is not None]
            prompt.add(row.prompt_index, found, exact, eager, num_settled)
    outputs, wrong_outputs = _judge(output, references)
    prompts, wrong_prompts = _judge(prompt, references)
    reasons = [*misfits, *wrong_outputs, *wrong_prompts]
    if is_greedy(sampling):
        reasons += _worse_choices(output, gaps, outputs.bound)
    return LogprobComparison(outputs, prompts, tuple(reasons), tuple(not_finite))


def is_greedy(sampling: SamplingParams) -> bool:
    """Tell whether the best token of the model's own logits is taken."""
    return (
        sampling.temperature == 0
        and sampling.presence_penalty == sampling.frequency_penalty == 0
        and sampling.repetition_penalty == 1
    )


def near_tie_tolerance(rows: Sequence[RequestRow], references: References) -> float:
    """Bound how far below the reference's best a greedy choice may lie outside float32, from eager's own
    errors."""
    output = _Tokens("output")
    for row in rows:
        exact, eager = references.scores(row.prompt_token_ids, row.output_token_ids)
        output.add(row.prompt_index, exact.output_logprobs, exact, eager)
    return output.bound(routed=False).times(2).worst


def _judge(tokens: _Tokens, references: References) -> tuple[LogprobErrors, list[str]]:
    """Measure the errors of one kind of tokens, and give a reason for every token that breaks their bound."""
    errors, bound = tokens.errors(), tokens.bound(routed=references.routed)
    worst = float(errors.max()) if len(errors) else 0.0
    typical = float(errors.median()) if bound.quantiles and len(errors) else rms(errors)
    measured = "" if references.is_exact else f", measured from eager {references.eager_dtype}"
    reasons = []
    settled = torch.tensor(tokens.settled, dtype=torch.bool)
    exactly = settled & (errors > LOGPROB_FLOOR)
    for i in (broken(errors, bound) | exactly).nonzero()[:, 0].tolist():
        request, token = tokens.places[i]
        off_by = f"{errors[i]:.3g}; no step could flip; bound {LOGPROB_FLOOR:.3g}"
        if not exactly[i]:
            off_by = _limit(float(errors[i]), errors, bound) + measured
        reasons.append(
            f"logprobs: request {request}, {tokens.kind} token {token}: {tokens.found[i]:.4g}, the "
            f"reference's is {tokens.exact[i]:.4g} (off by {off_by})"
        )
    most = float(errors[settled].max()) if bool(settled.any()) else 0.0
    return LogprobErrors(len(errors), worst, typical, bound, int(settled.sum()), most), reasons


def _limit(error: float, errors: torch.Tensor, bound: Bound) -> str:
    """Write an error that breaks its bound, and the bound."""
    over = broken_statistic(errors, bound)
    if over is None:
        return f"{error:.3g}; bound {bound.worst:.3g}"
    found = f"{over.found:.3g} {over.name} over {len(errors)} tokens"
    return f"{error:.3g}, {found}; bound {over.limit:.3g} {over.name}"


def _worse_choices(tokens: _Tokens, gaps: Sequence[float], bound: Bound) -> list[str]:
    """Give a reason for every greedy token that lies too far below the reference's best. The logits of both
    may be off by the bound."""
    twice = bound.times(2)
    limit = twice.limit(len(gaps)) if bound.quantiles else twice.worst
    found = _tensor(gaps)
    exactly = torch.tensor(tokens.settled, dtype=torch.bool) & (found > 2 * LOGPROB_FLOOR)
    return [
        f"logprobs: request {tokens.places[i][0]}, output token {tokens.places[i][1]} was chosen greedily "
        f"{gaps[i]:.3g} logits below the reference's best "
        f"(bound {2 * LOGPROB_FLOOR if exactly[i] else limit:.3g})"
        for i in (broken(found, twice) | exactly).nonzero()[:, 0].tolist()
    ]


def _shifted(eager: TextScores, exact: TextScores, followed: TextScores) -> TextScores:
    """Shift eager's scores so that they are as far from the followed ones as they are from the exact ones."""

    def moved(name: str) -> tuple[float, ...]:
        sides = (getattr(scores, name) for scores in (followed, eager, exact))
        return tuple(f + (e - x) for f, e, x in zip(*sides, strict=True))

    further = zip(followed.further_logprobs, eager.further_logprobs, exact.further_logprobs, strict=True)
    return replace(
        eager,
        prompt_logprobs=moved("prompt_logprobs"),
        output_logprobs=moved("output_logprobs"),
        further_logprobs=tuple(tuple(f + (e - x) for f, e, x in zip(*step, strict=True)) for step in further),
    )


def _tensor(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)

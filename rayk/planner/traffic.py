"""Say what comes: requests for simulations, and the sums that estimates need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rayk.sched.arrivals import due_times
from rayk.specs.plan import LoadedPlan, TrafficSpec
from rayk.specs.traces import TraceSpec
from rayk.traces import Recorded, read_trace, scaled
from rayk.traces.drawn import draw_prompts, input_lengths, output_lengths
from rayk.types.errors import UserError

if TYPE_CHECKING:
    from rayk.simulate import Arrival
    from rayk.simulate.arrivals import ArrivalSource

NS_PER_S = 1e9
NUM_SAMPLES = 1000  # requests that a profile is made of


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What requests are like, on average."""

    input_tokens: float
    cached_tokens: float  # of them, at the most that a prefix cache may find
    output_tokens: float
    long_input_tokens: int  # prompts of the SLO's share are no longer
    most_tokens: int  # of prompt and output together
    text: str

    @property
    def total_tokens(self) -> float:
        return self.input_tokens + self.output_tokens


class Traffic:
    """A plan's requests, at any rate."""

    def __init__(self, spec: TrafficSpec, *, vocab_size: int, has_prefixes: bool) -> None:
        """`has_prefixes`: whether engines keep prompts' prefixes. Where none does, all tokens are alike."""
        self.spec = spec
        self._token_ids = (0, vocab_size - 1)
        self._has_prefixes = has_prefixes

    @property
    def rate(self) -> float | None:
        """The requests per second that are asked for: in a trace, those recorded, at the speed it names."""
        if self.spec.trace is None:
            return self.spec.rate
        return _recorded_rate(self.spec.trace)

    def count(self, num_requests: int) -> int:
        """Bound a number of requests by those of the trace."""
        return num_requests if self.spec.trace is None else min(num_requests, len(_rows(self.spec.trace)))

    def arrivals(self, rate: float, num_requests: int, seed: int) -> Iterator[Arrival] | ArrivalSource:
        """Give the first requests, at so many per second."""
        if self.spec.trace is None:
            return self._drawn(rate, num_requests, seed)
        from rayk.simulate.arrivals import TraceArrivals

        trace = self.spec.trace
        return TraceArrivals(
            islice(_rows(trace), num_requests),
            block_tokens=trace.block_tokens,
            token_ids=self._token_ids,
            seed=seed,
            speed=trace.speed * rate / _recorded_rate(trace),
        )

    def _drawn(self, rate: float, num_requests: int, seed: int) -> Iterator[Arrival]:
        from rayk.simulate import Arrival

        spec = self.spec
        due = due_times(
            spec.process, rate=rate, num_requests=num_requests, burstiness=spec.burstiness, seed=seed
        )
        inputs = input_lengths(spec.inputs, num_requests, seed)
        outputs = output_lengths(spec.outputs, num_requests, seed)
        prompts = draw_prompts(
            inputs,
            self._token_ids,
            prefix_tokens=spec.prefix_tokens,
            num_prefixes=spec.num_prefixes,
            seed=seed,
        )
        for index, (at_ns, length) in enumerate(zip(due, inputs, strict=True)):
            yield Arrival(
                at_ns=at_ns,
                index=index,
                prompt=tuple(next(prompts)) if self._has_prefixes else _blank(length),
                max_tokens=outputs[index],
                session=None if spec.num_sessions is None else f"session {index % spec.num_sessions}",
            )

    def profile(self, good: float) -> Profile:
        """Sum requests up. `good`: the share of answers that must be good."""
        spec = self.spec
        if spec.trace is None:
            inputs = input_lengths(spec.inputs, NUM_SAMPLES, spec.seed)
            outputs = output_lengths(spec.outputs, NUM_SAMPLES, spec.seed)
            cached = float(np.mean([min(spec.prefix_tokens, n - 1) for n in inputs]))
            most = spec.inputs.most + spec.outputs.most
            text = f"{spec.input_tokens} input tokens, {spec.output_tokens} output tokens"
            if spec.prefix_tokens:
                text += f", prefixes of {spec.prefix_tokens} tokens ({spec.num_prefixes} of them)"
        else:
            rows = _rows(spec.trace)
            blocks = spec.trace.block_tokens
            inputs = [scaled(row.num_prompt_tokens, blocks) for row in rows]
            outputs = [scaled(row.num_output_tokens, blocks) for row in rows]
            cached = _shared_tokens(rows, blocks) / len(rows)
            most = max(n + m for n, m in zip(inputs, outputs, strict=True))
            text = (
                f"{len(rows):,} requests of {spec.trace.file}, "
                f"{np.mean(inputs):,.0f} input and {np.mean(outputs):,.0f} output tokens on average"
            )
        return Profile(
            input_tokens=float(np.mean(inputs)),
            cached_tokens=cached if self._has_prefixes else 0.0,
            output_tokens=float(np.mean(outputs)),
            long_input_tokens=int(np.quantile(inputs, good)),
            most_tokens=most,
            text=text,
        )


def check_fits(profile: Profile, max_positions: int, loaded: LoadedPlan) -> None:
    """Raise UserError where a request is longer than the model can take."""
    if profile.most_tokens > max_positions:
        key = "traffic.trace" if loaded.spec.traffic.trace else "traffic.input_tokens"
        raise UserError(
            f"requests of up to {profile.most_tokens:,} tokens with their outputs, and the model has "
            f"{max_positions:,} positions",
            where=loaded.where(key),
            mend="shorter ones, or a smaller traffic.trace.block_tokens",
        )


@lru_cache(maxsize=64)
def _blank(length: int) -> tuple[int, ...]:
    return (1,) * length


@lru_cache(maxsize=2)
def _rows(trace: TraceSpec) -> list[Recorded]:
    return read_trace(Path(trace.file), format=trace.format, limit=trace.limit)


def _recorded_rate(trace: TraceSpec) -> float:
    """Requests per second of those whose times were recorded, and so at least 1 in all of a trace."""
    rows = _rows(trace)
    times = [row.at_ns for row in rows if row.at_ns is not None]
    span_s = (max(times) - min(times)) / NS_PER_S if times else 0.0
    return trace.speed * len(rows) / span_s if span_s > 0 else 1.0


def _shared_tokens(rows: list[Recorded], block_tokens: int) -> float:
    """Count prompt tokens that stand in an earlier prompt as well, were nothing ever forgotten."""
    seen: set[int] = set()  # hash ids, each of which stands for all of a prompt up to its block's end
    turns: dict[str, int] = {}
    shared = 0
    for row in rows:
        count = scaled(row.num_prompt_tokens, block_tokens)
        if row.session is not None and not row.hash_ids:
            shared += min(turns.get(row.session, 0), count)
            turns[row.session] = max(turns.get(row.session, 0), count)
            continue
        num_known = len(list(takewhile(seen.__contains__, row.hash_ids)))
        seen.update(row.hash_ids)
        shared += min(num_known * block_tokens, count - 1)
    return shared

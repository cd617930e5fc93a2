"""Define a load: how requests arrive, what they ask, and what counts as a good answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayk.sched.arrivals import PROCESSES
from rayk.traces import TraceFormat
from rayk.traces.drawn import Lengths
from rayk.types.bounds import MAX_RATE, MAX_REQUESTS, MAX_SECONDS, MAX_TOKENS, MIN_RATE
from rayk.types.errors import UserError
from rayk.types.request import MAX_SEED
from rayk.types.slo import Slo

MAX_CONCURRENCY = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One load on one server: a cell of the report. Checked by `check_load`."""

    url: str  # the server's, without /v1
    model: str | None = None  # None: the first that the server names
    api_key: str | None = field(default=None, repr=False)
    use_chat: bool = False  # chat completions with texts instead of completions
    rate: float | None = None  # requests per second of an open load
    concurrency: int | None = None  # requests in flight of a closed load: each that ends lets the next one go
    process: str = "poisson"  # a key of sched.arrivals.PROCESSES, for an open load
    burstiness: float = 1.0
    trace: Path | None = None  # arrivals and lengths of a trace; see rayk.traces
    trace_format: TraceFormat | None = None  # None: told by the file
    trace_speed: float = 1.0  # how many times faster than it was recorded
    trace_block_tokens: int = 512  # what a block of 512 tokens of the trace becomes
    num_requests: int | None = None  # None: 100, or all of a trace or a file
    input_tokens: Lengths = Lengths(values=(128,))
    output_tokens: Lengths | None = None  # None: 64, or of a ShareGPT file as long as its answers are
    prefix_tokens: int = 0  # shared ones at a random prompt's start, out of `num_prefixes` stretches
    num_prefixes: int = 1
    # lowest and highest id of random prompts; None: the server's vocabulary
    token_ids: tuple[int, int] | None = None
    prompts: Path | None = None  # lines of {"prompt": text} or {"prompt_token_ids": [...]}
    sharegpt: Path | None = None  # whose conversations' first turns are the prompts; see sharegpt.py
    ignore_eos: bool = True
    temperature: float = 0.0
    body: Mapping[str, Any] = field(default_factory=dict)  # fields that every request has besides
    seed: int = 0
    slo: Slo = field(default_factory=Slo)
    warmup: int | None = None  # requests cut at the start; None: as many as MSER-5 finds
    cooldown: int | None = None  # requests cut at the end; None: those that came as the load was running out
    timeout_s: float = 600.0  # per request
    failed_share: float = 0.01  # more failures than this make the load INVALID

    @property
    def is_open(self) -> bool:
        """Tell whether requests leave at times that do not depend on answers, but for a session's own."""
        return self.concurrency is None

    @property
    def arrival(self) -> str:
        """Name poisson, gamma, constant, trace or closed."""
        if self.trace is not None:
            return "trace"
        return "closed" if self.concurrency is not None else self.process

    @property
    def name(self) -> str:
        """Name the cell, e.g. `poisson rate=4` or `closed concurrency=8`."""
        if self.trace is not None:
            return f"trace {self.trace.name} speed={self.trace_speed:g}"
        if self.concurrency is not None:
            return f"closed concurrency={self.concurrency}"
        shape = f" burstiness={self.burstiness:g}" if self.process == "gamma" else ""
        return f"{self.process} rate={self.rate:g}{shape}"


def check_load(load: Load) -> None:
    """Raise UserError for what cannot be sent."""
    has_texts = load.prompts is not None or load.sharegpt is not None
    given = [load.rate is not None, load.concurrency is not None, load.trace is not None]
    checks = (
        (
            sum(given) == 1,
            "a load has a rate, a concurrency or a trace",
            "one of --rate, --concurrency, --trace",
        ),
        (
            load.rate is None or MIN_RATE <= load.rate <= MAX_RATE,
            f"--request-rate or --rate {load.rate}",
            f"requests per second, above 0: {MIN_RATE:g} to {MAX_RATE:g}",
        ),
        (
            load.concurrency is None or 0 < load.concurrency <= MAX_CONCURRENCY,
            f"--max-concurrency or --concurrency {load.concurrency}",
            f"at least 1, at most {MAX_CONCURRENCY:,}",
        ),
        (load.process in PROCESSES, f"--arrival {load.process}", f"one of {', '.join(PROCESSES)}"),
        (
            1e-3 <= load.burstiness <= 1e6,
            f"--burstiness {load.burstiness}",
            "above 0, 0.001 to 1e6; 1 is Poisson's",
        ),
        (
            1e-6 <= load.trace_speed <= 1e6,
            f"--trace-speed {load.trace_speed}",
            "above 0, 1e-6 to 1e6; 2 is twice as fast",
        ),
        (
            0 < load.trace_block_tokens <= 1 << 16,
            f"--trace-block {load.trace_block_tokens}",
            "at least 1, at most 65,536",
        ),
        (
            load.num_requests is None or 0 < load.num_requests <= MAX_REQUESTS,
            f"--num-requests {load.num_requests}",
            f"at least 1, at most {MAX_REQUESTS:,}",
        ),
        (
            0 < load.num_prefixes <= MAX_REQUESTS
            and 0 <= load.prefix_tokens * load.num_prefixes <= MAX_TOKENS,
            f"shared prefixes: {load.num_prefixes} of {load.prefix_tokens} tokens",
            f"--num-prefixes of at least 1, at most {MAX_REQUESTS:,}, and {MAX_TOKENS:,} tokens in all",
        ),
        (0 <= load.seed <= MAX_SEED, f"--seed {load.seed}", f"0 to {MAX_SEED}"),
        (0 < load.timeout_s <= MAX_SECONDS, f"--timeout {load.timeout_s}", "seconds, above 0, at most 1e8"),
        (0 <= load.failed_share <= 1, f"--allow-failed {load.failed_share}", "a share between 0 and 1"),
        (load.warmup is None or load.warmup >= 0, f"--warmup {load.warmup}", "a number of requests"),
        (load.cooldown is None or load.cooldown >= 0, f"--cooldown {load.cooldown}", "a number of requests"),
        (load.url.startswith(("http://", "https://")), f"--url {load.url}", "http://HOST:PORT"),
        (not load.use_chat or has_texts, "--chat without texts", "--prompts FILE with texts"),
        (
            sum(source is not None for source in (load.prompts, load.trace, load.sharegpt)) <= 1,
            "prompts from several files",
            "one of --prompts, --trace, --dataset-path",
        ),
    )
    for holds, problem, mend in checks:
        if not holds:
            raise UserError(problem=problem, mend=mend)

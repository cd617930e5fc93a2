"""Draw or read prompts before the load begins, so that sending costs nothing but sending."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayk.bench.load import Load
from rayk.bench.sharegpt import read_sharegpt
from rayk.sched.arrivals import due_times
from rayk.traces import hastened, read_trace, scaled
from rayk.traces.drawn import Lengths, draw_prompts, input_lengths, output_lengths
from rayk.traces.prompts import TracePrompts
from rayk.types.bounds import MAX_SECONDS, MAX_TOKENS
from rayk.types.errors import UserError
from rayk.types.files import PROMPTS_BYTES, parse_json, read_text

NUM_REQUESTS = 100
OUTPUT_TOKENS = 64
MAX_DRAWN_TOKENS = 4 * MAX_TOKENS  # a load's prompts take 2.4 GB of lists then


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    index: int
    # after the load's start; None: when a request in flight ends, of a session its last one
    due_ns: int | None
    prompt: str | list[int]  # a text or token ids
    max_tokens: int
    seed: int
    session: str | None = None  # of a trace, whose requests go one after another
    delay_ns: int = 0  # from the end of the session's last answer

    @property
    def at_ns(self) -> int | None:
        """Give the time as traces.replay asks for it."""
        return self.due_ns


def plan_requests(load: Load, token_ids: tuple[int, int]) -> list[Planned]:
    """Plan a load's requests in order of their time. One seed draws the same prompts, with ids between the
    two of `token_ids`, at any rate. Raises UserError."""
    planned = _planned(load, token_ids)
    last_s = max(p.due_ns or 0 for p in planned) / 1e9
    if last_s > MAX_SECONDS:
        raise UserError(
            f"the last of {len(planned)} requests is due after {last_s:.3g} s",
            mend="fewer requests, or faster",
        )
    return planned


def _planned(load: Load, token_ids: tuple[int, int]) -> list[Planned]:
    if load.trace is not None:
        return _from_trace(load, load.trace, token_ids)
    output_tokens = load.output_tokens or Lengths(values=(OUTPUT_TOKENS,))
    prompts: list[str | list[int]]
    if load.sharegpt is not None:
        turns = read_sharegpt(load.sharegpt, seed=load.seed)
        count = load.num_requests or NUM_REQUESTS
        prompts = [turns[i % len(turns)].prompt for i in range(count)]
        if load.output_tokens is None:
            output_tokens = Lengths(values=tuple(turn.num_answer_tokens for turn in turns))
    elif load.prompts is not None:
        read = read_prompts(load.prompts)
        count = load.num_requests or len(read)
        prompts = [read[i % len(read)] for i in range(count)]
    else:
        count = load.num_requests or NUM_REQUESTS
        prompts = list(random_prompts(load, count, token_ids))
    max_tokens = output_lengths(output_tokens, count, load.seed)
    due: list[int] | list[None] = [None] * count
    if load.rate is not None:
        due = due_times(
            load.process, rate=load.rate, num_requests=count, burstiness=load.burstiness, seed=load.seed
        )
    rows = zip(due, prompts, max_tokens, strict=True)
    return [
        Planned(index=i, due_ns=at, prompt=prompt, max_tokens=tokens, seed=load.seed + i)
        for i, (at, prompt, tokens) in enumerate(rows)
    ]


def random_prompts(load: Load, count: int, token_ids: tuple[int, int]) -> Iterator[list[int]]:
    """Draw prompts as traces.drawn does. Raises UserError for more tokens than are drawn before a load."""
    lengths = input_lengths(load.input_tokens, count, load.seed)
    _check_tokens(sum(lengths), "--num-requests, or fewer --input-tokens")
    return draw_prompts(
        lengths,
        token_ids,
        prefix_tokens=load.prefix_tokens,
        num_prefixes=load.num_prefixes,
        seed=load.seed,
    )


def _check_tokens(count: int, mend: str) -> None:
    """Raise UserError for more tokens than are drawn before a load begins."""
    if count > MAX_DRAWN_TOKENS:
        problem = f"{count:,} tokens of prompts, and at most {MAX_DRAWN_TOKENS:,} are drawn before a load"
        raise UserError(problem, mend=f"fewer {mend}")


def read_prompts(path: Path) -> list[str | list[int]]:
    """Read prompts from JSON lines, as experiments do. Raises UserError that names the line."""
    try:
        lines = read_text(path, PROMPTS_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(problem=f"cannot read the prompts: {error}", where=str(path)) from error
    found = [_read(line, f"{path}:{n}") for n, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise UserError(problem="no prompts in the file", where=str(path))
    return found


def _read(line: str, where: str) -> str | list[int]:
    mend = '{"prompt": "text"} or {"prompt_token_ids": [1, 2]}'
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(problem=f"not JSON: {error}", where=where, mend=mend) from error
    row = row if isinstance(row, dict) else {}
    text, ids = row.get("prompt"), row.get("prompt_token_ids")
    if isinstance(text, str) and text and ids is None:
        return text
    if isinstance(ids, list) and ids and text is None and all(type(i) is int and i >= 0 for i in ids):
        return ids
    raise UserError(problem="not a prompt", where=where, mend=mend)


def _from_trace(load: Load, path: Path, token_ids: tuple[int, int]) -> list[Planned]:
    block = load.trace_block_tokens
    rows = read_trace(path, format=load.trace_format, limit=load.num_requests)
    num_tokens = sum(scaled(row.num_prompt_tokens, block) for row in rows)
    _check_tokens(num_tokens, "--num-requests, or a smaller --trace-block")
    prompts = TracePrompts(block_tokens=block, token_ids=token_ids, seed=load.seed)
    return [
        Planned(
            index=i,
            due_ns=row.at_ns,
            prompt=prompts.tokens(row, i),
            max_tokens=scaled(row.num_output_tokens, block),
            seed=load.seed + i,
            session=row.session,
            delay_ns=row.delay_ns,
        )
        for i, row in enumerate(hastened(row, load.trace_speed) for row in rows)
    ]

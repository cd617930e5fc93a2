"""Send several loads to one server, one after another, with tables on disk after each, and a report."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from rayk.bench.generator import Sent, drive, make_session
from rayk.bench.load import Load, check_load
from rayk.bench.prompts import Planned, plan_requests
from rayk.bench.summary import summarize
from rayk.reports.load_writer import LoadWriter
from rayk.types.errors import UserError
from rayk.types.reaching import why_unreached
from rayk.types.signals import run_coroutine

PROBE_S = 10.0
LOWEST_ID = 4  # random prompts begin here: lower ids are special in most vocabularies


class Watcher(Protocol):
    def begin(self, load: Load, num_requests: int) -> None: ...

    def ended(self, outcome: str) -> None: ...

    def end(self, cell: Mapping[str, Any]) -> None:
        """The load is on disk."""


class Silent:
    def begin(self, load: Load, num_requests: int) -> None: ...

    def ended(self, outcome: str) -> None: ...

    def end(self, cell: Mapping[str, Any]) -> None: ...


def run_bench(
    loads: Sequence[Load], out: Path, *, environment: Mapping[str, Any], watcher: Watcher | None = None
) -> list[dict[str, Any]]:
    """Send each load and write tables and report; the rows of cells.parquet.

    Loads draw unlike prompts, so that none finds another's in a prefix cache. Raises UserError for bad input,
    before the first request. When interrupted, the load in flight is written as far as it came.
    """
    for load in loads:
        check_load(load)
    names = [load.name for load in loads]
    if len(set(names)) < len(names):
        raise UserError(problem="the same load twice", mend="each --rate or --concurrency once")
    model, token_ids = run_coroutine(probe(loads[0]))
    loads = [with_own_seed(load) for load in loads]
    plans = [plan_requests(load, token_ids(load)) for load in loads]
    watcher = watcher or Silent()
    writer = LoadWriter(out, spec=[describe(load, model) for load in loads], environment=environment)
    cells = []
    for load, planned in zip(loads, plans, strict=True):
        watcher.begin(load, len(planned))
        cell, rows = _run_one(load, model, planned, watcher, writer)
        writer.write(cell, rows)
        watcher.end(cell)
        cells.append(cell)
    return cells


def with_own_seed(load: Load) -> Load:
    """Give a load of a name the same seed in every bench, and loads of other names others."""
    return replace(load, seed=load.seed + (zlib.crc32(load.name.encode()) >> 1))


def _run_one(
    load: Load, model: str, planned: Sequence[Planned], watcher: Watcher, writer: LoadWriter
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    sent = Sent()
    try:
        run_coroutine(drive(load, model, planned, sent, lambda seen: watcher.ended(seen.outcome)))
    except KeyboardInterrupt:
        if sent.requests:
            cell, rows = summarize(load, model, sent)
            reason = f"interrupted after {len(rows)} of {len(planned)} requests; {cell['reason']}"
            writer.write(cell | {"verdict": "INVALID", "met": False, "reason": reason}, rows)
        raise
    return summarize(load, model, sent)


async def probe(load: Load) -> tuple[str, Callable[[Load], tuple[int, int]]]:
    """Ask the server for the model's name, and tell how to find the ids of random prompts. Raises UserError
    where no server answers, or it has no such model."""
    url = f"{load.url.rstrip('/')}/v1/models"
    try:
        async with asyncio.timeout(PROBE_S), make_session(load) as session, session.get(url) as response:
            text = await response.text()
            if response.status != 200:
                raise UserError(problem=f"HTTP {response.status}: {text[:200]}", where=url)
            cards = {card["id"]: card for card in json.loads(text)["data"]}
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        cause = why_unreached(error) or f"no answer within {PROBE_S:g} s"
        raise UserError(problem=f"no server answers: {cause}", where=url, mend="rayk serve MODEL") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(problem="the answer is no list of models", where=url) from error
    name = load.model or next(iter(cards), "")
    if name not in cards:
        raise UserError(
            problem=f"no model {name}", where=url, mend=f"one of {', '.join(cards)}" if cards else ""
        )
    vocab_size = cards[name].get("vocab_size")

    def token_ids(load: Load) -> tuple[int, int]:
        if load.token_ids is not None:
            return load.token_ids
        if load.prompts is not None or load.sharegpt is not None:
            return (0, 0)
        if not isinstance(vocab_size, int):
            raise UserError(
                problem="the server does not say how large its vocabulary is",
                where=url,
                mend="--token-ids LOW-HIGH for random prompts, or --prompts FILE",
            )
        return (min(LOWEST_ID, vocab_size - 1), vocab_size - 1)

    return name, token_ids


def describe(load: Load, model: str) -> dict[str, Any]:
    """Describe a load for spec.yaml, without the key."""
    description = {
        name: getattr(load, name)
        for name in Load.__slots__
        if name not in ("api_key", "slo", "model", "body", "token_ids")
    }
    description |= {
        "model": model,
        "slo": str(load.slo),
        "body": dict(load.body),
        "token_ids": list(load.token_ids) if load.token_ids else None,
    }
    plain = (int, float, bool, dict, list, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in description.items()}

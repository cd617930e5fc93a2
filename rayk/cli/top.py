"""Show the engines of a server again and again: `rayk top`."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rayk.cli.guard import guarded, stdout
from rayk.cli.plain import plain_lines
from rayk.types.errors import UserError
from rayk.types.reaching import why_unreached

ANSWER_S = 10.0  # a server that does not tell in this time is asked again
STATES = {"ready": "green", "forming": "yellow", "lost": "bold red"}
# titles and how their columns are set
TITLES = (
    ("engine", "left"), ("role", "left"), ("TP", "right"), ("DCP", "right"), ("PP", "right"),
    ("state", "left"), ("running", "right"), ("waiting", "right"), ("free blocks", "right"),
    ("used %", "right"), ("computed/s", "right"), ("tokens/s", "right"), ("in flight", "right"),
    ("restarts", "right"), ("trouble", "left"),
)  # fmt: skip
STATE = [title for title, _ in TITLES].index("state")
# what a narrow terminal does without, in this order
DROPPED_FIRST = ("used %", "restarts", "computed/s", "DCP", "PP", "TP", "in flight", "role", "free blocks")
MIN_TROUBLE = 17  # characters that are kept for the trouble column, as for each: with padding and a gap
Engine = Mapping[str, Any]
FetchEngines = Callable[[], Sequence[Engine]]


@guarded
def top(
    url: Annotated[
        str | None, typer.Option(help="The server [default: http://127.0.0.1:8000].", show_default=False)
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="Ask the servers of this Ray cluster instead, HOST:PORT or auto; needs no API key."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="RAYK_API_KEY", help="Sent as a bearer token.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table as plain lines, and exit.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks; rates are over them.")
    ] = 1.0,
) -> None:
    """Show the engines of a server: role, sizes, state, requests, blocks, tokens per second, restarts.

    computed/s are tokens that forward passes took, prompts' included; tokens/s are tokens of answers. On a
    terminal the table stays in place until Ctrl-C; elsewhere one follows the other. Exit 2: nothing answers.
    """
    if url and address:
        raise UserError(problem="name a server or a cluster, not both", where="--url, --address")
    where = address or url or "http://127.0.0.1:8000"
    # Ctrl-C is how it is ended.
    with contextlib.suppress(KeyboardInterrupt), _engine_source(address, where, api_key) as fetch:
        screen = Screen(where=where, fetch=fetch)
        screen.look()
        _show(screen, interval, once=once)


def _show(screen: Screen, interval_s: float, *, once: bool) -> None:
    """Show tables until Ctrl-C, or one."""
    console = stdout()
    if not once and console.is_terminal:
        with Live(screen.table(console.width), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                screen.look_again()
                live.update(screen.table(console.width), refresh=True)
    while True:
        time.sleep(interval_s)
        screen.look_again()
        for line in plain_lines(screen.table()):
            console.print(line, markup=False, soft_wrap=True)
        if once:
            return


@dataclass
class Screen:
    """Keeps the last two looks at the engines."""

    where: str
    fetch: FetchEngines
    engines: Sequence[Engine] = ()
    at_s: float = 0.0
    # engine -> (computed, output) tokens per second; None before the second look
    rates: Mapping[str, tuple[float | None, float | None]] | None = None
    silent_s: float = 0.0  # since when nobody answers
    trouble: str = ""

    def look(self) -> None:
        """Ask the engines. Raises UserError where nobody answers."""
        found, now_s = self.fetch(), time.monotonic()
        before = {e["name"]: e for e in self.engines}
        if before:
            self.rates = {e["name"]: _rates(before.get(e["name"]), e, now_s - self.at_s) for e in found}
        self.engines, self.at_s, self.trouble, self.silent_s = found, now_s, "", 0.0

    def look_again(self) -> None:
        """Ask; where nobody answers any more, say so beside what was known last."""
        try:
            self.look()
        except UserError as error:
            self.trouble, self.silent_s = error.problem, time.monotonic() - self.at_s

    def table(self, width: int | None = None) -> Table:
        """Make a table for a terminal of so many characters (None: any); what does not fit is left out."""
        rows = [engine_row(e, (self.rates or {}).get(e["name"], (None, None))) for e in self.engines]
        shown = _shown_columns(rows, width)
        table = Table(title=Text(self._headline()), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        table.caption, table.caption_justify = tier_line(self.engines), "left"
        for i in shown:
            title, justify = TITLES[i]
            table.add_column(title, justify=justify, no_wrap=title != "trouble")  # type: ignore[arg-type]
        for row in rows:
            texts = [
                Text(text, style=STATES.get(row[STATE], "") if i == STATE else "")
                for i, text in enumerate(row)
            ]
            table.add_row(*(texts[i] for i in shown))
        return table

    def _headline(self) -> str:
        ready = sum(e["state"] == "ready" for e in self.engines)
        output = [rate for _, rate in (self.rates or {}).values() if rate is not None]
        told = [f"{ready} of {len(self.engines)} engines ready"]
        told += [f"{sum(output):,.1f} tokens/s"] if output else []
        told += [f"no answer for {self.silent_s:.0f} s: {self.trouble}"] if self.trouble else []
        return f"{self.where}: {', '.join(told)}"


def _shown_columns(rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Choose TITLES by index; the trouble column needs trouble, those of DCP and PP an engine that has it."""
    widths = {
        title: max(len(title), *(len(row[i]) for row in rows), 0) + 3 for i, (title, _) in enumerate(TITLES)
    }
    if any(row[-1] for row in rows):
        widths["trouble"] = MIN_TROUBLE  # it folds
    else:
        del widths["trouble"]
    for i, (title, _) in enumerate(TITLES):
        if title in ("DCP", "PP") and all(row[i] == "1" for row in rows):
            del widths[title]
    for title in DROPPED_FIRST:
        if width is None or sum(widths.values()) + 2 <= width:
            break
        widths.pop(title, None)
    return [i for i, (title, _) in enumerate(TITLES) if title in widths]


def _rates(before: Engine | None, now: Engine, seconds: float) -> tuple[float | None, float | None]:
    """Compute rates within one life: an engine that was formed again counts from 0."""
    if before is None or before["epoch"] != now["epoch"] or seconds <= 0:
        return None, None
    computed, output = (
        None if None in (before.get(key), now.get(key)) else (now[key] - before[key]) / seconds
        for key in ("num_computed_tokens", "num_sampled_tokens")
    )
    return computed, output


def engine_row(engine: Engine, rates: tuple[float | None, float | None]) -> list[str]:
    """Write texts in the order of TITLES; empty for what the engine does not tell."""
    free, total = engine["num_free_blocks"], engine["num_blocks"]
    blocks = "" if free is None or total is None else f"{free:,}/{total - 1:,}"
    used = "" if not blocks or total < 2 else f"{100 * (1 - free / (total - 1)):.1f}"
    computed, output = ("" if rate is None else f"{rate:,.1f}" for rate in rates)
    counts = ["" if engine[key] is None else f"{engine[key]:,}" for key in ("num_running", "num_waiting")]
    return [
        str(engine["name"]), str(engine["role"]), *(str(engine.get(size, 1)) for size in ("tp", "dcp", "pp")),
        str(engine["state"]), *counts, blocks, used, computed, output,
        f"{engine['num_requests']:,}", f"{engine['num_restarts']:,}", str(engine["trouble"]),
    ]  # fmt: skip


def tier_line(engines: Sequence[Engine]) -> str | None:
    """Sum up what all engines did with their host tier; None where none has one."""
    told = [offload for e in engines if (offload := e.get("offload")) is not None]
    if not told:
        return None

    def total(name: str) -> int:
        return sum(offload.get(name, 0) for offload in told)

    off, paused = (sum(bool(offload.get(why)) for offload in told) for why in ("why_off", "why_paused"))
    stored, loaded = (total(name) / 2**20 for name in ("stored_bytes", "loaded_bytes"))
    parts = [
        f"stored {stored:,.1f} MiB",
        f"loaded {loaded:,.1f} MiB for {total('loads'):,} of {total('lookups'):,} prompts",
        f"{total('swaps'):,} swapped out",
    ]
    failed = total("stores_failed") + total("loads_failed") + total("swaps_failed")
    parts += [f"{failed:,} moves failed"] if failed else []
    parts += [f"{paused} engines ask for nothing just now"] if paused else []
    parts += [f"{off} of {len(told)} engines without"] if off else []
    return f"host tier: {', '.join(parts)}"


def _ask_server(url: str, api_key: str | None) -> FetchEngines:
    """Ask GET /engines, by no proxy."""
    address = f"{url.rstrip('/').removesuffix('/v1')}/engines"
    if not address.startswith(("http://", "https://")):
        raise UserError(problem="not a server's URL", where=f"--url {url}", mend="--url http://HOST:PORT")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def fetch() -> list[Engine]:
        request = urllib.request.Request(address, headers=headers)  # noqa: S310
        try:
            with opener.open(request, timeout=ANSWER_S) as answer:
                return _engines(answer.read(), address)
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error.code, address) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = why_unreached(error) or f"no answer within {ANSWER_S:g} s"
            raise UserError(
                problem=f"no server answers: {reason}",
                where=address,
                mend="rayk serve MODEL, or another --url",
            ) from error

    return fetch


def _refused(status: int, where: str) -> UserError:
    mends = {
        401: "--api-key KEY, or RAYK_API_KEY in the environment",
        404: "the URL of a `rayk serve`: other servers do not tell of engines",
    }
    return UserError(problem=f"HTTP {status}", where=where, mend=mends.get(status, ""))


def _engines(body: bytes, where: str) -> list[Engine]:
    try:
        found = json.loads(body)["data"]
        for engine in found:
            engine_row(engine, (None, None))
            engine["epoch"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            problem="the answer is no list of engines", where=where, mend="the URL of a `rayk serve`"
        ) from error
    return list(found)


@contextmanager
def _engine_source(address: str | None, url: str, api_key: str | None) -> Iterator[FetchEngines]:
    """Ask the fleets of a Ray cluster, joined within the block, or a server."""
    if address is None:
        yield _ask_server(url, api_key)
        return
    from rayk.actors.fleets import engines_of_fleets, joined

    with joined(address):
        yield lambda: engines_of_fleets(ANSWER_S)

"""Send loads to a server, measure, and judge the measurement: `rayk bench`."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rayk.cli.guard import guarded, stderr, stdout
from rayk.types.errors import UserError
from rayk.types.files import parse_json

if TYPE_CHECKING:
    from rayk.bench import Load


class ArrivalProcess(StrEnum):
    poisson = "poisson"
    gamma = "gamma"
    constant = "constant"


class RecordedFormat(StrEnum):
    mooncake = "mooncake"
    azure = "azure"
    agentic = "agentic"


class Dataset(StrEnum):
    sharegpt = "sharegpt"
    random = "random"


N = TypeVar("N", int, float)


@guarded
def bench(
    url: Annotated[str, typer.Option(help="The server, http://HOST:PORT.")],
    rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="R[,R...]", help="Requests per second, whatever the server does (open loop); repeatable."
        ),
    ] = None,
    concurrency: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N[,N...]",
            help="Requests in flight, each of which lets the next one go (closed loop); repeatable.",
        ),
    ] = None,
    request_rate: Annotated[
        str | None, typer.Option(help="vLLM's name of --rate; inf where --max-concurrency is given.")
    ] = None,
    max_concurrency: Annotated[str | None, typer.Option(help="vLLM's name of --concurrency.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded arrivals, lengths and, where it has them, shared prefixes and sessions."),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help="Of each load [default: 100; all of a trace or a file].")
    ] = None,
    arrival: Annotated[
        ArrivalProcess, typer.Option(help="How requests of a rate arrive.")
    ] = ArrivalProcess.poisson,
    burstiness: Annotated[
        float, typer.Option(help="Of gamma: its shape. 1 is Poisson, less comes in bursts.")
    ] = 1.0,
    trace_format: Annotated[
        RecordedFormat | None,
        typer.Option(
            help="mooncake: JSON lines; agentic: with session_id and delay besides, turns wait for answers; "
            "azure: CSV [default: told by the file]."
        ),
    ] = None,
    trace_speed: Annotated[float, typer.Option(help="2 sends a trace twice as fast.")] = 1.0,
    trace_block: Annotated[
        int, typer.Option(help="Tokens that a trace's blocks of 512 become; all lengths shrink alike.")
    ] = 512,
    input_tokens: Annotated[
        str, typer.Option(help="Of random prompts: 128, or 5,37,300 in turn, or 64-256 uniform.")
    ] = "128",
    output_tokens: Annotated[
        str | None,
        typer.Option(help="Of answers, likewise [default: 64; of ShareGPT as long as its answers]."),
    ] = None,
    prefix_tokens: Annotated[int, typer.Option(help="Of a random prompt, shared with others.")] = 0,
    num_prefixes: Annotated[int, typer.Option(help="Shared prefixes there are, in turn.")] = 1,
    token_ids: Annotated[
        str | None, typer.Option(help="LOW-HIGH ids of random prompts [default: the server's vocabulary].")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='Lines of {"prompt": text} or {"prompt_token_ids": [..]}, instead of random ones.'),
    ] = None,
    dataset_name: Annotated[
        Dataset | None, typer.Option(help="As vLLM's benchmark names them: sharegpt takes --dataset-path.")
    ] = None,
    dataset_path: Annotated[Path | None, typer.Option(help="A ShareGPT file, JSON.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send texts as chat completions.")] = False,
    slo: Annotated[
        str, typer.Option(help="What a good answer keeps: ttft=200ms,tpot=20ms,itl=..,e2e=..")
    ] = "",
    warmup: Annotated[
        int | None, typer.Option(help="Requests cut at the start [default: by MSER-5].")
    ] = None,
    cooldown: Annotated[
        int | None, typer.Option(help="Requests cut at the end [default: when the load runs out].")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Answers have exactly the tokens asked for.")] = True,
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = 0.0,
    body: Annotated[
        str, typer.Option(help="JSON object of fields that every request has besides; null takes one away.")
    ] = "{}",
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    allow_failed: Annotated[
        float, typer.Option(help="Share of failed requests above which a load is INVALID.")
    ] = 0.01,
    model: Annotated[str | None, typer.Option(help="[default: the server's first]")] = None,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results [default: runs/bench-<time>].")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="NOISY loads fail, too.")] = False,
) -> None:
    """Send load to an OpenAI-compatible server: TTFT, TPOT, ITL, E2E, goodput, and whether to believe them.

    Open loads (--rate, --trace) send on schedule and count latencies from when a request was due; closed ones
    (--concurrency) from when it was sent. Without either, one request at a time. Percentiles appear where the
    sample supports them, with 95% intervals by batch means.

    Exit 0: every load is VALID or NOISY. 1: some is INVALID (the generator did not keep up, requests failed,
    answers were not as asked). 2: bad input, or no server. 130: interrupted; what was measured is on disk.
    """
    from rayk.bench.load import Load
    from rayk.traces.drawn import parse_lengths
    from rayk.types.slo import parse_slo

    answers = None if output_tokens is None else parse_lengths(output_tokens, where="--output-tokens")
    base = Load(
        url=url.rstrip("/").removesuffix("/v1"),
        model=model,
        api_key=api_key,
        use_chat=chat,
        process=arrival.value,
        burstiness=burstiness,
        trace=trace,
        trace_format=None if trace_format is None else trace_format.value,
        trace_speed=trace_speed,
        trace_block_tokens=trace_block,
        num_requests=num_requests,
        input_tokens=parse_lengths(input_tokens, where="--input-tokens"),
        output_tokens=answers,
        prefix_tokens=prefix_tokens,
        num_prefixes=num_prefixes,
        token_ids=None if token_ids is None else _parse_ids(token_ids),
        prompts=prompts,
        sharegpt=_sharegpt(dataset_name, dataset_path),
        ignore_eos=ignore_eos,
        temperature=temperature,
        body=_parse_body(body),
        seed=seed,
        slo=parse_slo(slo),
        warmup=warmup,
        cooldown=cooldown,
        timeout_s=timeout,
        failed_share=allow_failed,
    )
    rates, concurrencies = _levels(rate or [], concurrency or [], request_rate, max_concurrency)
    raise typer.Exit(send_loads(_spread(base, rates, concurrencies), out, strict=strict))


def _levels(
    rates: list[str], concurrencies: list[str], request_rate: str | None, max_concurrency: str | None
) -> tuple[list[float], list[int]]:
    """Collect the levels of load under all their option names. Raises UserError."""
    if request_rate is not None and request_rate.strip().lower() == "inf":
        if max_concurrency is None and not concurrencies:
            problem = "all requests at once are no load that says much"
            raise UserError(problem, where="--request-rate inf", mend="--max-concurrency N")
        request_rate = None
    foreign_rates = [] if request_rate is None else [request_rate]
    foreign_counts = [] if max_concurrency is None else [max_concurrency]
    if (foreign_rates and (foreign_counts or concurrencies)) or (foreign_counts and rates):
        problem = "a load has a rate or a number of requests in flight, not both"
        rate_name = "--request-rate" if foreign_rates else "--rate"
        where = f"{rate_name}, {'--max-concurrency' if foreign_counts else '--concurrency'}"
        raise UserError(problem, where=where, mend="one of them; --rate and --concurrency are a load each")
    mends = "2, or 2,4", "1,8"
    return (
        _numbers(float, rates, "--rate", mends[0])
        + _numbers(float, foreign_rates, "--request-rate", mends[0]),
        _numbers(int, concurrencies, "--concurrency", mends[1])
        + _numbers(int, foreign_counts, "--max-concurrency", mends[1]),
    )


def _numbers(kind: Callable[[str], N], texts: list[str], option: str, mend: str) -> list[N]:
    """Parse lists such as `1,2`. Raises UserError."""
    try:
        return [kind(part) for text in texts for part in text.split(",")]
    except ValueError:
        where = f"{option} {','.join(texts)}"
        raise UserError("not a number, or a list of them", where=where, mend=f"{option} {mend}") from None


def _sharegpt(name: Dataset | None, path: Path | None) -> Path | None:
    """Find the file of prompts, if any. Raises UserError."""
    if name is Dataset.sharegpt and path is None:
        raise UserError("no file is named", where="--dataset-name sharegpt", mend="--dataset-path FILE")
    if name is not Dataset.sharegpt and path is not None:
        mend = "--dataset-name sharegpt; of lines of prompts --prompts FILE"
        raise UserError("of which data set is not said", where=f"--dataset-path {path}", mend=mend)
    return path


def _spread(base: Load, rates: list[float], concurrencies: list[int]) -> list[Load]:
    if base.trace is not None and not rates and not concurrencies:
        return [base]
    loads = [replace(base, rate=rate) for rate in rates]
    loads += [replace(base, concurrency=count) for count in concurrencies]
    return loads or [replace(base, concurrency=1)]


def send_loads(loads: list[Load], out: Path | None, *, strict: bool) -> int:
    """Send loads, print the tables, return the exit code. Raises UserError for bad input."""
    from rayk.bench.run import run_bench
    from rayk.cli.plain import print_table
    from rayk.reports import collect_environment, load
    from rayk.reports.load_page import load_tables, reasons
    from rayk.types.signals import interrupts

    now = datetime.datetime.now().astimezone()
    folder = out or Path("runs") / f"bench-{now:%Y%m%d-%H%M%S}"
    environment = collect_environment(command=_without_key(sys.argv), seeds={"load": loads[0].seed})
    progress = BenchProgress()
    with interrupts(progress.stop), progress:
        run_bench(loads, folder, environment=environment, watcher=progress)
    result = load(folder)
    console = stdout()
    for table in load_tables(result.cells):
        print_table(console, table)
    for text in reasons(result.cells):
        stderr().print(text, markup=False)
    stderr().print(f"report: {folder / 'report.html'}", markup=False)
    verdicts = set(result.cells["verdict"])
    return int("INVALID" in verdicts or (strict and "NOISY" in verdicts))


def _without_key(command: list[str]) -> list[str]:
    kept = [re.sub(r"(?<=^--api-key=).+", "...", word) for word in command]
    return ["..." if before == "--api-key" else word for before, word in zip(["", *kept], kept, strict=False)]


def _parse_ids(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", text.strip())
    if match is None or int(match[1]) > int(match[2]):
        raise UserError(problem=f"not a range of token ids: {text!r}", where="--token-ids", mend="100-999")
    return int(match[1]), int(match[2])


def _parse_body(text: str) -> dict[str, Any]:
    try:
        body = parse_json(text)
    except ValueError as error:
        raise UserError(problem=f"not JSON: {error}", where="--body", mend='{"priority": 1}') from error
    if not isinstance(body, dict):
        raise UserError(problem="not an object", where="--body", mend='{"priority": 1}')
    return body


class BenchProgress:
    """Implements bench.run.Watcher: a bar on a terminal, a line per load elsewhere."""

    def __init__(self) -> None:
        self._console = stderr()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
            # Drawing is taken from the generator's own time.
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> BenchProgress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def stop(self) -> None:
        self._bar.stop()
        self._console.print("rayk: stopping (once more to stop at once)")

    def begin(self, load: Load, num_requests: int) -> None:
        self._bar.reset(self._task, total=num_requests, description=load.name)

    def ended(self, outcome: str) -> None:
        del outcome
        self._bar.advance(self._task)

    def end(self, cell: Mapping[str, Any]) -> None:
        self._console.print(f"{cell['verdict']:<8} {cell['cell_id']}  {cell['wall_s']:.1f} s", markup=False)

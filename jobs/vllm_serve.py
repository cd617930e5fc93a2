"""vLLM's own servers, P and D behind the plain proxy, with the proving connector: what a request costs with
it and without, and whether bugs that are planted at D are named by its /metrics.

    python jobs/vllm_serve.py [--requests 100] [--only kv_swapped] [--record]

A case is a D beside the P of its model: nothing planted at TP 1 and at TP 2, each planted bug, a bug whose
requests are failed, or computed again, and right requests of which some are sampled. It has requests of 20 to
300 random tokens, some of which share 133, and 8 tokens of output. One P and one D are alive at once, and end
with this job, however it ends. Milliseconds per request are the wall clock of all requests of a case, divided
by how many they are.

Exit status 1 where a planted bug is not named, a right hand-over is accused or not proven, a request fails
that should not or does not that should, or tokens differ from those of servers that prove nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import random
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install

from jobs.benchmarks.harness import ROOT, Page, above_zero, option, run
from jobs.vllm_proxy import make_handler, post, served
from rayk.cli.guard import run_guarded
from rayk.oracle.checkpoint import write_checkpoint
from rayk.reports.page import Column
from rayk.serve.ports import claim_port
from rayk.types.errors import DeadlineExceeded, UserError
from rayk.vllm.arguments import ALONE, ON_CPUS

HOST = "127.0.0.1"
STALE = """\
`stale_block_ids` has D read the blocks of the request before, as many as that has; beyond, its own. Equal
is the true verdict where these are the request's own: a prompt with the shared beginning, whose first block
D has already, loads only the rest, which is its own behind a request of one block, or where P has handed
the same block out again (vLLM reuses blocks without a hash last in, first out:
v1/core/block_pool.py:788-801)."""
SETTLE_S = 60.0
"""How long verdicts may come after the last answer."""
STOP_S = 30.0
WARM_UPS = 5
"""vLLM fails the first request of a pair whose handshake takes over 5 s."""
OVERRIDES: Mapping[str, dict[str, Any]] = {"qwen3": {"head_dim": 32}, "falcon_h1": {"hidden_size": 256}}
NO_PREFIX_CACHE = ("falcon_h1",)
"""vLLM 0.32.0 dies of a checkpoint of its state."""
STATUSES = ("equal", "mismatch", "unverified", "local", "skipped")
NAMED: Mapping[str, str] = {
    "heads_shifted": r"head \d+ holds head \d+",
    "kv_swapped": r"K and V swapped",
    "last_block_dropped": r"tail not written|of the sequence (never written|missing)",
    "stale_block_ids": r"stale or foreign content|other content",
    "state_columns_shifted": r"channels shifted",
}
"""A planted bug -> what a classification says that names it."""
_SERIES = re.compile(r"^vllm:kv_proof_(requests|first_mismatch)_total\{(.*)\} (\S+)$", re.MULTILINE)
_SECONDS = re.compile(r"^vllm:kv_proof_((?:digest|fetch)_seconds_(?:sum|count))\{.*\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Case:
    """A decode server."""

    family: str
    tp: int = 1
    planted: str = ""
    on_mismatch: str = "report"
    """report, fail; or recompute: fail, and vLLM's policy makes it compute what is wrong."""
    sampling_rate: float = 1.0

    @property
    def name(self) -> str:
        what = [self.planted or "right"]
        what += [self.on_mismatch] if self.on_mismatch != "report" else []
        what += [f"sampled{self.sampling_rate:g}"] if self.sampling_rate < 1 else []
        return "-".join([f"{self.family}-tp{self.tp}", *what])

    @property
    def is_answered_rightly(self) -> bool:
        """Whether its tokens are those of servers that prove nothing."""
        return not self.planted or self.on_mismatch == "recompute"

    @property
    def seed(self) -> str:
        """Of its prompts: all that are answered rightly have the same."""
        return f"{self.family}-tp{self.tp}-right" if self.is_answered_rightly else self.name


CASES = (
    Case("qwen3"),
    *(Case("qwen3", planted=bug) for bug in NAMED if bug != "state_columns_shifted"),
    Case("qwen3", planted="kv_swapped", on_mismatch="fail"),
    Case("qwen3", planted="kv_swapped", on_mismatch="recompute"),
    Case("qwen3", sampling_rate=0.25),
    Case("qwen3", tp=2),
    Case("falcon_h1"),
    Case("falcon_h1", planted="state_columns_shifted"),
)


# --- what /metrics says ---------------------------------------------------------------------------


@dataclass
class Proofs:
    """Verdicts of a server's ranks, the first wrong places of mismatches, and what proofs cost."""

    statuses: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    """digest and fetch, each as digest_seconds_sum, digest_seconds_count"""

    def since(self, before: Proofs) -> Proofs:
        return Proofs(
            self.statuses - before.statuses, self.places - before.places, self.seconds - before.seconds
        )

    def mean_ms(self, what: str) -> float | None:
        """The mean of what was measured; None where nothing was."""
        number = self.seconds[f"{what}_seconds_count"]
        return self.seconds[f"{what}_seconds_sum"] * 1e3 / number if number else None

    def named(self, bug: str) -> str:
        """The place that most requests name of those whose classification is the bug's, or nothing."""
        return next((place for place, _ in self.places.most_common() if re.search(NAMED[bug], place)), "")


def read_proofs(text: str) -> Proofs:
    """Sum up a server's /metrics over its engines."""
    found = Proofs()
    for name, labels, number in _SERIES.findall(text):
        of = dict(_LABEL.findall(labels))
        if name == "requests":
            found.statuses[of["status"]] += int(float(number))
        else:
            place = "layer {layer}, {field}, head {head}, token {token}: {classification}".format_map(of)
            found.places[place] += int(float(number))
    for name, number in _SECONDS.findall(text):
        found.seconds[name] += float(number)  # type: ignore[assignment] # floats, too
    return found


def judge(case: Case, proofs: Proofs, num_requests: int, num_failed: int, num_unlike: int) -> list[str]:
    """What must never be, a line each. `num_unlike` answers have other tokens than servers that prove
    nothing."""
    num_wrong = proofs.statuses["mismatch"]
    wrong = []
    if case.on_mismatch == "fail":
        if num_failed != num_wrong:
            wrong.append(f"{num_failed} requests failed, and {num_wrong} were wrong")
    elif num_failed:
        wrong.append(f"{num_failed} of {num_requests} requests failed")
    if case.is_answered_rightly and num_unlike:
        wrong.append(f"{num_unlike} of {num_requests} answers have other tokens")
    if (case.sampling_rate < 1) != bool(proofs.statuses["skipped"]):
        wrong.append(f"{proofs.statuses['skipped']} skipped at a sampling rate of {case.sampling_rate:g}")
    if case.planted:
        if not proofs.named(case.planted):
            told = ", ".join(proofs.places) or "no mismatch"
            wrong.append(f"{case.planted} is not named: {told}")
    elif num_wrong:
        wrong.append(f"accused {num_wrong} times with nothing planted: {', '.join(proofs.places)}")
    elif not proofs.statuses["equal"]:
        wrong.append("nothing was proven")
    return [f"{case.name}: {line}" for line in wrong]


# --- servers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """What the servers of a job share."""

    python: Path
    secret_file: Path
    logs: Path
    start_s: float


@dataclass
class VllmServer:
    name: str
    log: Path
    url: str
    status: int
    """The pipe on which its keeper says that nothing is left of it, and nothing else."""

    def wait_ready(self, limit_s: float) -> None:
        """Raises UserError where it ends first, DeadlineExceeded."""
        until = time.monotonic() + limit_s
        while not self._answers():
            if self.has_ended(0.5):
                said = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
                errors = [line for line in said if "Error" in line] or said[-1:]
                raise UserError(f"{self.name} did not start: {''.join(errors[-1:])}", where=str(self.log))
            if time.monotonic() > until:
                raise DeadlineExceeded(f"the start of {self.name}", limit_s, {"log": str(self.log)})

    def has_ended(self, wait_s: float) -> bool:
        return bool(select.select([self.status], [], [], wait_s)[0])

    def _answers(self) -> bool:
        try:
            self.get("/health")
        except (OSError, http.client.HTTPException):
            return False
        return True

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            text: str = answer.read().decode()
        return text


@contextlib.contextmanager
def vllm_server(launch: Launch, model: Path, name: str, options: Sequence[str]) -> Iterator[VllmServer]:
    """A server that is starting; none of its processes is left when this ends, or this process does."""
    port, side_port = claim_port(HOST, 0), claim_port(HOST, 0)
    command = [launch.python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", HOST]
    command += ["--port", port, "--served-model-name", "m", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", 1024, "--kv-cache-memory-bytes", 64 << 20, *options]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))} | {
        **ALONE,
        **ON_CPUS,
        "PYTHONPATH": str(ROOT),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
    }
    reading, writing = os.pipe()
    log = launch.logs / f"{name}.log"
    with log.open("wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "rayk.vllm.keeper", str(writing), *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(writing,),
        )
    os.close(writing)
    assert keeper.stdin is not None
    pid = int(os.read(reading, 1 << 12).split()[1])  # "began PID"
    server = VllmServer(name, log, f"http://{HOST}:{port}", reading)
    try:
        yield server
    finally:
        if not server.has_ended(0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)  # so that it gives its shared memory back
            server.has_ended(STOP_S)
        keeper.stdin.close()  # the keeper kills what is left
        keeper.wait()
        while os.read(reading, 1 << 12):
            pass
        os.close(reading)


def connector(launch: Launch, case: Case | None = None, *, proves: bool) -> list[str]:
    """The servers' option for NIXL's connector, wrapped if it `proves`; as D has it in a case."""
    extra: dict[str, Any] = {"kv_lease_duration": 600}
    config: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    if proves:
        config["kv_connector_module_path"] = "rayk.vllm.proving"
        extra |= {"secret_file": str(launch.secret_file), "keep_rows": True, "timeout_s": 60}
    if proves and case is not None:
        extra["sampling_rate"] = case.sampling_rate
        extra["on_mismatch"] = "report" if case.on_mismatch == "report" else "fail"
        if case.planted:
            extra["planted"] = case.planted
        if case.on_mismatch == "recompute":
            config["kv_load_failure_policy"] = "recompute"
    return ["--kv-transfer-config", json.dumps(config | {"kv_connector_extra_config": extra})]


# --- requests -------------------------------------------------------------------------------------


def draw_prompts(seed: str, number: int) -> list[list[int]]:
    """Prompts of lengths that no seed changes; every fourth begins alike."""
    lengths, tokens = random.Random(7), random.Random(seed)
    shared = _draw(tokens, 133)
    return [(shared if i % 4 == 0 else []) + _draw(tokens, lengths.randrange(20, 300)) for i in range(number)]


def _draw(tokens: random.Random, number: int) -> list[int]:
    return [tokens.randrange(5, 205) for _ in range(number)]


def complete(url: str, prompt: Sequence[int]) -> list[int] | None:
    """The tokens that answer a prompt; None where the request fails."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    try:
        with post(f"{url}/v1/completions", {**body, "return_token_ids": True}) as answer:
            (choice,) = json.load(answer)["choices"]
    except (OSError, http.client.HTTPException) as error:
        print(f"a request failed: {error}", file=sys.stderr)
        return None
    tokens: list[int] = choice["token_ids"]
    return None if choice["finish_reason"] == "error" else tokens


@dataclass(frozen=True)
class Load:
    proofs: Proofs
    """What D tells."""
    answers: list[list[int] | None]
    """Tokens by prompt, None where a request failed."""
    ms: float
    """Wall clock of all requests, divided by how many they are."""
    prefill_digest_ms: float | None


def send(options: argparse.Namespace, case: Case, prefill: VllmServer, decode: VllmServer) -> Load:
    """Have every prompt completed, after some that nobody counts."""
    prompts = draw_prompts(case.seed, options.requests)
    handler = make_handler(prefill.url, decode.url)
    with served(handler) as url, ThreadPoolExecutor(options.clients) as pool:
        warm_ups = [complete(url, _draw(random.Random(i), 150)) for i in range(WARM_UPS)]
        fails = case.on_mismatch == "fail"
        if not fails and all(answer is None for answer in warm_ups):
            raise UserError(f"no request of {WARM_UPS} is answered by {decode.name}", where=str(decode.log))

        def send_all(prompts: Sequence[Sequence[int]]) -> list[list[int] | None]:
            return list(pool.map(lambda prompt: complete(url, prompt), prompts))

        def num_judged(answers: Sequence[list[int] | None]) -> int:
            return len(answers) if fails else sum(answer is not None for answer in answers)

        warm = send_all(draw_prompts(f"{case.name}, warm", 2 * options.clients))
        before = _settled(decode, (1 + num_judged(warm)) * case.tp)
        prefill_before = read_proofs(prefill.get("/metrics"))
        began = time.perf_counter()
        answers = send_all(prompts)
        ms = (time.perf_counter() - began) * 1e3 / len(prompts)
        after = _settled(decode, before.statuses.total() + num_judged(answers) * case.tp)
        digests = read_proofs(prefill.get("/metrics")).since(prefill_before)
    return Load(after.since(before), answers, ms, digests.mean_ms("digest"))


def _settled(decode: VllmServer, number: int) -> Proofs:
    """What D tells as soon as it has so many verdicts, or after SETTLE_S; without a connector that proves at
    once."""
    until = time.monotonic() + SETTLE_S
    while True:
        text = decode.get("/metrics")
        found = read_proofs(text)
        if found.statuses.total() >= number or "vllm:kv_proof_" not in text or time.monotonic() > until:
            return found
        time.sleep(0.2)


# --- all cases ------------------------------------------------------------------------------------

COLUMNS = (
    Column(title="planted", key="planted"),
    Column(title="model", key="family"),
    Column(title="D's TP", key="tp", spec=",d"),
    Column(title="on a mismatch", key="on_mismatch"),
    Column(title="sampled", key="sampling_rate", spec=".0%"),
    Column(title="requests", key="requests", spec=",d"),
    Column(title="failed", key="failed", spec=",d"),
    Column(title="other tokens than bare", key="unlike", spec=",d"),
    *(Column(title=status, key=status, spec=",d") for status in STATUSES),
    Column(title="first place named", key="place"),
    Column(title="digest at P, ms", key="prefill_digest_ms", spec=",.2f"),
    Column(title="digest at D, ms", key="decode_digest_ms", spec=",.2f"),
    Column(title="fetch beside the steps, ms", key="fetch_ms", spec=",.2f"),
    Column(title="ms per request bare", key="bare_ms", spec=",.0f"),
    Column(title="ms per request proving", key="ms", spec=",.0f"),
)


def measure_family(
    options: argparse.Namespace, launch: Launch, cases: Sequence[Case], page: Page
) -> Iterable[dict[str, Any]]:
    """A row per case, all of one model; what is wrong is told the page."""
    family = cases[0].family
    folder = Path("checkpoints/vllm") / family
    model = write_checkpoint(family, folder, overrides=OVERRIDES[family]).resolve()
    more = ["--no-enable-prefix-caching"] if family in NO_PREFIX_CACHE else []

    def loads(wanted: Sequence[Case], *, proves: bool) -> Iterator[tuple[Case, Load]]:
        kind = "proving" if proves else "bare"
        plain = [*more, *connector(launch, proves=proves)]
        with vllm_server(launch, model, f"P-{family}-{kind}", plain) as prefill:
            for case in wanted:
                told = connector(launch, case, proves=proves)
                ranks = ["--tensor-parallel-size", str(case.tp)]
                with vllm_server(launch, model, f"D-{case.name}-{kind}", [*more, *told, *ranks]) as decode:
                    prefill.wait_ready(launch.start_s)
                    decode.wait_ready(launch.start_s)
                    page.environment["vllm"] = json.loads(decode.get("/version"))["version"]
                    load = send(options, case, prefill, decode)
                print(f"{case.name}, {kind}: {load}", file=sys.stderr, flush=True)
                yield case, load

    bare = [Case(family, tp) for tp in sorted({case.tp for case in cases})]
    of_bare = {case.tp: load for case, load in loads(bare, proves=False)}
    for case, load in loads(cases, proves=True):
        num_failed = load.answers.count(None)
        unlike = [mine != theirs for mine, theirs in zip(load.answers, of_bare[case.tp].answers, strict=True)]
        page.wrong += judge(case, load.proofs, options.requests, num_failed, sum(unlike))
        place = load.proofs.named(case.planted) if case.planted else ", ".join(load.proofs.places)
        yield {
            **dataclasses.asdict(case),
            "planted": case.planted or "nothing",
            "requests": options.requests,
            "failed": num_failed,
            "unlike": sum(unlike) if case.is_answered_rightly else None,
            **{status: load.proofs.statuses[status] for status in STATUSES},
            "place": place or "none",
            "prefill_digest_ms": load.prefill_digest_ms,
            "decode_digest_ms": load.proofs.mean_ms("digest"),
            "fetch_ms": load.proofs.mean_ms("fetch"),
            "bare_ms": of_bare[case.tp].ms,
            "ms": load.ms,
        }


def measure(options: argparse.Namespace, page: Page) -> None:
    """Add a row per case, and what is wrong."""
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        raise UserError(f"no case has {options.only!r}", "--only", ", ".join(case.name for case in CASES))
    python = options.python if options.python.is_absolute() else ROOT / options.python
    if not python.exists():
        raise UserError(
            "no interpreter of vLLM's environment", str(python), "make vllm, or name one: --python"
        )
    rows: list[dict[str, Any]] = []
    with tempfile.NamedTemporaryFile("w", prefix="rayk-secret-") as secret:
        secret.write(secrets.token_hex(32))
        secret.flush()
        launch = Launch(python, Path(secret.name), options.out, options.start_s)
        for _, of_family in itertools.groupby(cases, lambda case: case.family):
            rows += measure_family(options, launch, list(of_family), page)
    page.say(
        f"vLLM {page.environment['vllm']}, one P at TP 1 per model, {options.requests} requests of "
        f"{options.clients} clients, float32, digests and rows kept of every request. Verdicts are D's, one "
        "per request and rank. A digest is made within a step of the engine: that is what a proof costs. The "
        "wall clock of a load says less, for it differs by more from one server to the next.",
        "",
    )
    page.tables = {"cases": rows}
    page.section("Planted bugs and costs", COLUMNS, rows)
    page.say(*page.wrong, STALE, "", "Needs: the environment of `make vllm`, and about 4 GB of memory.")


def main() -> int:
    return run(
        measure,
        __file__,
        title="The proving connector in vLLM's servers",
        keeps=True,
        requests={"type": above_zero, "default": 100, "help": "of each case"},
        clients={"type": above_zero, "default": 4, "help": "at once"},
        only=option("", "cases whose name contains this, e.g. qwen3-tp1-kv_swapped, right, tp2"),
        python=option(Path(".venv-vllm/bin/python"), "of vLLM's environment", type=Path),
        start_s=option(600.0, "seconds that a server may take to start"),
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))

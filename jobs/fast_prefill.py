"""Fast prefill on and off: what layers that reuse earlier layers' keys and values cost a prompt.

    python jobs/fast_prefill.py [--out DIR] > jobs/benchmarks/results/fast_prefill.md
    python jobs/fast_prefill.py --device cuda --dtype bfloat16 --hidden-size 896 --num-heads 14 \\
        --intermediate-size 4864                                   # the shape of Qwen2-0.5B
    ray job submit --working-dir . -- python jobs/fast_prefill.py --out /absolute/path

A Qwen2 model of 24 layers, written with random weights, whose last 12 layers reuse the keys and values of
the first 12. Layers 0-11 are the first group, 12-23 the second. Two engines of one rank load it, with fast
prefill and without; they take turns at every prompt, `--repeats` times after one uncounted round, so that
what else the machine does strikes both alike. Times are medians: of a group from where the one before it
ended to the end of its last layer (events on a GPU), of a request from its submission to its first token.

Exit status 1 when tokens of both engines differ, or from transformers' (prompts up to --reference-tokens),
or when computed token-layers are not those of the formula; with --check also when the second group takes a
tenth or more of its time, at a prompt of 4096 tokens or more, or no prompt is as long. In other dtypes than
float32 rounding may part tokens: they are told, not judged.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without an install
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fast_prefill_report import TABLES, make_page, markdown  # noqa: E402
from layer_clock import LayerClock  # noqa: E402
from layer_costs import group_flops, num_token_layers  # noqa: E402

from jobs.benchmarks.harness import ending  # noqa: E402
from rayk.cli.guard import run_guarded  # noqa: E402
from rayk.engine.build import make_leader  # noqa: E402
from rayk.engine.leader import RequestEvent  # noqa: E402
from rayk.engine.loop import EngineLoop, NoExtension  # noqa: E402
from rayk.engine.rank import EngineRank  # noqa: E402
from rayk.models.config import DecoderConfig  # noqa: E402
from rayk.models.engine_plan import plan_engine  # noqa: E402
from rayk.oracle.checkpoint import write_checkpoint  # noqa: E402
from rayk.oracle.reference import Reference  # noqa: E402
from rayk.parallel.local import LocalComm  # noqa: E402
from rayk.reports import collect_environment  # noqa: E402
from rayk.reports.files import write_text  # noqa: E402
from rayk.reports.html import write_page  # noqa: E402
from rayk.reports.table_files import claim_folder, write_tables  # noqa: E402
from rayk.types.config import EngineConfig  # noqa: E402
from rayk.types.errors import UserError  # noqa: E402
from rayk.types.request import Request, SamplingParams  # noqa: E402

GROUPS = ("first", "second")
BLOCK_SIZE = 16
TARGET_RATIO, TARGET_TOKENS = 0.1, 4096
"""The second group's time with fast prefill over that without, from prompts of so many tokens on."""


@dataclass(frozen=True)
class Measured:
    """One request on one engine."""

    ttft_ms: float
    group_ms: tuple[float, float]
    """Of its prefill."""
    group_token_layers: tuple[int, int]
    """Of its prefill: tokens computed, summed over the group's layers."""
    num_token_layers: int
    """Of all its steps and layers, as the engine counts."""
    token_ids: tuple[int, ...]


class Engine:
    """One rank in this thread, one request at a time."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.rank = EngineRank(config, LocalComm())
        self.model: DecoderConfig = self.rank.model_config
        second = self.model.fast_prefill_layers
        self.groups = (range(second.start), second)
        self._clock = LayerClock(self.rank.decoder, self.groups, self.rank.device)
        self._leader = make_leader(self.rank)
        self._loop = EngineLoop(self.rank, NoExtension(), self._leader)
        self._num_requests = 0

    def run(self, prompt: Sequence[int], max_tokens: int) -> Measured:
        """Prefill a prompt and decode greedily."""
        self._num_requests += 1
        request = Request(
            request_id=str(self._num_requests),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        events: queue.SimpleQueue[RequestEvent] = queue.SimpleQueue()
        before = self.rank.num_token_layers
        started = time.perf_counter()
        self._leader.submit(request, events.put)
        tokens: list[int] = []
        ttft_ms, prefill = 0.0, ((0.0, 0.0), (0, 0))
        for event in self._events(events):
            if not tokens:
                ttft_ms = (time.perf_counter() - started) * 1e3
                prefill = self._clock.take()  # type: ignore[assignment]
            tokens += event.token_ids
        _, decoded = self._clock.take()
        total = self.rank.num_token_layers - before
        assert total == sum(prefill[1]) + sum(decoded), "the engine counts other tokens than its layers saw"
        return Measured(ttft_ms, *prefill, total, tuple(tokens))

    def _events(self, events: queue.SimpleQueue[RequestEvent]) -> Iterator[RequestEvent]:
        while True:
            while events.empty():
                self._loop.turn()
            event = events.get_nowait()
            if event.error is not None:
                raise event.error
            yield event
            if event.is_last:
                return


@dataclass
class Run:
    """Everything measured, by (prompt tokens, fast prefill), one entry per repeat."""

    prompts: dict[int, tuple[int, ...]]
    engines: dict[bool, Engine]
    measured: dict[tuple[int, bool], list[Measured]] = field(default_factory=dict)
    reference: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Prompt tokens -> transformers' tokens."""

    def median(self, num_tokens: int, fast: bool, pick: Callable[[Measured], float]) -> float:
        """Over repeats."""
        return statistics.median(pick(m) for m in self.measured[num_tokens, fast])

    def wrong_counts(self) -> Iterator[str]:
        """Where other token-layers were computed than the formula says."""
        for (num_tokens, fast), measured in self.measured.items():
            num_decoded = len(measured[0].token_ids) - 1
            model = self.engines[fast].model
            wanted = num_token_layers(model, num_tokens, fast_prefill=fast, num_decoded=num_decoded)
            for repeat, one in enumerate(measured):
                if one.num_token_layers != wanted:
                    where = _where(num_tokens, fast, repeat)
                    yield f"{where}: {one.num_token_layers} token-layers, not {wanted}"

    def wrong_tokens(self) -> Iterator[str]:
        """Where tokens are not transformers', or, of a prompt that it was not asked about, not those of the
        first repeat without fast prefill."""
        for (num_tokens, fast), measured in self.measured.items():
            asked = num_tokens in self.reference
            wanted = self.reference[num_tokens] if asked else self.measured[num_tokens, False][0].token_ids
            for repeat, one in enumerate(measured):
                if one.token_ids != wanted:
                    where = _where(num_tokens, fast, repeat)
                    yield f"{where}: {one.token_ids}, {'transformers' if asked else 'off'}: {wanted}"


def _where(num_tokens: int, fast: bool, repeat: int) -> str:
    return f"{num_tokens} tokens, fast prefill {'on' if fast else 'off'}, repeat {repeat}"


def measure(options: argparse.Namespace, folder: Path) -> Run:
    """Run all prompts on both engines, in turns."""
    prompts = {n: make_prompt(n, options) for n in sorted(set(options.prompts))}
    longest = max(prompts) + options.max_tokens
    off = EngineConfig(
        model=str(folder),
        dtype=options.dtype,
        device=options.device,
        block_size=BLOCK_SIZE,
        num_blocks=-(-longest // BLOCK_SIZE) + 2,
        max_batch_tokens=options.chunk or max(prompts),
        max_seqs=1,
        attention_backend=options.backend,
        cuda_graphs="never",  # layers are watched from the host
    )
    engines = {fast: Engine(replace(off, fast_prefill=fast)) for fast in (False, True)}
    assert len(engines[True].rank.fast_prefill_layers) == options.num_layers - options.num_own_layers
    run = Run(prompts, engines)
    for repeat in range(-1, options.repeats):
        for num_tokens, prompt in prompts.items():
            for fast in (False, True) if repeat % 2 else (True, False):
                found = engines[fast].run(prompt, options.max_tokens)
                if repeat >= 0:
                    run.measured.setdefault((num_tokens, fast), []).append(found)
        print(f"round {repeat + 1} of {options.repeats}", file=sys.stderr, flush=True)
    short = [n for n in prompts if n <= options.reference_tokens] if options.dtype == "float32" else []
    if short:
        answers = Reference(folder).generate([prompts[n] for n in short], options.max_tokens, ignore_eos=True)
        run.reference = {n: answer.token_ids for n, answer in zip(short, answers, strict=True)}
    return run


def make_prompt(num_tokens: int, options: argparse.Namespace) -> tuple[int, ...]:
    """Random tokens, no special ones (they are the vocabulary's first)."""
    draw = random.Random(f"{options.seed}/{num_tokens}")
    return tuple(draw.randrange(8, options.vocab_size) for _ in range(num_tokens))


def kv_bytes(config: EngineConfig, model: DecoderConfig, num_tokens: int) -> int:
    """What the blocks of a request of so many tokens take in all layers."""
    geometry = plan_engine(config, model).ranks[0]
    return sum(len(g.group.layers) * g.page_bytes * -(-num_tokens // g.rows) for g in geometry.groups)


def tables(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Rows of groups, requests and prompts."""
    groups, requests = [], []
    for (num_tokens, fast), measured in run.measured.items():
        for repeat, one in enumerate(measured):
            key = {"num_prompt_tokens": num_tokens, "fast_prefill": fast, "repeat": repeat}
            requests.append(
                key
                | {"ttft_ms": one.ttft_ms, "num_token_layers": one.num_token_layers}
                | {"output_token_ids": list(one.token_ids)}
            )
            groups += [
                key
                | {"group": name, "first_layer": layers.start, "last_layer": layers.stop - 1}
                | {"time_ms": one.group_ms[number], "num_token_layers": one.group_token_layers[number]}
                | {"flops": _flops(run, num_tokens, fast, number)}
                for number, (name, layers) in enumerate(zip(GROUPS, run.engines[fast].groups, strict=True))
            ]
    prompts = [_prompt_row(run, num_tokens) for num_tokens in run.prompts]
    return dict(zip(TABLES, (prompts, groups, requests), strict=True))


def _flops(run: Run, num_tokens: int, fast: bool, number: int) -> int:
    """Of a group in the prefill of a prompt."""
    engine = run.engines[fast]
    only_last = fast and GROUPS[number] == "second"
    positions = range(num_tokens - 1 if only_last else 0, num_tokens)
    return group_flops(engine.model, engine.groups[number], positions)


def _prompt_row(run: Run, num_tokens: int) -> dict[str, Any]:
    """Medians and counts of one prompt, on and off side by side."""
    row: dict[str, Any] = {"num_prompt_tokens": num_tokens}
    for fast, side in ((False, "off"), (True, "on")):
        for number, name in enumerate(GROUPS):
            times = [one.group_ms[number] for one in run.measured[num_tokens, fast]]
            row[f"{name}_{side}_ms"] = statistics.median(times)
            row[f"{name}_{side}_min_ms"], row[f"{name}_{side}_max_ms"] = min(times), max(times)
            row[f"{name}_{side}_flops"] = _flops(run, num_tokens, fast, number)
        row[f"ttft_{side}_ms"] = run.median(num_tokens, fast, lambda m: m.ttft_ms)
        row[f"token_layers_{side}"] = sum(run.measured[num_tokens, fast][0].group_token_layers)
    for name in (*GROUPS, "ttft"):
        row[f"{name}_ratio"] = row[f"{name}_on_ms"] / row[f"{name}_off_ms"]
    pairs = zip(run.measured[num_tokens, True], run.measured[num_tokens, False], strict=True)
    row["second_worst_ratio"] = max(on.group_ms[1] / off.group_ms[1] for on, off in pairs)
    engine = run.engines[True]
    unshared = replace(engine.model, layers=tuple(replace(c, kv_source=None) for c in engine.model.layers))
    row["kv_bytes"] = kv_bytes(engine.config, engine.model, num_tokens)
    row["kv_saved_bytes"] = kv_bytes(engine.config, unshared, num_tokens) - row["kv_bytes"]
    told = {one.token_ids for fast in (False, True) for one in run.measured[num_tokens, fast]}
    row["tokens"] = "equal" if len(told) == 1 else "differ"
    wanted = run.reference.get(num_tokens)
    row["transformers"] = None if wanted is None else "equal" if told == {wanted} else "differ"
    return row


def missed_targets(prompts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where rows of the table of prompts miss the target, or why they cannot show that it is met."""
    judged = [row for row in prompts if row["num_prompt_tokens"] >= TARGET_TOKENS]
    if not judged:
        return [f"no prompt of {TARGET_TOKENS} tokens or more: the second group's time is not judged"]
    return [
        f"{row['num_prompt_tokens']} tokens: the second group takes {row['second_ratio']:.3f} of its time, "
        f"not less than {TARGET_RATIO:g}"
        for row in judged
        if not row["second_ratio"] < TARGET_RATIO
    ]


def write_model(options: argparse.Namespace) -> Path:
    """The checkpoint, unless the folder holds it. Raises UserError for sizes no model can have."""
    num_own, num_shared = options.num_own_layers, options.num_layers - options.num_own_layers
    if not 0 < num_shared <= num_own:
        raise UserError(
            f"--num-own-layers {num_own} of {options.num_layers} layers",
            mend="at least half of the layers, and not all, have keys and values of their own",
        )
    if options.num_heads % options.num_kv_heads or options.hidden_size % (2 * options.num_heads):
        raise UserError(
            f"--hidden-size {options.hidden_size}, --num-heads {options.num_heads}, --num-kv-heads "
            f"{options.num_kv_heads}",
            mend="KV heads divide the heads, and twice the heads divide the hidden size (rope turns pairs)",
        )
    overrides = {
        "num_hidden_layers": options.num_layers,
        "hidden_size": options.hidden_size,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "intermediate_size": options.intermediate_size,
        "vocab_size": options.vocab_size,
        # The same checkpoint serves any prompts of the usual lengths.
        "max_position_embeddings": max(16384, max(options.prompts) + options.max_tokens),
        "kv_sharing_targets": [None] * num_own + list(range(num_shared)),
    }
    print(f"checkpoint {options.checkpoint}", file=sys.stderr, flush=True)
    return write_checkpoint("qwen2", options.checkpoint, overrides=overrides)


def run_job(options: argparse.Namespace) -> int:
    """Measure, write, print; the exit status."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is visible", mend="--device cpu")
    torch.set_num_threads(options.threads)
    environment = collect_environment(
        command=sys.argv,
        seeds={"prompts": options.seed},
        threads=options.threads,
        load_at_start=os.getloadavg()[0],
    )
    now = datetime.datetime.now().astimezone()
    out = options.out or Path("runs") / f"fast-prefill-{now:%Y%m%d-%H%M%S}"
    claim_folder(out, TABLES)
    run = measure(options, write_model(options))
    environment["load_at_end"] = os.getloadavg()[0]
    environment["attention"] = [backend.name for backend in run.engines[True].rank.backends.used]
    found = tables(run)
    write_tables(found, out)
    write_text(out / "environment.json", json.dumps(environment, indent=2) + "\n")
    page = make_page(found, run.engines[True].model, options, environment)
    write_page(page, out / "report.html")
    text = markdown(found["prompts"], run.engines[True].model, options, environment)
    write_text(out / "report.md", text + "\n")
    print(text)
    wrong_tokens, failures = list(run.wrong_tokens()), list(run.wrong_counts())
    if options.check:
        failures += missed_targets(found["prompts"])
    print(f"report: {out / 'report.html'}", file=sys.stderr)
    # Of lower precision, other tokens are told only.
    return max(ending(wrong_tokens, check=options.dtype == "float32"), ending(failures, check=True))


def _positive(text: str) -> int:
    """Raises ValueError, which argparse reports."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def _not_negative(text: str) -> int:
    """Raises ValueError, which argparse reports."""
    if int(text) < 0:
        raise ValueError
    return int(text)


_positive.__name__, _not_negative.__name__ = "number above 0", "number from 0 on"  # argparse says it


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, kind, meaning in (
        ("num-layers", 24, _positive, "of the model"),
        ("num-own-layers", 12, _positive, "layers with keys and values of their own; those after reuse them"),
        ("hidden-size", 128, _positive, "of the model; a multiple of twice the heads"),
        ("num-heads", 4, _positive, "query heads"),
        ("num-kv-heads", 2, _positive, "heads of keys and values; they divide the query heads"),
        ("intermediate-size", 512, _positive, "of each layer's MLP"),
        ("vocab-size", 515, _positive, "of the model"),
        ("repeats", 5, _positive, "of every prompt on either engine, after one uncounted round"),
        ("max-tokens", 8, _positive, "output tokens of a request; only its prefill is timed"),
        ("reference-tokens", 1024, _not_negative, "longest prompt transformers is asked about; 0: none"),
        ("seed", 0, int, "of the prompts"),
        ("threads", 1, _positive, "of torch and the CPU kernels"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{meaning} (default: %(default)s)")
    parser.add_argument(
        "--prompts",
        type=_positive,
        nargs="+",
        default=[512, 1024, 2048, 4096, 8192],
        metavar="N",
        help="tokens of each prompt (default: 512 to 8192)",
    )
    parser.add_argument(
        "--chunk", type=_positive, help="tokens of a prefill step (default: the longest prompt)"
    )
    dtypes = ["float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="default: %(default)s")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
    parser.add_argument("--backend", default="auto", help="attention backend (default: %(default)s)")
    folder = Path("checkpoints/fast-prefill")
    parser.add_argument(
        "--checkpoint", type=Path, default=folder, help="the model, written if missing (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/fast-prefill-<time>)")
    parser.add_argument("--check", action="store_true", help="a missed target is exit status 1")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse_options()
    sys.exit(run_guarded(lambda: run_job(chosen)))

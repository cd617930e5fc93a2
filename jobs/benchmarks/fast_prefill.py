"""Fast prefill on and off: what layers that reuse earlier layers' keys and values cost a prompt.

    python jobs/benchmarks/fast_prefill.py --check --record
    python jobs/benchmarks/fast_prefill.py --device cuda --dtype bfloat16 --hidden-size 896 --num-heads 14 \\
        --intermediate-size 4864                                   # the shape of Qwen2-0.5B
    ray job submit --working-dir . -- python jobs/benchmarks/fast_prefill.py --out /absolute/path

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
import itertools
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, above_zero, lines, option, run
from jobs.benchmarks.layer_clock import LayerClock
from jobs.benchmarks.layer_costs import group_flops, num_token_layers
from rayk.cli.guard import run_guarded
from rayk.engine.build import make_leader
from rayk.engine.leader import RequestEvent
from rayk.engine.loop import EngineLoop, NoExtension
from rayk.engine.rank import EngineRank
from rayk.models.config import DecoderConfig
from rayk.models.engine_plan import plan_engine
from rayk.oracle.checkpoint import write_checkpoint
from rayk.oracle.reference import Reference
from rayk.parallel.local import LocalComm
from rayk.reports.page import Column, Plot
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from rayk.types.request import Request, SamplingParams

GROUPS = ("first", "second")
BLOCK_SIZE = 16
TARGET_RATIO, TARGET_TOKENS = 0.1, 4096
"""The second group's time with fast prefill over that without, from prompts of so many tokens on."""
PUBLISHED_LAYERS, PUBLISHED_OWN_LAYERS = 24, 12
PUBLISHED_TOKENS, PUBLISHED_OFF_MS, PUBLISHED_ON_MS = 8192, 16.6, 9.7
PUBLISHED = (
    f"The published experiment: a Qwen2-like model of {PUBLISHED_LAYERS} layers whose last "
    f"{PUBLISHED_LAYERS - PUBLISHED_OWN_LAYERS} reuse the first {PUBLISHED_OWN_LAYERS}, on a GPU; "
    f"at {PUBLISHED_TOKENS:,} tokens the second layer group took {PUBLISHED_OFF_MS} ms without fast prefill "
    f"and {PUBLISHED_ON_MS} ms with it, a ratio of {PUBLISHED_ON_MS / PUBLISHED_OFF_MS:.2f}. Those times and "
    "that ratio are of another machine and another engine and were not measured here: they say nothing of "
    "how fast ours is. What is repeated is the form: two groups of layers, of which the second reuses the "
    "first's keys and values."
)
UNSTEADY = 2.0
"""Slowest over fastest repeat of a group from which on a run says that its times are unsteady."""

COLUMNS = (
    Column(title="prompt tokens", key="num_prompt_tokens", spec=",d"),
    Column(title="first group off, ms", key="first_off_ms", spec=",.1f"),
    Column(title="first group on, ms", key="first_on_ms", spec=",.1f"),
    Column(title="second group off, ms", key="second_off_ms", spec=",.1f"),
    Column(title="second group on, ms", key="second_on_ms", spec=",.2f"),
    Column(title="second group, on / off", key="second_ratio", spec=".4f"),
    Column(title="in the worst repeat", key="second_worst_ratio", spec=".4f"),
    Column(title="TTFT off, ms", key="ttft_off_ms", spec=",.1f"),
    Column(title="TTFT on, ms", key="ttft_on_ms", spec=",.1f"),
    Column(title="TTFT, on / off", key="ttft_ratio", spec=".3f"),
)
COUNTS = (
    Column(title="prompt tokens", key="num_prompt_tokens", spec=",d"),
    Column(title="first group, GFLOP", key="first_gflop", spec=",.3f"),
    Column(title="second group off, GFLOP", key="second_off_gflop", spec=",.3f"),
    Column(title="second group on, GFLOP", key="second_on_gflop", spec=",.5f"),
    Column(title="token-layers off", key="token_layers_off", spec=",d"),
    Column(title="token-layers on", key="token_layers_on", spec=",d"),
    Column(title="KV, MiB", key="kv_mib", spec=",.2f"),
    Column(title="saved by sharing, MiB", key="kv_saved_mib", spec=",.2f"),
    Column(title="tokens on and off", key="tokens"),
    Column(title="tokens and transformers'", key="transformers"),
)

Rows = Sequence[Mapping[str, Any]]


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
    return {"prompts": prompts, "groups": groups, "requests": requests}


def _flops(run: Run, num_tokens: int, fast: bool, number: int) -> int:
    engine = run.engines[fast]
    only_last = fast and GROUPS[number] == "second"
    positions = range(num_tokens - 1 if only_last else 0, num_tokens)
    return group_flops(engine.model, engine.groups[number], positions)


def _prompt_row(run: Run, num_tokens: int) -> dict[str, Any]:
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


def counted(rows: Rows) -> list[dict[str, Any]]:
    return [
        {
            **row,
            "first_gflop": row["first_off_flops"] / 1e9,
            "second_off_gflop": row["second_off_flops"] / 1e9,
            "second_on_gflop": row["second_on_flops"] / 1e9,
            "kv_mib": row["kv_bytes"] / 2**20,
            "kv_saved_mib": row["kv_saved_bytes"] / 2**20,
            "transformers": row["transformers"] or "not asked",
        }
        for row in rows
    ]


def published(rows: Rows, model: DecoderConfig) -> str:
    """The published experiment, how this run differs from it in form, and this run's own ratios."""
    parts = [PUBLISHED]
    num_layers, num_own = model.num_layers, model.fast_prefill_layers.start
    if (num_layers, num_own) != (PUBLISHED_LAYERS, PUBLISHED_OWN_LAYERS):
        parts.append(
            f"Unlike there, {num_own} of {num_layers} layers have keys and values of their own here."
        )
    if all(row["num_prompt_tokens"] != PUBLISHED_TOKENS for row in rows):
        parts.append(f"No prompt of {PUBLISHED_TOKENS:,} tokens was run here.")
    ratios = "; ".join(
        f"{row['num_prompt_tokens']:,} tokens {row['first_ratio']:.2f} and {row['second_ratio']:.2g}"
        for row in rows
    )
    parts.append(
        f"What this run took with fast prefill of its time without, first and second group: {ratios}."
    )
    return " ".join(parts)


def unsteady(rows: Rows) -> list[str]:
    """The groups whose repeats differ by more than a factor UNSTEADY, in words."""
    found = []
    for row in rows:
        for group, side in itertools.product(("first", "second"), ("off", "on")):
            low, high = row[f"{group}_{side}_min_ms"], row[f"{group}_{side}_max_ms"]
            if high > UNSTEADY * low:
                what = f"{row['num_prompt_tokens']:,} tokens, {group} group {side}"
                found.append(f"{what}: {low:,.2f} to {high:,.2f} ms")
    return found


def warning(rows: Rows) -> str:
    """What a reader must know of unsteady times; empty where they are steady."""
    found = unsteady(rows)
    if not found:
        return ""
    return (
        f"Unsteady times: repeats of one group differ by more than a factor {UNSTEADY:g}, as on a machine "
        f"that does something else: {'; '.join(found)}."
    )


def about(model: DecoderConfig, options: argparse.Namespace) -> str:
    second = model.fast_prefill_layers
    chunk = f"steps of {options.chunk:,} tokens" if options.chunk else "one step"
    last_own = options.num_own_layers - 1
    return (
        f"{model.num_layers} Qwen2 layers, hidden {model.hidden_size}, {model.num_query_heads} query and "
        f"{model.num_kv_heads} KV heads of {model.head_size}, MLP {options.intermediate_size}, random "
        f"weights, {options.dtype}; layers {second.start}-{second.stop - 1} (the second group) reuse keys "
        f"and values of layers 0-{last_own} (the first). One request at a time, its prompt in {chunk}; "
        f"medians of {options.repeats} repeats, on and off in turns within one run."
    )


def figures(rows: Rows) -> list[Plot]:
    sizes = [row["num_prompt_tokens"] for row in rows]

    def of(*keys: str) -> dict[str, tuple[list[int], list[float]]]:
        return {key: (sizes, [row[key] for row in rows]) for key in keys}

    times = [f"{group}_{side}_ms" for group in (*GROUPS, "ttft") for side in ("off", "on")]
    return [
        lines("times", "Time of the layer groups and to the first token", of(*times)),
        lines("ratios", "What is left of the time", of("second_ratio", "ttft_ratio"), y="on / off"),
        lines("flops", "Operations", of("first_gflop", "second_off_gflop", "second_on_gflop"), y="GFLOP"),
    ]


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Add the times and the counts of each prompt; returns the missed targets."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is visible", mend="--device cpu")
    torch.set_num_threads(options.threads)
    found = measure(options, write_model(options))
    engine = found.engines[True]
    page.environment |= {"seeds": {"prompts": options.seed}, "threads": options.threads}
    page.tables = tables(found)
    rows = counted(page.tables["prompts"])
    page.say(about(engine.model, options), "")
    page.say(f"Attention: {', '.join(backend.name for backend in engine.rank.backends.used)}.", "")
    page.section("Times", COLUMNS, rows, note="Medians of each group.", plots=figures(rows))
    page.section(
        "What is computed and kept", COUNTS, rows, note="Operations: jobs/benchmarks/layer_costs.py."
    )
    page.say(*([f"**{warning(rows)}**", ""] if warning(rows) else []), published(rows, engine.model))
    wrong_tokens = list(found.wrong_tokens())
    for line in wrong_tokens if options.dtype != "float32" else []:
        print(line, file=sys.stderr)  # of lower precision, other tokens are told only
    page.wrong += [*(wrong_tokens if options.dtype == "float32" else []), *found.wrong_counts()]
    return missed_targets(page.tables["prompts"])


def main(argv: Sequence[str] | None = None) -> int:
    def number(default: int, text: str) -> dict[str, Any]:
        return option(default, text, type=above_zero)

    return run(
        fill,
        __file__,
        title="Fast prefill",
        argv=argv,
        keeps=True,
        num_layers=number(24, "of the model"),
        num_own_layers=number(12, "layers with keys and values of their own; those after reuse them"),
        hidden_size=number(128, "of the model; a multiple of twice the heads"),
        num_heads=number(4, "query heads"),
        num_kv_heads=number(2, "heads of keys and values; they divide the query heads"),
        intermediate_size=number(512, "of each layer's MLP"),
        vocab_size=number(515, "of the model"),
        repeats=number(5, "of every prompt on either engine, after one uncounted round"),
        max_tokens=number(8, "output tokens of a request; only its prefill is timed"),
        reference_tokens=option(1024, "longest prompt transformers is asked about; 0: none"),
        seed=option(0, "of the prompts"),
        threads=number(1, "of torch and the CPU kernels"),
        prompts=option([512, 1024, 2048, 4096, 8192], "tokens of each", type=above_zero, nargs="+"),
        chunk=option(None, "tokens of a prefill step; else the longest prompt", type=above_zero),
        dtype=option("float32", "of the model", choices=["float32", "bfloat16", "float16"]),
        device=option("cpu", "of both engines", choices=["cpu", "cuda"]),
        backend=option("auto", "of attention"),
        checkpoint=option(Path("checkpoints/fast-prefill"), "the model, written if missing", type=Path),
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))

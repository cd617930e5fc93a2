"""What the host tier of KV pages saves: time to first token of prompts that were computed before.

    python jobs/benchmarks/offload.py [--check] [--record]     # about 10 minutes on 2 cores
    python jobs/benchmarks/offload.py --quick                  # tiny models and short prompts: does it run?

For each model, engines and host tiers are Ray actors, and NIXL moves pages between them, as in a server.
Every prompt, drawn anew in every repeat, is asked for in these ways, in turns: `device` and `host` --hits
times, `cold` and `disk` --colds times, the others once.

    cold            an engine without a tier computes it
    storing         an engine computes it and stores it in its host tier meanwhile
    device          the same engine once more: its own prefix cache has it
    host            another engine, which keeps no prefixes itself, loads it from that tier: canonical pages,
                    on both sides all layers of a block in one piece
    host per layer  the same with per-layer pages in engines and tier (computed and stored by a third engine)
    disk            after all prompts of the repeat, and before each turn, the tiers' processes are killed;
                    the new ones find their pages on disk (dropped from the system's cache before), and that
                    engine loads them

`device per layer` and `disk per layer` are the same with per-layer pages.

A prompt of n tokens has one more, which is computed in all ways: its logits are asked for. Before that, many
short prompts fill the tiers and are asked for in another order, so that the blocks of a prompt lie apart, as
in a tier that many have used. memcpy is torch's copy_ of as many bytes as a host hit moved, in the same run.

Exit status 1 when tokens differ from those of `cold`, or KV came from elsewhere than it should; with --check
also when, for prompts of 512 tokens or more, a host hit is not faster than computing the prompt, or than with
per-layer pages (medians of the ratios within each repeat).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, above_zero, lines, option, run
from jobs.benchmarks.offload_engines import Answer, Deployment, drop_page_cache
from jobs.benchmarks.offload_summary import COLUMNS, JUDGED_FROM, KINDS, failures, summary
from rayk.actors.launch import connect, gpu_share, num_cluster_gpus
from rayk.cli.guard import run_guarded
from rayk.kv.geometry import plan_rank
from rayk.kv.layout import KVCacheLayout
from rayk.models.families import load_config
from rayk.models.kv_specs import engine_groups
from rayk.models.tensor_parallel import why_tp_unsupported
from rayk.oracle.checkpoint import write_checkpoint
from rayk.reports.page import Plot
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from rayk.types.offload import OffloadSettings
from rayk.types.rows import moving_ns

CANONICAL, PER_LAYER = "BHLNC", "LBNHC"
TIERS = {"canonical": CANONICAL, "per_layer": PER_LAYER}
ENGINES: Mapping[str, tuple[str, str | None]] = {
    "plain": (CANONICAL, None),
    "writer": (CANONICAL, "canonical"),
    "reader": (CANONICAL, "canonical"),
    "layer_writer": (PER_LAYER, "per_layer"),
    "layer_reader": (PER_LAYER, "per_layer"),
}
"""Engine -> layout of its pages, host tier."""
WRITERS, READERS = ("writer", "layer_writer"), ("reader", "layer_reader")
AT_ONCE = 16
"""Short prompts that are asked for together."""
# Only writers have a prefix cache of their own: the others have to be given every prompt anew.
COMPUTING = {"cold": "plain", "storing": "writer", "storing per layer": "layer_writer"}
FOUND = {
    "device": "writer",
    "device per layer": "layer_writer",
    "host": "reader",
    "host per layer": "layer_reader",
}
ON_DISK = {"disk": "reader", "disk per layer": "layer_reader"}
"""Kind of request -> engine that is asked."""
MAX_TOKENS = 2
MEMCPY_ROUNDS = 5
PAUSE_S = 0.02
"""Before every request: what the one before left to be done, such as the end of its lease, is done then."""
Order = tuple[tuple[str, str], ...]
"""(kind, engine) of the requests of a turn."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model: real shapes of a few layers, random weights."""

    family: str
    config: Mapping[str, Any]
    """Overrides of its config class."""
    state_block_size: int | None = None


POSITIONS = {"max_position_embeddings": 16384}
MODELS: Mapping[str, Model] = {
    # 8 layers with a window, 8 without. Every token goes to all experts: so many random routers would not
    # choose clearly.
    "gpt_oss": Model(
        family="gpt_oss",
        config=POSITIONS
        | {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 16, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128}
        | {"num_local_experts": 4, "num_experts_per_tok": 4},
    ),
    # 20 layers with a window, 4 without.
    "gemma3": Model(
        family="gemma3",
        config=POSITIONS
        | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64}
        | {"sliding_window": 512, "sliding_window_pattern": 6},
    ),
    # 8 Mamba-2 layers, 4 of attention, 4 MLPs.
    "nemotron_h": Model(
        family="nemotron_h",
        config=POSITIONS
        | {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "head_dim": 64}
        | {"num_key_value_heads": 4, "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 120}
        | {"n_groups": 2, "chunk_size": 128}
        | {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"] * 4},
        state_block_size=512,
    ),
}
QUICK: Mapping[str, Model] = {
    "gpt_oss": Model(family="gpt_oss", config={}),
    "gemma3": Model(family="gemma3", config={}),
    "nemotron_h": Model(family="nemotron_h", config={}, state_block_size=64),
}


@dataclass
class Run:
    model: str
    options: argparse.Namespace
    deployment: Deployment
    folder: Path
    """Of the tiers' pages on disk."""
    rows: list[dict[str, Any]] = field(default_factory=list)

    async def warm_up(self, unit: int, num_prompts: int) -> None:
        """Fill the tiers with short prompts of other people, and ask for them in another order: what goes
        first, and so the blocks that others get, is then spread over the whole tier."""
        prompts = [make_prompt(self.options.seed, self.model, -1 - i, unit) for i in range(num_prompts)]
        mixed = random.Random(self.options.seed).sample(prompts, len(prompts))
        for names, asked in ((WRITERS, prompts), (READERS, mixed)):
            for name in names:
                for start in range(0, len(asked), AT_ONCE):
                    batch = asked[start : start + AT_ONCE]
                    await asyncio.gather(*(self.deployment.ask(name, p, 1) for p in batch))
                await self.deployment.settle(name)

    async def repeat(self, number: int, sizes: Sequence[int]) -> None:
        prompts = {n: make_prompt(self.options.seed, self.model, number, n) for n in sizes}
        for n, prompt in prompts.items():
            for kinds in (COMPUTING, FOUND):
                num_turns = self.options.hits if kinds is FOUND else 1
                for turn, order in enumerate(self._orders(kinds, number, num_turns)):
                    for kind, name in order:
                        await self._ask(number, turn, n, kind, name, prompt)
                for name in kinds.values():
                    await self.deployment.settle(name)
                if kinds is COMPUTING:
                    # The engine without a tier forgets what it computed.
                    for turn in range(1, self.options.colds):
                        await self._ask(number, turn, n, "cold", kinds["cold"], prompt)
        for turn, order in enumerate(self._orders(ON_DISK, number, self.options.colds)):
            await self._from_disk(number, turn, order, prompts)
        self._copy(number)

    async def _from_disk(
        self, number: int, turn: int, order: Order, prompts: Mapping[int, Sequence[int]]
    ) -> None:
        """Every prompt once more, when nothing is in host memory any more."""
        for tier in TIERS:
            await self.deployment.restart(tier)
        drop_page_cache(self.folder)
        for n, prompt in prompts.items():
            for kind, name in order:
                await self._ask(number, turn, n, kind, name, prompt)
                await self.deployment.settle(name)

    def _orders(self, kinds: Mapping[str, str], number: int, num_turns: int) -> list[Order]:
        """Of each turn, in which order a prompt is asked for. Every order comes as often as any other, as far
        as that goes: what one leaves behind, such as warm caches, is nobody's gain."""
        orders = list(itertools.permutations(kinds.items()))
        random.Random(f"{self.options.seed}/{self.model}/{len(orders)}").shuffle(orders)
        start = number * num_turns  # repeats go on in the list
        return [orders[(start + turn) % len(orders)] for turn in range(num_turns)]

    def _copy(self, number: int) -> None:
        """Time memcpy of as many bytes as loads of this repeat moved."""
        rows = [row for row in self.rows if row["repeat"] == number and row["bytes"]]
        took = {n: memcpy_ms(n, self.options.device) for n in {row["bytes"] for row in rows}}
        for row in rows:
            row["memcpy_ms"] = took[row["bytes"]]

    async def _ask(self, number: int, turn: int, n: int, kind: str, name: str, prompt: Sequence[int]) -> None:
        await asyncio.sleep(PAUSE_S)
        answer = await self.deployment.ask(name, prompt, MAX_TOKENS)
        row = {"model": self.model, "num_prompt_tokens": n, "kind": kind, "repeat": number, "turn": turn}
        row |= _measured(answer)
        row["memcpy_ms"] = None
        self.rows.append(row)


def _measured(answer: Answer) -> dict[str, Any]:
    info = answer.info
    rows = [row for row in answer.transfers if row.purpose == "load"]
    moved = sum(row.bytes for row in rows)
    moving = moving_ns(rows)
    merged = [
        row.num_descriptors if row.num_descriptors_merged is None else row.num_descriptors_merged
        for row in rows
    ]
    return {
        "ttft_ms": answer.ttft_ms,
        "num_cached_tokens": info.get("num_cached_tokens", 0),
        "num_host_tokens": info.get("num_host_tokens", 0),
        "num_disk_tokens": info.get("num_disk_tokens", 0),
        "bytes": moved,
        "num_descriptors": sum(row.num_descriptors for row in rows),
        "num_descriptors_merged": sum(merged),
        "load_ms": info.get("load_ns", 0) / 1e6 or None,
        "look_up_ms": (info["found_ns"] - info["asked_ns"]) / 1e6 if "loaded_ns" in info else None,
        "move_ms": moving / 1e6 if moved else None,
        "digest_ms": max((row.digest_ns for row in rows), default=0) / 1e6 or None,
        "gb_per_s": moved / moving if moving else None,
        "offload_failure": str(info.get("offload_failure", "")),
        "token_ids": list(answer.token_ids),
    }


def make_prompt(seed: int, model: str, repeat: int, num_tokens: int) -> tuple[int, ...]:
    """Random tokens, no special ones (they are the vocabulary's first), and one more."""
    draw = random.Random(f"{seed}/{model}/{repeat}/{num_tokens}")
    return tuple(draw.randrange(8, 512) for _ in range(num_tokens + 1))


def memcpy_ms(num_bytes: int, device: str) -> float:
    """Milliseconds of torch's copy_ of so many bytes to the device, by one thread: the median."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    if device == "cuda":
        source = source.pin_memory()
    target = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(MEMCPY_ROUNDS):
        began = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def engine_config(folder: Path, model: Model, longest: int, options: argparse.Namespace) -> EngineConfig:
    """An engine whose pool, and whose tier, hold the longest prompt and a little more."""
    config = EngineConfig(
        model=str(folder),
        tp=options.tp,
        device=options.device,
        dtype=options.dtype,
        max_batch_tokens=options.chunk,
        max_seqs=AT_ONCE,
        prefix_caching=True,
        state_block_size=model.state_block_size,
    )
    groups = engine_groups(config, load_config(folder))
    blocks = sum(-(-(longest + 1 + MAX_TOKENS) // g.spec.block_size) + 1 for g in groups)
    unit, _ = _short_prompts(config)
    at_once = sum(AT_ONCE * (-(-(unit + 2) // g.spec.block_size) + 1) for g in groups)
    return replace(config, num_blocks=max(blocks + blocks // 8, at_once) + 2)


def _short_prompts(config: EngineConfig) -> tuple[int, int]:
    """Tokens of the shortest prompt that a tier keeps, and how many of these fill it."""
    groups = engine_groups(replace(config, tp=1), load_config(config.model))
    unit = math.lcm(*(g.spec.block_size for g in groups))
    return unit, -(-config.num_blocks // sum(unit // g.spec.block_size for g in groups))


def tier_settings(config: EngineConfig, layout: str, pages: Path) -> OffloadSettings:
    """A tier with as many blocks as an engine's pool, at TP 1."""
    groups = engine_groups(replace(config, tp=1), load_config(config.model))
    block_bytes = plan_rank(groups, KVCacheLayout(layout), num_blocks=2).block_bytes
    return OffloadSettings(
        host_bytes=config.num_blocks * block_bytes,
        layout=layout,
        load="always",
        swap="never",
        pending_share=1.0,
        disk_folder=str(pages),
        disk_bytes=16 << 30,
    )


def prepare(options: argparse.Namespace) -> dict[str, EngineConfig]:
    """Write the models' checkpoints; model -> its engines, but for layout and prefix cache. Raises UserError
    where they cannot do what is asked for."""
    models, configs, units = QUICK if options.quick else MODELS, {}, {}
    for name in options.models:
        folder = options.checkpoints / f"offload-{'quick-' if options.quick else ''}{name}"
        print(f"{name}: checkpoint {folder}", file=sys.stderr, flush=True)
        write_checkpoint(models[name].family, folder, overrides=models[name].config)
        _check_model(name, folder, options)
        configs[name] = engine_config(folder, models[name], max(options.prompts), options)
        units[name], _ = _short_prompts(configs[name])
    _check_units(units, options.prompts)
    return configs


def _check_model(name: str, folder: Path, options: argparse.Namespace) -> None:
    config, longest = load_config(folder), max(options.prompts)
    why = why_tp_unsupported(config, options.tp)
    if why is not None:
        fit = [str(tp) for tp in range(1, options.tp) if why_tp_unsupported(config, tp) is None]
        raise UserError(f"{name}: {why}", where=f"--tp {options.tp}", mend=f"--tp {' or '.join(fit)}")
    most = config.max_positions - 1 - MAX_TOKENS
    if longest > most:
        raise UserError(
            f"{name}: {longest} tokens, one more and {MAX_TOKENS} of output are over {config.positions_text}",
            where=f"--prompts {longest}",
            mend=f"{most} or fewer",
        )


def _check_units(units: Mapping[str, int], prompts: Sequence[int]) -> None:
    """Refuse prompts that no tier keeps to their end."""
    unit = math.lcm(*units.values())
    bad = [n for n in prompts if n % unit]
    if bad:
        each = ", ".join(f"{name} {tokens}" for name, tokens in units.items())
        raise UserError(
            f"a host tier keeps whole blocks only; multiples of so many tokens are found to the end: {each}",
            where=f"--prompts {bad[0]}",
            mend=f"a multiple of {unit}, as {-(-bad[0] // unit) * unit}",
        )


async def measure_model(
    name: str, config: EngineConfig, options: argparse.Namespace, pages: Path, share: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    tiers = {tier: tier_settings(config, layout, pages / tier) for tier, layout in TIERS.items()}
    engines = {
        engine: (replace(config, layout=layout, prefix_caching=engine in WRITERS), tier)
        for engine, (layout, tier) in ENGINES.items()
    }
    deployment = Deployment(f"rayk/offload-{name}", engines)
    run = Run(name, options, deployment, pages)
    try:
        await deployment.open(tiers, share)
        began = time.monotonic()
        await run.warm_up(*_short_prompts(config))
        print(f"{name}: tiers are full, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        for number in range(options.repeats):
            await run.repeat(number, options.prompts)
            print(f"{name}: repeat {number + 1} of {options.repeats}", file=sys.stderr, flush=True)
        return run.rows, deployment.facts
    finally:
        await deployment.close()


def figures(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """TTFT by prompt tokens: a figure per model, a line per way to compute a prompt or to find it."""
    drawn = [kind for kind in KINDS if not kind.startswith("storing") and kind != "device per layer"]
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = {kind: [r for r in rows if (r["model"], r["kind"]) == (model, kind)] for kind in drawn}
        series = {
            kind: ([r["num_prompt_tokens"] for r in some], [r["ttft_ms"] for r in some])
            for kind, some in of.items()
            if some
        }
        found.append(lines(f"ttft-{model}", f"{model}: TTFT", series))
    return found


def about(options: argparse.Namespace) -> str:
    times = _number(options.repeats, "repeat")
    hits, colds = _number(options.hits, "time"), _number(options.colds, "time")
    return (
        f"TP {options.tp}, {options.dtype} on {options.device}, prefill steps of {options.chunk:,} tokens; "
        f"one request at a time, the ways in turns. {times}; in each a prompt is found on device and in host "
        f"memory {hits}, computed cold and read from disk {colds}, and stored once. `times`: how many that "
        "are together; TTFT: their median, the least and the most. Ratios are medians of the ratios "
        "within each repeat. `of cold`: TTFT over the median of computing the prompt; `of per layer`: "
        "over that of the same with per-layer pages in the same turn. Copies: descriptors asked of the "
        "transport, and what is left where neighbours go as one. `load`: from the question to the tier "
        "until all rows are in the engine's blocks, proven; of it until the tier's answer, the move, and "
        "`other`, the rest: the way to all ranks and back, blocks, this side's digests. Digests of both "
        "sides are told by themselves: the tier's are part of its answer, the engine's of the rest."
    )


def _number(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number > 1)}"


def shapes(models: Mapping[str, Model]) -> list[str]:
    """A line per model: what of its config is not the tiny checkpoint's."""
    return [
        f"{name}: "
        + (", ".join(f"{k} {_short(v)}" for k, v in model.config.items()) or "the tiny checkpoint")
        for name, model in models.items()
    ]


def _short(value: object) -> str:
    if isinstance(value, list):
        counts = {kind: value.count(kind) for kind in value}
        return " + ".join(f"{number} {kind}" for kind, number in counts.items())
    return str(value)


PUBLISHED = (
    "Published, for cross-layer blocks against per-layer pages on their GPUs: a CPU hit took 43 ms instead "
    "of 109 ms, and 125 ms instead of 144 ms in another set-up. Those times are others', of other machines "
    "and models, cited and not measured here; what can be compared is the form: the same hit, pages in one "
    "piece against pages per layer."
)


def settle(options: argparse.Namespace) -> None:
    """Fill in what other options decide. Raises UserError for what cannot be measured or judged."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is visible", mend="--device cpu")
    default = (128, 256) if options.quick else (512, 1024, 2048, 4096, 8192)
    options.prompts = sorted(set(options.prompts or default))
    options.colds = options.colds or (1 if options.quick else 3)
    options.models = list(dict.fromkeys(options.models))
    if options.check and max(options.prompts) < JUDGED_FROM:
        raise UserError(f"--check judges prompts of {JUDGED_FROM} tokens or more: there are none")


def fill(options: argparse.Namespace, page: Page) -> list[str]:
    """Measure, and add a row per model, prompt and way; returns host hits that do not pay."""
    settle(options)
    torch.set_num_threads(1)
    configs = prepare(options)
    page.environment |= {"seeds": {"prompts": options.seed}, "threads": 1, "engines": {}}
    rows: list[dict[str, Any]] = []
    models = QUICK if options.quick else MODELS
    with connect(options.address, about={"job": "offload"}):
        num_gpus = len(ENGINES) * options.tp
        share = gpu_share(num_gpus, "auto", num_cluster_gpus()) if options.device == "cuda" else 0.0
        for name in options.models:
            with tempfile.TemporaryDirectory(prefix="pages-", dir=options.out) as pages:
                measured = measure_model(name, configs[name], options, Path(pages), share)
                found, page.environment["engines"][name] = asyncio.run(measured)
            rows += found
    page.tables = {"requests": rows, "summary": summary(rows)}
    page.say(
        about(options), "", *(f"- {line}" for line in shapes({n: models[n] for n in options.models})), ""
    )
    page.section("TTFT", COLUMNS, page.tables["summary"], plots=figures(page.tables["summary"]))
    page.say(PUBLISHED)
    wrong, missed = failures(page.tables, judged_from=JUDGED_FROM if options.check else None)
    page.wrong += wrong
    return missed


def main(argv: Sequence[str] | None = None) -> int:
    return run(
        fill,
        __file__,
        title="Host tier",
        argv=argv,
        keeps=True,
        models=option(list(MODELS), "to measure", type=str, nargs="+", choices=list(MODELS)),
        prompts=option(None, "tokens of each; else 512 to 8192", type=above_zero, nargs="+", metavar="N"),
        repeats=option(1, "with other prompts each", type=above_zero),
        hits=option(24, "of every prompt on device and host per repeat", type=above_zero),
        colds=option(None, "of every prompt computed, and read from disk; else 3", type=above_zero),
        chunk=option(1024, "tokens of a prefill step", type=above_zero),
        tp=option(1, "of every engine", type=above_zero),
        seed=option(0, "of the prompts"),
        dtype=option("float32", "of the models", choices=["float32", "bfloat16", "float16"]),
        device=option("cpu", "of the engines", choices=["cpu", "cuda"]),
        quick={"action": "store_true", "help": "tiny models, prompts of 128 and 256, --colds 1"},
        checkpoints=option(Path("checkpoints"), "written there", type=Path),
        address=option(None, "a running Ray cluster; else a local one is started", type=str),
    )


if __name__ == "__main__":
    sys.exit(run_guarded(main))

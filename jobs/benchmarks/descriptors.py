"""Descriptors that one request's KV takes, and the bytes they carry: canonical against per-layer pages.

    python jobs/benchmarks/descriptors.py --record

Nothing is moved: the plans of both sides are lowered for a prompt whose blocks were handed out in order.
A cell is `descriptors (left when consecutive blocks of dense runs are read as one)`, of all consumer ranks.
Needed are the bytes of live rows; more may move where cutting a block would take too many descriptors.
In BHLNC and BLHNC one allocation holds blocks of all layers; in LBNHC and LBHNC every layer lies apart, as in
engines that allocate layer by layer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from jobs.benchmarks.harness import Page, run
from rayk.models.config import DecoderConfig
from rayk.models.engine_plan import EnginePlan, plan_engine
from rayk.models.families import SUPPORTED, parse_config
from rayk.oracle.hybrids import FAMILIES as TINY
from rayk.oracle.tiny import make_config
from rayk.transfer.plan import consecutive_tables, plan_transfer
from rayk.types.config import EngineConfig

ABOUT = """\
A prompt of 1024 tokens; blocks of 16 tokens (or more, where attention's pages grow towards a state's), one
block of states per request, bfloat16 (recurrent states float32); one layout on both sides, blocks in order.
MiB are those of live rows, all consumer ranks together. Cells: descriptors (left when neighbours are read as
one). Last column: what the better per-layer layout has left, over what BHLNC has.

Of full attention alone (Llama's rows, and tests/transfer/test_descriptor_counts.py): same TP takes one per
run of consecutive blocks where blocks are outermost, and as many times more as there are layers where they
are not; other TP takes one per head slice and block in BHLNC, times the layers in BLHNC and LBHNC, and times
the tokens of a block, too, in LBNHC.
"""
ABOUT_BYTES = """
# Bytes moved per byte needed

Blocks that are filled in part are cut to their live rows, at sixteenths and never below 16 tokens, where the
bytes that saves cost more than the descriptors it adds (8 KiB each, rayk/kv/groups.py). Cells: MiB needed,
times moved in the layout that moves most of those above.
"""
LAYOUTS = ("BHLNC", "BLHNC", "LBNHC", "LBHNC")
TPS = ((1, 1), (1, 2), (2, 1), (4, 2))
NUM_TOKENS = 1024
LENGTHS = (5, 100, 1024, 4096)
BLOCK_SIZE = 16

RELEASED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "mamba2": ("Mamba-Codestral-7B", {"num_hidden_layers": 64, "num_heads": 128, "head_dim": 64}),
    "jamba": ("Jamba-v0.1", {}),
    "bamba": ("Bamba-9B", {"attn_layer_indices": [9, 18, 27], "mamba_d_head": 64, "mamba_d_state": 128}),
    "granitemoehybrid": (
        "granite-4.0-h-small",
        {
            "num_hidden_layers": 40,
            "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
            "num_key_value_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
        },
    ),
    "nemotron_h": (
        "Nemotron-H-8B",
        {
            "layers_block_type": [
                {"M": "mamba", "-": "mlp", "*": "attention"}[letter]
                for letter in "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
            ]
        },
    ),
    "falcon_h1": (
        "Falcon-H1-7B",
        {
            "hidden_size": 3072,
            "num_hidden_layers": 44,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 24,
            "mamba_d_head": 128,
        },
    ),
    "qwen3_next": ("Qwen3-Next-80B-A3B", {}),
    "deepseek_v3": ("DeepSeek-V3", {}),
    "llama": ("Llama-3.1-8B", {"num_key_value_heads": 8, "max_position_embeddings": 131072}),
}
"""Family -> a released model of it, and where the sizes of its caches differ from transformers' defaults."""


@dataclass(frozen=True)
class Moved:
    num_bytes: int
    needed_bytes: int
    """Of live rows."""
    token_bytes: int
    """Of one row per token, in all layers that have one."""
    num_descriptors: int
    num_coalesced: int

    def __str__(self) -> str:
        return f"{self.num_descriptors:,} ({self.num_coalesced:,})"


def model_of(family: str, values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json of these values describes."""
    # A released config.json may have keys that the config class does not know.
    defaults = make_config(family, values if values is TINY.get(family) else {})
    config = json.loads(defaults.to_json_string(use_diff=False)) | dict(values)
    wanted = family.replace("_", "").lower() + "forcausallm"
    (name,) = (name for name in SUPPORTED if name.lower() == wanted)
    return parse_config(config | {"architectures": [name]}, where=family)


def plan_of(model: DecoderConfig, layout: str, tp: int, num_tokens: int = NUM_TOKENS) -> EnginePlan:
    """One engine's memory: room for the request once over."""
    config = EngineConfig(
        model="", dtype="bfloat16", tp=tp, layout=layout, block_size=BLOCK_SIZE, num_blocks=2
    )
    num_groups = len(plan_engine(config, model).groups)
    return plan_engine(replace(config, num_blocks=1 + num_groups * -(-num_tokens // BLOCK_SIZE)), model)


def moved(model: DecoderConfig, layout: str, tp: tuple[int, int], num_tokens: int = NUM_TOKENS) -> Moved:
    """Lower every consumer rank's plan."""
    producer, consumer = (plan_of(model, layout, size, num_tokens) for size in tp)
    tables = consecutive_tables(producer.ranks[0], num_tokens)
    reads = [
        read
        for rank in consumer.ranks
        for read in plan_transfer(producer.ranks, rank).lower(
            num_tokens, tables, consecutive_tables(rank, num_tokens)
        )
    ]
    rows = [
        (len(g.group.spec.live_rows(num_tokens)), g.rows, len(g.group.layers) * g.page_bytes // g.rows)
        for rank in consumer.ranks
        for g in rank.groups
    ]
    return Moved(
        sum(r.num_bytes for r in reads),
        sum(num_live * row_bytes for num_live, _, row_bytes in rows),
        sum(row_bytes for _, per_block, row_bytes in rows if per_block > 1),
        sum(r.num_descriptors for r in reads),
        sum(r.num_coalesced for r in reads),
    )


def kinds(model: DecoderConfig) -> str:
    plan = plan_of(model, "BHLNC", 1)
    counts: dict[str, int] = {}
    for group in plan.groups:
        counts[group.spec.kind] = counts.get(group.spec.kind, 0) + len(group.layers)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def rows(name: str, model: DecoderConfig) -> list[list[str]]:
    found = []
    for tp in TPS:
        by_layout = [moved(model, layout, tp) for layout in LAYOUTS]
        assert len({m.needed_bytes for m in by_layout}) == 1, "whatever the layout, the same rows are live"
        canonical, per_layer = by_layout[0].num_coalesced, min(m.num_coalesced for m in by_layout[2:])
        found.append(
            [
                name,
                kinds(model),
                f"{tp[0]} -> {tp[1]}",
                f"{by_layout[0].needed_bytes / 2**20:,.2f}",
                *map(str, by_layout),
                f"{per_layer / canonical:.1f}",
            ]
        )
    return found


def byte_rows(name: str, model: DecoderConfig) -> list[list[str]]:
    """One row per TP pair: what is needed and the most that is moved, by length of the prompt."""
    found = []
    for tp in TPS:
        cells = []
        for num_tokens in LENGTHS:
            by_layout = [moved(model, layout, tp, num_tokens) for layout in LAYOUTS]
            most, needed = max(m.num_bytes for m in by_layout), by_layout[0].needed_bytes
            cells.append(f"{needed / 2**20:,.2f} x {most / needed:.3f}")
        found.append([name, f"{tp[0]} -> {tp[1]}", *cells])
    return found


def fill(options: argparse.Namespace, page: Page) -> None:
    """Add a table of descriptors and one of bytes."""
    named = options.families
    models = {RELEASED[family][0]: model_of(family, RELEASED[family][1]) for family in named}
    tiny = {f"{family}, tiny": model_of(family, TINY[family]) for family in named if family in TINY}
    page.say(ABOUT)
    head = ["model", "caches", "TP", "MiB", *LAYOUTS, "per-layer / BHLNC"]
    page.table(head, [row for name, model in (models | tiny).items() for row in rows(name, model)])
    page.say(ABOUT_BYTES)
    head = ["model", "TP", *(f"{num_tokens:,} tokens" for num_tokens in LENGTHS)]
    page.table(head, [row for name, model in models.items() for row in byte_rows(name, model)])


def main() -> int:
    families = {"nargs": "+", "default": list(RELEASED), "choices": list(RELEASED)}
    return run(fill, __file__, title="Descriptors per request", families=families)


if __name__ == "__main__":
    sys.exit(main())

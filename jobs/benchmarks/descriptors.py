"""Descriptors that one request's KV takes, and the bytes they carry: canonical against per-layer pages.

    python jobs/benchmarks/descriptors.py > jobs/benchmarks/results/descriptors.md

Nothing is moved: the plans of both sides are lowered for a prompt whose blocks were handed out in order.
A cell is `descriptors (left when consecutive blocks of dense runs are read as one)`, of all consumer ranks.
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

from rayk.engine.plan import EnginePlan, plan_engine  # noqa: E402
from rayk.models.config import DecoderConfig  # noqa: E402
from rayk.models.families import SUPPORTED, parse_config  # noqa: E402
from rayk.oracle.hybrids import FAMILIES as TINY  # noqa: E402
from rayk.oracle.tiny import make_config  # noqa: E402
from rayk.transfer.plan import consecutive_tables, plan_transfer  # noqa: E402
from rayk.types.config import EngineConfig  # noqa: E402

ABOUT = """# Descriptors per request

A prompt of 1024 tokens; blocks of 16 tokens (or more, where attention's pages grow towards a state's), one
block of states per request, bfloat16 (recurrent states float32); one layout on both sides, blocks in order.
Cells: descriptors (left when neighbours are read as one), all consumer ranks together. Last column: what the
better per-layer layout has left, over what BHLNC has.

    python jobs/benchmarks/descriptors.py > jobs/benchmarks/results/descriptors.md
"""
LAYOUTS = ("BHLNC", "BLHNC", "LBNHC", "LBHNC")
TPS = ((1, 1), (1, 2), (2, 1))
NUM_TOKENS = 1024
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
}
"""Family -> a released model of it, and where the sizes of its caches differ from transformers' defaults."""


@dataclass(frozen=True)
class Moved:
    """What one request takes, over all consumer ranks."""

    num_bytes: int
    num_descriptors: int
    num_coalesced: int

    def __str__(self) -> str:
        return f"{self.num_descriptors:,} ({self.num_coalesced:,})"


def model_of(family: str, values: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json of these values describes."""
    # A released config.json may have keys that the config class does not know.
    defaults = make_config(family, values if values is TINY[family] else {})
    config = json.loads(defaults.to_json_string(use_diff=False)) | dict(values)
    wanted = family.replace("_", "").lower() + "forcausallm"
    (name,) = (name for name in SUPPORTED if name.lower() == wanted)
    return parse_config(config | {"architectures": [name]}, where=family)


def plan_of(model: DecoderConfig, layout: str, tp: int) -> EnginePlan:
    """One engine's memory: room for the request once over."""
    config = EngineConfig(
        model="", dtype="bfloat16", tp=tp, layout=layout, block_size=BLOCK_SIZE, num_blocks=2
    )
    num_groups = len(plan_engine(config, model).groups)
    return plan_engine(replace(config, num_blocks=1 + num_groups * -(-NUM_TOKENS // BLOCK_SIZE)), model)


def moved(model: DecoderConfig, layout: str, tp: tuple[int, int]) -> Moved:
    """Lower every consumer rank's plan."""
    producer, consumer = (plan_of(model, layout, size) for size in tp)
    tables = consecutive_tables(producer.ranks[0], NUM_TOKENS)
    reads = [
        read
        for rank in consumer.ranks
        for read in plan_transfer(producer.ranks, rank).lower(
            NUM_TOKENS, tables, consecutive_tables(rank, NUM_TOKENS)
        )
    ]
    return Moved(
        sum(r.num_bytes for r in reads),
        sum(r.num_descriptors for r in reads),
        sum(r.num_coalesced for r in reads),
    )


def kinds(model: DecoderConfig) -> str:
    """How many caches of each kind."""
    plan = plan_of(model, "BHLNC", 1)
    counts: dict[str, int] = {}
    for group in plan.groups:
        counts[group.spec.kind] = counts.get(group.spec.kind, 0) + len(group.layers)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def rows(name: str, model: DecoderConfig) -> list[list[str]]:
    """One row per TP pair."""
    found = []
    for tp in TPS:
        by_layout = [moved(model, layout, tp) for layout in LAYOUTS]
        assert len({m.num_bytes for m in by_layout}) == 1, "whatever the layout, the same rows move"
        canonical, per_layer = by_layout[0].num_coalesced, min(m.num_coalesced for m in by_layout[2:])
        found.append(
            [
                name,
                kinds(model),
                f"{tp[0]} -> {tp[1]}",
                f"{by_layout[0].num_bytes / 2**20:,.2f}",
                *map(str, by_layout),
                f"{per_layer / canonical:.1f}",
            ]
        )
    return found


def markdown(body: list[list[str]]) -> str:
    """The table."""
    head = ["model", "caches", "TP", "MiB", *LAYOUTS, "per-layer / BHLNC"]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """Print Markdown."""
    parser = argparse.ArgumentParser(description="Descriptors per request, canonical and per layer.")
    parser.add_argument("--families", nargs="+", default=list(RELEASED), choices=list(RELEASED))
    families = parser.parse_args().families
    body: list[list[str]] = []
    for family in families:
        name, values = RELEASED[family]
        body += rows(name, model_of(family, values))
    for family in families:
        body += rows(f"{family}, tiny", model_of(family, TINY[family]))
    print(ABOUT)
    print(markdown(body))


if __name__ == "__main__":
    main()

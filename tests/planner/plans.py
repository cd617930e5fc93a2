"""Plans of a tiny model over tables made by hand, whose best is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rayk.costs.book import CostBook
from rayk.costs.table import (
    EngineCosts,
    EngineKey,
    LinearCost,
    ReadCosts,
    StepTable,
    TransferTable,
    read_name,
)
from rayk.planner.plan import Plan
from rayk.types.config import EngineConfig

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 511,
}
MS = 1e6


def write_config(folder: Path) -> Path:
    """Write a config.json, with no weights beside it."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def book(*, decode: dict[str, float], prefill: dict[str, float], **others: Any) -> CostBook:
    """Make a book of every engine: ms of each term of its decode steps and of the others. Reads take 1 ms."""
    tables = [
        StepTable(terms=tuple(terms), constants=tuple(ms * MS for ms in terms.values()), **others)
        for terms in (decode, prefill)
    ]
    key = EngineKey("flat", 1, 1, 1, "float32", "auto", "cpu", "auto", "auto", 16)
    engine = EngineCosts(key=key, decode=tables[0], prefill=tables[1], source="by hand")
    sides = [EngineConfig(model="", tp=tp) for tp in (1, 2, 4)]
    costs = ReadCosts(post=LinearCost(), wait=LinearCost(fixed_ns=MS))
    reads = {read_name(prefill_side, decode_side): costs for prefill_side in sides for decode_side in sides}
    return CostBook(any_engine=engine, transfers=TransferTable(reads=reads), folder="by hand")


def plan_spec(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a spec on four CPU slots; sections in `changes` are laid over its own."""
    spec: dict[str, Any] = {
        "name": "tiny",
        "model": str(write_config(folder)),
        "cpu": {"slots": 4},
        "costs": "by hand",
        "traffic": {"input_tokens": 32, "output_tokens": 6, "num_requests": 60, "process": "constant"},
        "slo": {"ttft": "60ms", "tpot": "40ms"},
        "search": {"tp": [1], "max_batch_tokens": [64], "max_seqs": [4], "num_blocks": 64},
    }
    for name, value in changes.items():
        spec[name] = spec[name] | value if isinstance(value, dict) and name in spec else value
    return spec


def make_plan(
    folder: Path, costs: CostBook, *, extrapolates: bool = False, num_jobs: int = 1, **changes: Any
) -> Plan:
    spec = plan_spec(folder, **changes)
    return Plan(spec, costs=costs, extrapolates=extrapolates, num_jobs=num_jobs, budget_s=1e6)

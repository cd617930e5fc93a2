"""A trace is simulated as it is served: the same prompts, and a session's turns behind its answers."""

from __future__ import annotations

import json
from pathlib import Path

from rayk.bench.load import Load
from rayk.bench.prompts import plan_requests
from rayk.simulate import simulate_cell
from rayk.simulate.arrivals import TraceArrivals
from rayk.traces import read_trace
from tests.simulate.cells import BOOK, MODEL, sim_cell

MS = 1_000_000
ROWS = [
    {"session_id": "a", "timestamp": 0, "input_length": 512, "output_length": 640, "hash_ids": [0]},
    {"session_id": "a", "delay": 40, "input_length": 1024, "output_length": 128, "hash_ids": [0, 1]},
    {"timestamp": 8, "input_length": 700, "output_length": 64},
    {"session_id": "a", "delay": 0, "input_length": 1300, "output_length": 64, "hash_ids": [0, 1, 2]},
]


def test_a_trace_with_sessions_is_simulated_as_a_load_sends_it(tmp_path: Path) -> None:
    path = tmp_path / "agents.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    drawn = {"block_tokens": 8, "token_ids": (3, 499), "seed": 5}
    arrivals = TraceArrivals(read_trace(path), speed=2.0, **drawn)  # type: ignore[arg-type]
    rows = simulate_cell(sim_cell(engine={"prefix_caching": True}), MODEL, arrivals, BOOK).requests
    load = Load(url="http://h", trace=path, trace_speed=2.0, trace_block_tokens=8, seed=5)
    planned = plan_requests(load, (3, 499))
    by_index = {row.prompt_index: row for row in rows}
    assert [by_index[p.index].prompt_token_ids for p in planned] == [p.prompt for p in planned]
    assert [len(by_index[p.index].output_token_ids) for p in planned] == [p.max_tokens for p in planned]
    turns = [by_index[p.index] for p in planned if p.session == "a"]
    ends = [row.token_times_ns[-1] for row in turns]
    assert [row.due_ns for row in turns] == [0, ends[0] + 20 * MS, ends[1]]
    assert [row.due_ns for row in rows if row not in turns] == [4 * MS]
    assert [row.num_cached_tokens for row in turns] == [0, 8, 16], "each block of the turn before"

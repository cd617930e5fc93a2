"""`ray timeline` of a run that profiles: a span per request and phase, of requests that run at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.markers import nixl, ray, thorough

pytestmark = thorough

NUM_REQUESTS = 24
PHASES = ("prefill", "transfer", "decode")
SCRIPT = """
import json, sys
import ray
from rayk import Experiment
from tests.clusters import cluster
spec, out = json.loads(sys.argv[1]), sys.argv[2]
with cluster(num_cpus=4, object_store_memory=150 << 20) as found:
    result = Experiment(spec).run(out + "/run", address=found.address)
    ray.init(address=found.address, namespace="rayk")
    with open(out + "/timeline.json", "w") as file:
        json.dump(ray.timeline(), file)
    ray.shutdown()
print(result.cells["verdict"].tolist(), flush=True)
"""
"""A process of its own: Ray reads whether to profile when it is imported."""


@ray
@nixl
@pytest.mark.timeout(280)
def test_every_request_has_a_span_of_every_phase(spec: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    asked = spec(
        [{"prefill.tp": 1, "decode.tp": 1}],
        prompts={"random": {"count": NUM_REQUESTS, "input_tokens": [5, 37], "seed": 0}},
        sampling={"max_tokens": 24, "ignore_eos": True},
        engine={"num_blocks": 512, "max_seqs": NUM_REQUESTS},
        checks=["kv_bytes"],
    )
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    # Workers end with so short a run before they have sent what they send once a second.
    environment |= {"RAY_PROFILING": "1", "RAY_task_events_report_interval_ms": "50"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(asked), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=270,
        check=False,
    )
    assert "['PASS']" in done.stdout, done.stderr
    events = json.loads((tmp_path / "timeline.json").read_text())
    spans: dict[str, dict[str, tuple[float, float]]] = {phase: {} for phase in PHASES}
    for event in events:
        if event["cat"] in spans:
            request, of_phase = event["args"]["request"], spans[event["cat"]]
            assert request not in of_phase, "a request goes through a phase once"
            of_phase[request] = (event["ts"], event["ts"] + event["dur"])
            assert event["args"]["engine"] == ("prefill0" if event["cat"] == "prefill" else "decode0")
    assert {phase: len(found) for phase, found in spans.items()} == dict.fromkeys(PHASES, NUM_REQUESTS)
    for request in spans["prefill"]:
        (start, _), (_, here), (begun, end) = (spans[phase][request] for phase in PHASES)
        assert start <= here <= begun + 1 <= end + 1, request
    assert (
        max(sum(a <= at < b for a, b in spans["decode"].values()) for at, _ in spans["decode"].values()) > 1
    )

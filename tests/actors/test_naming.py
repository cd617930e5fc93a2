"""Names that Ray's dashboard shows: what they say, and that none of them grows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rayk.actors import launch
from rayk.actors.engines import EngineHandle
from rayk.actors.naming import (
    MAX_PART,
    MAX_TASK,
    bounded,
    cell_name,
    front_name,
    loop_name,
    models_in_words,
    rank_in_words,
    run_name,
)
from rayk.experiments.run import _metadata
from rayk.reports import ResultWriter
from rayk.specs import LoadedSpec
from rayk.types.config import EngineConfig

LONG = "prefill.tp=1,decode.tp=2,prefill.layout=BHLNC,decode.layout=LBNHC,policy=round_robin," * 3


def test_what_is_cut_still_differs() -> None:
    texts = [LONG + str(i) for i in range(100)]
    cut = [bounded(t) for t in texts]
    assert len(set(cut)) == len(texts)
    assert {len(c) for c in cut} == {MAX_PART}
    assert all(c.startswith("prefill.tp=1,decode.tp=2") for c in cut)
    assert bounded("x" * MAX_PART) == "x" * MAX_PART


def test_runs_are_named_after_their_experiment_and_model() -> None:
    name = run_name("hetero tp/1", ["checkpoints/qwen3-tiny"])
    assert name.startswith("hetero-tp-1-qwen3-tiny-")
    assert name != run_name("hetero tp/1", ["checkpoints/qwen3-tiny"])
    assert run_name("", ["org/qwen3"]).startswith("qwen3-")
    # A name is a part of an actor's, which slashes divide.
    assert "/" not in run_name("a/b", ["m/" + LONG])
    assert len(run_name(LONG, [LONG])) <= 2 * MAX_PART + 8


def test_several_models_are_counted() -> None:
    assert models_in_words(["a/m", "a/n", "a/m"]) == "2 models"
    assert models_in_words(["a/m", "a/m"]) == "m"


@pytest.mark.parametrize(
    ("engine", "role", "expected"),
    [
        ("prefill0", "prefill", "prefill0 rank 1/4: qwen3-tiny"),
        ("decode1", "decode", "decode1 rank 1/4: qwen3-tiny"),
        ("prefill0", "aggregated", "prefill0 rank 1/4 aggregated: qwen3-tiny"),
    ],
)
def test_loops_say_engine_rank_role_and_model(engine: str, role: str, expected: str) -> None:
    assert loop_name(engine, 1, 4, role, "checkpoints/qwen3-tiny") == expected


def test_workers_say_engine_and_rank_first() -> None:
    name = "rayk/hetero-tp-qwen3-tiny-4e8f28/decode0/r1"
    assert rank_in_words(name) == rank_in_words(name + "#2") == "decode0 rank 1, hetero-tp-qwen3-tiny-4e8f28"
    assert rank_in_words("w") == "w"


def test_fronts_are_named_after_their_server_and_no_two_alike() -> None:
    names = [front_name("rayk/fleet/qwen3-tiny-4e8f28", i) for i in range(3)]
    assert names == [f"rayk/front/qwen3-tiny-4e8f28{again}" for again in ("", "#1", "#2")]


def test_names_of_tasks_are_bounded() -> None:
    assert len(loop_name(LONG, 1, 4, "decode", LONG)) <= MAX_TASK
    assert len(cell_name(LONG, 12, LONG)) <= MAX_TASK
    assert cell_name("p1-d2", 0, "checkpoints/m") == "cell p1-d2: m"
    assert cell_name("p1-d2", 2, "checkpoints/m") == "cell p1-d2 #2: m"


class _Worker:
    """Takes down how its loop is called."""

    def __init__(self) -> None:
        self.options_seen: dict[str, Any] = {}
        self.run = self

    def options(self, **options: Any) -> _Worker:
        self.options_seen = options
        return self

    def remote(self) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future


def test_every_rank_s_loop_is_a_task_with_its_name() -> None:
    async def start() -> list[_Worker]:
        workers = [_Worker(), _Worker()]
        engine = EngineHandle("decode0", "decode", 1, EngineConfig(model="c/m", tp=2), workers)
        engine.start()
        await engine.stopped()
        return workers

    found = [w.options_seen for w in asyncio.run(start())]
    assert [f["name"] for f in found] == ["decode0 rank 0/2: m", "decode0 rank 1/2: m"]
    assert all(f["enable_task_events"] for f in found)
    assert {f["concurrency_group"] for f in found} == {"loop"}


def test_an_experiment_s_job_has_a_name_that_ray_lists() -> None:
    loaded = SimpleNamespace(spec=SimpleNamespace(name="hetero-tp", models=lambda: ["c/qwen3-tiny"]))
    writer = SimpleNamespace(directory=Path("runs/a"))
    about = _metadata(cast(LoadedSpec, loaded), cast(ResultWriter, writer), 20)
    # Ray's client reads this key: see JobRow of its dashboard.
    assert about["job_name"] == "hetero-tp qwen3-tiny"
    assert (about["cells"], about["results"]) == ("20", str(Path("runs/a").resolve()))
    assert all(isinstance(value, str) for value in about.values()), "Ray takes no others"


def test_the_driver_s_job_has_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def init(**settings: Any) -> dict[str, str]:
        seen.update(settings)
        return {"gcs_address": "here"}

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launch.ray, "init", init)
    with launch.connect(None, about={"experiment": "hetero-tp"}) as joined:
        assert joined.address == "here"
    assert seen["job_config"].metadata == {"experiment": "hetero-tp"}

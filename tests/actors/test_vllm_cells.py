"""Cells on vLLM's engines: what fails on the way, on Ray; and what vLLM tells, in rayk's terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayk.actors.cell_outcome import CellOutcome
from rayk.actors.vllm_cell import _mismatch, captured_rows, vllm_sampling
from rayk.specs import Cell, expand, load_spec
from rayk.types.config import VllmEngineConfig
from rayk.types.errors import EngineDied, RaykError, Unsupported
from rayk.types.request import SamplingParams
from tests.actors.vllm_engines import Fake, left, was_asked
from tests.experiments.conftest import wait_until
from tests.markers import ray, thorough
from tests.pd import HANG_S
from tests.specs.models import decoder, spec

RUN = "vllm-cells"


def cell_of(config: VllmEngineConfig, **deadlines: float) -> Cell:
    """One prefill and one decode engine."""
    limits = {"cell_s": HANG_S, "request_s": HANG_S} | deadlines
    (cell,) = expand(load_spec(spec(device="cpu", matrix={}, deadlines=limits)).spec, decoder())
    return replace(cell, vllm=(config, config))


@pytest.fixture(scope="module")
def coordinator(ray_address: str) -> Iterator[Any]:
    from rayk.actors import launch, placement

    with launch.connect(ray_address):
        found = launch.start_coordinator(f"rayk/coordinator/{RUN}")
        yield found
        placement.kill(found)


def outcome_of(running: Any) -> CellOutcome:
    import ray

    found: CellOutcome = ray.get(running, timeout=2 * HANG_S)
    return found


@thorough
@ray
@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("dies mid-request", EngineDied, "engine prefill0 died: its process was killed by SIGSEGV"),
        ("refuses", Unsupported, "vLLM 0.32.0 refuses: .*'Foo'"),
        ("killed at start", EngineDied, "killed by SIGKILL"),
    ],
)
def test_an_engine_that_fails_ends_its_cell_and_nothing_is_left(
    coordinator: Any, fake: Fake, fault: str, kind: type[RaykError], words: str
) -> None:
    for _ in range(2):  # nothing is in the way of the next cell
        config = fake(fault)
        outcome = outcome_of(coordinator.run_cell.remote(cell_of(config), [[1, 2, 3]], 0, capture=False))
        assert [type(error) for error in outcome.errors] == [kind]
        with pytest.raises(kind, match=words):
            raise outcome.errors[0]
        if fault != "dies mid-request":  # the decode engine lives on there
            assert left(config) == []


@thorough
@ray
def test_an_engine_whose_actor_is_killed_leaves_no_process(coordinator: Any, fake: Fake) -> None:
    import ray

    from rayk.actors.launch import NAMESPACE

    config = fake("holds")
    running = coordinator.run_cell.remote(cell_of(config), [[1, 2, 3]], 0, capture=False)
    wait_until(lambda: was_asked(config), "a request to be with an engine", HANG_S)
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
    engines = [n for n in names if n.startswith(f"rayk/{RUN}/vllm/prefill")]
    # Ray forgets those of earlier cells only some time after their deaths.
    last = max(engines, key=lambda name: int(name.removeprefix(f"rayk/{RUN}/vllm/prefill").partition("/")[0]))
    ray.kill(ray.get_actor(last, namespace=NAMESPACE))
    (error,) = outcome_of(running).errors
    assert isinstance(error, EngineDied)
    assert error.engine == "prefill0"
    wait_until(lambda: len(left(config)) == 3, "the end of all that it began", HANG_S)


def test_sampling_has_vllms_names() -> None:
    told = vllm_sampling(SamplingParams(max_tokens=7, top_k=None, stop_token_ids=(3,), logprobs=0))
    assert told["top_k"] == 0
    assert told["stop"] is None
    assert (told["max_tokens"], told["stop_token_ids"], told["logprobs"]) == (7, [3], 0)


def test_rows_of_all_workers_come_in_one_piece() -> None:
    first, second = np.arange(12, dtype=np.uint8).reshape(3, 4), np.arange(40, 44, dtype=np.uint8)
    shapes = [[[0, "k", 1, 3, 4]], [[2, "conv_x", 0, 1, 4]]]
    (p0, p1) = captured_rows(shapes, first.tobytes() + second.tobytes())
    assert np.array_equal(p0[0]["k", 1], first)
    assert np.array_equal(p1[2]["conv_x", 0], second[None])


def test_a_mismatch_is_the_first_of_all_ranks() -> None:
    def found(layer: int, unit: int) -> dict[str, Any]:
        where = {"layer": layer, "group": 0, "field": "k", "unit": unit, "unit_name": "head", "token": 5}
        return {"mismatch": where | {"classification": "zeros"}, "bytes_checked": 100, "bytes_mismatched": 8}

    error = _mismatch("c/0/1", [found(3, 0), found(1, 2)])
    assert str(error) == "KV of c/0/1 differs: layer 1, group 0, k, head 2, token 5: zeros"
    assert (error.num_bytes_checked, error.num_bytes_mismatched) == (200, 16)

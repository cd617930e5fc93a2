"""vLLM's engines in a spec: cells, what they heed, what is refused, the order that keeps engines alive."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rayk.specs import Cell, load_spec, plan_cells
from rayk.specs.cells import STANDARD_AXES
from rayk.specs.load import dump_spec, renew_spec
from rayk.specs.server_plan import ServerOptions, plan_server
from rayk.specs.vllm_engines import ENGINES_KEPT, in_order, num_starts
from rayk.types.config import VllmEngineConfig
from rayk.types.errors import SpecError
from tests.conftest import CheckpointFactory
from tests.specs.models import decoder, spec

VLLM = {"engine": {"kind": "vllm"}}


def cells(**changes: Any) -> list[Cell]:
    return [cell for cell, _ in plan_cells(load_spec(spec(**changes)), decoder(), device="cpu")]


def test_both_kinds_in_one_matrix() -> None:
    found = cells(matrix={"engine.kind": ["rayk", "vllm"], "mode": ["aggregated", "disaggregated"]})
    assert [c.cell_id for c in found] == [
        "agg-tp1",
        "p1-d1",
        "agg-tp1-engine.kind=vllm",
        "p1-d1-engine.kind=vllm",
    ]
    assert [len(c.vllm) for c in found] == [0, 0, 1, 2]
    of_rayk, of_vllm = found[1], found[3]
    assert (of_rayk.axes["policy"], of_rayk.axes["transfer.staging"]) == ("round_robin", "auto")
    for name in ("policy", "failure_policy", "transfer.staging"):
        assert of_vllm.axes[name] is None
    assert of_vllm.axes["transfer.mode"] == "pull"
    assert (of_rayk.axes["decode.block_size"], of_vllm.axes["decode.block_size"]) == (16, None)
    assert of_vllm.vllm[1].block_size is None  # vLLM chooses
    # An engine serves whatever role a cell has for it.
    assert found[2].vllm[0] == of_vllm.vllm[0] == of_vllm.vllm[1]


def test_a_spec_without_these_keys_has_the_same_axes_and_is_continued() -> None:
    (cell,) = cells()
    assert set(cell.axes) == set(STANDARD_AXES)
    assert (cell.vllm, cell.refused_by) == ((), None)
    text = dump_spec(load_spec(spec()).spec)
    assert text.count("block_size: 16\n") == 3  # of the sides and of the host tier
    older = "\n".join(
        line for line in text.splitlines() if not line.strip().startswith(("kind:", "connector"))
    )
    assert renew_spec(older) == text


def test_what_an_engine_is_started_with() -> None:
    (cell,) = cells(
        engine={
            "kind": "vllm",
            "python": "envs/a/python",
            "prefix_caching": True,
            "vllm": {"max_model_len": 512, "seed": 1},
            "connector": "OffloadingConnector",
            "connector_options": {"num_cpu_blocks": 8},
        },
        prefill={"tp": 2, "layout": "NHD", "block_size": 64, "vllm": {"seed": 2}},
        decode={"python": "/envs/b/python"},
        kv_dtype="fp8_e4m3",
        transfer={"mode": "push"},
        dtype="bfloat16",
    )
    prefill, decode = cell.vllm
    assert prefill == VllmEngineConfig(
        python=str(Path.cwd() / "envs/a/python"),
        model="m",
        tp=2,
        dtype="bfloat16",
        kv_dtype="fp8_e4m3",
        layout="LBNHC",
        block_size=64,
        max_tokens=512,
        prefix_caching=True,
        connector="OffloadingConnector",
        transfer_mode="push",
        connector_options=(("num_cpu_blocks", "8"),),
        arguments=(("max_model_len", "512"), ("seed", "2")),
    )
    assert (decode.python, decode.arguments) == ("/envs/b/python", (("max_model_len", "512"), ("seed", "1")))
    assert cell.axes["prefill.layout"] == "LBNHC"


def test_unlike_kinds_have_no_handshake_and_who_refuses_is_told() -> None:
    (cell,) = cells(prefill={"kind": "vllm"})
    assert cell.unsupported == "rayk and vLLM have no common handshake: prefill is vllm, decode is rayk"
    assert (cell.refused_by, cell.vllm, cell.vllm_engines) == ("rayk", (), ())
    assert cells(prefill={"tp": 3})[0].refused_by == "model"
    assert cells(prefill={"tp": 3}, **VLLM)[0].unsupported is None  # vLLM is asked
    (of_versions,) = cells(decode={"python": "/other/python"}, **VLLM)
    assert of_versions.unsupported is None
    assert of_versions.vllm[0] != of_versions.vllm[1]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            VLLM | {"prefill": {"fast_prefill": True}},
            "prefill.fast_prefill is a setting of rayk's own engines",
        ),
        ({"engine": {"kind": "vllm", "comm": "gloo"}}, "engine.comm is a setting of rayk's own"),
        (
            {"engine": {"kind": "vllm", "num_blocks": 64}},
            r"engine.num_blocks(.|\n)*engine: \{vllm: \{num_gpu_blocks_override",
        ),
        (VLLM | {"matrix": {"policy": ["round_robin"]}}, "policy is a setting of rayk's own"),
        ({"engine": {"connector": "MultiConnector"}}, "engine.connector is a setting of vLLM's engines"),
        (VLLM | {"offload": {"host_gib": 1.0}}, r"offload.host_gib is a setting|offload is rayk's own"),
        (VLLM | {"faults": {"kind": "kill", "point": "prefill"}}, "fault kill strikes rayk's own engines"),
        (
            {"engine": {"kind": "vllm", "vllm": {"block_size": 8}}},
            "engine argument block_size is said elsewhere",
        ),
        (
            {"engine": {"kind": "vllm", "vllm": {"kv_cache_dtype": "fp8"}}},
            r"kv_cache_dtype is said elsewhere(.|\n)*kv_dtype, prefill.kv_dtype",
        ),
        (
            VLLM | {"decode": {"vllm": {"enable_prefix_caching": True}}},
            r"enable_prefix_caching is said elsewhere(.|\n)*engine.prefix_caching",
        ),
        (
            {"engine": {"kind": "vllm", "vllm": {"kv_offloading_size": 1}}},
            r"kv_offloading_size is said elsewhere(.|\n)*engine.connector: OffloadingConnector",
        ),
        (
            {"engine": {"kind": "vllm", "vllm": {"worker_extension_cls": "a.B"}}},
            "worker_extension_cls is not taken: rayk's checks ask vLLM's workers",
        ),
        (
            VLLM | {"prefill": {"vllm": {"pipeline_parallel_size": 2}}},
            r"pipeline_parallel_size is said elsewhere in a spec(.|\n)*prefill.pp, decode.pp",
        ),
        ({"engine": {"kind": "vllm", "vllm": {"data_parallel_size": 2}}}, "data_parallel_size is not taken"),
        ({"engine": {"kind": "vllm", "vllm": {"spec_model": "m"}}}, "spec_model is not taken: a draft"),
        ({"engine": {"kind": "vllm", "kernel_block_size": 16}}, r"kernel_block_size(.|\n)*leave it out"),
        (
            {"engine": {"kind": "vllm", "vllm": {"max_model_len": 40}}},
            r"over the 40 of a sequence(.|\n)*max_model_len: ",
        ),
        ({"engine": {"kind": "sglang"}}, "engine.kind must be one of 'rayk' or 'vllm'"),
        ({"engine": {"kind": "vllm", "connector": "a b"}}, "neither the name of a connector"),
        ({"engine": {"kind": "vllm", "vllm": {"a": float("nan")}}}, "must be JSON"),
        ({"prefill": {"layout": "NHD"}}, "prefill.layout must be one of"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError) as caught:
        cells(**changes)
    assert re.search(told, str(caught.value)), str(caught.value)


def test_in_a_matrix_of_both_kinds_settings_of_one_are_passed_over() -> None:
    found = cells(
        engine={"num_blocks": 64}, matrix={"engine.kind": ["rayk", "vllm"], "engine.comm": ["auto", "shm"]}
    )
    assert [c.axes["engine.comm"] for c in found] == ["auto", "shm", None]


def test_a_server_is_rayks_own(checkpoint: CheckpointFactory) -> None:
    options = ServerOptions(model=str(checkpoint("qwen3")), overrides=("engine.kind=vllm",))
    with pytest.raises(SpecError, match="a server's engines are rayk's own"):
        plan_server(options)


def engine(name: str) -> VllmEngineConfig:
    return VllmEngineConfig(python="p", model=name)


A, B, C, D, E = map(engine, "abcde")


def test_cells_that_share_engines_follow_each_other() -> None:
    needs = [(A, B), (D, D), (B, C), (), (A, A), (E, D), (A, B)]
    order = list(in_order(needs))
    assert order == [3, 0, 6, 2, 4, 1, 5]
    assert num_starts([needs[i] for i in order]) == 7  # a b c, another a, d, another d, e
    assert sorted(order) == list(range(len(needs)))


def test_the_least_recently_used_engine_stops_first() -> None:
    assert ENGINES_KEPT == 4
    assert num_starts([(A, B), (C, D), (A, E), (B, C)]) == 4 + 1 + 1
    assert num_starts([(A, A), (A,), (A, A)]) == 2

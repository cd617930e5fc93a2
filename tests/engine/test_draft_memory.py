"""What a drafter takes of memory as it is planned, beside what engines with one allocate and load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rayk.engine.build import ThreadEngine
from rayk.explain.explanation import explain_pair, locate
from rayk.models.drafters.config import find_drafter
from rayk.models.engine_pool import engine_pool
from rayk.models.families import load_config, read_config
from rayk.models.memory_plan import GPU_GB, USED_SHARE, plan_memory, plan_size
from rayk.models.stored_sizes import drafter_bytes, held_bytes
from rayk.oracle.eagle3 import write_eagle3
from rayk.oracle.mtp import add_mtp
from rayk.specs.host_tier import _pool_bytes
from rayk.specs.server_plan import DEFAULT_BLOCKS, POOL_BYTES, _with_pool
from rayk.types.config import EngineConfig
from rayk.types.speculative import SpeculativeConfig
from tests.markers import one_per
from tests.models.tiny import write_checkpoint
from tests.pd import HANG_S

MakeCase = Callable[[str], tuple[Path, SpeculativeConfig, list[str]]]
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2, "mlp_only_layers": []}


@pytest.fixture
def case(tmp_path: Path) -> MakeCase:
    """A model, its drafter, and the files with the drafter's tensors."""

    def make(method: str) -> tuple[Path, SpeculativeConfig, list[str]]:
        model, own = tmp_path / "model", tmp_path / "own"
        if method == "eagle3":
            saved = write_checkpoint(model, "llama", num_hidden_layers=6)
            return model, SpeculativeConfig(method=method, model=str(write_eagle3(own, saved.path))), [""]
        if method == "draft":
            write_checkpoint(model, "gpt_oss")
            write_checkpoint(own, "gpt_oss", num_hidden_layers=2)
            return model, SpeculativeConfig(method=method, model=str(own)), [""]
        saved = write_checkpoint(
            model, method, num_nextn_predict_layers=1, **(HYBRID if method == "qwen3_next" else {})
        )
        before = set(load_file(model / "model.safetensors"))
        add_mtp(model, saved.model, 1, seed=4, dtype=saved.model.dtype)
        added = set(load_file(model / "model.safetensors")) - before
        return model, SpeculativeConfig(method="mtp"), sorted(added)

    return make


def engine_of(model: Path, drafts: SpeculativeConfig | None, **settings: Any) -> EngineConfig:
    return EngineConfig(
        **{"model": str(model), "num_blocks": 20, "max_seqs": 3, "speculative": drafts} | settings
    )


@one_per()
@pytest.mark.parametrize(
    ("method", "shape", "own_tp"),
    [
        ("eagle3", {}, None),
        ("eagle3", {"tp": 2, "layout": "LBNHC"}, None),
        ("eagle3", {"tp": 2}, 2),
        ("draft", {"tp": 2, "block_size": 32}, 2),
        ("deepseek_v3", {"tp": 2}, None),
        ("qwen3_next", {"tp": 2}, 2),
        ("eagle3", {"kv_dtype": "fp8_e4m3"}, None),
    ],
)
def test_pools_take_what_is_planned(
    case: MakeCase, method: str, shape: dict[str, Any], own_tp: int | None
) -> None:
    """Of each rank to the byte: a drafter's pages, and behind the pool the blocks of states to go back to."""
    model, drafts, _ = case(method)
    engine = engine_of(model, replace(drafts, tp=own_tp), **shape)
    config = load_config(model)
    with ThreadEngine(engine, timeout_s=HANG_S) as running:
        taken = [rank.caches.geometry.buffer_bytes for rank in running.ranks]
        assert [len(rank.caches.buffer) for rank in running.ranks] == taken
        held = [rank.load_memory.weight_bytes for rank in running.ranks]
    with ThreadEngine(replace(engine, speculative=None), timeout_s=HANG_S) as running:
        plain = [rank.load_memory.weight_bytes for rank in running.ranks]
    assert [rank.buffer_bytes for rank in engine_pool(engine, config)] == taken
    assert _pool_bytes(engine, config) == sum(taken)
    assert _pool_bytes(replace(engine, speculative=None), config) < sum(taken)
    side = {"tp": engine.tp, "block_size": engine.block_size, "layout": engine.layout}
    section = {"method": drafts.method, "model": drafts.model, "num_tokens": drafts.num_tokens, "tp": own_tp}
    settings: dict[str, Any] = {
        "engine": {"num_blocks": engine.num_blocks, "max_seqs": engine.max_seqs},
        "dtype": "float32",
        "kv_dtype": engine.kv_dtype,
        "speculative": {key: value for key, value in section.items() if value is not None},
        "prefill": side,
        "decode": side,
    }
    assert explain_pair(str(model), settings).sides["prefill"].buffer_bytes == max(taken)
    # A byte of the last page is the drafter's.
    (last, *_) = locate(
        str(model), settings, side="decode", rank=0, byte=_last_page_byte(engine, config), find=None
    )
    assert last["draft_layer"] >= 0
    drafter = find_drafter(engine, config)
    assert drafter is not None
    for rank, (more, without) in enumerate(zip(held, plain, strict=True)):
        weights = drafter_bytes(config, drafter, engine.tp, rank)
        # Beside weights a rank has tables of rotations, and a head's ids of tokens.
        assert weights <= more - without <= weights + 300_000


def _last_page_byte(engine: EngineConfig, config: Any) -> int:
    geometry = engine_pool(engine, config)[0]
    rider = geometry.groups[-1]
    field = rider.fields[0]
    return field.address(0, geometry.num_blocks - 1, 0, 0)


@pytest.mark.parametrize("method", ["eagle3", "deepseek_v3", "draft"])
def test_weights_are_those_of_the_files(case: MakeCase, method: str) -> None:
    """Of a rank that has all of a drafter: the tensors of floats that its file has."""
    model, drafts, added = case(method)
    config = read_config(model)
    drafter = find_drafter(engine_of(model, drafts), config)
    assert drafter is not None
    tensors = load_file(drafter.path / "model.safetensors")
    # Copies of the model's own embedding and output matrix, which MTP layers may have, are not read.
    copies = ("shared_head.head.weight", "embed_tokens.weight")
    names = [n for n in added if not n.endswith(copies)] if method == "deepseek_v3" else list(tensors)
    floats = [tensors[name] for name in names if tensors[name].is_floating_point()]
    for tp, rank in ((1, 0), (2, 1)):  # each rank has all of it
        assert drafter_bytes(config, drafter, tp, rank) == sum(t.numel() for t in floats) * 4


def test_blocks_from_memory_leave_room_for_the_drafter(case: MakeCase) -> None:
    """Weights and pools of an engine with so many blocks as are planned fit; with one more they do not."""
    model, drafts, _ = case("eagle3")
    config = read_config(model)
    plain, drafting = plan_memory(model, "2xL4"), plan_memory(model, "2xL4", speculative=drafts)
    assert [size.reason for size in drafting.sizes] == ["", "", *[_NO_STAGES for s in plain.sizes[2:]]]
    drafter = find_drafter(engine_of(model, drafts), config)
    assert drafter is not None
    for without, size in zip(plain.sizes[:2], drafting.sizes[:2], strict=True):
        last = size.tp - 1
        weights = held_bytes(config, size.tp, last, keeps_fp8=False) + drafter_bytes(
            config, drafter, size.tp, last
        )
        assert size.weight_bytes == weights > without.weight_bytes
        engine = engine_of(model, drafts, tp=size.tp, num_blocks=100)
        (one, *_) = engine_pool(engine, config)
        assert size.block_bytes == one.block_bytes > without.block_bytes
        room = int(GPU_GB["L4"] * 10**9 * USED_SHARE)
        fitting = replace(engine, num_blocks=size.num_blocks)
        assert engine_pool(fitting, config)[0].pages_bytes + weights <= room
        more = replace(engine, num_blocks=size.num_blocks + 1)
        assert engine_pool(more, config)[0].pages_bytes + weights > room
    assert drafting.draft_weight_bytes == drafter_bytes(config, drafter, 1, 0)
    assert (plain.draft_token_bytes, plain.drafts) == (0, "")
    assert drafting.drafts == "eagle3"
    # Keys and values of 2 heads of 16 elements, in float32.
    assert drafting.draft_token_bytes == 2 * 2 * 16 * 4


_NO_STAGES = "method eagle3 with pp: 2: a drafter computes on ranks that have all layers and all tokens"


def test_states_to_go_back_to_count(case: MakeCase) -> None:
    model, drafts, _ = case("qwen3_next")
    config = read_config(model)
    engine = engine_of(model, drafts, max_seqs=5)
    room = 10**9
    weights = [0]
    plain = plan_size(replace(engine, speculative=None), config, room, weights, tokens=100)
    size = plan_size(engine, config, room, weights, tokens=100)
    num_states = sum(not g.group.spec.has_token_rows for g in engine_pool(engine, config)[0].groups)
    assert size.num_blocks == room // size.block_bytes - 5 * drafts.num_tokens * num_states
    assert size.num_blocks < plain.num_blocks


@pytest.mark.parametrize("method", ["qwen3_next", "eagle3"])
def test_a_servers_pool_keeps_to_its_bytes(case: MakeCase, method: str) -> None:
    """Where nobody gives blocks: what a drafter takes of each id, and the blocks behind the pool, count."""
    model, drafts, _ = case(method)
    config = replace(read_config(model), max_positions=1 << 20)
    engine = engine_of(model, drafts, max_seqs=256)
    pooled = _with_pool(engine, config)
    (found, *_) = engine_pool(pooled, config)
    assert pooled.num_blocks > DEFAULT_BLOCKS
    assert POOL_BYTES - found.block_bytes < found.num_blocks * found.block_bytes <= POOL_BYTES
    assert _with_pool(replace(engine, speculative=None), config).num_blocks > pooled.num_blocks

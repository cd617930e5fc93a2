"""A server's options as engines; pools that hold what a server may be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayk.engine.build import ThreadEngine
from rayk.kv.manager import KVCacheManager
from rayk.models.families import load_config
from rayk.models.kv_specs import engine_groups
from rayk.sched.policy import PolicySettings
from rayk.specs.server_plan import DEFAULT_BLOCKS, POOL_BYTES, ServerOptions, plan_server
from rayk.types.errors import SpecError, Unsupported, UserError
from tests.conftest import CheckpointFactory
from tests.pd import make_request


def plan(model: Path, **options: Any) -> Any:
    return plan_server(ServerOptions(model=str(model), **options), device="cpu").settings


def test_options_become_engines(checkpoint: Any) -> None:
    model = checkpoint("qwen3")
    found = plan(model, prefill_tp=2, num_decode=2, max_waiting=3, request_s=5.0, num_spares=1)
    assert [(e.name, e.role, e.config.tp) for e in found.engines] == [
        ("prefill0", "prefill", 2),
        ("decode0", "decode", 1),
        ("decode1", "decode", 1),
    ]
    assert {e.config.model for e in found.engines} == {str(model.resolve())}
    assert (found.model.model_id, found.model.folder) == (model.name, str(model.resolve()))
    assert (found.max_waiting, found.request_s, found.num_spares) == (3, 5.0, 1)
    assert (found.policy, found.failure_policy, found.is_aggregated) == ("round_robin", "migrate", False)


def test_each_engine_of_a_role_may_have_a_size_of_its_own(checkpoint: Any) -> None:
    model = checkpoint("qwen3")
    given = ("engine.max_seqs=3",)
    found = plan(model, prefill_tp=(1, 2), decode_tp=[4, 1, 2], overrides=given)
    assert [(e.name, e.role, e.config.tp) for e in found.engines] == [
        ("prefill0", "prefill", 1),
        ("prefill1", "prefill", 2),
        ("decode0", "decode", 4),
        ("decode1", "decode", 1),
        ("decode2", "decode", 2),
    ]
    assert found.num_workers == 10
    for entry in found.engines:
        (alone,) = (
            e
            for e in plan(model, **{f"{entry.role}_tp": entry.config.tp}, overrides=given).engines
            if e.role == entry.role
        )
        assert entry.config == alone.config, "as if it were the only one"
    repeated = plan(model, prefill_tp=(2,), num_prefill=3, decode_tp=(1, 2), num_decode=2)
    assert [e.config.tp for e in repeated.engines] == [2, 2, 2, 1, 2]
    both = plan(model, mode="aggregated", prefill_tp=(1, 4))
    assert [(e.role, e.config.tp) for e in both.engines] == [("aggregated", 1), ("aggregated", 4)]


def test_without_sizes_engines_do_both(checkpoint: Any) -> None:
    found = plan(checkpoint("qwen3"))
    assert [(e.name, e.role, e.config.tp) for e in found.engines] == [("prefill0", "aggregated", 1)]
    both = plan(checkpoint("qwen3"), mode="aggregated", prefill_tp=2, num_prefill=2)
    assert [(e.role, e.config.tp) for e in both.engines] == [("aggregated", 2)] * 2


def test_settings_of_engines(checkpoint: Any) -> None:
    overrides = ("engine.max_seqs=3", "decode.layout=BHLNC", "transfer.mode=push", "decode.num_blocks=77")
    found = plan(checkpoint("qwen3"), decode_tp=2, overrides=overrides)
    prefill, decode = (e.config for e in found.engines)
    assert (prefill.max_seqs, decode.max_seqs) == (3, 3)
    assert (prefill.layout, decode.layout) == ("auto", "BHLNC")
    assert (prefill.num_blocks, decode.num_blocks) == (256, 77), "whoever gives blocks gives all of them"
    assert found.transfer.mode == "push"


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1", "gemma3"])
def test_what_small_pools_hold_is_what_engines_take(checkpoint: Any, family: str) -> None:
    model = checkpoint(family)
    found = plan(model, mode="aggregated", overrides=("engine.num_blocks=9",))
    pool_tokens = found.model.pool_tokens
    assert pool_tokens is not None
    assert 1 < pool_tokens < found.model.max_positions
    with ThreadEngine(found.engines[0].config) as engine:
        fits, exceeds = engine.generate(
            [make_request(str(n), [5] * (n - 1), 1) for n in (pool_tokens, pool_tokens + 1)]
        )
    assert fits.error is None
    assert isinstance(exceeds.error, UserError)
    assert "KV blocks" in str(exceeds.error)
    both = plan(model, decode_tp=1, overrides=("prefill.num_blocks=9", "decode.num_blocks=200"))
    assert both.model.pool_tokens == pool_tokens, "the smaller pool's"
    assert plan(model, mode="aggregated").model.pool_tokens is None


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1", "gemma3", "mamba2"])
@pytest.mark.parametrize("tp", [1, 2])
def test_pools_hold_every_row_at_its_longest_or_what_memory_allows(
    checkpoint: Any, family: str, tp: int
) -> None:
    model = checkpoint(family)
    config = load_config(str(model))
    for entry in plan(model, prefill_tp=tp, decode_tp=1).engines:
        groups = engine_groups(entry.config, config)
        manager = KVCacheManager(groups, entry.config.num_blocks)
        longest = manager.max_request_blocks(config.max_positions, entry.config.max_batch_tokens)
        holds_all = entry.config.num_blocks - 1 >= 2 * longest * entry.config.max_seqs
        assert (
            holds_all
            or entry.config.num_blocks == DEFAULT_BLOCKS
            or entry.config.num_blocks * manager_block_bytes(groups, entry.config.tp) <= POOL_BYTES
        )


def manager_block_bytes(groups: Any, tp: int) -> int:
    """No less than a rank's share of the canonical pages of one block."""
    return max(g.spec.page_bytes for g in groups) * groups[0].num_positions // tp


def test_what_the_model_cannot_do_is_refused(checkpoint: Any) -> None:
    with pytest.raises(Unsupported, match="TP 3 does not divide"):
        plan(checkpoint("qwen3"), decode_tp=3)


def test_what_policies_are_told_reaches_the_server(checkpoint: Any) -> None:
    told = ("policy_settings.block_tokens=16", "engine.prefix_caching=true")
    found = plan(checkpoint("qwen3"), policy="conditional", num_prefill=1, overrides=told)
    assert found.policy == "conditional"
    assert found.policy_settings == PolicySettings(block_tokens=16)
    without = plan(checkpoint("qwen3"), policy="conditional", num_prefill=1, overrides=told[:1])
    assert without.policy_settings == PolicySettings(block_tokens=16, index_blocks=0), "no caches to look up"
    with pytest.raises(SpecError, match="did you mean 'policy_settings.block_tokens'"):
        plan(checkpoint("qwen3"), overrides=("policy_settings.blok_tokens=16",))
    with pytest.raises(
        SpecError, match=r"did you mean 'prefill.block_size' or 'decode.block_size' or 'offload"
    ):
        plan(checkpoint("qwen3"), overrides=("engine.block_size=16",))


def test_the_cluster_decides_what_auto_is(checkpoint: CheckpointFactory) -> None:
    model = str(checkpoint("qwen3"))
    elsewhere = ServerOptions(model=model, tensor_parallel_size=2, overrides=("engine.comm=nccl",))
    plan = plan_server(elsewhere, is_local=False)
    assert plan.settings.device == "auto"
    assert plan.on_device("cuda").device == "cuda"
    with pytest.raises(SpecError, match="^--set engine.comm=nccl: comm: nccl cannot run on device cpu"):
        plan.on_device("cpu")
    with pytest.raises(SpecError, match="^--set engine.comm=nccl: comm: nccl cannot run on device cpu"):
        plan_server(elsewhere, device="cpu")
    here = plan_server(ServerOptions(model=model, device="cpu"))
    assert here.on_device("cuda") is here.settings, "it was given"

"""What is refused before anything starts, with its message."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayk.actors.coordinator import _offload_of
from rayk.kv.groups import group_layers
from rayk.kv.manager import KVCacheManager
from rayk.models.config import ExpertsConfig, RopeConfig
from rayk.models.kv_specs import kv_cache_specs
from rayk.specs import load_spec, plan_cells, resolve_prompts
from rayk.specs.devices import check_device, resolve_device
from rayk.specs.prompts import special_token_ids
from rayk.types.errors import CheckpointError, DeviceError, SpecError
from tests.specs.models import decoder, spec


def plan(config: Any = None, **changes: Any) -> Any:
    return plan_cells(load_spec(spec(**changes)), config or decoder(), device="cpu")


def test_backends_and_comms_must_fit_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SpecError, match="attention_backend: triton cannot run on device cpu"):
        plan(decode={"attention_backend": "triton"})
    with pytest.raises(SpecError, match="comm: nccl cannot run on device cpu"):
        plan(prefill={"tp": 2}, engine={"comm": "nccl"})
    for engine in ({"attention_backend": "cpu"}, {"comm": "shm"}):
        with pytest.raises(SpecError, match="cannot run on device cuda"):
            plan(device="cuda", prefill={"tp": 2}, engine=engine)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert plan(engine={"attention_backend": "triton", "comm": "gloo"})


def test_transfer_settings_do_not_matter_to_aggregated_cells() -> None:
    assert len(plan(mode="aggregated", transfer={"mode": "push"})) == 1


def test_kv_bytes_alone_is_fine_outside_float32() -> None:
    assert len(plan(dtype="bfloat16", checks=["kv_bytes"])) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_check_runs_in_every_dtype(dtype: str) -> None:
    checks = ["tokens", "kv_bytes", "kv_values", "logprobs"]
    ((cell, _),) = plan(dtype=dtype, checks=checks)
    assert cell.checks == tuple(checks)


def test_outside_float32_logprobs_are_the_default_and_are_asked_of_the_engines() -> None:
    ((cell, _),) = plan(dtype="bfloat16")
    assert cell.checks == ("logprobs", "kv_bytes")
    assert (cell.sampling.logprobs, cell.sampling.prompt_logprobs) == (0, 0)
    ((more, _),) = plan(dtype="bfloat16", sampling={"logprobs": 3})
    assert (more.sampling.logprobs, more.sampling.prompt_logprobs) == (3, 0)
    ((plain, _),) = plan()
    assert plain.sampling.logprobs is plain.sampling.prompt_logprobs is None


def test_routed_tokens_are_compared_in_float32_only() -> None:
    config = decoder()
    experts = ExpertsConfig(num_experts=4, num_chosen=2, intermediate_size=32, alpha=1.7, limit=7.0)
    routed = replace(config, layers=(config.layers[0], replace(config.layers[1], mlp=experts)))
    assert plan(routed, checks=["tokens"])
    assert plan(routed, dtype="bfloat16")
    with pytest.raises(SpecError, match="check tokens of a model that routes experts, in bfloat16"):
        plan(routed, dtype="bfloat16", checks=["tokens"])


def test_kv_values_is_supported() -> None:
    ((cell, _),) = plan(checks=["tokens", "kv_bytes", "kv_values"])
    assert cell.checks == ("tokens", "kv_bytes", "kv_values")


def test_tokens_need_temperature_zero() -> None:
    with pytest.raises(SpecError, match="compares greedy tokens"):
        plan(sampling={"temperature": 0.5})


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"kind": "kill"}, "needs a point"),
        ({"kind": "kill", "point": "lunch"}, "cannot strike at 'lunch'"),
        ({"kind": "flip_bit", "point": "decode"}, "cannot strike at 'decode'"),
        ({"kind": "kill", "point": "prefill", "rank": 1}, "rank 1 of a prefill engine of TP 1"),
        ({"kind": "kill", "point": "decode", "rank": 2}, "rank 2 of a decode engine of TP 2"),
    ],
)
def test_faults_that_cannot_be_meant(fault: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        plan(faults=[fault], decode={"tp": 2})


def test_aggregated_cells_have_no_transfer_to_strike() -> None:
    with pytest.raises(SpecError, match="strikes a transfer"):
        plan(mode="aggregated", faults=[{"kind": "early_reuse"}])


WRONG_KV: dict[str, Any] = {"kind": "wrong_kv", "point": "rope", "layer": 1}
VALUES = {"checks": ["kv_bytes", "kv_values"]}


def rotating() -> Any:
    """Layer 1 rotates its keys, layer 0 has no positions; keys are not normed."""
    config = decoder()
    rope = RopeConfig(kind="default", theta=10000.0, rotary_size=16)
    return replace(config, layers=(config.layers[0], replace(config.layers[1], rope=rope)))


def test_wrong_kv_is_expected_to_be_named() -> None:
    for changes in (VALUES, {**VALUES, "mode": "aggregated"}):
        ((cell, _),) = plan(rotating(), faults=[WRONG_KV], **changes)
        assert cell.expected_verdict == "KV_MISMATCH"
    ((cell, _),) = plan(rotating(), faults=[{**WRONG_KV, "expect": "TOKEN_MISMATCH"}])
    assert cell.expected_verdict == "TOKEN_MISMATCH"


@pytest.mark.parametrize(
    ("fault", "changes", "problem"),
    [
        ({"point": None}, VALUES, "needs a point"),
        ({"point": "decode"}, VALUES, "cannot strike at 'decode'"),
        ({"request": 1}, VALUES, "does not heed `request`"),
        ({"role": "decode"}, VALUES, "what the prefill engine holds"),
        ({"layer": 2}, VALUES, "no layer 2: the model has layers 0 to 1"),
        ({"layer": 0}, VALUES, "layer 0 has no positions"),
        ({"point": "k_norm"}, VALUES, "does not norm its keys"),
        ({"point": "store_kv"}, {**VALUES, "engine": {"kernel_block_size": 1}}, "one slot in"),
        ({}, {"checks": ["kv_bytes"]}, "named by check kv_values"),
    ],
)
def test_wrong_kv_that_cannot_be_meant(fault: dict[str, Any], changes: dict[str, Any], problem: str) -> None:
    given = {k: v for k, v in {**WRONG_KV, **fault}.items() if v is not None}
    with pytest.raises(SpecError, match=problem):
        plan(rotating(), faults=[given], **changes)


def test_supported_faults_pass() -> None:
    for fault in (
        {"kind": "kill", "point": "transfer", "role": "decode", "rank": 0},
        {"kind": "flip_bit", "request": 1, "seed": 7},
        {"kind": "early_reuse"},
    ):
        ((cell, _),) = plan(faults=[fault])
        assert cell.faults[0].kind == fault["kind"]


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "flip_bit", "layer": 0},
        {"kind": "kill", "point": "decode", "request": 1},
        {"kind": "early_reuse", "step": 2},
    ],
)
def test_a_fault_field_that_would_be_ignored_is_refused(fault: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="does not heed"):
        plan(faults=[fault])


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ({"kind": "kill", "point": "prefill"}, "ENGINE_ERROR"),
        ({"kind": "kill", "point": "transfer"}, "ENGINE_ERROR"),
        ({"kind": "flip_bit"}, "KV_MISMATCH"),
        ({"kind": "early_reuse"}, "TRANSFER_ERROR"),
        ({"kind": "early_reuse", "expect": "KV_MISMATCH"}, "KV_MISMATCH"),
    ],
)
def test_the_verdict_a_fault_must_end_in(fault: dict[str, object], verdict: str) -> None:
    ((cell, _),) = plan(faults=[fault])
    assert cell.expected_verdict == verdict


def test_prompt_over_the_models_positions_names_both_numbers() -> None:
    assert plan(prompts={"random": {"input_tokens": [1000]}})
    with pytest.raises(SpecError, match=r"1001 \+ max_tokens 24 = 1025 tokens, over the model's 1024"):
        plan(prompts={"random": {"input_tokens": [5, 1001]}})


def test_prompt_over_the_pool_names_both_numbers() -> None:
    # 40 + 24 tokens are 4 blocks of 16; one of the pool's blocks is the null block.
    prompts = {"random": {"input_tokens": [40]}}
    assert plan(prompts=prompts, engine={"num_blocks": 5})
    with pytest.raises(SpecError, match=r"40 \+ max_tokens 24 = 64 tokens need 4 KV blocks.* pool of 3 \(4"):
        plan(prompts=prompts, engine={"num_blocks": 4})
    with pytest.raises(SpecError, match="over the decode engine's pool of 1"):
        plan(prompts=prompts, decode={"num_blocks": 2})
    assert plan(prompts=prompts, mode="aggregated", decode={"num_blocks": 2})


def test_the_pool_check_counts_every_group() -> None:
    """The smallest pool it lets through is one in which the manager can serve the request."""
    config = decoder(windows=(None, 20, None, 20))
    settings = {"max_batch_tokens": 32}

    def passes(num_blocks: int) -> bool:
        try:
            plan(
                config,
                prompts={"random": {"input_tokens": [100]}},
                engine={**settings, "num_blocks": num_blocks},
            )
        except SpecError:
            return False
        return True

    smallest = next(n for n in range(2, 40) if passes(n))
    groups = group_layers(kv_cache_specs(config, block_size=16, dtype="float32"))
    assert len(groups) == 2
    manager = KVCacheManager(groups, smallest)
    computed = 0
    while computed < 124:
        # One chunk at a time, as prefill runs; what has left the window is given back.
        computed = min(124, computed + 32)
        assert manager.extend("r", computed) is not None
        manager.trim("r", computed)


def test_kernel_block_size_must_divide() -> None:
    with pytest.raises(SpecError, match="kernel_block_size 6 does not divide block_size 16"):
        plan(engine={"kernel_block_size": 6})


def test_random_prompts_cycle_and_avoid_special_ids() -> None:
    loaded = load_spec(spec(prompts={"random": {"count": 7, "input_tokens": [400, 3], "seed": 5}})).spec
    config = decoder(vocab_size=10, max_positions=4096)
    prompts = resolve_prompts(loaded, config)
    assert [len(p) for p in prompts] == [400, 3] * 3 + [400]
    assert {i for p in prompts for i in p} == set(range(10)) - {2}
    assert prompts == resolve_prompts(loaded, config)
    other = load_spec(spec(prompts={"random": {"count": 7, "input_tokens": [400, 3], "seed": 6}})).spec
    assert prompts != resolve_prompts(other, config)


def test_random_prompts_share_prefixes_in_turn() -> None:
    random = {"count": 8, "input_tokens": [40, 90, 8], "seed": 5}

    def prompts(**changes: int) -> list[list[int]]:
        loaded = load_spec(spec(prompts={"random": random | changes})).spec
        return resolve_prompts(loaded, decoder(vocab_size=1000, max_positions=4096))

    found = prompts(prefix_tokens=20, num_prefixes=2)
    assert [len(p) for p in found] == [40, 90, 8, 40, 90, 8, 40, 90]
    for i, prompt in enumerate(found):
        sharing = found[i % 2]  # of 40 or 90 tokens
        shared = min(20, len(prompt))
        assert prompt[:shared] == sharing[:shared]
    assert found[0][:20] != found[1][:20]
    assert len({tuple(p[20:24]) for p in found if len(p) > 20}) == 6, "what follows is each prompt's own"
    assert found == prompts(prefix_tokens=20, num_prefixes=2)
    other = prompts(prefix_tokens=20, num_prefixes=2, seed=6)
    assert found[0][:20] != other[0][:20]
    assert prompts() == prompts(prefix_tokens=0, num_prefixes=3) != found


def test_special_ids_come_from_tokenizer_and_config(tmp_path: Path) -> None:
    tokens = [{"id": 7, "special": True}, {"id": 8, "special": False}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 2], "pad_token_id": None}))
    assert special_token_ids(str(tmp_path)) == {1, 2, 7}
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not valid JSON"):
        special_token_ids(str(tmp_path))


def test_prompt_files_hold_texts_and_ids(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_token_ids": [1, 499]}\n\n{"prompt": "ab"}\n')
    loaded = load_spec(spec(prompts={"file": str(path)})).spec
    prompts = resolve_prompts(loaded, decoder(), lambda model: lambda text: [ord(c) for c in text])
    assert prompts == [[1, 499], [97, 98]]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"prompt_token_ids": [1, 500]}', "token id 500 is outside the vocabulary of 500 tokens"),
        ('{"prompt_token_ids": [-1]}', "token id -1"),
        ('{"prompt_token_ids": []}', "empty"),
        ('{"prompt_token_ids": [1.5]}', "list of integers"),
        ('{"prompt_token_ids": [true]}', "list of integers"),
        ('{"prompt": 3}', "must be a text"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "exactly one of"),
        ('{"text": "a"}', "exactly one of"),
        ("[1]", "exactly one of"),
        ("{", "not valid JSON"),
    ],
)
def test_bad_prompt_lines_are_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt_token_ids": [1]}\n' + line + "\n")
    loaded = load_spec(spec(prompts={"file": str(path)})).spec
    with pytest.raises(SpecError, match=problem) as caught:
        resolve_prompts(loaded, decoder(), lambda model: lambda text: [1])
    assert caught.value.where == f"{path}:2"


def test_missing_and_empty_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read the prompts file"):
        resolve_prompts(load_spec(spec(prompts={"file": str(tmp_path / "no")})).spec, decoder())
    (tmp_path / "e").write_text("\n")
    with pytest.raises(SpecError, match="no prompt"):
        resolve_prompts(load_spec(spec(prompts={"file": str(tmp_path / "e")})).spec, decoder())


def test_out_of_vocabulary_stop_token_is_refused() -> None:
    with pytest.raises(SpecError, match=r"sampling\.stop_token_ids: token id 500"):
        plan(sampling={"stop_token_ids": [500]})


def test_cuda_needs_a_gpu() -> None:
    with pytest.raises(DeviceError, match="no GPU was found"):
        check_device("cuda", num_gpus=0)
    check_device("cuda", num_gpus=1)
    check_device("auto", num_gpus=0)
    assert resolve_device("auto", "cpu") == "cpu"
    assert resolve_device("cuda", "cpu") == "cuda"


def test_staging_of_what_is_pushed_is_refused_unless_other_cells_pull() -> None:
    with pytest.raises(SpecError) as caught:
        plan(transfer={"mode": "push", "staging": "always"})
    assert caught.value.problem.startswith("transfer.staging: always with transfer.mode: push")
    assert caught.value.mend == "transfer: {mode: pull}, or staging: auto"
    for staging in ("auto", "never"):
        plan(transfer={"mode": "push", "staging": staging})
    plan(transfer={"mode": "pull", "staging": "always"})
    plan(transfer={"staging": "always"}, matrix={"transfer.mode": ["pull", "push"]})
    plan(transfer={"mode": "push", "staging": "always"}, mode="aggregated")


def test_a_host_tier_must_hold_a_block_of_each_group() -> None:
    """Too small a tier, a layout that its groups cannot share, and a way through it that joins nobody."""
    with pytest.raises(SpecError, match=r"cannot hold a block of each of 1 KV groups.*\n.*host_gib: 0\.0000"):
        plan(offload={"host_gib": 1e-6})
    assert plan(offload={"host_gib": 0.001})
    with pytest.raises(SpecError, match="transfer.path: host without a host tier"):
        plan(transfer={"path": "host"})
    with pytest.raises(SpecError, match=r"an outbox of 1,048,576 bytes has no.*\n.*outbox_mib: at least"):
        plan(offload={"host_gib": 1, "outbox_mib": 1}, prefill={"block_size": 8192})
    assert plan(offload={"host_gib": 0.1, "outbox_mib": 1})
    tier = {"offload": {"host_gib": 0.1}, "transfer": {"path": "host"}}
    assert plan(**tier)
    with pytest.raises(SpecError, match="no tier is both's"):
        plan(**tier, decode={"kv_dtype": "fp8_e4m3"}, checks=["kv_bytes"])
    with pytest.raises(SpecError, match="a host tier reads what it keeps"):
        plan(offload={"host_gib": 0.1}, transfer={"path": "host", "mode": "push"})


@pytest.mark.parametrize(("mib", "num_bytes"), [(None, None), (0, 0), (3, 3 << 20)])
def test_the_size_of_outboxes_reaches_engines(mib: int | None, num_bytes: int | None) -> None:
    ((cell, _),) = plan(offload={"host_gib": 1, "outbox_mib": mib})
    found = _offload_of(cell)
    assert found is not None
    assert found.outbox_bytes == num_bytes


def test_deadlines_reach_the_host_tier() -> None:
    """A store or load lasts no longer than a transfer, and what is offered as long as a request may."""
    ((cell, _),) = plan(offload={"host_gib": 1}, deadlines={"transfer_s": 7, "request_s": 40})
    found = _offload_of(cell)
    assert found is not None
    assert (found.transfer_s, found.lease_s) == (7, 47)

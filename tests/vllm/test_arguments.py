"""What vLLM is told of an engine."""

from __future__ import annotations

from dataclasses import replace

from rayk.types.config import VllmEngineConfig
from rayk.vllm.arguments import PROVING, engine_arguments, engine_environment

CONFIG = VllmEngineConfig(
    python="p",
    model="m",
    tp=2,
    block_size=64,
    layout="LBHNC",
    connector_options=(("planted", '"kv_swapped"'),),
    arguments=(("max_num_seqs", "3"), ("hf_overrides", '{"a": [1]}')),
)


def test_people_overrule_what_the_fields_say() -> None:
    told = engine_arguments(CONFIG, "/run/secret")
    assert (told["tensor_parallel_size"], told["block_size"], told["max_num_seqs"]) == (2, 64, 3)
    assert told["hf_overrides"] == {"a": [1]}
    assert "max_num_batched_tokens" not in told, "vLLM chooses"


def test_the_proving_connector_goes_by_the_name_of_the_one_it_wraps() -> None:
    transfer = engine_arguments(CONFIG, "/run/secret", "10.0.0.7")["kv_transfer_config"]
    assert (transfer["kv_connector"], transfer["kv_connector_module_path"]) == ("NixlConnector", PROVING)
    options = transfer["kv_connector_extra_config"]
    told = options["secret_file"], options["keep_rows"], options["planted"]
    assert told == ("/run/secret", True, "kv_swapped")
    assert "secret" not in options, "vLLM logs its arguments"
    assert options["host"] == "10.0.0.7", "a decode engine of another machine asks there"


def test_engines_that_push_have_vllms_connector_for_it() -> None:
    pushing = replace(CONFIG, transfer_mode="push")
    assert engine_arguments(pushing)["kv_transfer_config"]["kv_connector"] == "NixlPushConnector"
    assert "kv_transfer_config" not in engine_arguments(replace(CONFIG, connector=""))
    bare = engine_arguments(replace(CONFIG, is_proven=False))["kv_transfer_config"]
    assert "kv_connector_module_path" not in bare
    assert "secret_file" not in bare["kv_connector_extra_config"]


def test_a_layout_is_asked_for_only_where_one_is_wanted() -> None:
    told = engine_environment(CONFIG, "127.0.0.1", 23456)
    assert told["VLLM_KV_CACHE_LAYOUT"] == "LBHNC"
    assert told["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "23456"
    assert "VLLM_KV_CACHE_LAYOUT" not in engine_environment(replace(CONFIG, layout="auto"), "h", 1)

"""Engines on one GPU: tokens against transformers, and KV handed over in device memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rayk.engine.build import ThreadEngine
from rayk.engine.rank import EngineRank
from rayk.parallel.local import LocalComm
from rayk.types.config import EngineConfig
from tests.engine.stepped import Stepped, run_greedy
from tests.families import ATTENTION, GROUPED, HYBRID
from tests.markers import gpu, interpreted, nixl, thorough
from tests.pd import MakeAgent, Pair, local_agents, make_request

_NAMES = itertools.count()
ONE_HEAD = {"num_key_value_heads": 1}


def nixl_agents() -> MakeAgent:
    """Agents of this process over UCX."""
    from rayk.transfer.nixl_agent import NixlAgent

    return lambda name: NixlAgent(f"gpu-test-{next(_NAMES)}-{name}")


@pytest.fixture
def expected(checkpoint, reference):
    """Probe prompts of the tiny Qwen3 (their margins are known) and the reference's tokens."""
    from rayk.oracle.checkpoint import read_marker

    path = checkpoint("qwen3")
    prompts = [list(probe["prompt"]) for probe in read_marker(path)["probes"]]
    answers = reference(path).generate(prompts, max_tokens=24, ignore_eos=True)
    return path, prompts, [list(a.token_ids) for a in answers]


@gpu
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("layout", ["BHLNC", "LBNHC"])
def test_tokens_equal_transformers(expected, backend: str, layout: str) -> None:
    path, prompts, answers = expected
    config = EngineConfig(
        model=str(path), device="cuda", layout=layout, attention_backend=backend, max_batch_tokens=64
    )
    with ThreadEngine(config, poison=-1) as engine:
        done = engine.generate([make_request(f"r{i}", p) for i, p in enumerate(prompts)])
    assert [c.token_ids for c in done] == answers


@gpu
@pytest.mark.parametrize(
    ("family", "overrides", "interleave"),
    [("llama", ONE_HEAD, 1), ("deepseek_v3", {}, 1), ("gpt_oss", ONE_HEAD, 16)],
    ids=["one head", "latents", "sinks and windows"],
)
def test_ranks_on_one_gpu_deal_their_tokens(
    checkpoint, reference, family: str, overrides: dict[str, Any], interleave: int
) -> None:
    """Chunks of prompts beside decodes."""
    from rayk.oracle.checkpoint import read_marker

    path = checkpoint(family, overrides=overrides)
    prompts = [list(probe["prompt"]) for probe in read_marker(path)["probes"]]
    answers = reference(path).generate(prompts, max_tokens=24, ignore_eos=True)
    shape = {"tp": 2, "dcp": 2, "dcp_interleave": interleave}
    config = EngineConfig(model=str(path), device="cuda", max_batch_tokens=64, num_blocks=64, **shape)
    with ThreadEngine(config, poison=-1) as engine:
        assert engine.ranks[0].backends.implementation == "triton (token shards)"
        done = engine.generate([make_request(f"r{i}", p) for i, p in enumerate(prompts)])
    assert [c.token_ids for c in done] == [list(a.token_ids) for a in answers]


@gpu
@pytest.mark.parametrize("make_agents", [local_agents, pytest.param(nixl_agents, marks=nixl)])
@pytest.mark.parametrize("tp", [(1, 2), (2, 1)])
def test_kv_moves_between_engines_on_one_gpu(
    expected, make_agents: Callable[[], MakeAgent], tp: tuple[int, int]
) -> None:
    path, prompts, answers = expected
    layouts = ("BHLNC", "LBNHC")
    with Pair.open(path, tp=tp, layouts=layouts, make_agent=make_agents(), device="cuda") as pair:
        assert pair.generate(prompts) == answers
        pair.check_all_free()


@gpu
@pytest.mark.parametrize("cuda_graphs", ["auto", "never"])
def test_decode_graphs_give_the_same_tokens(expected, cuda_graphs: str) -> None:
    path, prompts, answers = expected
    config = EngineConfig(
        model=str(path), device="cuda", num_blocks=64, max_seqs=4, cuda_graphs=cuda_graphs, layout="BHLNC"
    )
    rank = EngineRank(config, LocalComm(), poison=-1)
    assert rank.graphs_note == ("1, 2, 4" if cuda_graphs == "auto" else "none: engine.cuda_graphs: never")
    lengths = [24, 10, 4]
    outputs = run_greedy(rank, prompts, lengths)
    assert outputs == [a[:n] for a, n in zip(answers, lengths, strict=True)]


@gpu
@pytest.mark.parametrize("hybrid_kv", [True, False])
@pytest.mark.parametrize("family", ["llama4", "gemma3n"])
def test_decode_graphs_see_chunks_and_windows(checkpoint, reference, family: str, hybrid_kv: bool) -> None:
    """Chunks end inside what is decoded; prefill is fast in gemma3n's last layers."""
    from rayk.oracle.checkpoint import read_marker

    # transformers 5.17 looks tokens up past the end of a table per layer that has not all of them.
    whole = {"overrides": {"vocab_size_per_layer_input": 515}} if family == "gemma3n" else {}
    path = checkpoint(family, **whole)
    prompts = [list(probe["prompt"]) for probe in read_marker(path)["probes"]]
    answers = reference(path).generate(prompts, max_tokens=24, ignore_eos=True)
    config = EngineConfig(
        model=str(path),
        device="cuda",
        max_seqs=4,
        hybrid_kv=hybrid_kv,
        fast_prefill=True,
        max_batch_tokens=64,
    )
    with ThreadEngine(config, poison=-1) as engine:
        assert engine.ranks[0].graph_sizes == (1, 2, 4)
        done = engine.generate([make_request(f"r{i}", p) for i, p in enumerate(prompts)])
    assert [c.token_ids for c in done] == [list(a.token_ids) for a in answers]


@gpu
@pytest.mark.parametrize("tp", [(1, 1), (2, 1)])
def test_decode_graphs_continue_from_kv_that_was_read(expected, tp: tuple[int, int]) -> None:
    """D replays graphs over blocks that NIXL or a copy filled; P's threads share no graph with it."""
    path, prompts, answers = expected
    with Pair.open(path, tp=tp, make_agent=local_agents(), device="cuda", max_seqs=4) as pair:
        assert pair.d.engine.ranks[0].graph_sizes == (1, 2, 4)
        assert pair.generate(prompts) == answers
        pair.check_all_free()


@gpu
@pytest.mark.parametrize("family", [*(f for f in ATTENTION if f not in (*GROUPED, "qwen3")), *HYBRID])
def test_every_family_decodes_in_graphs(checkpoint, family: str) -> None:
    """Recurrent states, latents and experts too, prompts in chunks. On a CPU other tests hold the tokens to
    transformers'."""
    from rayk.oracle.checkpoint import read_marker

    if family == "gpt_oss" and not hasattr(transformers.GptOssConfig(), "swiglu_limit"):
        pytest.skip("this release of transformers cannot write it")
    path = checkpoint(family)
    prompts = [list(probe["prompt"]) for probe in read_marker(path)["probes"]]
    tokens = []
    for device, graphs, sizes in (("cpu", "never", ()), ("cuda", "auto", (1, 2, 4))):
        config = EngineConfig(
            model=str(path), device=device, max_seqs=4, max_batch_tokens=64, cuda_graphs=graphs
        )
        with ThreadEngine(config, poison=-1) as engine:
            assert engine.ranks[0].graph_sizes == sizes
            done = engine.generate([make_request(f"r{i}", p) for i, p in enumerate(prompts)])
        tokens.append([c.token_ids for c in done])
    assert tokens[1] == tokens[0]


def logits_of(path: Path, num_tokens: int = 150, **settings: Any) -> torch.Tensor:
    """After so many tokens in three chunks, the later ones from what the cache holds: float64 [vocab]."""
    engine = Stepped(path, max_batch_tokens=num_tokens * 3 // 7, **settings)
    engine.add("r", [(7 * i) % 500 for i in range(num_tokens)], 1)
    engine.finish()
    return engine.logits["r"][0].double().cpu()


def distance(own: torch.Tensor, right: torch.Tensor) -> float:
    return float((own - right).norm() / right.norm())


on_each_device = pytest.mark.parametrize(
    ("device", "num_tokens"),
    [pytest.param("cpu", 30, marks=[interpreted, thorough]), pytest.param("cuda", 150, marks=gpu)],
)
"""Of an engine with Triton's attention: interpreted, and compiled."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "qwen3_next", "mamba2"])
@on_each_device
def test_16_bit_engines_are_as_near_as_on_a_cpu(
    checkpoint, family: str, dtype: str, device: str, num_tokens: int
) -> None:
    path = checkpoint(family)
    right = logits_of(path, num_tokens)
    on_cpu, found = (
        distance(logits_of(path, num_tokens, dtype=dtype, device=d, attention_backend=backend), right)
        for d, backend in (("cpu", "auto"), (device, "triton"))
    )
    assert found < 2 * on_cpu + 0.02


@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [*product(("qwen3", "deepseek_v3", "qwen3_next"), ("fp8_e4m3",)), ("qwen3", "nvfp4")],
)
@on_each_device
def test_quantised_caches_give_the_logits_of_a_cpu(
    checkpoint, family: str, kv_dtype: str, device: str, num_tokens: int
) -> None:
    path = checkpoint(family)
    on_cpu, found = (
        logits_of(path, num_tokens, kv_dtype=kv_dtype, device=d, attention_backend=backend)
        for d, backend in (("cpu", "auto"), (device, "triton"))
    )
    assert distance(found, on_cpu) < 0.05

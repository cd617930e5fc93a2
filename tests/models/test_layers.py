"""Norms, embedding scale and output head against transformers' modules."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3MLP,
    Gemma3RMSNorm,
    Gemma3TextConfig,
    Gemma3TextScaledWordEmbedding,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rayk.models.config import NormConfig
from rayk.models.layers.embedding import LmHead, VocabEmbedding, rounded_scale
from rayk.models.layers.linear import STRETCH_BYTES, HugePages, Linear, RowParallelLinear
from rayk.models.layers.mlp import GatedMlp
from rayk.models.layers.norm import Norm
from rayk.parallel.local import LocalComm
from tests.helpers import assert_matches
from tests.models.tiny import run_ranks

NORMS = {
    "llama": (LlamaRMSNorm, NormConfig(eps=1e-3)),
    "gpt_oss": (GptOssRMSNorm, NormConfig(eps=1e-3, wide=True)),
    "gemma3": (Gemma3RMSNorm, NormConfig(eps=1e-3, wide=True, offset=1.0)),
    "cohere2": (Cohere2LayerNorm, NormConfig(kind="layer", eps=1e-3, wide=True)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(NORMS))
def test_norm_is_transformers_own(name: str, dtype: torch.dtype) -> None:
    module, config = NORMS[name]
    theirs = module(96, eps=1e-3)
    with torch.no_grad():
        theirs.weight.copy_(draw(96, seed=1))
    theirs = theirs.to(dtype)
    # A mean other than 0, for the kind that removes it.
    x = (2 * draw(50, 96) + 0.7).to(dtype)
    mine = Norm(theirs.weight.detach(), config).forward(x)
    weight = theirs.weight.detach().double() + config.offset
    normed = F.layer_norm if config.kind == "layer" else F.rms_norm
    exact = normed(x.double(), (96,), weight, eps=1e-3)
    assert_matches(mine, exact, theirs(x).detach())


def test_norms_differ_from_each_other() -> None:
    x, weight = (2 * draw(50, 96) + 0.7).bfloat16(), draw(96, seed=1).bfloat16()
    made = [Norm(weight, config).forward(x) for _, config in NORMS.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(made) for b in made[:i])


def test_norm_with_a_weight_per_head() -> None:
    config = NormConfig(eps=1e-3, wide=True, offset=1.0)
    weight, x = draw(3, 8, seed=1).bfloat16(), draw(5, 3, 8).bfloat16()
    together = Norm(weight, config).forward(x)
    for head in range(3):
        assert torch.equal(together[:, head], Norm(weight[head], config).forward(x[:, head]))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_scale_is_rounded_as_in_transformers(dtype: torch.dtype, tp_size: int) -> None:
    theirs = Gemma3TextScaledWordEmbedding(11, 8, 0, embed_scale=3072**0.5).to(dtype)
    ids = torch.tensor([10, 0, 4, 5, 6])
    expected = theirs(ids).detach()
    plain = theirs.weight.detach()

    def body(comm: Any) -> torch.Tensor:
        rows = range(11 * comm.rank // comm.size, 11 * (comm.rank + 1) // comm.size)
        share = plain[rows.start : rows.stop]
        scale = rounded_scale(3072**0.5, dtype)
        return VocabEmbedding(share, rows, comm, scale=scale).forward(ids)

    for mine in run_ranks(tp_size, body):
        assert torch.equal(mine, expected)
    assert (dtype == torch.float32) == torch.equal(expected, plain[ids] * 3072**0.5)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_logit_scale_and_soft_cap(tp_size: int) -> None:
    weight, hidden = draw(11, 8), draw(3, 8, seed=1)
    scaled = hidden.double() @ weight.T.double() * 0.25
    exact = torch.tanh(scaled / 1.5) * 1.5
    eager = torch.tanh(hidden @ weight.T * 0.25 / 1.5) * 1.5

    def body(comm: Any) -> torch.Tensor:
        rows = range(11 * comm.rank // comm.size, 11 * (comm.rank + 1) // comm.size)
        share = weight[rows.start : rows.stop]
        return LmHead(share, 11, comm, scale=0.25, soft_cap=1.5).forward(hidden)

    assert float(exact.abs().max()) < 1.5 < float(scaled.abs().max())
    for mine in run_ranks(tp_size, body):
        assert_matches(mine, exact, eager)


def test_gelu_mlp_is_transformers_own() -> None:
    config = Gemma3TextConfig(hidden_size=32, intermediate_size=24, num_attention_heads=2)
    theirs = Gemma3MLP(config)
    gate, up, down = (p.weight.detach() for p in (theirs.gate_proj, theirs.up_proj, theirs.down_proj))
    mine = GatedMlp(
        Linear(torch.cat([gate, up]), None), RowParallelLinear(down, None, LocalComm()), "gelu_tanh"
    )
    x = 3 * draw(7, 32)
    eager = theirs(x).detach()
    assert_matches(mine.forward(x), theirs.double()(x.double()).detach(), eager)


def test_partial_sums_have_the_bias_once() -> None:
    weight, bias, x = draw(4, 6), draw(4, seed=1), draw(3, 6, seed=2)

    def body(comm: Any) -> torch.Tensor:
        mine = slice(3 * comm.rank, 3 * comm.rank + 3)
        return RowParallelLinear(weight[:, mine], bias, comm, reduce=False).forward(x[:, mine])

    parts = run_ranks(2, body)
    exact = x.double() @ weight.T.double() + bias.double()
    assert_matches(parts[0] + parts[1], exact, x @ weight.T + bias)


def test_weights_share_huge_pages_and_no_byte() -> None:
    memory = HugePages()

    def fill(i: int) -> torch.Tensor:
        dtype = (torch.float32, torch.bfloat16)[i % 2]
        num_rows = STRETCH_BYTES if i == 7 else 3 + i  # one that no stretch holds
        return memory.empty(torch.Size((num_rows, 5)), dtype)[:3].fill_(i)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(fill, range(40)))
    for i, weight in enumerate(found):
        assert weight.data_ptr() % 64 == 0
        assert bool((weight == i).all()), i
    assert len({w.untyped_storage().data_ptr() for w in found}) <= 3

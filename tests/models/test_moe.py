"""Experts against transformers' GptOssMLP: uneven splits, ranks without an expert, every kind of product."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from rayk.kernels.grouped_matmul import grouped_matmul
from rayk.models.config import ExpertsConfig, RouterConfig
from rayk.models.layers import moe as moe_module
from rayk.models.layers.linear import Linear
from rayk.models.layers.moe import Experts, Moe
from rayk.models.layers.router import ExpertRouter
from rayk.models.weights import WeightReader
from rayk.parallel import shard
from rayk.parallel.comm import Comm
from rayk.parallel.local import LocalComm
from rayk.types.errors import CheckpointError
from tests.each import each
from tests.helpers import assert_matches
from tests.markers import interpreted
from tests.models.test_decoder import every_logit, prompts
from tests.models.tiny import assert_right, draw, load, run_ranks, write_checkpoint

HIDDEN, INNER = 24, 20


def reference(num_experts: int, num_chosen: int) -> Any:
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=num_experts,
        num_experts_per_tok=num_chosen,
        swiglu_limit=1.5,
        experts_implementation="eager",
    )
    module = GptOssMLP(config).eval()
    draw(module)
    return module


def moe(theirs: Any, comm: Comm) -> Moe:
    """The rank's share of transformers' module."""
    experts = theirs.experts
    own_experts = shard.shard_range(experts.num_experts, comm.size, comm.rank)
    part = slice(own_experts.start, own_experts.stop)
    return Moe(
        router=ExpertRouter(
            Linear(theirs.router.weight.detach(), theirs.router.bias.detach()),
            RouterConfig(bias=True),
            theirs.router.top_k,
        ),
        experts=Experts.from_interleaved(
            gate_up=experts.gate_up_proj.detach()[part],
            gate_up_bias=experts.gate_up_proj_bias.detach()[part],
            down=experts.down_proj.detach()[part],
            down_bias=experts.down_proj_bias.detach()[part],
        ),
        first_expert=own_experts.start,
        config=ExpertsConfig(
            num_experts=experts.num_experts,
            num_chosen=theirs.router.top_k,
            intermediate_size=INNER,
            alpha=experts.alpha,
            limit=experts.limit,
        ),
        comm=comm,
    )


def inputs(num_tokens: int) -> torch.Tensor:
    return 2 * torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(3))


def answers(theirs: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64 and in float32."""
    exact = copy.deepcopy(theirs).double()
    with torch.no_grad():
        return exact(x[None].double())[0][0], theirs(x[None])[0][0]


@each("num_tokens", [1, 5, 37])
@each(
    ("num_experts", "num_chosen", "tp_size"),
    [(4, 2, 1), (4, 2, 3), (5, 3, 2), (5, 3, 4), (3, 1, 4), (2, 2, 5), (1, 1, 2), (8, 4, 4)],
)
def test_experts_equal_transformers(num_experts: int, num_chosen: int, tp_size: int, num_tokens: int) -> None:
    """37 tokens in steps of `num_tokens`."""
    theirs, x = reference(num_experts, num_chosen), inputs(37)
    exact, eager = answers(theirs, x)

    def body(comm: Comm) -> torch.Tensor:
        mine = moe(theirs, comm)
        return torch.cat([mine.forward(part) for part in x.split(num_tokens)])

    ranks = run_ranks(tp_size, body)
    for mine in ranks:
        assert torch.equal(mine, ranks[0])
        assert_matches(mine, exact, eager)


@each(("num_experts", "tp_size"), [(5, 3), (5, 1), (2, 3)])
@pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=interpreted)])
def test_the_products_of_accelerators_give_the_same(
    impl: str, num_experts: int, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_module, "grouped_matmul", partial(grouped_matmul, impl=impl))
    theirs, x = reference(num_experts, 2), inputs(37)
    exact, eager = answers(theirs, x)
    for mine in run_ranks(tp_size, lambda comm: moe(theirs, comm).forward(x)):
        assert_matches(mine, exact, eager)


class WithoutWaiting(TorchDispatchMode):
    """Refuses what needs values to know a shape, and lists what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func.overloadpacket.__name__)
        assert torch.Tag.data_dependent_output not in func.tags, func
        assert torch.Tag.dynamic_output_shape not in func.tags, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tp_size", [1, 3])
def test_nothing_waits_for_the_choice_whatever_the_number_of_tokens(
    tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same operators run for 1 token as for 300, as a CUDA graph's warm-up and its capture need."""
    monkeypatch.setattr(moe_module, "grouped_matmul", partial(grouped_matmul, impl="torch"))
    comm = LocalComm()
    comm.size, comm.rank = tp_size, tp_size - 1
    mine, lists = moe(reference(5, 2), comm), []
    for num_tokens in (1, 64, 65, 300):
        with torch.no_grad(), WithoutWaiting() as mode:
            mine._run_experts(inputs(num_tokens), *mine.router.forward(inputs(num_tokens)))
        lists.append(mode.calls)
    assert all(calls == lists[0] for calls in lists)
    assert "_grouped_mm" in lists[0]


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_an_experts_nan_reaches_no_token_that_is_none_of_its(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of zero does not undo a NaN."""
    monkeypatch.setattr(moe_module, "grouped_matmul", partial(grouped_matmul, impl=impl))
    theirs, x = reference(4, 2), inputs(37)
    mine = moe(theirs, LocalComm())
    clean = mine.forward(x)
    is_its = (mine.router.forward(x)[0] == 1).any(-1)
    assert 0 < int(is_its.sum()) < 37
    mine.experts.down[1, 3] = float("nan")
    found = mine.forward(x)
    assert torch.equal(found[~is_its], clean[~is_its])
    assert bool(found[is_its].isnan().any(-1).all())


def test_both_limits_cut() -> None:
    """The comparisons above reach the cut-offs on both sides."""
    theirs, x = reference(4, 2), inputs(37)
    with torch.no_grad():
        w = theirs.experts
        gate_up = x @ w.gate_up_proj[0] + w.gate_up_proj_bias[0]
    gate, up = gate_up[:, ::2], gate_up[:, 1::2]
    assert float(gate.max()) > 1.5
    assert float(gate.min()) < -1.5
    assert float(up.max()) > 1.5
    assert float(up.min()) < -1.5


@pytest.mark.parametrize(("num_experts", "tp_size"), [(4, 3), (5, 3), (2, 3), (2, 6)], ids=lambda n: str(n))
def test_decoder_with_uneven_experts(tmp_path: Path, num_experts: int, tp_size: int) -> None:
    checkpoint = write_checkpoint(
        tmp_path,
        "gpt_oss",
        num_attention_heads=6,
        num_key_value_heads=3,
        num_local_experts=num_experts,
        num_hidden_layers=2,
    )
    for token_ids, logits in zip(prompts(), every_logit(checkpoint, tp_size), strict=True):
        assert_right(checkpoint, token_ids, logits)


def test_a_rank_reads_its_experts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_checkpoint(tmp_path, "gpt_oss", num_hidden_layers=1, intermediate_size=512)
    readers: list[WeightReader] = []
    original = WeightReader.__exit__

    def remember(self: WeightReader, *args: Any) -> None:
        readers.append(self)
        original(self, *args)

    monkeypatch.setattr(WeightReader, "__exit__", remember)
    num_experts = run_ranks(4, lambda comm: load(checkpoint, comm).layers[0].mlp.experts.count)
    assert num_experts == [1, 1, 1, 2]
    one_expert = 4 * (64 * 1024 + 1024 + 512 * 64 + 64)
    totals = sorted(reader.total_read_bytes for reader in readers)
    assert totals[-1] - totals[0] in range(one_expert, one_expert + 8192)
    assert max(reader.max_read_bytes for reader in readers) == 4 * 64 * 1024


def test_weights_of_experts_that_do_not_fit(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "gpt_oss", num_hidden_layers=1, num_local_experts=2)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({k: v for k, v in tensors.items() if k != name}, file)
    # Ranks 0 and 1 of 4 hold none of the two experts or one; each says what is missing.
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        run_ranks(4, lambda comm: load(checkpoint, comm))
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, file)
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[2, 100, 64\].*asks for \[2, 101, 64\]"):
        run_ranks(4, lambda comm: load(checkpoint, comm))

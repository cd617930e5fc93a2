"""Decoders whose weights stay in fp8, against transformers' with the same weights, dequantised, and inputs
rounded by compressed-tensors."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from safetensors.torch import load_file, save_file
from torch import Tensor

from rayk.attention import get_backend
from rayk.engine.build import ThreadEngine
from rayk.engine.costs import StepCosts
from rayk.models.families import load_config
from rayk.models.loader import load_decoder
from rayk.models.pieces import Keeping
from rayk.parallel.comm import Comm
from rayk.types.batch import ScheduledBatch
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams
from tests.helpers import assert_matches
from tests.markers import thorough
from tests.models.tiny import Paged, reference_logits, reference_model, run_ranks

BLOCK = 16
PROMPT = [(7 * i * i + 3) % 263 for i in range(19)]
DIMS = {"intermediate_size": 96, "num_hidden_layers": 2}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": DIMS,
    "qwen3_moe": DIMS | {"moe_intermediate_size": 32, "mlp_only_layers": []},
    "deepseek_v3": DIMS
    | {"moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16},
}
INPUT_SCALE = 0.02
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
INPUTS = {
    "group": QuantizationArgs(**FLOAT8, strategy="group", group_size=BLOCK, dynamic=True),
    "token": QuantizationArgs(**FLOAT8, strategy="token", dynamic=True),
    "static": QuantizationArgs(**FLOAT8, strategy="tensor", dynamic=False),
}


@dataclass
class Release:
    """A checkpoint in fp8, and transformers' model with its weights dequantised."""

    path: Path
    model: Any
    scheme: str

    def logits(self, dtype: torch.dtype) -> Tensor:
        """transformers' with quantised inputs."""
        model = copy.deepcopy(self.model).to(dtype)
        with inputs_rounded(model, INPUTS[self.scheme]):
            return reference_logits(model, PROMPT)


def is_linear(name: str) -> bool:
    return ".layers." in name and name.endswith("proj.weight")


@pytest.fixture
def release(tmp_path: Path) -> Callable[[str, str], Release]:
    def write(family: str, scheme: str) -> Release:
        plain, path = tmp_path / "plain", tmp_path / "fp8"
        reference_model(family, **SIZES[family]).save_pretrained(plain)
        whole, stored = load_file(plain / "model.safetensors"), {}
        for name, weight in list(whole.items()):
            if not is_linear(name):
                stored[name] = weight
                continue
            block = {"group": (BLOCK, BLOCK), "token": (1, weight.shape[1]), "static": tuple(weight.shape)}[
                scheme
            ]
            grid = weight.unfold(0, block[0], block[0]).unfold(1, block[1], block[1])
            scales = grid.abs().amax((-1, -2)) / 448
            spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            values = (weight / spread).to(torch.float8_e4m3fn)
            module = name.removesuffix("weight")
            whole[name] = values.float() * spread
            stored |= {
                name: values,
                f"{module}weight_scale": scales if scheme != "static" else scales.view(()),
            }
            if scheme == "static":
                stored[f"{module}input_scale"] = torch.tensor(INPUT_SCALE)
        path.mkdir()
        save_file(stored, path / "model.safetensors")
        save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((plain / "config.json").read_text())
        weights = (
            FLOAT8
            | {
                "group": {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
                "token": {"strategy": "channel"},
                "static": {"strategy": "tensor"},
            }[scheme]
        )
        inputs = INPUTS[scheme].model_dump(mode="json", exclude_none=True)
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        settings = {"quant_method": "compressed-tensors", "config_groups": {"all": group}, "ignore": []}
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        return Release(path, model.eval(), scheme)

    return write


@contextlib.contextmanager
def inputs_rounded(model: Any, args: QuantizationArgs) -> Iterator[None]:
    """Have linear maps, of experts too, take inputs rounded to fp8, but for kv_b_proj, which rayk multiplies
    in another order and therefore dequantises."""
    names = ("proj", "proj.weight")
    rounded = {
        p.untyped_storage().data_ptr()
        for name, p in model.named_parameters()
        if ".layers." in name and name.endswith(names) and "kv_b_proj" not in name
    }
    linear = torch.nn.functional.linear

    def with_rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() not in rounded:
            return linear(x, weight, bias)
        flat = x.reshape(1, -1, x.shape[-1])
        if args.dynamic:
            scale, zero = compute_dynamic_scales_and_zp(flat, args, torch.nn.Module())
        else:
            scale, zero = torch.tensor(INPUT_SCALE), torch.tensor(0.0)
        return linear(fake_quantize(flat, scale, zero, args).view(x.shape).to(x.dtype), weight, bias)

    with mock.patch.object(torch.nn.functional, "linear", with_rounded):
        yield


def logits_of(release: Release, tp: int, keeping: list[Keeping] | None) -> Tensor:
    """rayk's, with kept weights or dequantised ones."""
    config = load_config(release.path)

    def run(comm: Comm) -> Tensor:
        decoder = load_decoder(
            release.path,
            config,
            comm=comm,
            dtype=torch.float32,
            device=torch.device("cpu"),
            backend=get_backend("reference", "cpu"),
            keeping=None if keeping is None else keeping[comm.rank],
        )
        return Paged(decoder, 1, tp=(tp, comm.rank)).step([PROMPT])[0]

    return run_ranks(tp, run)[0]


CASES = [
    pytest.param("qwen3", "group", 1),
    pytest.param("qwen3", "group", 2, marks=thorough),
    pytest.param("qwen3", "token", 1, marks=thorough),
    pytest.param("qwen3", "static", 2, marks=thorough),
    pytest.param("qwen3_moe", "group", 1, marks=thorough),
    pytest.param("qwen3_moe", "group", 2, marks=thorough),
    pytest.param("deepseek_v3", "group", 1, marks=thorough),
]


@pytest.mark.parametrize(("family", "scheme", "tp"), CASES)
def test_logits_are_those_of_transformers_with_rounded_inputs(
    release: Callable[[str, str], Release], family: str, scheme: str, tp: int
) -> None:
    """And they are much nearer to these than to those of dequantised weights: inputs are rounded."""
    made = release(family, scheme)
    keeping = [Keeping() for _ in range(tp)]
    kept, dequantised = logits_of(made, tp, keeping), logits_of(made, tp, None)
    exact = made.logits(torch.float64)
    assert_matches(kept, exact, made.logits(torch.float32), what=f"{family}, {scheme}, TP {tp}")
    plain = reference_logits(copy.deepcopy(made.model).double(), PROMPT)
    assert_matches(dequantised, plain, reference_logits(made.model, PROMPT), what="dequantised")
    distances = [float((kept - other).abs().max()) for other in (exact, dequantised)]
    assert distances[0] * 100 < distances[1], distances
    for rank in keeping:
        assert rank.kept
        assert all("kv_b_proj" in name for name in rank.left), rank.text


def test_columns_cut_inside_a_block_are_dequantised_and_told(release: Callable[[str, str], Release]) -> None:
    """At TP 4 a rank has 24 inner columns, one and a half blocks; its rows of the same cut stay in fp8."""
    made, keeping = release("qwen3", "group"), [Keeping() for _ in range(4)]
    logits_of(made, 4, keeping)
    for rank in keeping:
        assert {name.partition("layers.")[2][2:] for name in rank.left} == {"mlp.down_proj.weight"}
        assert any("up_proj" in name for name in rank.kept)
        assert rank.text == "12 matrices kept in fp8, 2 dequantised (mlp.down_proj.weight)"


@thorough
def test_experts_of_a_layer_are_kept_all_or_none_and_told_so(release: Callable[[str, str], Release]) -> None:
    """The last expert of the upper layer rounds inputs by a scale of its own, which the others' do not."""
    made, keeping = release("qwen3_moe", "static"), Keeping()
    file = made.path / "model.safetensors"
    stored = load_file(file)
    names = sorted(name for name in stored if is_linear(name) and stored[name].dtype == torch.float8_e4m3fn)
    experts = [name for name in names if ".layers.1.mlp.experts." in name]
    stored[experts[-1].replace("up_proj.weight", "down_proj.input_scale")] = torch.tensor(0.03)
    save_file(stored, file)
    logits_of(made, 1, [keeping])
    assert sorted(keeping.left) == experts
    assert sorted(keeping.kept) == sorted(set(names) - set(experts))


def test_an_engine_keeps_weights_if_told_to_and_says_so(release: Callable[[str, str], Release]) -> None:
    """On a CPU it dequantises them unless told: nothing there multiplies fp8. Kept ones take fewer bytes."""
    made = release("qwen3", "group")
    read: dict[str, int] = {}
    held: dict[str, int] = {}
    for weights, told in {
        "auto": "all dequantised",
        "kept": "14 matrices kept in fp8",
        "dequantised": "all dequantised",
    }.items():
        with ThreadEngine(EngineConfig(model=str(made.path), weights=weights)) as engine:
            sampling = SamplingParams(max_tokens=4, ignore_eos=True)
            request = Request(request_id=weights, prompt_token_ids=tuple(PROMPT), sampling=sampling)
            (result,) = engine.generate([request])
            (rank,) = engine.ranks
        assert result.error is None
        assert rank.weights_note == f"fp8, blocks of 16 x 16: {told}"
        held[weights] = rank.load_memory.weight_bytes
        _, read[weights] = StepCosts(rank).count(ScheduledBatch(step=0, requests=()))
        if weights == "kept":
            assert not rank.graph_sizes, "their products are not among the calls that a CPU notes"
            assert result.token_ids[0] == int(made.logits(torch.float32)[-1].argmax())
    # Four bytes of an element against one, and a scale of four bytes for each block of 256.
    assert read["auto"] == read["dequantised"]
    assert held["auto"] - held["kept"] >= read["auto"] - read["kept"]
    assert read["kept"] * 4 * 256 == read["auto"] * (256 + 4)

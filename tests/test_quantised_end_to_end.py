"""Quantised KV from prefill to decode at unlike TP sizes; converted where the two sides keep unlike formats.

Expected tokens are those of one rayk engine that does all of it; what any engine says is held against
transformers with a cache that rounds as the formats do (rayk.oracle.quantised, written apart).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayk.engine.build import RequestResult, ThreadEngine
from rayk.experiments.references import References
from rayk.oracle.checkpoint import read_marker
from rayk.oracle.quantised import KVRounding
from rayk.transfer.consumer import Consumption
from rayk.types.config import EngineConfig
from rayk.types.errors import KVMismatch
from tests.markers import one_per, slow, sweep
from tests.pd import Pair, make_request

FORMATS_OF = {
    "fp8": {"kv_dtype": "fp8_e4m3"},
    "fp8-token-head": {"kv_dtype": "fp8_e4m3", "kv_scales": "token_head"},
    "nvfp4": {"kv_dtype": "nvfp4"},
    "auto": {"kv_dtype": "auto"},
}
TPS = ((1, 1), (1, 2), (2, 1), (2, 4), (4, 2))
CONVERTED = (("auto", "fp8"), ("fp8", "auto"), ("auto", "nvfp4"), ("nvfp4", "fp8"), ("fp8-token-head", "fp8"))
NUM_TOKENS = 10


@dataclass(frozen=True, eq=False)
class Model:
    """A tiny checkpoint, and what one engine answers."""

    path: Path
    prompts: list[list[int]]
    answers: dict[tuple[str, int], list[RequestResult]]

    def aggregated(self, name: str, tp: int) -> list[RequestResult]:
        """Of one engine at this format and TP, kept."""
        if (name, tp) not in self.answers:
            config = EngineConfig(model=str(self.path), tp=tp, num_blocks=64, **FORMATS_OF[name])  # type: ignore[arg-type]
            with ThreadEngine(config) as engine:
                self.answers[name, tp] = engine.generate(self.requests())
        return self.answers[name, tp]

    def requests(self) -> list[Any]:
        return [
            make_request(f"r{i}", prompt, NUM_TOKENS, logprobs=0) for i, prompt in enumerate(self.prompts)
        ]


@pytest.fixture(scope="module", params=["qwen3", pytest.param("mistral", marks=slow), "bamba", "deepseek_v3"])
def model(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Model:
    """Full attention; a sliding window; states beside attention; latents."""
    path = of_family(checkpoint, request.param)
    probe: list[int] = read_marker(path)["probes"][2]["prompt"]
    return Model(path, [probe[:5], probe[20:57], probe[60:170]], {})


def of_family(checkpoint: Callable[..., Path], family: str) -> Path:
    """Rotated keys of deepseek_v3 are 8 wide otherwise, and nvfp4's blocks 16."""
    return checkpoint(family, **({"overrides": {"qk_rope_head_dim": 16}} if family == "deepseek_v3" else {}))


def hand_over(model: Model, tp: tuple[int, int], names: tuple[str, str]) -> list[RequestResult]:
    """Every request through both engines."""
    changes = tuple(dict(FORMATS_OF[name]) for name in names)
    with Pair.open(model.path, tp=tp, changes=changes) as pair:  # type: ignore[arg-type]
        done = pair.complete(model.requests())
        pair.check_all_free()
    return done


def check_forced(model: Model, done: Sequence[RequestResult], names: tuple[str, str]) -> None:
    """Chosen tokens and their log probabilities, teacher-forced, within what flipped steps change."""
    sides = [KVRounding(FORMATS_OF[n]["kv_dtype"], FORMATS_OF[n].get("kv_scales", "tensor")) for n in names]
    rounding = sides[0] if names[0] == names[1] else replace(sides[0], then=sides[1])
    references = References(str(model.path), None, rounding=rounding)
    for prompt, completion in zip(model.prompts, done, strict=True):
        exact, other = references.scores(prompt, completion.token_ids)
        noise = np.abs(np.subtract(exact.output_logprobs, other.output_logprobs)).max()
        bound = max(2e-3, 2 * noise)
        assert max(exact.output_gaps) <= 2 * bound
        told = [p.logprob for p in completion.logprobs]
        assert np.abs(np.subtract(exact.output_logprobs, told)).max() <= bound


@sweep(3)
@one_per("name")
@pytest.mark.parametrize("tp", TPS, ids=lambda t: f"{t[0]}to{t[1]}")
@pytest.mark.parametrize("name", ["fp8", "fp8-token-head", "nvfp4"])
def test_both_sides_quantised(model: Model, name: str, tp: tuple[int, int]) -> None:
    done = hand_over(model, tp, (name, name))
    expected = model.aggregated(name, tp[0])
    if [d.token_ids for d in done] != [e.token_ids for e in expected]:
        assert tp[0] != tp[1], "the same sums in the same order"
        check_forced(model, done, (name, name))


@pytest.mark.parametrize("name", ["fp8", "fp8-token-head", "nvfp4"])
def test_what_engines_say_is_the_rounded_references(model: Model, name: str) -> None:
    for tp in (1, 2):
        check_forced(model, model.aggregated(name, tp), (name, name))


@sweep(3)
@one_per("names")
@pytest.mark.parametrize("tp", [(1, 2), (2, 1)], ids=lambda t: f"{t[0]}to{t[1]}")
@pytest.mark.parametrize("names", CONVERTED, ids="-to-".join)
def test_converted_on_receive(model: Model, names: tuple[str, str], tp: tuple[int, int]) -> None:
    """The reference rounds as P does, then what it cached as D does."""
    done = hand_over(model, tp, names)
    assert all(row.convert_ns > 0 for d in done for row in d.info["transfers"])
    check_forced(model, done, names)


# Planted faults: each is named, in scales and states as in keys.


Fields = dict[str, torch.Tensor]
"""Bytes of a layer's live rows by field, [rows, units, bytes]."""


class Corrupted:
    """What arrived at D is changed through its views, before it is digested."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, change: Callable[[Fields], None]) -> None:
        real = Consumption._verify

        def verify(consumption: Consumption) -> KVMismatch | None:
            for view in consumption.views:
                table = consumption.block_tables[view.group.index]
                ids, slots, _ = view.places(table, consumption.ticket.num_tokens)
                seen = {f.name: f.view.view(torch.uint8) for f in view.fields}
                rows = {name: v[ids, :, slots].clone() for name, v in seen.items()}
                change(rows)
                for name, values in rows.items():
                    seen[name][ids, :, slots] = values
            return real(consumption)

        monkeypatch.setattr(Consumption, "_verify", verify)


def exchange(*names: str) -> Callable[[Fields], None]:
    def change(rows: Fields) -> None:
        if names[0] in rows:
            rows[names[0]], rows[names[1]] = rows[names[1]], rows[names[0]]

    return change


def in_field(name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Fields], None]:
    def change(rows: Fields) -> None:
        if name in rows:
            rows[name] = how(rows[name])

    return change


def roll(name: str, by: int, axis: int) -> Callable[[Fields], None]:
    return in_field(name, lambda values: values.roll(by, axis))


def flip(values: torch.Tensor) -> torch.Tensor:
    values[3, 0, 0] ^= 0x10
    return values


def blank_tail(values: torch.Tensor) -> torch.Tensor:
    values[-3:] = 0
    return values


FAULTS: dict[str, tuple[str, str, Callable[[Fields], None], str, int, str]] = {
    "fp8-swap": ("qwen3", "fp8", exchange("k", "v"), "k", 0, "K and V swapped"),
    "scales": ("qwen3", "fp8-token-head", exchange("k_scale", "v_scale"), "k_scale", 0, "v_scale swapped"),
    "fp8-heads": ("qwen3", "fp8", roll("k", 1, 1), "k", 0, "head 0 holds head 1"),
    "scale-heads": ("qwen3", "fp8-token-head", roll("v_scale", 1, 1), "v_scale", 0, "head 0 holds head 1"),
    "nvfp4-swap": ("qwen3", "nvfp4", exchange("k", "v"), "k", 0, "K and V swapped"),
    "nvfp4-shift": ("qwen3", "nvfp4", roll("v", -1, 0), "v", 0, "token t holds token t+1"),
    "scale-shift": ("qwen3", "nvfp4", roll("k_scale", 1, 0), "k_scale", 0, "token t holds token t-1"),
    "scale-bit": ("qwen3", "nvfp4", in_field("k_scale", flip), "k_scale", 3, "one flipped bit in byte 0"),
    "scale-tail": ("qwen3", "nvfp4", in_field("v_scale", blank_tail), "v_scale", 34, "tail not written: "),
    "projection": ("bamba", "fp8", exchange("conv_b", "conv_c"), "conv_b", 36, "conv_b and conv_c swapped"),
    "latent-shift": ("deepseek_v3", "fp8", roll("latent", 1, 0), "latent", 0, "token t holds token t-1"),
    "latent-scales": (
        "deepseek_v3",
        "fp8-token-head",
        exchange("latent_scale", "rope_scale"),
        "latent_scale",
        0,
        "rope_scale swapped",
    ),
    "rope-tail": ("deepseek_v3", "nvfp4", in_field("rope", blank_tail), "rope", 34, "tail not written: "),
    "state-heads": ("bamba", "nvfp4", roll("ssm", 1, 1), "ssm", 36, "holds head"),
}
"""Family, format, change; the field and token that must be named, and how."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    family, name, change, field, token, why = FAULTS[fault]
    path = of_family(checkpoint, family)
    Corrupted(monkeypatch, change)
    prompt = read_marker(path)["probes"][2]["prompt"][20:57]
    with Pair.open(path, tp=(2, 1), **FORMATS_OF[name]) as pair:
        request = make_request("r", prompt, 4)
        prefilled = pair.prefill(request)
        done = pair.decode(request, prefilled)
        assert isinstance(done.error, KVMismatch), done.error
        assert done.token_ids == []
        found = pair.explain("r", prefilled.payload)  # type: ignore[arg-type]
        assert (found.field, found.token) == (field, token)
        assert why in found.classification
        pair.d.handover.settle("r")
        pair.check_all_free()

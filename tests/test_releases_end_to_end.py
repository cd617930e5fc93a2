"""Checkpoints in the formats of quantised releases: greedy tokens against transformers on what the formats'
own libraries dequantise, aggregated and handed over; and what a rank holds while it loads one."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from rayk.attention import get_backend
from rayk.engine.build import ThreadEngine
from rayk.models.families import load_config
from rayk.models.load_memory import held_bytes
from rayk.models.loader import load_decoder
from rayk.models.stored_sizes import rank_pieces
from rayk.models.unused import unused_tensors
from rayk.models.weights import WeightReader
from rayk.oracle.dequantised import plain_checkpoint
from rayk.parallel.local import LocalComm
from rayk.types.config import EngineConfig
from tests.answers import NUM_TOKENS, Answers, make_answers
from tests.markers import one_per
from tests.pd import Pair, make_request

RELEASES = (
    ("qwen3", "fp8-block"),
    ("qwen3_moe", "fp8-block"),
    ("deepseek_v3", "fp8-block"),
    ("llama", "fp8-tensor"),
    ("llama", "fp8-channel"),
    ("gpt_oss", "mxfp4"),
    ("llama", "gptq"),
    ("llama", "int4"),
    ("llama", "int8"),
    ("llama", "modelopt-fp8"),
    ("qwen2", "gptq"),
    ("qwen3", "modelopt-nvfp4"),
    ("qwen3_moe", "awq"),
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{family}-{form}": (family, {"quantise": form}) for family, form in RELEASES
}
PAIRS = ((1, 2), (2, 1))
TP_SETTINGS = ((1,), (2,), *PAIRS)


@pytest.fixture(scope="session")
def answers(checkpoint: Callable[..., Path], reference: Callable[..., Any]) -> Callable[[str], Answers]:
    """By model name; each asked once."""
    return make_answers(MODELS, checkpoint, reference)


def cells() -> list[Any]:
    """Every model at every TP setting. Beside the first model's, `make test-all` runs those of one rank and,
    in turns, of one pair of unlike engines, which loads shares of two ranks as well."""
    return [
        pytest.param(
            model,
            tp,
            id=f"{model}-tp{'to'.join(map(str, tp))}",
            marks=[pytest.mark.slow] if i and tp not in ((1,), PAIRS[i % 2]) else [],
        )
        for (i, model), tp in product(enumerate(MODELS), TP_SETTINGS)
    ]


@one_per("tp")
@pytest.mark.parametrize(("model", "tp"), cells())
def test_tokens_equal_those_of_the_dequantised_model(
    model: str, tp: tuple[int, ...], answers: Callable[[str], Answers]
) -> None:
    path, prompts, expected = answers(model)
    settings: Any = {"max_batch_tokens": 64, "num_blocks": 96}
    if len(tp) == 1:
        with ThreadEngine(EngineConfig(model=str(path), tp=tp[0], **settings)) as engine:
            done = engine.generate([make_request(str(i), p, NUM_TOKENS) for i, p in enumerate(prompts)])
        assert [d.error for d in done] == [None] * len(prompts)
        assert [d.token_ids for d in done] == expected
        return
    with Pair.open(path, tp=tp, layouts=("BHLNC", "LBNHC"), **settings) as pair:
        assert pair.generate(prompts, NUM_TOKENS) == expected
        pair.check_all_free()


@one_per()
@pytest.mark.parametrize(("model", "tp"), list(product(MODELS, (1, 2))))
def test_a_rank_holds_its_shard_and_one_tensor(model: str, tp: int, checkpoint: Callable[..., Path]) -> None:
    family, options = MODELS[model]
    path = checkpoint(family, **options)
    config = load_config(path)
    readers: list[WeightReader] = []

    def load(folder: Path) -> int:
        def opened(*args: Any) -> WeightReader:
            readers.append(WeightReader(*args))
            return readers[-1]

        comm, backend = LocalComm(), get_backend("reference", "cpu")
        comm.size, comm.rank = tp, 0
        to: Any = {"dtype": torch.float32, "device": torch.device("cpu"), "backend": backend}
        return held_bytes(load_decoder(folder, load_config(folder), comm=comm, open_weights=opened, **to))

    with plain_checkpoint(path) as plain:
        assert load(path) == load(plain)
    quantised, whole = readers
    # One piece: in float32, and as stored with its scales.
    largest = max(math.prod(shape) for _, shape in rank_pieces(config, tp, 0))
    assert whole.max_read_bytes <= quantised.max_read_bytes <= 5.5 * largest
    # Only what the rank needs is read, and everything that is there is used.
    assert quantised.total_read_bytes < 0.6 * whole.total_read_bytes
    assert not unused_tensors(path, config)

"""The jobs with vLLM's engines: what they cover, and how many engines they start."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rayk.specs import Cell, load_spec, plan_cells
from rayk.specs.prompts import random_prompts
from rayk.specs.vllm_engines import in_order, num_starts
from tests.specs.models import decoder

JOBS = Path(__file__).parents[2] / "jobs"


def cells_of(name: str) -> list[Cell]:
    """Of one model by every name: what it is made of does not matter here."""
    return [cell for cell, _ in plan_cells(load_spec(JOBS / name), decoder(), device="cpu")]


def starts(cells: list[Cell]) -> int:
    needs = [cell.vllm_engines for cell in cells]
    return num_starts([needs[i] for i in in_order(needs)])


def pairs(cells: list[Cell], model: str) -> Counter[tuple[int, ...]]:
    chosen = [c for c in cells if Path(c.spec.model).name == model]
    return Counter(tuple(engine.tp for engine in c.engines) for c in chosen)


def num_shared_blocks(cell: Cell, block_size: int) -> int:
    """How many whole blocks of prompts are those of an earlier prompt."""
    assert cell.spec.prompts.random is not None
    seen: set[tuple[int, ...]] = set()
    found = 0
    for prompt in random_prompts(cell.spec.prompts.random, 1000, ()):
        # The last token of a prompt is always computed.
        starts = {tuple(prompt[:end]) for end in range(block_size, len(prompt), block_size)}
        found += len(starts & seen)
        seen |= starts
    return found


def test_the_experiment_has_the_issues_cells_and_few_starts() -> None:
    cells = cells_of("vllm.yaml")
    of_vllm = [c for c in cells if c.vllm]
    assert len(cells) == 2 * len(of_vllm) == 38
    assert starts(cells) == 12  # of at most 14
    both, one_to_two = Counter([(1,), (2,), (1, 1), (1, 2), (2, 1)]), Counter([(1,), (1, 2)])
    assert pairs(of_vllm, "falcon_h1-one-group") == both
    assert set(pairs(of_vllm, "qwen3")) == set(both)
    for model in ("falcon_h1", "llama", "mistral"):
        assert pairs(of_vllm, model) == one_to_two
    sizes = {tuple(e.block_size for e in c.vllm) for c in of_vllm if c.decode and "qwen3" in c.spec.model}
    assert sizes == {(64, 128), (128, 64), (128, 128)}
    cached = [c for c in of_vllm if c.vllm[0].prefix_caching]
    assert abs(2 * len(cached) - len(of_vllm)) <= 1
    assert all(c.spec.prompts.random and c.spec.prompts.random.prefix_tokens % 2 for c in cached)
    assert {num_shared_blocks(c, 128) for c in cached} == {2}
    # An engine is P in one cell and D in another.
    assert {c.vllm[0] for c in of_vllm} & {c.vllm[1] for c in of_vllm if c.decode}
    # Each cell of vLLM's has one of rayk's beside it.
    assert {c.cell_id.replace("-engine.kind=vllm", "") for c in of_vllm} == {
        c.cell_id for c in cells if not c.vllm
    }


def test_the_nightly_run_is_the_full_product() -> None:
    cells = cells_of("vllm_nightly.yaml")
    others = [c for c in cells if c.vllm[0].connector != "NixlConnector"]
    precisions = [c for c in cells if (c.vllm[0].dtype, c.vllm[0].kv_dtype) != ("float32", "auto")]
    handed_over = [
        c
        for c in cells
        if c.decode and c.axes["transfer.mode"] == "pull" and c not in others and c not in precisions
    ]
    assert len(handed_over) == 5 * 2 * 4 * 4
    assert len(cells) == len(handed_over) + 5 * 2 * 4 + 4 + len(others) + len(precisions)
    assert {num_shared_blocks(c, 128) for c in cells} == {2}
    assert [c.vllm[0].connector for c in others] == ["ExampleConnector", "MultiConnector"]
    assert Counter((c.vllm[0].dtype, c.vllm[0].kv_dtype, c.vllm[1].tp) for c in precisions) == Counter(
        [
            ("bfloat16", "auto", 1),
            ("bfloat16", "auto", 2),
            ("float32", "fp8_e4m3", 1),
            ("float32", "fp8_e4m3", 2),
        ]
    )
    assert len({c.cell_id for c in cells}) == len(cells)
    assert starts(cells) < len(cells) / 2


def test_cells_that_vllm_gets_right_have_200_hand_overs() -> None:
    cells = cells_of("vllm_right.yaml")
    random = [c.spec.prompts.random for c in cells if c.decode]
    assert sum(prompts.count for prompts in random if prompts is not None) == 200
    # vLLM #55208, and unlike blocks, are wrong.
    one_group = [c for c in cells if c.spec.model.endswith("one-group")]
    assert all(engine.tp == 1 for c in one_group for engine in c.engines)
    assert {engine.block_size for c in cells for engine in c.vllm} == {64}

"""Memory of engines whose models attend in chunks: kernel blocks begin where chunks do, in groups of their
own and in full ones."""

from __future__ import annotations

import pytest

from rayk.models.engine_plan import EnginePlan, plan_engine
from rayk.models.kv_specs import engine_groups, group_chunks
from rayk.types.config import EngineConfig
from rayk.types.errors import UserError
from tests.each import each
from tests.kv.decoders import decoder, layer

LLAMA4 = ("chunked", "chunked", "chunked", "full")


def plan(*layers: str, chunk: int, **settings: object) -> EnginePlan:
    return plan_engine(EngineConfig(model="made", **settings), decoder(*layers, chunk=chunk))  # type: ignore[arg-type]


def kernel_blocks(made: EnginePlan) -> list[tuple[str, int, int]]:
    """(kind, tokens of a block, rows of a kernel block) of each group."""
    return [(g.group.spec.kind, g.block_size, g.kernel_block_size) for g in made.ranks[0].groups]


def chunks_begin_with_kernel_blocks(made: EnginePlan, chunk: int, num_tokens: int = 512) -> bool:
    """Every position that begins a chunk, in the groups that hold chunked layers, is a kernel block's first;
    and no kernel block crosses two of the group's blocks."""
    return all(
        start % g.kernel_block_size == 0 and g.block_size % g.kernel_block_size == 0
        for g in made.ranks[0].groups
        for start in range(0, num_tokens, chunk)
        if 0 in g.group.layers
    )


@each("hybrid_kv", [True, False])
@each("block_size", [1, 4, 16, 24])
@each("chunk", [1, 5, 6, 7, 8, 16, 48, 64, 512])
def test_kernel_blocks_are_the_largest_that_chunks_begin_with(chunk: int, block_size: int, hybrid_kv: bool):
    made = plan(*LLAMA4, chunk=chunk, block_size=block_size, hybrid_kv=hybrid_kv)
    found = kernel_blocks(made)
    largest = max(n for n in range(1, block_size + 1) if block_size % n == 0 and chunk % n == 0)
    if hybrid_kv:
        assert found == [("chunked", block_size, largest)] * 3 + [("full", block_size, block_size)]
    else:
        assert found == [("full", block_size, largest)]
        assert made.groups[0].layers == (0, 1, 2, 3)
    assert chunks_begin_with_kernel_blocks(made, chunk)


def test_layers_of_unlike_chunks_in_one_group_share_what_divides_them():
    """Without hybrid_kv; with it each has a group of its own."""
    model = decoder(layer("chunked", 12), layer("chunked", 18), "sliding", "full")
    for hybrid_kv, expected in ((False, ((12, 18),)), (True, ((12,), (18,), (), ()))):
        config = EngineConfig(model="made", block_size=24, hybrid_kv=hybrid_kv)
        assert group_chunks(engine_groups(config, model), model) == expected
    (whole,) = plan_engine(EngineConfig(model="made", block_size=24, hybrid_kv=False), model).ranks[0].groups
    assert whole.kernel_block_size == 6
    with pytest.raises(
        UserError, match="kernel_block_size 12 does not divide the chunks of 12 and 18 positions"
    ):
        plan_engine(EngineConfig(model="made", block_size=24, kernel_block_size=12, hybrid_kv=False), model)
    made = plan_engine(EngineConfig(model="made", block_size=24), model)
    assert kernel_blocks(made) == [
        ("chunked", 24, 12),
        ("chunked", 24, 6),
        ("sliding", 24, 24),
        ("full", 24, 24),
    ]


@pytest.mark.parametrize("hybrid_kv", [True, False])
def test_blocks_that_have_grown_are_cut_for_chunks_too(hybrid_kv: bool):
    """A state's page of 5248 bytes is less than three of attention's of 16 tokens: blocks of 48."""
    layers = ("state", "chunked", "state", "full")
    for chunk, largest in ((6, 6), (20, 4), (48, 48), (64, 16)):
        made = plan(*layers, chunk=chunk, hybrid_kv=hybrid_kv)
        found = {kind: (size, rows) for kind, size, rows in kernel_blocks(made)}
        size, rows = found["chunked" if hybrid_kv else "full"]
        assert (size, rows) == (48, largest)
        assert found["mamba2"] == (512, 1)
        if hybrid_kv:
            assert found["full"] == (48, 48)
        told = dict(zip((g.spec.kind for g in made.groups), made.kernel_block_sizes, strict=True))
        assert told == {kind: 512 if kind == "mamba2" else found[kind][1] for kind in found}, "in tokens"


@pytest.mark.parametrize("hybrid_kv", [True, False])
@pytest.mark.parametrize(
    ("settings", "problem", "mend"),
    [
        (
            {"kernel_block_size": 16},
            "kernel_block_size 16 does not divide the chunks of 24",
            "a divisor of 8",
        ),
        ({"kernel_block_size": 4, "block_size": 12}, None, ""),
        ({"kernel_block_size": 5}, "kernel_block_size 5 does not divide", "a divisor of 16"),
        ({"kernel_block_size": 2}, None, ""),
    ],
    ids=str,
)
def test_a_kernel_block_that_chunks_do_not_begin_with_is_refused(
    settings: dict[str, int], problem: str | None, mend: str, hybrid_kv: bool
):
    if problem is None:
        made = plan(*LLAMA4, chunk=24, hybrid_kv=hybrid_kv, **settings)
        assert {rows for _, _, rows in kernel_blocks(made)} == {settings["kernel_block_size"]}
        assert chunks_begin_with_kernel_blocks(made, 24)
        return
    with pytest.raises(UserError) as caught:
        plan(*LLAMA4, chunk=24, hybrid_kv=hybrid_kv, **settings)
    assert caught.value.problem.startswith(problem)
    assert mend in caught.value.mend


def test_one_kinds_kernel_blocks_are_refused_or_taken_alone():
    by_kind = {"kernel_block_sizes": (("chunked", 4),)}
    assert kernel_blocks(plan(*LLAMA4, chunk=24, **by_kind))[2:] == [("chunked", 16, 4), ("full", 16, 16)]
    # The full group has nothing of chunks, unless they lie in it.
    full = {"kernel_block_sizes": (("full", 16),)}
    assert kernel_blocks(plan(*LLAMA4, chunk=24, **full))[2:] == [("chunked", 16, 8), ("full", 16, 16)]
    with pytest.raises(UserError, match="chunks of 24 positions that layers of full groups see"):
        plan(*LLAMA4, chunk=24, hybrid_kv=False, **full)
    with pytest.raises(UserError, match="chunks of 24 positions that layers of chunked groups see"):
        plan(*LLAMA4, chunk=24, kernel_block_sizes=(("chunked", 16),))
    with pytest.raises(UserError, match="names chunked groups, and the model has none"):
        plan(*LLAMA4, chunk=24, hybrid_kv=False, **by_kind)


def test_a_kernel_block_is_refused_where_blocks_have_grown():
    """24 divides the blocks of 48, to which those of 16 grow, but not the chunk of 32; 16 divides both."""
    layers = ("state", "chunked", "state", "full")
    assert ("chunked", 48, 16) in kernel_blocks(plan(*layers, chunk=32))
    assert ("chunked", 48, 8) in kernel_blocks(plan(*layers, chunk=32, kernel_block_size=8))
    with pytest.raises(UserError, match="kernel_block_size 24 does not divide the chunks of 32") as caught:
        plan(*layers, chunk=32, kernel_block_size=24)
    assert "a divisor of 16" in caught.value.mend

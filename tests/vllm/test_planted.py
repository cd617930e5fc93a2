"""Bugs planted in D over full attention, windows and states, and in one rank's share: each is found where it
is, and named. Stores and layers are those of tests.vllm.standins."""

from __future__ import annotations

from typing import Any

import pytest

from rayk.types.errors import Unsupported
from rayk.vllm.planted import PLANTED
from tests.each import each
from tests.vllm.pairs import (
    FULL,
    STATES,
    WIDE,
    WINDOW,
    pair,
)
from tests.vllm.standins import Model


@each(
    "planted, field, classification",
    [
        ("heads_shifted", "k", "head 0 holds head 1 of the producer"),
        ("kv_swapped", "k", "K and V swapped"),
        ("last_block_dropped", "k", "tail not written"),
        ("state_columns_shifted", "conv_x", "channels shifted: channel c holds channel c-1"),
    ],
)
def test_a_bug_planted_in_d_is_caught_and_named(planted: str, field: str, classification: str) -> None:
    with pair(planted=planted) as made:
        for worker in made.consumer.workers:
            for layer in worker.layers.values():
                if not isinstance(layer.kv_cache, tuple):
                    layer.kv_cache.zero_()
        (result,) = made.run()
        assert result["status"] == "mismatch"
        assert result["mismatch"]["field"] == field
        assert result["mismatch"]["classification"].startswith(classification), result["mismatch"]
        assert result["bytes_mismatched"] > 0


KV = [(layer, name) for layer in range(4) for name in ("k", "v")]
WRONG = {
    "heads_shifted": KV,
    "kv_swapped": KV,
    "last_block_dropped": KV,
    "state_columns_shifted": [(3, "conv_b"), (3, "conv_c"), (3, "conv_x")],
}
"""What each bug spoils: (layer, field). Layer 1 is a window, 2 has chunks, and 3 has a state, too."""


@each("p_tp, planted_ranks", [(1, [0]), (1, [1]), (2, [0]), (2, [1]), (2, [0, 1]), (1, [])])
@each("planted", list(WRONG))
def test_a_bug_in_one_rank_s_share_is_found_there_alone(
    planted: str, p_tp: int, planted_ranks: list[int]
) -> None:
    d = {"planted": planted, "planted_ranks": planted_ranks, "model": WIDE}
    with pair(p_tp, 2, p={"keep_rows": True, "model": WIDE}, **d) as made:
        results = made.run()
        for rank, (result, half) in enumerate(zip(results, made.consumer.halves, strict=True)):
            is_planted = rank in planted_ranks
            assert result["status"] == ("mismatch" if is_planted else "equal")
            taken = half.counts.take()
            assert taken is not None
            found = {(layer, name) for layer, name, *_ in taken["wrong"]}
            assert sorted(found) == (WRONG[planted] if is_planted else [])
            heads = {unit for _, name, unit, _ in taken["wrong"] if name in ("k", "v")}
            assert heads <= {2 * rank, 2 * rank + 1}, "a rank tells of its own heads"


@each(
    "planted, field, token, classification",
    [
        ("heads_shifted", "k", 47, "head 0 holds head 1 of the producer"),
        ("kv_swapped", "k", 47, "K and V swapped"),
        ("last_block_dropped", "k", 64, "tail not written: tokens 64 to 69"),
    ],
)
def test_a_bug_over_a_window_is_named_at_a_token_of_the_window(
    planted: str, field: str, token: int, classification: str
) -> None:
    with pair(2, 1, p={"keep_rows": True, "groups": [WINDOW]}, groups=[WINDOW], planted=planted) as made:
        made.consumer.workers[0].layers["model.layers.1.self_attn.attn"].kv_cache.zero_()
        (result,) = made.run()
        wrong = result["mismatch"]
        assert (wrong["layer"], wrong["field"], wrong["token"]) == (1, field, token)
        assert wrong["classification"].startswith(classification), wrong
    with pair(2, 1, p={"groups": [WINDOW]}, groups=[WINDOW]) as made:
        assert made.run()[0]["status"] == "equal"


@each("groups", [1, 2])
@each("p_tp, d_tp", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_shifted_state_beside_attention_is_named_on_each_rank(p_tp: int, d_tp: int, groups: int) -> None:
    model = Model(size_v=8, mamba_groups=groups)
    both: dict[str, Any] = {"groups": [FULL, STATES], "model": model, "keep_rows": True}
    with pair(p_tp, d_tp, p=both, planted="state_columns_shifted", **both) as made:
        for rank, result in enumerate(made.run()):
            wrong = result["mismatch"]
            assert (wrong["layer"], wrong["field"]) == (3, "conv_x")
            assert wrong["unit"] == rank * model.mamba_heads // d_tp
            assert wrong["classification"].startswith("channels shifted: channel c holds channel c-1")
    with pair(p_tp, d_tp, p=both, **both) as made:
        assert {result["status"] for result in made.run()} == {"equal"}


@each("planted", ["heads_shifted", "kv_swapped"])
def test_a_bug_leaves_alone_what_d_had_already(planted: str) -> None:
    """Its prefix cache has that block for others, too."""
    with pair(planted=planted) as made:
        ids = made.expect(made.prefill(), num_local=32)
        made.move(ids)
        cache = made.consumer.workers[0].layers["model.layers.0.self_attn.attn"].kv_cache
        before = cache.clone()
        made.consumer.halves[0].received({"d-r"}, set())
        (result,) = made.results()
        assert (result["status"], result["mismatch"]["token"]) == ("mismatch", 32)
        changed = {int(i) for i in (cache != before).flatten(1).any(1).nonzero()}
        assert changed == set(ids[FULL][1:3])


def test_stale_block_ids_read_the_request_before() -> None:
    with pair(planted="stale_block_ids") as made:
        first, second = made.prefill("a", 1), made.prefill("b", 2)
        its_own = second["remote_block_ids"]
        ids = made.expect(first, "a", 1)
        made.move(ids, 1)
        made.consumer.halves[0].received({"d-a"}, set())
        assert made.results("a")[0]["status"] == "equal"
        ids = made.expect(second, "b", 2)
        assert second["remote_block_ids"] == first["remote_block_ids"] != its_own
        made.move(ids, 1)  # What lies in these blocks.
        made.consumer.halves[0].received({"d-b"}, set())
        (result,) = made.results("b")
        assert result["status"] == "mismatch"
        assert "missing: tokens 0 to 69 hold stale or foreign content" in result["mismatch"]["classification"]


def test_planted_bugs_that_a_model_has_no_room_for_are_refused() -> None:
    assert len(PLANTED) == 5
    with pair(1, 2, planted="heads_shifted") as made, pytest.raises(Unsupported, match="one KV head"):
        made.run()
    uneven = Model(size_v=4)
    with pair(planted="kv_swapped", model=uneven, p={"model": uneven}) as made:
        made.expect({})
        with pytest.raises(Unsupported, match="unlike sizes"):
            made.consumer.halves[0].received({"d-r"}, set())

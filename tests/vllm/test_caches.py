"""A vLLM worker's caches read in canonical coordinates: the same KV has the same words in any engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from rayk.kernels.digest import digest_rows
from rayk.kv.fields import FIELD_IDS
from rayk.transfer.diagnose import first_difference
from rayk.transfer.verify import WrongWord
from rayk.types.errors import Unsupported
from rayk.vllm.caches import ROWS_PER_GROUP, ProvenCaches
from rayk.vllm.proof_compare import ArrivedKV, PeerProof, compare
from tests.vllm.standins import (
    MLAAttentionSpec,
    Model,
    Worker,
    keys_transposed,
    shuffled,
    side_by_side,
)

TOKENS = 77
"""Of no whole number of blocks or row groups; beyond a window, inside a chunk."""

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens outside heads": {"order": "BNHC", "conv": "SD"},
    "K transposed, large blocks": {"places": keys_transposed, "block_size": 64},
    "heads outside blocks": {"order": "HBNC", "places": keys_transposed},
    "by a table": {"places": shuffled, "block_size": 32, "conv": "SD"},
    "kernel blocks": {"block_size": 64, "kernel_block_size": 16},
}


def words_of(model: Model, tp_size: int, seed: int = 0, **layout: Any) -> np.ndarray:
    """All words of a request over an engine's ranks, [words]; those that several ranks have must agree."""
    merged: np.ndarray | None = None
    for rank in range(tp_size):
        worker = Worker(model, (rank, tp_size), **layout)
        ids = worker.block_ids(TOKENS, seed=rank)
        worker.write(model.values(TOKENS, seed), ids)
        words = worker.prove().digests(ids, TOKENS)
        if merged is None:
            merged = words
        assert not ((merged != words) & (merged != 0) & (words != 0)).any(), "replicas differ"
        merged = np.where(words == 0, merged, words)
    assert merged is not None
    assert (merged != 0).all(), "a word that no rank has"
    return merged


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_kv_has_the_same_words_in_every_engine(dtype: torch.dtype, groups: int) -> None:
    model = Model(dtype, state_dtype=dtype, mamba_groups=groups)
    expected = words_of(model, 1)
    for name, layout in LAYOUTS.items():
        for tp_size in (1, 2):
            assert np.array_equal(words_of(model, tp_size, **layout), expected), f"{name}, TP {tp_size}"
    assert not (words_of(model, 1, seed=1) == expected).any()


def test_fp8_has_the_same_words_in_every_engine() -> None:
    model = Model(torch.bfloat16)
    expected = words_of(model, 1, is_fp8=True)
    assert np.array_equal(words_of(model, 2, is_fp8=True, **LAYOUTS["K transposed, large blocks"]), expected)
    assert np.array_equal(words_of(model, 2, is_fp8=True, **LAYOUTS["by a table"]), expected)


def test_ranks_that_share_heads_have_the_same_words() -> None:
    """Four ranks for two KV heads, and for one group of B and C."""
    model = Model()
    assert np.array_equal(words_of(model, 4), words_of(model, 1))


def test_words_are_those_of_the_plain_values() -> None:
    """Of values laid out by nobody but this test, in the order of the digest vector."""
    model = Model()
    values = model.values(TOKENS)
    live = {0: 0, 1: TOKENS + 1 - model.window, 2: TOKENS // model.chunk * model.chunk, 3: 0}
    expected = []
    for layer, start in live.items():
        for field in ("k", "v"):
            content = values[layer, field].transpose(0, 1)[None].contiguous()
            expected.append(_words(layer, field, content, torch.arange(start, TOKENS)))
    for field in ("conv_x", "conv_b", "conv_c", "ssm"):
        content = values[3, field].flatten(1)[None, :, None].contiguous()
        expected.append(_words(3, field, content, torch.tensor([TOKENS - 1]), torch.tensor([0])))
    assert np.array_equal(words_of(model, 1), np.concatenate(expected))


def _words(
    layer: int, field: str, content: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor | None = None
) -> np.ndarray:
    """Words of one block that holds all rows, [1, units, rows, elements]."""
    first = int(rows[0]) // ROWS_PER_GROUP
    return (
        digest_rows(
            content,
            torch.zeros_like(rows),
            rows if slots is None else slots,
            rows,
            layer=layer,
            units=range(content.shape[1]),
            fields=[(FIELD_IDS[field], 0, content.shape[3])],
            rows_per_group=ROWS_PER_GROUP,
            first_group=first,
            num_groups=int(rows[-1]) // ROWS_PER_GROUP + 1 - first,
            impl="reference",
        )
        .reshape(-1)
        .numpy()
    )


def pair(**layout: Any) -> tuple[Worker, list[list[int]], ProvenCaches, np.ndarray]:
    """A worker with a request's values and block ids, its caches, and the right words, of another engine."""
    model = Model(mamba_groups=2)
    worker = Worker(model, **layout)
    ids = worker.block_ids(TOKENS)
    worker.write(model.values(TOKENS), ids)
    return worker, ids, worker.prove(), words_of(model, 1, block_size=32)


def wrong_words(
    expected: np.ndarray, caches: ProvenCaches, ids: list[list[int]], found: np.ndarray, first_row: int = 0
) -> list[WrongWord]:
    """As D's worker compares them."""
    arrival = ArrivedKV("r", None, TOKENS, first_row, found)
    proof = PeerProof(caches.description, TOKENS, expected)
    return compare(arrival, caches.views([()] * len(ids)), caches.description, {0: proof}).wrong


def swap_keys_and_values(worker: Worker, values: dict[Any, torch.Tensor]) -> None:
    size = worker.model.size_v
    values[1, "k"][70, 1, :size], values[1, "v"][70, 1] = (
        values[1, "v"][70, 1],
        values[1, "k"][70, 1, :size].clone(),
    )


def shift_heads(worker: Worker, values: dict[Any, torch.Tensor]) -> None:
    values[3, "v"] = values[3, "v"].roll(1, dims=1)


def shift_tokens(worker: Worker, values: dict[Any, torch.Tensor]) -> None:
    values[0, "k"][1:] = values[0, "k"][:-1].clone()


def swap_groups(worker: Worker, values: dict[Any, torch.Tensor]) -> None:
    values[3, "conv_b"], values[3, "conv_c"] = values[3, "conv_c"], values[3, "conv_b"]


@pytest.mark.parametrize(
    ("fault", "layer", "field", "unit", "row_group", "classification"),
    [
        (swap_keys_and_values, 1, "k", 1, 4, None),
        (shift_heads, 3, "v", 0, 0, "head 0 holds head 1 of the producer"),
        (shift_tokens, 0, "k", 0, 0, "rows shifted: token t holds token t-1"),
        (swap_groups, 3, "conv_b", 0, 4, "CONV_B and conv_c swapped"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_what_is_stored_wrong_has_other_words_and_is_named(
    fault: Any, layer: int, field: str, unit: int, row_group: int, classification: str | None
) -> None:
    worker, ids, caches, expected = pair(places=keys_transposed)
    right = caches.digests(ids, TOKENS)
    assert wrong_words(expected, caches, ids, right) == []
    rows = caches.rows(ids, TOKENS)

    values = worker.model.values(TOKENS)
    fault(worker, values)
    worker.write(values, ids)
    first = wrong_words(expected, caches, ids, caches.digests(ids, TOKENS))[0]
    view = next(v for v in caches.views(ids) if v.layer == first.layer and v.group.index == first.group)
    assert (first.layer, view.fields[first.field_index].name) == (layer, field)
    assert (first.unit, first.row_group) == (unit, row_group)
    key = layer, view.group.spec.part
    found = first_difference("r", view, TOKENS, rows[key], caches.rows(ids, TOKENS)[key])
    assert found is not None
    if classification is not None:
        assert found.classification.lower() == classification.lower()


def test_a_stale_block_has_other_words() -> None:
    worker, ids, caches, expected = pair()
    ids[0][1], ids[0][2] = ids[0][2], ids[0][1]
    wrong = wrong_words(expected, caches, ids, caches.digests(ids, TOKENS))
    assert {(w.layer, w.row_group) for w in wrong} == {(0, 1), (0, 2), (3, 1), (3, 2)}


def test_rows_before_the_first_are_left_out() -> None:
    """What D computed itself is not compared; a group that begins before is left out whole."""
    worker, ids, caches, expected = pair()
    for first_row, num_groups in ((32, 2), (33, 3)):
        late = caches.digests(ids, TOKENS, first_row)
        assert wrong_words(expected, caches, ids, late, first_row) == []
        full = late[: 2 * 2 * 5].reshape(4, 5)
        assert (full[:, :num_groups] == 0).all()
        assert (full[:, num_groups:] != 0).all()


def test_a_description_says_what_this_rank_holds() -> None:
    caches = Worker(Model(), (1, 2), places=keys_transposed).prove()
    description = json.loads(json.dumps(caches.description))
    assert (description["tp_rank"], description["tp_size"]) == (1, 2)
    units_of = {
        (entry["layer"], entry["kind"], f["name"]): (f["units"], f["of"])
        for entry in description["layers"]
        for f in entry["fields"]
    }
    assert units_of[0, "full", "k"] == units_of[1, "sliding", "v"] == units_of[2, "chunked", "k"] == ([1], 2)
    assert units_of[3, "mamba2", "conv_x"] == units_of[3, "mamba2", "ssm"] == ([2, 3], 4)
    assert units_of[3, "mamba2", "conv_b"] == units_of[3, "mamba2", "conv_c"] == ([0], 1)
    assert [entry["group"] for entry in description["layers"]] == [0, 1, 2, 0, 3]


def test_only_the_requests_blocks_are_read() -> None:
    """Other blocks hold what is no number, and views have as many blocks as the request."""
    model = Model()
    worker = Worker(model, places=keys_transposed)
    ids = worker.block_ids(TOKENS)
    for layer in worker.layers.values():
        for cache in [layer.kv_cache] if isinstance(layer.kv_cache, torch.Tensor) else layer.kv_cache:
            cache.fill_(float("nan"))
    worker.write(model.values(TOKENS), ids)
    caches = worker.prove()
    assert np.array_equal(caches.digests(ids, TOKENS), words_of(model, 1))
    assert {view.num_blocks for view in caches.views(ids)} == {5, 1}
    with pytest.raises(ValueError, match="block 24 of group 0: there are 24"):
        caches.views([[24], [], [], []])


def test_a_shared_cache_is_its_owners() -> None:
    worker = Worker(Model())
    worker.layers[
        "model.layers.3.self_attn.attn"
    ].kv_sharing_target_layer_name = "model.layers.0.self_attn.attn"
    parts = [(e["layer"], e["part"]) for e in worker.prove().description["layers"]]
    assert parts == [(0, "attention"), (1, "attention"), (2, "attention"), (3, "state")]


def change_spec(worker: Worker, kind: type | None = None, **fields: Any) -> None:
    group = worker.kv_cache_config.kv_cache_groups[0]
    group.kv_cache_spec = (kind or type(group.kv_cache_spec))(**{**vars(group.kv_cache_spec), **fields})


def change_states(worker: Worker, **fields: Any) -> None:
    group = next(g for g in worker.kv_cache_config.kv_cache_groups if g.layer_names == ["model.7.mixer"])
    group.kv_cache_spec = type(group.kv_cache_spec)(**{**vars(group.kv_cache_spec), **fields})


class NamedGdn:
    name = "GDN_ATTN"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda w: change_spec(w, MLAAttentionSpec),
            "model.layers.0.self_attn.attn: vLLM's MLAAttentionSpec",
        ),
        (lambda w: change_spec(w, kv_quant_mode=2), "a KV cache of auto: .* set kv_cache_dtype"),
        (lambda w: change_spec(w, num_kv_heads=1), "1 KV heads on a rank of 1, where the model has 2"),
        (lambda w: change_states(w, mamba_type=NamedGdn), "model.7.mixer: states of GDN_ATTN"),
        (lambda w: change_states(w, num_speculative_blocks=1), "turn use_replayssm off"),
        (
            lambda w: setattr(
                w.layers["model.layers.1.self_attn.attn"].attn_backend, "get_name", lambda: "FLEX"
            ),
            "attention backend FLEX: .* choose one of CPU_ATTN, FLASH_ATTN",
        ),
        (
            lambda w: setattr(w.vllm_config.parallel_config, "pipeline_parallel_size", 2),
            "pipeline parallelism",
        ),
        (lambda w: setattr(w.vllm_config, "speculative_config", object()), "speculative decoding"),
    ],
)
def test_what_cannot_be_proven_is_refused_by_name(change: Any, text: str) -> None:
    worker = Worker(Model())
    change(worker)
    with pytest.raises(Unsupported, match=text):
        worker.prove()


def test_places_are_side_by_side_in_the_plain_engine() -> None:
    layout = Worker(Model(), places=side_by_side).prove().description["layers"][0]["layout"]
    strides = "head 192, token 12, element 1"
    assert layout == f"CPU_ATTN, 16 tokens: k from 0: {strides}; v from 8: {strides}"

"""Backends store, then attend; they agree with dense attention, and say what they are."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rayk.attention import AttentionParams, CommonAttentionMetadata, get_backend
from rayk.attention import backends as backends_module
from rayk.attention.backends import first_chunk
from rayk.kernels.paged_attention import why_no_native
from rayk.kv.specs import FullAttentionSpec, SlidingWindowSpec
from rayk.types.errors import UserError
from tests.each import each
from tests.helpers import assert_matches
from tests.kernels.cases import AXIS_ORDERS, Batch, count_marks, dense_attention, make_batch, num_seen
from tests.markers import interpreted

BACKENDS = ("cpu", "cpu-torch", "reference", pytest.param("triton", marks=interpreted))
needs_native = pytest.mark.skipif(why_no_native() is not None, reason="no compiler")
MIXED = ((1, 1), (1, 38), (7, 7), (9, 40))


def new_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """k and v of this step's tokens, packed."""
    pairs = list(zip(batch.requests, batch.keys, batch.values, strict=True))
    k = torch.cat([keys[total - n :] for (n, total), keys, _ in pairs])
    v = torch.cat([values[total - n :] for (n, total), _, values in pairs])
    return k, v


def common_of(batch: Batch) -> CommonAttentionMetadata:
    return CommonAttentionMetadata.from_host(
        query_lens=[n for n, _ in batch.requests],
        seq_lens=[total for _, total in batch.requests],
        block_table=batch.block_table,
        slot_mapping=batch.slot_mapping,
        block_size=batch.cache.shape[-2],
    )


def forward(
    name: str,
    batch: Batch,
    scale: float = 0.25,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    backend = get_backend(name, "cpu")
    k, v = new_tokens(batch)
    params = AttentionParams(
        scale, batch.window, torch.tensor(batch.kv_index), batch.head_size_k, v.shape[-1], sinks, soft_cap
    )
    metadata = backend.build(common_of(batch), batch.window)
    return backend.forward(batch.q, k, v, batch.cache, metadata, params)


@each("order", AXIS_ORDERS)
@each("window", [None, 13])
@pytest.mark.parametrize("name", BACKENDS)
def test_stores_then_attends(name: str, order: str, window: int | None) -> None:
    """This step's keys and values reach the cache only through the backend; counted exactly."""
    batch = make_batch(MIXED, order=order, block_size=8, window=window, marks=True, store_new=False)
    out = forward(name, batch)
    assert torch.equal(torch.round(out * num_seen(batch)).long(), count_marks(batch))


@pytest.mark.parametrize("name", BACKENDS)
def test_numbers_match_float64(name: str) -> None:
    batch = make_batch(MIXED, store_new=False, kv_index=(0, 1, 1, 1), window=20)
    exact = dense_attention(batch, torch.float64, 0.25)
    assert_matches(forward(name, batch), exact, dense_attention(batch, torch.float32, 0.25), what=name)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("sinks", "soft_cap"),
    [(torch.tensor([1.0, -1.0, 0.5, 3.0]), None), (None, 0.8), (torch.tensor([1.0, -1.0, 0.5, 3.0]), 0.8)],
    ids=["sinks", "cap", "both"],
)
def test_a_layers_sinks_and_soft_cap_reach_the_kernel(
    name: str, sinks: Tensor | None, soft_cap: float | None
) -> None:
    batch = make_batch(MIXED, store_new=False, kv_index=(0, 1, 1, 1), window=20)
    exact = dense_attention(batch, torch.float64, 0.25, sinks=sinks, soft_cap=soft_cap)
    eager = dense_attention(batch, torch.float32, 0.25, sinks=sinks, soft_cap=soft_cap)
    assert_matches(forward(name, batch, 0.25, sinks, soft_cap), exact, eager, what=name)


def test_one_backend_serves_several_threads() -> None:
    """Ranks may be threads that share a backend; its kept memory must not be shared."""
    backend = get_backend("cpu-torch", "cpu")
    batches = [make_batch(((1, 200 + i), (30, 90)), seed=i) for i in range(4)]
    wrong: list[int] = []

    def work(i: int) -> None:
        batch = batches[i]
        params = AttentionParams(0.25, None, torch.tensor(batch.kv_index), 16, 16)
        metadata = backend.build(common_of(batch), None)
        k, v = new_tokens(batch)
        exact = dense_attention(batch, torch.float64, 0.25)
        for _ in range(20):
            out = backend.forward(batch.q, k, v, batch.cache, metadata, params)
            if float((out - exact).abs().max()) > 1e-5:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


PROMPTS = ((20, 20), (33, 33))


def write_table(path: Path, monkeypatch: pytest.MonkeyPatch, **ratios: float) -> None:
    rows = [
        {"device": "cpu", "head_size": 16, "group": 2, "tokens": int(tokens[1:]), "ratio": ratio}
        for tokens, ratio in ratios.items()
    ]
    path.write_text(json.dumps(rows))
    monkeypatch.setenv("RAYK_FIRST_CHUNKS", str(path))


def count_dense(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    attend = first_chunk.attend

    def counted(q: Tensor, *rest: Any) -> Tensor:
        calls.append(len(q))
        return attend(q, *rest)

    monkeypatch.setattr(first_chunk, "attend", counted)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_first_chunks_go_to_torch_where_it_was_measured_to_be_faster(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get the same numbers, and the cache the same keys and values for the steps to come."""
    write_table(tmp_path / "table", monkeypatch, _16=1.5, _64=0.5)
    calls = count_dense(monkeypatch)
    batch, paged = (make_batch(PROMPTS, dtype=dtype, store_new=False) for _ in range(2))
    exact, eager = (dense_attention(batch, kind, 0.25) for kind in (torch.float64, dtype))
    assert_matches(forward("cpu-torch", batch), exact, eager, what="dense")
    assert calls == [53]
    monkeypatch.delenv("RAYK_FIRST_CHUNKS")
    forward("cpu-torch", paged)
    assert calls == [53]
    assert torch.equal(batch.cache.view(torch.int8), paged.cache.view(torch.int8))


@pytest.mark.parametrize(
    ("requests", "options", "ratios"),
    [
        (((20, 20), (1, 33)), {}, {"_16": 1.5}),  # cached context
        (PROMPTS, {"window": 13}, {"_16": 1.5}),
        (PROMPTS, {"kv_index": (0, 1, 1, 1)}, {"_16": 1.5}),
        (PROMPTS, {}, {"_16": 0.9, "_64": 1.5}),
        (PROMPTS, {}, {"_64": 1.5}),
    ],
    ids=["context", "window", "uneven heads", "slower", "not measured"],
)
def test_other_chunks_stay_with_the_paged_kernel(
    requests: Any, options: dict[str, Any], ratios: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table(tmp_path / "table", monkeypatch, **ratios)
    calls = count_dense(monkeypatch)
    batch = make_batch(requests, store_new=False, **options)
    exact, eager = (dense_attention(batch, kind, 0.25) for kind in (torch.float64, torch.float32))
    assert_matches(forward("cpu-torch", batch), exact, eager, what="paged")
    assert calls == []


def test_a_table_of_first_chunks_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "table").write_text("{1}")
    monkeypatch.setenv("RAYK_FIRST_CHUNKS", str(tmp_path / "table"))
    with pytest.raises(UserError, match="RAYK_FIRST_CHUNKS"):
        forward("cpu-torch", make_batch(PROMPTS, store_new=False))


def test_metadata_of_another_window_is_refused() -> None:
    batch = make_batch(MIXED)
    backend = get_backend("reference", "cpu")
    k, v = new_tokens(batch)
    params = AttentionParams(0.25, 4, torch.tensor(batch.kv_index), 16, 16)
    with pytest.raises(AssertionError, match="another attention group"):
        backend.forward(batch.q, k, v, batch.cache, backend.build(common_of(batch), None), params)


def test_auto_takes_the_devices_own() -> None:
    assert get_backend("auto", "cpu").name == "cpu"
    assert get_backend("auto", "cuda:1").name == "triton"


@needs_native
def test_cpu_runs_native_code_where_it_can() -> None:
    assert get_backend("cpu", "cpu").implementation == "cpu-native"


def test_fallback_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends_module, "why_no_native", lambda: "no C++ compiler")
    backend = get_backend("cpu", "cpu")
    assert backend.implementation == "cpu-torch (no C++ compiler)"
    assert backend.name == "cpu"


def test_unknown_name_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="unknown attention backend 'flash'") as caught:
        get_backend("flash", "cpu")
    for name in ("auto", "cpu", "reference", "triton"):
        assert name in caught.value.mend


def test_cpu_backend_on_cuda_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="cannot run on cuda"):
        get_backend("cpu", "cuda")


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayk.kernels import interpreter

    monkeypatch.setattr(interpreter, "INTERPRETED", False)
    with pytest.raises(UserError, match="cannot run on cpu"):
        get_backend("triton", "cpu")


@pytest.mark.parametrize("name", ["cpu", "reference", pytest.param("triton", marks=interpreted)])
def test_vetoes(name: str) -> None:
    backend = get_backend(name, "cpu")
    full = FullAttentionSpec(16, 2, 64, 64, "bfloat16", 8)
    sliding = SlidingWindowSpec(16, 2, 64, 64, "float32", 8, window=50)
    assert backend.veto("BHLNC", full) is None
    assert backend.veto("LHBNC", sliding) is None
    why = backend.veto("LBNHC", FullAttentionSpec(16, 2, 64, 64, "float8_e4m3fn", 8))
    assert why is not None
    assert "float8_e4m3fn" in why


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param("cpu", 1024, marks=needs_native),
        ("cpu-torch", None),
        ("reference", None),
        pytest.param("triton", 256, marks=interpreted),
    ],
)
def test_heads_without_room_are_vetoed(name: str, most: int | None) -> None:
    """And what is let through is computed."""
    backend = get_backend(name, "cpu")
    size = most or 2000
    assert backend.veto("LBNHC", FullAttentionSpec(16, 2, size, size, "float32", 8)) is None
    batch = make_batch(((3, 5), (1, 40)), head_size_k=size, head_size_v=size, store_new=False, seed=1)
    exact = dense_attention(batch, torch.float64, 0.03)
    assert_matches(forward(name, batch, 0.03), exact, dense_attention(batch, torch.float32, 0.03))
    for sizes in ((size + 1, 16), (16, size + 1)) if most else ():
        why = backend.veto("LBNHC", FullAttentionSpec(16, 2, *sizes, "float32", 8))
        assert why is not None
        assert str(size + 1) in why
        assert backend.implementation in why

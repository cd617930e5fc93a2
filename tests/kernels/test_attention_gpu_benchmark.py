"""The GPU attention benchmark: its dry run, its counts, and what it tells other people's kernels."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.markers import gpu, interpreted, thorough

BENCHMARKS = Path(__file__).resolve().parents[2] / "jobs" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import attention_gpu as benchmark
    from gpu_attention import paths
    from gpu_attention.problem import Problem, Shape, eager
finally:
    sys.path.remove(str(BENCHMARKS))

DECODE = Shape("decode", ((1, 37), (1, 64), (1, 5)), num_kv_heads=2, group=2, head_size=16)
VARIANTS = [
    DECODE,
    replace(DECODE, requests=((9, 40), (1, 33), (20, 20))),
    replace(DECODE, window=6, requests=((9, 40), (1, 33))),
    replace(DECODE, soft_cap=0.7, group=4),
]


def rows_of(output: str) -> list[list[str]]:
    """Cells of the table's rows."""
    lines = [line for line in output.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


@pytest.mark.parametrize(
    ("requests", "torchs", "ratio"),
    [
        (((40, 40),) * 2, 4.0, 1.5),
        (((40, 40),), None, None),
        (((9, 40),), 4.0, None),
        (((1, 1), (2, 2)), 4.0, None),
    ],
)
def test_a_table_of_first_chunks_has_prompts_that_both_computed(
    requests: tuple[tuple[int, int], ...], torchs: float | None, ratio: float | None
) -> None:
    shape = replace(DECODE, requests=requests)
    took = {benchmark.OURS: 6.0, benchmark.SDPA: torchs}
    assert set(took) <= set(paths.PATHS)
    row = benchmark.first_chunk(shape, [benchmark.Row(shape, *pair) for pair in took.items()], "cpu")
    expected = {"device": "cpu", "head_size": 16, "group": 2, "tokens": 40, "ratio": ratio}
    assert row == (expected if ratio else None)


@thorough
def test_without_cuda_it_says_so_in_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    script = [sys.executable, str(BENCHMARKS / "attention_gpu.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert "no CUDA device" in done.stdout


def test_dry_run_times_what_it_can_and_names_the_rest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    arguments = ["--device", "cpu", "--repeats", "2", "--shapes", "sinks window", "--out", "dry"]
    assert benchmark.main(arguments) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "dry.md").read_text() == printed
    command = "jobs/benchmarks/attention_gpu.py --device cpu --repeats 2 --shapes 'sinks window' --out dry"
    assert printed.endswith(f"\nReproduce:\n\n    python {command}\n")
    rows = rows_of(printed)
    assert [row[1] for row in rows] == list(benchmark.PATHS) * 2
    for row in rows:
        if row[1] in ("rayk", "flex_attention (dense)"):
            assert float(row[2]) > 0
            assert row[5].endswith("%")
            assert float(row[8]) < torch.finfo(torch.bfloat16).eps
        else:
            assert row[2] in (
                "needs CUDA",
                "only a decode step is split",
                "SDPA has no sinks",
                "not installed",
            )
    assert [row[3] for row in rows if row[1] == "rayk"] == ["1.00", "1.00"]


def test_a_wrong_path_is_named_and_not_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets_the_last_key(problem: Problem) -> Callable[[], Tensor]:
        problem.keys = [keys[:-1] for keys in problem.keys]
        problem.values = [values[:-1] for values in problem.values]
        return paths.torch_sdpa(problem)

    def raises(problem: Problem) -> Callable[[], Tensor]:
        raise RuntimeError("no | kernel image\nfor this device")

    monkeypatch.setitem(benchmark.PATHS, "torch SDPA (dense)", forgets_the_last_key)
    monkeypatch.setitem(benchmark.PATHS, "rayk", raises)
    options = ["--device", "cpu", "--repeats", "2", "--shapes", "decode 1 x 8192"]
    assert benchmark.main(options) == 1, "rayk itself failed"
    by_path = {row[1]: row for row in rows_of(capsys.readouterr().out)}
    assert by_path["torch SDPA (dense)"][2] == "WRONG, not timed"
    assert by_path["rayk"][2] == "failed: RuntimeError: no / kernel image"


@pytest.mark.parametrize("shape", VARIANTS, ids=["decode", "mixed", "window", "soft cap"])
def test_bytes_and_flop_are_those_of_the_keys_that_are_seen(shape: Shape) -> None:
    """Counted in the mask, key by key."""
    problem = Problem(shape, "cpu", torch.float16)
    masks = [problem.seen(r) for r in range(len(shape.requests))]
    seen = sum(int(mask.sum()) for mask in masks)
    assert shape.flop == 2 * seen * shape.num_query_heads * (16 + 16)
    live = sum(int(mask.any(0).sum()) for mask in masks)
    read = live * 2 * shape.num_kv_heads * 16 * 2
    assert shape.num_bytes(2) == read + 2 * problem.q.numel() * 2


def as_if_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Problem, "on_cuda", property(lambda self: True))


def assert_right(call: Callable[[], Tensor], problem: Problem) -> None:
    assert benchmark.relative_error(call(), eager(problem)) < torch.finfo(problem.q.dtype).eps


@interpreted
@pytest.mark.parametrize("soft", [{}, {"has_sinks": True}, {"soft_cap": 0.7}], ids=str)
def test_the_unsplit_path_computes_the_same(soft: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(replace(DECODE, **soft), "cpu", torch.float16)
    as_if_on_cuda(monkeypatch)
    assert_right(paths.rayk_not_split(problem), problem)


def attend_dense(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, cap: float) -> Tensor:
    """q [n, Q, D], keys and values [t, H, D]: [n, Q, D], for kernels that are not installed here."""
    group = q.shape[1] // keys.shape[1]
    scores = torch.einsum("nqd,tqd->qnt", q.float(), keys.float().repeat_interleave(group, 1)) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    position = torch.arange(len(keys) - len(q), len(keys)).unsqueeze(1)
    distance = position - torch.arange(len(keys))
    hidden = (distance < 0) | ((distance >= window) if window else torch.tensor(False))
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("qnt,tqd->nqd", weights, values.float().repeat_interleave(group, 1)).to(q.dtype)


class FakeFlashInfer:
    """Follows the page tables as FlashInfer's documentation describes them."""

    def __init__(self, workspace: Tensor, kv_layout: str, *, use_tensor_cores: bool | None = None) -> None:
        assert kv_layout == "NHD"
        assert workspace.dtype == torch.uint8
        self.decodes = use_tensor_cores is not None

    def plan(self, *tables: Tensor | int, causal: bool = False, **options: object) -> None:
        assert causal != self.decodes
        *indptrs, self.heads, self.kv_heads, self.size, self.page_size = tables
        self.starts = indptrs[0] if not self.decodes else None
        self.kv_starts, self.indices, self.last = indptrs[-3:]
        self.options = options

    def run(self, q: Tensor, cache: Tensor) -> Tensor:
        """cache [pages, 2, page size, H, D]."""
        assert cache.shape[1:] == (2, self.page_size, self.kv_heads, self.size)
        assert q.shape[1:] == (self.heads, self.size)
        starts = torch.arange(len(q) + 1) if self.starts is None else self.starts
        window, cap = self.options["window_left"] + 1, self.options["logits_soft_cap"] or 0
        rows = []
        for r, last in enumerate(self.last.tolist()):
            pages = self.indices[self.kv_starts[r] : self.kv_starts[r + 1]]
            total = (len(pages) - 1) * self.page_size + last
            keys, values = (cache[pages, i].flatten(0, 1)[:total] for i in (0, 1))
            some = q[starts[r] : starts[r + 1]]
            rows.append(attend_dense(some, keys, values, self.options["sm_scale"], window, cap))
        return torch.cat(rows)


@pytest.mark.parametrize("shape", VARIANTS, ids=["decode", "mixed", "window", "soft cap"])
def test_flashinfer_is_told_the_same_problem(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = FakeFlashInfer
    module.BatchPrefillWithPagedKVCacheWrapper = FakeFlashInfer
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    as_if_on_cuda(monkeypatch)
    problem = Problem(shape, "cpu", torch.float16)
    assert_right(paths.flashinfer_paged(problem), problem)


def fake_unified_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seqused_k: Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: Tensor,
    softcap: float,
    q_descale: None,
    k_descale: None,
    v_descale: None,
    sinks: Tensor | None = None,
) -> None:
    """The parameters of an older vLLM: k and v [blocks, block size, H, D]."""
    assert causal
    assert sinks is None
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(seqused_k.max())
    for r, total in enumerate(seqused_k.tolist()):
        tokens = torch.arange(total)
        where = block_table[r, tokens // k.shape[1]], tokens % k.shape[1]
        rows = slice(cu_seqlens_q[r], cu_seqlens_q[r + 1])
        window = window_size[0] + 1
        out[rows] = attend_dense(q[rows], k[where], v[where], softmax_scale, window, softcap)


@pytest.mark.parametrize("shape", VARIANTS, ids=["decode", "mixed", "window", "soft cap"])
def test_vllm_is_told_the_same_problem(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("vllm.v1.attention.ops.triton_unified_attention")
    module.unified_attention = fake_unified_attention
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for parent in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    as_if_on_cuda(monkeypatch)
    problem = Problem(shape, "cpu", torch.float16)
    assert_right(paths.vllm_unified(problem), problem)


@gpu
def test_on_the_gpu_every_path_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    for shapes in ("decode 8 x 4096", "mixed"):
        assert benchmark.main(["--repeats", "3", "--shapes", shapes]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows
    assert [row for row in rows if row[2].startswith(("WRONG", "failed"))] == []

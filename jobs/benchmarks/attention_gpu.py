"""Time rayk's Triton paged attention on a GPU beside other people's kernels, as shares of measured ceilings.

    python jobs/benchmarks/attention_gpu.py [--dtype bfloat16] [--repeats 50] [--shapes decode] [--eager]
                                            [--out NAME] [--first-chunks FILE]
    python jobs/benchmarks/attention_gpu.py --device cpu      # a dry run: small shapes, plain torch

Ceilings are measured in the same run: bandwidth by copying 1 GiB (bytes read and written), FLOP/s by a
large matrix product. Bytes of a row are the keys and values that its queries see, the queries and the
result; FLOP are those of the two products over the keys that each query sees. `x rayk` is a path's time
over rayk's: above 1 is slower.

Every path's result is first compared with float32 eager attention over dense keys and values; a wrong one
is named and not timed. Paths take turns, each replays a CUDA graph (with --eager, its plain call) after the
second-level cache was overwritten; medians. Paths that are not installed or cannot compute a shape say so.
SDPA and flex_attention read dense keys and values: for them there is no paging to pay for.

--out NAME also writes jobs/benchmarks/results/NAME.md. --first-chunks FILE writes rayk's time over SDPA's for
prompts without cached context: with RAYK_FIRST_CHUNKS=FILE engines take the faster. Without a CUDA device
nothing is measured.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # works without an install

from gpu_attention.paths import PATHS, Cannot
from gpu_attention.problem import Problem, Shape, eager

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = ("shape", "path", "ms", "x rayk", "GB/s", "of copy", "TFLOP/s", "of matmul", "error")
PACKAGES = ("torch", "triton", "vllm", "flashinfer-python")
OURS = "rayk"
SDPA = "torch SDPA (dense)"

GPT_OSS = {"group": 8, "head_size": 64, "has_sinks": True}
SHAPES = (
    Shape("decode 1 x 8192", ((1, 8192),)),
    Shape("decode 8 x 4096", ((1, 4096),) * 8),
    Shape("decode 64 x 2048", ((1, 2048),) * 64),
    Shape("decode 256 x 512", ((1, 512),) * 256),
    Shape("decode 4 x 32768, 1 KV head", ((1, 32768),) * 4, num_kv_heads=1, group=8),
    Shape("decode 64 x 4096 sinks", ((1, 4096),) * 64, **GPT_OSS),
    Shape("decode 64 x 4096 sinks window 128", ((1, 4096),) * 64, window=128, **GPT_OSS),
    Shape("decode 16 x 4096 D256 soft cap", ((1, 4096),) * 16, group=2, head_size=256, soft_cap=50.0),
    Shape("prefill 1 x 8192", ((8192, 8192),)),
    Shape("prefill 4 x 2048", ((2048, 2048),) * 4),
    Shape("prefill 1024 of 8192", ((1024, 8192),)),
    Shape("prefill 4 x 2048 sinks window 128", ((2048, 2048),) * 4, window=128, **GPT_OSS),
    Shape("prefill 4 x 2048 D256 soft cap", ((2048, 2048),) * 4, group=2, head_size=256, soft_cap=50.0),
    Shape("mixed 32 x 1 of 2048 + 2 x 512 of 2048", ((1, 2048),) * 32 + ((512, 2048),) * 2),
)


@dataclass(frozen=True)
class Ceilings:
    """What the machine gives plain torch, measured in this run."""

    copy_gbps: float
    matmul_tflops: float


@dataclass(frozen=True)
class Replay:
    """A captured call, kept as long as its graph, which reads the tensors that the call holds."""

    graph: torch.cuda.CUDAGraph
    call: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


class Clock:
    """Times calls on one device."""

    def __init__(self, device: str, *, graphs: bool) -> None:
        self._on_cuda = device != "cpu"
        self._graphs = graphs and self._on_cuda
        # Larger than any second-level cache: writing it leaves nothing of the last call there.
        self._flush = torch.empty((256 << 20) if self._on_cuda else 0, dtype=torch.uint8, device=device)

    def prepared(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call warmed up and, on a GPU, captured in a CUDA graph."""
        for _ in range(3):
            call()
        if not self._graphs:
            return call
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
        return Replay(graph, call)

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Of one call, with cold caches on a GPU."""
        if not self._on_cuda:
            begin = time.perf_counter_ns()
            call()
            return (time.perf_counter_ns() - begin) / 1e6
        self._flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def medians(self, calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        """Median milliseconds of each call; they take turns, so that all see the same clocks."""
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(repeats):
            for name, call in calls.items():
                taken[name].append(self.milliseconds(call))
        return {name: statistics.median(values) for name, values in taken.items()}


def measure_ceilings(clock: Clock, device: str, dtype: torch.dtype, repeats: int) -> Ceilings:
    """Copy bandwidth (bytes read and written) and the rate of a square matrix product."""
    size, num_bytes = (8192, 1 << 30) if device != "cpu" else (1024, 64 << 20)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    took = clock.medians(
        {"copy": lambda: target.copy_(source), "matmul": lambda: torch.mm(left, right, out=product)},
        max(3, repeats),
    )
    return Ceilings(2 * num_bytes / took["copy"] / 1e6, 2 * size**3 / took["matmul"] / 1e9)


@dataclass(frozen=True)
class Row:
    """A path on a shape: times, or why there are none."""

    shape: Shape
    path: str
    milliseconds: float | None = None
    error: float | None = None
    reason: str = ""

    def cells(self, ours: float | None, ceilings: Ceilings, itemsize: int) -> list[str]:
        error = "" if self.error is None else f"{self.error:.1e}"
        if self.milliseconds is None:
            return [self.shape.name, self.path, self.reason, "", "", "", "", "", error]
        gbps = self.shape.num_bytes(itemsize) / self.milliseconds / 1e6
        tflops = self.shape.flop / self.milliseconds / 1e9
        return [
            self.shape.name,
            self.path,
            f"{self.milliseconds:.4f}",
            "" if ours is None else f"{self.milliseconds / ours:.2f}",
            f"{gbps:.4g}",
            f"{gbps / ceilings.copy_gbps:.0%}",
            f"{tflops:.4g}",
            f"{tflops / ceilings.matmul_tflops:.0%}",
            error,
        ]


def first_chunk(shape: Shape, rows: Sequence[Row], device: str) -> dict[str, object] | None:
    """How much longer rayk's kernel takes than SDPA for prompts without context; None for other batches."""
    took = {row.path: row.milliseconds for row in rows}
    ours, torchs = took[OURS], took[SDPA]
    tokens = shape.requests[0][1]
    if ours is None or torchs is None or set(shape.requests) != {(tokens, tokens)}:
        return None
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name(device)
    about = {"device": name, "head_size": shape.head_size, "group": shape.group}
    return about | {"tokens": tokens, "ratio": round(ours / torchs, 3)}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of what is expected."""
    return float((actual.float() - expected).norm() / expected.norm())


def measure(shape: Shape, clock: Clock, options: argparse.Namespace) -> list[Row]:
    """A row of every path: compared first, then timed if it is right to a rounding of the dtype."""
    problem = Problem(shape, options.device, options.torch_dtype)
    expected = eager(problem)
    limit = torch.finfo(options.torch_dtype).eps
    calls: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for name, make in PATHS.items():
        try:
            call = make(problem)
            errors[name] = relative_error(call(), expected)
            if errors[name] < limit:
                calls[name] = clock.prepared(call)
            else:
                reasons[name] = "WRONG, not timed"
        except Cannot as cannot:
            reasons[name] = str(cannot)
        except Exception as error:  # noqa: BLE001 - other people's kernels fail in their own ways
            reasons[name] = f"failed: {type(error).__name__}: {error}".split("\n")[0][:100].replace("|", "/")
    took = clock.medians(calls, options.repeats)
    return [Row(shape, name, took.get(name), errors.get(name), reasons.get(name, "")) for name in PATHS]


def environment(device: str) -> list[str]:
    """What the numbers were measured on and with."""
    machine = platform.processor() or platform.machine()
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        machine = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors, CUDA {torch.version.cuda}"
        )
    git = ["git", "-C", str(RESULTS.parent), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return [
        f"- {machine}, {platform.platform()}, Python {platform.python_version()}",
        "- " + ", ".join(f"{name} {version_of(name)}" for name in PACKAGES),
        f"- commit {commit or 'unknown'}",
    ]


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def report(options: argparse.Namespace) -> Iterator[str]:
    """Lines of the result, as they come. Notes in `options.failed` whether rayk gave no time on a shape."""
    clock = Clock(options.device, graphs=not options.eager)
    dry = options.device == "cpu"
    yield f"# Attention on {'a CPU: a dry run, not a measurement' if dry else 'a GPU'}\n"
    yield "\n".join(environment(options.device))
    yield f"- {options.dtype}, medians of {options.repeats}, {'calls' if options.eager else 'CUDA graphs'}"
    ceilings = measure_ceilings(clock, options.device, options.torch_dtype, options.repeats)
    yield f"- copy {ceilings.copy_gbps:.4g} GB/s, matrix product {ceilings.matmul_tflops:.4g} TFLOP/s\n"
    yield "| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS)
    for shape in (shape for shape in SHAPES if options.shapes in shape.name):
        rows = measure(shape.small() if dry else shape, clock, options)
        ours = next(row.milliseconds for row in rows if row.path == OURS)
        for row in rows:
            cells = row.cells(ours, ceilings, options.torch_dtype.itemsize)
            yield "| " + " | ".join(cells) + " |"
        options.failed |= ours is None
        chunk = first_chunk(rows[0].shape, rows, options.device)
        options.chunks += [chunk] if chunk else []
    yield f"\nReproduce:\n\n    {shlex.join(['python', 'jobs/benchmarks/attention_gpu.py', *options.words])}"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options; `device` is None where there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else None)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--shapes", default="", help="only shapes whose name contains this")
    parser.add_argument("--eager", action="store_true", help="time calls, not replays of CUDA graphs")
    parser.add_argument("--first-chunks", type=Path, help="write the table of first chunks here")
    parser.add_argument("--out", help="also write jobs/benchmarks/results/OUT.md")
    options = parser.parse_args(arguments)
    if not any(options.shapes in shape.name for shape in SHAPES):
        parser.error(f"--shapes: none of {', '.join(repr(shape.name) for shape in SHAPES)}")
    options.words = sys.argv[1:] if arguments is None else arguments
    options.torch_dtype = getattr(torch, options.dtype)
    options.eager |= options.device == "cpu"
    options.failed = False
    options.chunks = []
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when rayk itself is wrong or fails on a shape."""
    options = parsed(arguments)
    if options.device is None:
        print("attention_gpu: no CUDA device, nothing measured (--device cpu makes a dry run)")
        return 0
    if options.device == "cpu":
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    lines = []
    for line in report(options):
        print(line, flush=True)
        lines.append(line)
    if options.out:
        (RESULTS / f"{options.out}.md").write_text("\n".join(lines) + "\n")
    if options.first_chunks:
        options.first_chunks.write_text(json.dumps(options.chunks, indent=1) + "\n")
    return int(options.failed)


if __name__ == "__main__":
    sys.exit(main())

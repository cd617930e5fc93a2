"""An engine of the shape of Llama 3.1 8B in bfloat16: steps, prefill, idle time. Its weights are drawn."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobs.gpu.rows import Row
from jobs.gpu.stages import Bench, Stage
from rayk.engine.build import ThreadEngine
from rayk.models.formats import Quantisation
from rayk.models.weights import WeightReader
from rayk.types.config import EngineConfig
from rayk.types.request import Request, SamplingParams

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SMALL = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
VARIANTS = {"graphs": "auto", "eager": "never"}
STD = 0.02
START_S = 300
_RUNS = itertools.count()


class DrawnWeights(WeightReader):
    """Tensors drawn on a device instead of read: matrices from a normal distribution, vectors of ones."""

    def __init__(
        self,
        folder: Path,
        plain: Callable[[str], str],
        quantisation: Quantisation | None,
        *,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(folder, plain, quantisation)
        self._options: dict[str, Any] = {"device": device, "dtype": dtype}
        torch.manual_seed(0)

    def require(self, name: str, shape: tuple[int, ...]) -> Any:
        """Every tensor is there, in any shape."""

    def read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        whole = (len(rows) if rows is not None else shape[0], *shape[1:])
        if columns is not None:
            whole = (whole[0], len(columns), *whole[2:])
        made = torch.empty(whole, **self._options)
        return made.fill_(1) if len(shape) == 1 else made.normal_(0, STD)


@dataclass(frozen=True)
class Sizes:
    """What is asked of the engine."""

    model: dict[str, Any]
    batches: tuple[int, ...]
    prompt: int
    """Tokens of a prompt that is then decoded."""
    decoded: int
    prefill: int
    num_blocks: int

    @classmethod
    def of(cls, bench: Bench) -> Sizes:
        if bench.is_small:
            return cls(SMALL, (1, 2), 8, 6, 24, 40)
        return cls(LLAMA_8B, (1, 64), 256, 128, 8192, 8192)

    @property
    def weights(self) -> int:
        """Elements that a step multiplies: all but the embedding's."""
        m = self.model
        heads = (m["num_attention_heads"] * 2 + m["num_key_value_heads"] * 2) * m["head_dim"]
        layer = m["hidden_size"] * (heads + 3 * m["intermediate_size"])
        return int(m["num_hidden_layers"] * layer + m["hidden_size"] * m["vocab_size"])

    @property
    def kv_elements(self) -> int:
        """Of one token."""
        m = self.model
        return int(2 * m["num_hidden_layers"] * m["num_key_value_heads"] * m["head_dim"])


def _engine(variant: str, bench: Bench) -> ThreadEngine:
    """The engine of a variant. There is room for one: the last one ends first."""
    if variant not in bench.kept:
        bench.close()
        gc.collect()
        bench.kept[variant] = _start(variant, bench)
    engine: ThreadEngine = bench.kept[variant]
    return engine


def _start(variant: str, bench: Bench) -> ThreadEngine:
    sizes = Sizes.of(bench)
    draw = functools.partial(DrawnWeights, device=bench.device, dtype=bench.dtype)
    with tempfile.TemporaryDirectory(prefix="rayk-drawn-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(sizes.model))
        (Path(folder) / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensor
        config = EngineConfig(
            model=folder,
            device=bench.device,
            dtype="bfloat16",
            num_blocks=sizes.num_blocks,
            max_seqs=max(sizes.batches),
            max_batch_tokens=sizes.prefill,
            cuda_graphs=VARIANTS[variant],
            attention_backend="triton",
        )
        return ThreadEngine(config, open_weights=draw, timeout_s=START_S)


class Load:
    """Requests that run together; when their tokens came."""

    def __init__(self, engine: ThreadEngine, count: int, prompt: int, tokens: int) -> None:
        self.began = time.monotonic()
        name, sampling = next(_RUNS), SamplingParams(max_tokens=tokens, ignore_eos=True)
        vocab = engine.ranks[0].model_config.vocab_size
        self._events = [
            engine.submit(
                Request(
                    request_id=f"{name}.{i}",
                    prompt_token_ids=tuple((7 * j + 13 * i + name) % vocab for j in range(prompt)),
                    sampling=sampling,
                )
            )
            for i in range(count)
        ]
        self.times: list[list[float]] = [[] for _ in self._events]

    def wait(self, tokens: int | None = None) -> None:
        """Until every request has so many tokens; None: until all have ended."""
        for events, times in zip(self._events, self.times, strict=True):
            while tokens is None or len(times) < tokens:
                event = events.get(timeout=300)
                if event.error is not None:
                    raise event.error
                times += [event.time_ns / 1e9] * len(event.token_ids)
                if event.is_last:
                    break

    def step_ms(self) -> float:
        """A decode step of them all, from when each has its first token."""
        start, end = max(t[0] for t in self.times), max(t[-1] for t in self.times)
        later = sum(t > start for times in self.times for t in times)
        return (end - start) / later * len(self.times) * 1e3


def _items(device: str) -> Sequence[str]:
    small = device == "cpu"
    sizes = ("1", "2") if small else ("1", "64")
    loads = [*(f"decode {n}" for n in sizes), f"prefill {24 if small else 8192}", f"profile {sizes[-1]}"]
    return [f"{variant} {load}" for variant in VARIANTS for load in loads]


def _measure(item: str, bench: Bench) -> Iterator[Row]:
    variant, load, number = item.split()
    sizes, engine = Sizes.of(bench), _engine(variant, bench)
    about = {
        "kernel": f"engine, {load}",
        "variant": f"{variant}: decode graphs {engine.ranks[0].graphs_note}",
    }
    if load == "decode":
        yield _decode(int(number), sizes, engine, bench, about)
    elif load == "prefill":
        yield _prefill(int(number), sizes, engine, bench, about)
    else:
        yield from _profile(int(number), sizes, engine, bench, about)


def _decode(count: int, sizes: Sizes, engine: ThreadEngine, bench: Bench, about: dict[str, str]) -> Row:
    load = Load(engine, count, sizes.prompt, sizes.decoded)
    load.wait()
    context = count * (sizes.prompt + sizes.decoded / 2)
    num_bytes = (sizes.weights + context * sizes.kv_elements) * bench.dtype.itemsize
    rates = bench.rates(load.step_ms(), num_bytes=num_bytes, flop=2 * sizes.weights * count)
    shape = f"{count} x 1 of {sizes.prompt} to {sizes.prompt + sizes.decoded}"
    return Row(**about, shape=shape, **rates, value=count * 1e3 / rates["ms"], unit="tokens/s")


def _prefill(count: int, sizes: Sizes, engine: ThreadEngine, bench: Bench, about: dict[str, str]) -> Row:
    best = float("inf")
    for _ in range(3):
        load = Load(engine, 1, count, 1)
        load.wait()
        best = min(best, load.times[0][0] - load.began)
    head = sizes.model["hidden_size"] * sizes.model["vocab_size"]  # of one token only
    heads = sizes.model["num_attention_heads"] * sizes.model["head_dim"] * sizes.model["num_hidden_layers"]
    flop = 2 * (sizes.weights - head) * count + 2 * heads * count**2
    rates = bench.rates(best * 1e3, flop=flop)
    return Row(**about, shape=f"1 x {count}", **rates, value=count / best, unit="tokens/s")


def _profile(
    count: int, sizes: Sizes, engine: ThreadEngine, bench: Bench, about: dict[str, str]
) -> Iterator[Row]:
    """Kernels of a layer, and the share of the time in which the device has none."""
    load = Load(engine, count, sizes.prompt, sizes.decoded)
    load.wait(2)
    on_cuda = bench.device != "cpu"
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if on_cuda else kinds.CPU]) as profiler:
        before = min(map(len, load.times))
        load.wait(sizes.decoded - 2)
        steps = min(map(len, load.times)) - before
    load.wait()
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    shape = f"{count} x 1, {steps} steps"
    per_step = len(kernels) / steps
    value = per_step / sizes.model["num_hidden_layers"]
    yield Row(**about, shape=shape, value=value, unit="kernels per layer", note=f"{per_step:.0f} of a step")
    if kernels:
        began = min(e.time_range.start for e in kernels)
        ended = max(e.time_range.end for e in kernels)
        busy = sum(e.time_range.elapsed_us() for e in kernels)
        idle = max(0.0, 1 - busy / (ended - began))
        yield Row(**about, shape=shape, ms=busy / steps / 1e3, value=idle, unit="of the time idle")


STAGE = Stage(name="engine", about="an 8B-shaped bfloat16 engine", items=_items, measure=_measure)

"""What of a decode step crosses between the host and a GPU: one copy each way, and nothing waits but for the
tokens. There need be no GPU: tensors are shapes on a device called cuda, and Triton launches nothing."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from rayk.attention import backend
from rayk.engine import rank as rank_module
from rayk.engine import staging
from rayk.engine.build import make_leader
from rayk.engine.fence import HostFence
from rayk.engine.inputs import InputBuilder
from rayk.engine.leader import RequestEvent
from rayk.engine.loop import EngineLoop, NoExtension
from rayk.engine.rank import EngineRank
from rayk.kernels import uploads
from rayk.kernels.paged_attention import HeadGroups, head_groups
from rayk.models.weights import WeightReader
from rayk.parallel.local import LocalComm
from rayk.types.config import EngineConfig
from tests.engine.test_graphs import Again
from tests.markers import thorough
from tests.pd import make_request

NOTHING: Mapping[str, Any] = {}
LIBC10 = Path(torch.__file__).parent / "lib" / "libc10.so"
GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""What makes a device current, by its type. Without CUDA there is nothing; what meta has does nothing."""
CUDA, META = 1, 14


class Crossings(TorchDispatchMode):
    """Counts copies between devices, and those of them that are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.num_waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        ends = None
        is_queued = any(flag is True for flag in (*args, (kwargs or {}).get("non_blocking")))
        if func is torch.ops.aten.copy_.default:
            ends = args[1], args[0]
        elif func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to):
            # In inference mode the second does not become the first.
            ends = args[0], out
        if ends is not None and ends[0].device.type != ends[1].device.type:
            self.found[f"{ends[0].device.type} to {ends[1].device.type}"] += 1
            self.num_waits += not is_queued
        return out


class NoKernels:
    """Stands for a Triton kernel."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **constants: None


HOST_PARTS: tuple[tuple[Any, str], ...] = (
    (WeightReader, "_piece"),
    (InputBuilder, "build"),
    (EngineRank, "_see"),
    (torch.Tensor, "numpy"),
)
"""What computes on the host, where tensors have content."""


def on_host(part: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return part(*arguments)

    return call


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device of which there are only shapes."""
    from triton.runtime.interpreter import InterpretedFunction

    def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
        with unset_fake_temporarily():
            return torch.zeros(num_bytes, dtype=torch.uint8)

    def head_groups_of(kv_index: torch.Tensor) -> HeadGroups:
        with unset_fake_temporarily():
            return head_groups(torch.zeros(len(kv_index), dtype=torch.int64))

    guards = (ctypes.c_void_p * (META + 1)).in_dll(ctypes.CDLL(LIBC10), GUARDS)
    cuda, guards[CUDA] = guards[CUDA], guards[META]
    for owner, name in HOST_PARTS:
        monkeypatch.setattr(owner, name, on_host(getattr(owner, name)))
    monkeypatch.setattr(staging, "host_buffer", host_buffer)
    # Of another's shape: fakes compute with a constant of one element.
    monkeypatch.setattr(uploads, "pinned", lambda host: torch.empty(host.shape, dtype=host.dtype))
    monkeypatch.setattr(rank_module, "make_fence", lambda device: HostFence())
    monkeypatch.setattr(InterpretedFunction, "__getitem__", NoKernels.__getitem__)
    monkeypatch.setattr(backend, "head_groups", head_groups_of)  # of each layer, once
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)  # of loading
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    guards[CUDA] = cuda


@pytest.mark.parametrize("inference", [False, True])
def test_what_crosses_is_counted_and_what_waits_raises(no_device: None, inference: bool) -> None:
    with torch.inference_mode(inference), Crossings() as crossings:
        there = torch.zeros(2, dtype=torch.int64, device="cuda:0")
        there.copy_(torch.zeros(2, dtype=torch.int64), non_blocking=True)
        torch.zeros(2).to("cuda:0")
        torch.tensor([1, 2], device="cuda:0")
        assert crossings.found == {"cpu to cuda": 3}
        assert crossings.num_waits == 2
        there.cpu()
        assert crossings.found == {"cpu to cuda": 3, "cuda to cpu": 1}
        for wait in (there.tolist, there[0].item, lambda: bool(there.any())):
            with pytest.raises(Exception, match="_local_scalar_dense"):
                wait()
        with pytest.raises(DynamicOutputShapeException):
            there.nonzero()


def crossings_of_steps(
    path: Path, *, scheduling: str = "auto", recorded: bool = False, sampling: Mapping[str, Any] = NOTHING
) -> list[Counter[str]]:
    """What crosses in three decode steps of three requests, after prefills that wait for nothing either."""
    config = EngineConfig(
        model=str(path),
        device="cuda:0",
        num_blocks=160,
        max_seqs=4,
        async_scheduling=scheduling,
        cuda_graphs="never",
    )
    rank = EngineRank(config, LocalComm(), recorder=Again() if recorded else None)
    leader = make_leader(rank)
    loop = EngineLoop(rank, NoExtension(), leader)
    events: list[RequestEvent] = []
    for i in range(3):
        leader.submit(make_request(str(i), range(5, 100 + i), 8, **sampling), events.append)
    with Crossings() as crossings:
        for _ in range(3):
            loop.turn()  # prefill; recorded steps begin
    num_tokens, found = len(events), []
    for _ in range(3):
        with crossings:
            crossings.found.clear()
            loop.turn()
        found.append(Counter(crossings.found))
    assert crossings.num_waits == 0
    assert len(events) == num_tokens + 9
    return found


ONCE_EACH_WAY = {"cpu to cuda": 1, "cuda to cpu": 1}
to_compare_addresses = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("scheduling", ["auto", "never"])
@to_compare_addresses
def test_a_decode_step_crosses_once_each_way(
    checkpoint: Callable[..., Path], no_device: None, recorded: bool, scheduling: str
) -> None:
    with unset_fake_temporarily():
        path = checkpoint("llama")
    assert crossings_of_steps(path, scheduling=scheduling, recorded=recorded) == [ONCE_EACH_WAY] * 3


@thorough
@pytest.mark.parametrize("family", ["jamba", "falcon_h1", "qwen3_next", "deepseek_v3", "gpt_oss"])
@to_compare_addresses
def test_steps_of_other_layers_cross_once_each_way(
    checkpoint: Callable[..., Path], no_device: None, family: str
) -> None:
    """States, latents, experts; chunks of prompts are told to kernels without a wait."""
    with unset_fake_temporarily():
        path = checkpoint(family)
    assert crossings_of_steps(path) == [ONCE_EACH_WAY] * 3


@to_compare_addresses
def test_what_drawn_requests_ask_for_crosses_beside_it(
    checkpoint: Callable[..., Path], no_device: None
) -> None:
    """Which rows are drawn, and all that filters and noise need to know of them: two more copies."""
    with unset_fake_temporarily():
        path = checkpoint("llama")
    asked = {"temperature": 0.8, "seed": 3, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    assert crossings_of_steps(path, sampling=asked) == [{"cpu to cuda": 3, "cuda to cpu": 1}] * 3

"""jobs/benchmarks/device_reads.py as a stage of the GPU day, between the host memories of two processes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from jobs.gpu import transfers
from jobs.gpu.rows import Rows
from jobs.gpu.stages import Bench
from rayk.transfer import nixl_agent
from rayk.transfer.costs import TransferCosts
from tests.markers import nixl, thorough

MIB = 1 << 20


class Said:
    """A page that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, *lines: str) -> None:
        self.lines += lines


@nixl
@thorough
@pytest.mark.timeout(300)
def test_rows_tell_pulls_and_pushes_of_every_shape_beside_plain_copies(tmp_path: Path) -> None:
    """Every byte that was pulled is compared by the script; a wrong one ends it."""
    bench = Bench("cpu", Rows(tmp_path))
    bench.repeats = 1
    rows = list(transfers.STAGE.measure("rayk's setting", bench))
    costs, rows = [r for r in rows if r.kernel == "transfer costs"], [r for r in rows if r.unit != "ns"]
    assert [row.shape for row in costs] == list(TransferCosts.__slots__)
    assert all(row.value is not None and row.value >= 0 for row in costs)
    shapes = [f"{n} x {4096} bytes, device" for n in (1, 16, 256)]
    shapes += [f"{n} x {65536} bytes, device" for n in (1, 16)]
    shapes += [f"1 x {MIB} bytes, device", f"1 x {8 * MIB} bytes, device"]
    assert {row.kernel: [r.shape for r in rows if r.kernel == row.kernel] for row in rows} == {
        "NIXL read": shapes,
        "NIXL write": shapes,
    }
    for row in rows:
        assert row.gbps is not None
        assert row.of_copy is not None
        assert row.value is not None
        assert min(row.gbps, row.of_copy, row.value) > 0
        assert row.unit == transfers.BESIDE


def test_memory_of_another_process_is_mapped_not_copied(tmp_path: Path) -> None:
    import device_reads

    content = device_reads.pattern(8192, 3)
    memory, handle = device_reads.shared(content, "cpu", tmp_path)
    theirs = device_reads.mapped(handle)
    assert torch.equal(theirs, content)
    memory[5] += 1
    assert theirs[5] == memory[5]
    target = torch.zeros_like(content)
    assert device_reads.copy_seconds(theirs, target, torch.tensor([1, 0]).numpy(), 4096) > 0
    assert torch.equal(target, memory)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_without_a_gpu_or_nixl_it_says_so(monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    import device_reads

    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("no_such_nixl",))
    nixl_agent.nixl_api.cache_clear()
    page = Said()
    try:
        device_reads.fill(argparse.Namespace(device=device, peer=None, mib=1, repeats=1), page)
    finally:
        nixl_agent.nixl_api.cache_clear()
    (line,) = page.lines
    assert ("pip install nixl" if device else "No CUDA device") in line

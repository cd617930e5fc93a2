"""Compiles kernels for GPUs that are not here, from their real call sites, and reads what they use.

 with compiling(TARGETS["sm_90"]) as built:
     paged_attention_triton(...)      # CPU tensors; compiles instead of running

A stand-in driver names the target, and a launch becomes a compilation, specialised (alignment, constants) as
a real launch would be. It needs a process of its own, without TRITON_INTERPRET: the stand-in stays.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rayk.kernels.interpreter import INTERPRETED
from rayk.kernels.target import TARGETS, Target

_FIRST_DEVICE = 1000
"""Stand-in devices are numbered from here, beyond real ones, because Triton caches kernels by device."""
_MATRIX_INSTRUCTIONS = ("wgmma.mma_async", "tcgen05.mma", "mma.sync", "v_mfma")


@dataclass(frozen=True)
class Built:
    """One compiled kernel and what it uses of its target."""

    kernel: str
    target: str
    registers: int
    """Vector registers per thread."""
    spills: int
    """Spilled registers (AMD), or bytes of local memory and stack per thread (NVIDIA)."""
    shared_bytes: int
    instruction: str
    """The matrix instruction: wgmma, tcgen05, mma or mfma; fma without tensor cores."""
    tile_rows: int = 0
    tile_keys: int = 0
    """How many query rows and keys an attention tile has; the combining kernel has no rows."""
    num_warps: int = 0
    programs: int = 0
    """Programs that one multiprocessor holds at once."""
    buffers: int = 0
    """Tiles of keys, and of values, that are in flight or in use at once; 0: no loop copies tiles ahead."""
    copies: int = 0
    """Asynchronous copies from global to shared memory, of all loops and what runs before them (NVIDIA)."""
    byte_loads: int = 0
    """Loads of single bytes from global memory (NVIDIA)."""
    loops_ahead: int = 0
    """Innermost loops that copy tiles to shared memory ahead (NVIDIA)."""
    loops_waiting: int = 0
    """Innermost loops that load some tile when they need it, and wait (NVIDIA)."""
    miscompiled: str = ""
    """What Triton or ptxas got wrong in it: faults that `find_miscompiled` and `find_unwritten` know."""

    @property
    def problems(self) -> list[str]:
        """The limits that it breaks."""
        limit = TARGETS[self.target].shared_bytes
        found = []
        if self.spills:
            found.append(f"{self.spills} spilled")
        if self.shared_bytes > limit:
            found.append(f"{self.shared_bytes} bytes of shared memory, the limit is {limit}")
        return found + ([self.miscompiled] if self.miscompiled else [])


@contextlib.contextmanager
def compiling(target: Target) -> Iterator[list[Built]]:
    """Compile every kernel launched inside for `target` instead of running it, and list it."""
    assert not INTERPRETED, "Triton's interpreter is on: nothing would be compiled"
    driver.set_active(_StandIn(target))
    built: list[Built] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        built.append(_inspect(kernel.__name__, target, compiled, kwargs))
        return compiled

    JITFunction.run = compile_only
    try:
        yield built
    finally:
        JITFunction.run = run


class _StandIn:
    """The part of a Triton driver that compilation asks for."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        name = self._target.name
        return GPUTarget("hip", name, 64) if self._target.is_amd else GPUTarget("cuda", int(name[3:]), 32)

    def get_current_device(self) -> int:
        return _FIRST_DEVICE + list(TARGETS).index(self._target.name)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def _inspect(name: str, target: Target, compiled: Any, arguments: Mapping[str, Any]) -> Built:
    assembly = compiled.asm["amdgcn" if target.is_amd else "ptx"]
    if target.is_amd:
        registers, spills = read_amd_use(assembly)
    else:
        registers, spills = _nvidia_use(compiled.asm["cubin"])
        spills -= min(spills, untouched_stack(assembly))
    num_warps, shared_bytes = compiled.metadata.num_warps, compiled.metadata.shared
    programs = target.programs_at_once(registers=registers, shared_bytes=shared_bytes, num_warps=num_warps)
    copies, byte_loads = (0, 0) if target.is_amd else count_loads(assembly)
    ahead, waiting = (0, 0) if target.is_amd else count_loops(compiled.asm["ttgir"])
    faults = find_miscompiled(compiled.asm["ttgir"])
    if "wgmma.mma_async" in assembly:
        faults += find_unwritten(_read_cubin(compiled.asm["cubin"], "nvdisasm", "-c"))
    used = (i for i in _MATRIX_INSTRUCTIONS if i in assembly)
    instruction = next(used, "fma").removeprefix("v_").split(".")[0]
    return Built(
        name,
        target.name,
        registers,
        spills,
        shared_bytes,
        instruction,
        tile_rows=arguments.get("ROWS", 0),
        tile_keys=arguments.get("TILE_KEYS", 0),
        num_warps=num_warps,
        programs=programs,
        buffers=count_buffers(compiled.asm["ttgir"]),
        copies=copies,
        byte_loads=byte_loads,
        loops_ahead=ahead,
        loops_waiting=waiting,
        miscompiled="; ".join(faults),
    )


def count_buffers(ttgir: str) -> int:
    """Count the buffers of the tiles that loops copy ahead, the fewest of any: memory of [buffers, rows,
    columns], into which nothing is copied where it is allocated."""
    depths = re.findall(r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x\w+,", ttgir)
    return min(map(int, depths), default=0)


def count_loops(ttgir: str) -> tuple[int, int]:
    """Count the innermost loops of known length that copy tiles to shared memory asynchronously, and those
    that load tiles into registers; a loop may do both."""
    inner = [body for body in _loop_bodies(ttgir) if "scf.for" not in body]
    ahead = ["ttg.async_copy_global_to_local" in body for body in inner]
    return sum(ahead), sum(bool(re.search(r"= tt\.load .*tensor<\d+x\d+x", body)) for body in inner)


def find_miscompiled(ttgir: str) -> list[str]:
    """Find two faults of Triton's NVIDIA backend, each of which gave wrong results on an H100 (Triton 3.6).

    A product of mma.sync takes `kWidth` values in a row from each of four lanes; a sum over fewer than those
    has its values twice. And where a loop copies tiles ahead and leaves products of tensor cores under way at
    its end, a tile that something else reads too has a buffer too few: a copy replaces what is multiplied.
    """
    found = [
        f"a product over {size} values takes {width} in a row from each of four lanes"
        for size, width in re.findall(
            r"tt\.dot [^:]*: tensor<\d+x(\d+)x\w+, #ttg\.dot_op<[^>]*kWidth = (\d+)", ttgir
        )
        if int(size) < 4 * int(width)
    ]
    for body in _loop_bodies(ttgir):
        waited = re.search(r"warp_group_dot_wait .*pendings = ([1-9]\d*)", body)
        if waited is None or "scf.for" in body:
            continue
        products = re.findall(r"warp_group_dot (%\w+), (%\w+),", body[: waited.start()])
        tiles = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", body))
        tiles |= {
            new: tiles.get(old, old) for new, old in re.findall(r"(%\w+) = ttg\.memdesc_trans (%\w+)", body)
        }
        for name in {tiles[x] for pair in products[-int(waited.group(1)) :] for x in pair if x in tiles}:
            buffers = re.search(rf"{name} = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", ttgir)
            before = ttgir[: ttgir.index(body)]
            ahead = len(re.findall(rf"= ttg\.memdesc_index {name}\[", before))
            if buffers is not None and int(buffers.group(1)) <= ahead:
                there = f"{buffers.group(1)} buffers of {name}"
                found.append(f"{there} while products read it and {ahead} copies are ahead")
    return found


def find_unwritten(sass: str) -> list[str]:
    """Find uniform registers that machine code reads and nowhere writes, a fault of ptxas 12.8, which comes
    with Triton 3.6 and 3.7: a descriptor of wgmma named other bytes of shared memory, and an H100's sums were
    wrong."""
    written: set[int] = set()
    read: set[int] = set()
    lines = re.findall(r"^\s*/\*\w+\*/\s+(?:@!?\w+ )?([A-Z][\w.]*) +([^;]*);", sass, re.M)
    for operation, text in lines:
        first, *others = text.split(",")
        descriptor = re.search(r"gdesc\[UR(\d+)\]", text)
        if descriptor:
            # A's descriptor and B's; A may be in registers, and its descriptor is nothing then.
            at = int(descriptor.group(1))
            read.update(range(at if "gdesc" in others[0] else at + 2, at + 4))
            continue
        result = re.fullmatch(r"\s*UR(\d+)\s*", first)
        if result:
            size = 4 if ".128" in operation else 2 if ".64" in operation or "WIDE" in operation else 1
            written.update(range(int(result.group(1)), int(result.group(1)) + size))
        read.update(int(x) for x in re.findall(r"\bUR(\d+)", ",".join(others) if result else text))
    return [f"ptxas reads UR{x}, which nothing writes" for x in sorted(read - written)]


def count_loads(ptx: str) -> tuple[int, int]:
    """Count the asynchronous copies to shared memory, and the loads of single bytes from global memory."""
    byte_loads = re.findall(r"\bld\.global\S*\.[bus]8\b", ptx)
    return len(re.findall(r"\bcp\.async\.c[ag]\.shared\.global\b", ptx)), len(byte_loads)


def _loop_bodies(ttgir: str) -> list[str]:
    """Cut out what stands between each loop's line and the bracket below it."""
    lines = ttgir.splitlines()
    bodies = []
    for at, line in enumerate(lines):
        if "scf.for" in line:
            end = " " * (len(line) - len(line.lstrip())) + "}"
            length = next(n for n, below in enumerate(lines[at + 1 :]) if below.startswith(end))
            bodies.append("\n".join(lines[at + 1 : at + 1 + length]))
    return bodies


def read_amd_use(assembly: str) -> tuple[int, int]:
    """Vector registers and spills, from the kernel's metadata; scratch memory counts as a spill."""
    found = {name: int(value) for name, value in re.findall(r"^\s+-?\s*\.(\w+):\s+(\d+)$", assembly, re.M)}
    spills = found["vgpr_spill_count"] + found["sgpr_spill_count"] + found["private_segment_fixed_size"]
    return found["vgpr_count"], spills


def untouched_stack(ptx: str) -> int:
    """Count the bytes of stack that a kernel reserves but never touches: LLVM leaves some behind. The
    assembler's own spills do not show in PTX."""
    if "st.local" in ptx or "ld.local" in ptx:
        return 0
    sizes = re.findall(r"\.local \.align \d+ \.b8\s+__local_depot\d+\[(\d+)\]", ptx)
    return sum(-(-int(size) // 8) * 8 for size in sizes)


def _nvidia_use(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack and local memory, as cuobjdump reports them."""
    text = _read_cubin(cubin, "cuobjdump", "-res-usage")
    found = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _read_cubin(cubin: bytes, tool: str, option: str) -> str:
    """What a tool that comes with Triton says of machine code."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as handle:
        handle.write(cubin)
        handle.flush()
        command = [str(path), option, handle.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

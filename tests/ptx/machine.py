"""A machine that runs compiled NVIDIA kernels, PTX text, without a GPU, and finds their races.

All threads of a program go in lockstep, as numpy arrays over threads; where a branch divides them, those
furthest behind go first. Shared memory is bytes. What a real GPU would only sometimes get wrong is always an
error here: a global access outside every argument or out of alignment; a shared byte that two warps touch,
one to change it, without a barrier between; one that a copy under way has not brought or a product of wgmma
under way still reads; and one that wgmma reads without a fence after it was stored. It runs PTX as its
specification says; what ptxas makes of it is another matter (rayk.kernels.ahead.find_unwritten).

Sources: NVIDIA's "PTX ISA" (fragments of mma, wgmma and ldmatrix; matrix descriptors), and CUTLASS's
cute/arch/mma_sm90_desc.hpp (what descriptors' strides mean where rows or columns run first).
"""

# Shapes: N threads, W warps of 32, B bytes that each thread touches.

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.ptx.lanes import Lanes
from tests.ptx.memory import SHARED_BASE, GlobalMemory, SharedMemory
from tests.ptx.text import Instruction, Kernel, PtxError
from tests.ptx.values import (
    RAW,
    Array,
    elements,
    numpy_type,
    parameter,
    typed,
)


def run_ptx(
    ptx: str, grid: Sequence[int], arguments: Sequence[Any], *, num_warps: int, shared_bytes: int
) -> None:
    """Run a kernel's programs one after another.

    Args:
        ptx: the text of a module with one kernel.
        arguments: the kernel's parameters in order: tensors on the CPU for pointers, ints, floats; those
            missing at the end (Triton's scratch memory) are null.

    Raises:
        PtxError: an unknown instruction, a wild access, or a race.
    """
    kernel = Kernel(ptx)
    memory = GlobalMemory([x for x in arguments if isinstance(x, torch.Tensor)])
    sizes = [*grid, 1, 1][:3]
    with np.errstate(all="ignore"):
        for program in np.ndindex(sizes[2], sizes[1], sizes[0]):
            machine = _Program(kernel, memory, arguments, program[::-1], sizes, num_warps, shared_bytes)
            machine.run()


class _Program(Lanes):
    """One program (thread block) as it runs."""

    def __init__(
        self,
        kernel: Kernel,
        memory: GlobalMemory,
        arguments: Sequence[Any],
        program: Sequence[int],
        grid: Sequence[int],
        num_warps: int,
        shared_bytes: int,
    ) -> None:
        super().__init__(num_warps * 32, kernel.types)
        self._kernel = kernel
        self._memory = memory
        self._shared = SharedMemory(shared_bytes)
        threads = self._threads
        self._warp = np.arange(threads) // 32
        self._lane = np.arange(threads) % 32
        self._registers["%tid.x"] = np.arange(threads, dtype=np.uint32)
        self._registers["%laneid"] = self._lane.astype(np.uint32)
        constants = {"global_smem": SHARED_BASE, "%ntid.x": threads, "%tid.y": 0, "%tid.z": 0}
        constants |= {f"%ctaid.{axis}": program[i] for i, axis in enumerate("xyz")}
        constants |= {f"%nctaid.{axis}": grid[i] for i, axis in enumerate("xyz")}
        for name, value in constants.items():
            self._registers[name] = np.full(threads, value, np.uint32)
        self._parameters = {
            name: parameter(kind, arguments[i] if i < len(arguments) else 0)
            for i, (kind, name) in enumerate(kernel.parameters)
        }
        self._copies: list[Callable[[], None]] = []
        self._copy_groups: list[list[Callable[[], None]]] = []
        self._products: list[Callable[[], None]] = []
        self._product_groups: list[list[Callable[[], None]]] = []
        self._next: Array | None = None
        """Each thread's next instruction, where a branch divided them; None: they go together."""

    def run(self) -> None:
        at, end = 0, len(self._kernel.instructions)
        while at < end:
            instruction = self._kernel.instructions[at]
            here = None if self._next is None else self._next == at
            self._mask = here
            if instruction.guard:
                met = self._registers[instruction.guard.removeprefix("!")]
                met = ~met if instruction.guard[0] == "!" else met
                self._mask = met if here is None else met & here
            target = self._execute(instruction, at, end)
            at = self._go_on(at, target, here, end)

    def _go_on(self, at: int, target: int | None, here: Array | None, end: int) -> int:
        """Choose the next instruction: that of the threads furthest behind."""
        if target is None and here is None:
            return at + 1
        taken = np.zeros(self._threads, bool)
        if target is not None:
            taken = np.ones(self._threads, bool) if self._mask is None else self._mask
        following = np.where(taken, target if target is not None else 0, at + 1)
        if here is not None and self._next is not None:
            following = np.where(here, following, self._next)
        first = int(following.min())
        self._next = None if (following == first).all() else following
        return first

    def _execute(self, instruction: Instruction, at: int, end: int) -> int | None:
        """Execute one instruction; returns where those threads that take a branch go on."""
        name = instruction.parts[0]
        if name in ("bra", "ret", "exit"):
            if self._mask is not None and not self._mask.any():
                return None
            return self._kernel.labels[instruction.operands[0]] if name == "bra" else end
        method = getattr(self, f"_do_{name}", None)
        try:
            if method is not None:
                method(instruction)
            else:
                self._compute(instruction)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise PtxError(f"not known to this machine: {instruction.text} ({error!r})") from error
        return None

    # Between threads.

    def _do_shfl(self, instruction: Instruction) -> None:
        result, a, by, bounds = instruction.operands[:4]
        result, _, in_range = result.partition("|")
        value = self._get(a, "b32")
        by, bounds = (self._get(x, "u32").astype(np.int64) for x in (by, bounds))
        clamp, segment = bounds & 31, bounds >> 8 & 31
        least = self._lane & segment
        most = least | (clamp & ~segment)
        mode = instruction.parts[2]
        other = {
            "up": self._lane - by,
            "down": self._lane + by,
            "bfly": self._lane ^ by,
            "idx": least | (by & ~segment),
        }[mode]
        valid = other >= most if mode == "up" else other <= most
        self._set(result, value[32 * self._warp + np.where(valid, other, self._lane)], "b32")
        if in_range:
            self._set(in_range, valid, "pred")

    def _do_redux(self, instruction: Instruction) -> None:
        kind = instruction.parts[-1]
        value = self._get(instruction.operands[1], kind).reshape(-1, 32)
        reduce = {"max": np.maximum, "min": np.minimum, "add": np.add}[instruction.parts[2]]
        reduced = reduce.reduce(value, axis=1).astype(value.dtype)
        self._set(instruction.operands[0], np.repeat(reduced, 32), kind)

    def _do_bar(self, instruction: Instruction) -> None:
        if instruction.parts[1] == "warp":
            return
        if self._mask is not None:
            gone = self._next == len(self._kernel.instructions) if self._next is not None else False
            if not (self._mask | gone).all():
                raise PtxError(f"not all threads come to a barrier: {instruction.text}")
        self._shared.barrier()

    _do_barrier = _do_bar

    def _do_fence(self, instruction: Instruction) -> None:
        if "proxy" in instruction.parts:
            self._shared.fence()

    # Memory.

    def _do_ld(self, instruction: Instruction) -> None:
        kind = instruction.parts[-1]
        results, address = instruction.operands[:2]
        if "param" in instruction.parts:
            raw = np.full(self._threads, self._parameters[address[0]])
            self._set(results, typed(raw.astype(RAW[int(kind[1:]) // 8]), kind), kind)
            return
        results = results if isinstance(results, tuple) else (results,)
        size, active = int(kind[1:]) // 8, self._active()
        width = size * len(results)
        raw = np.zeros((self._threads, width), np.uint8)
        if "global" in instruction.parts:
            where = self._address(address, "u64")[active]
            raw[active] = self._memory.load(where, width, instruction.text)
        elif any(x.startswith("shared") for x in instruction.parts):
            where = self._address(address, "u32")[active]
            raw[active] = self._shared.load(where, width, self._warp[active], instruction.text)
        else:
            raise PtxError(f"not known to this machine: {instruction.text}")
        for i, name in enumerate(results):
            part = np.ascontiguousarray(raw[:, i * size : (i + 1) * size]).view(RAW[size])[:, 0]
            self._set(name, typed(part, kind), kind)

    def _do_st(self, instruction: Instruction) -> None:
        kind = "b" + instruction.parts[-1][1:]
        address, values = instruction.operands[:2]
        values = values if isinstance(values, tuple) else (values,)
        active = self._active()
        parts = [np.ascontiguousarray(self._get(x, kind)[active])[:, None].view(np.uint8) for x in values]
        raw = np.concatenate(parts, 1)
        if "global" in instruction.parts:
            self._memory.store(self._address(address, "u64")[active], raw, instruction.text)
        elif any(x.startswith("shared") for x in instruction.parts):
            where = self._address(address, "u32")[active]
            self._shared.store(where, raw, self._warp[active], instruction.text)
        else:
            raise PtxError(f"not known to this machine: {instruction.text}")

    def _do_cp(self, instruction: Instruction) -> None:
        if "commit_group" in instruction.parts:
            self._copy_groups.append(self._copies)
            self._copies = []
        elif "wait_group" in instruction.parts or "wait_all" in instruction.parts:
            left = int(instruction.operands[0]) if instruction.operands else 0
            while len(self._copy_groups) > left:
                for land in self._copy_groups.pop(0):
                    land()
        elif "bulk" in instruction.parts:
            raise PtxError(f"not known to this machine: {instruction.text}")
        else:
            to, source, size, *rest = instruction.operands
            count, active = int(size, 0), self._active()
            taken = (
                self._get(rest[0], "u32").astype(np.int64)[active] if rest else np.full(len(active), count)
            )
            raw = np.zeros((len(active), count), np.uint8)
            for length in np.unique(taken[taken > 0]):
                which = np.flatnonzero(taken == length)
                where = self._address(source, "u64")[active][which]
                raw[which, :length] = self._memory.load(where, int(length), instruction.text)
            where = self._address(to, "u32")[active]
            land = self._shared.start_copy(where, raw, self._warp[active], instruction.text)
            self._copies.append(land)

    def _do_ldmatrix(self, instruction: Instruction) -> None:
        results, address = instruction.operands
        results = results if isinstance(results, tuple) else (results,)
        where = self._address(address, "u32").reshape(-1, 32)
        for i, name in enumerate(results):
            rows = where[:, 8 * i : 8 * i + 8].reshape(-1)
            warps = np.repeat(np.arange(len(where)), 8)
            raw = self._shared.load(rows, 16, warps, instruction.text).reshape(-1, 8, 16)
            matrix = np.ascontiguousarray(raw).view(np.uint16)
            matrix = matrix.transpose(0, 2, 1) if "trans" in instruction.parts else matrix
            self._set(name, np.ascontiguousarray(matrix).view(np.uint32).reshape(-1), "b32")

    def _do_stmatrix(self, instruction: Instruction) -> None:
        address, sources = instruction.operands
        sources = sources if isinstance(sources, tuple) else (sources,)
        where = self._address(address, "u32").reshape(-1, 32)
        for i, name in enumerate(sources):
            words = np.ascontiguousarray(self._get(name, "b32"))
            matrix = words.view(np.uint16).reshape(-1, 8, 8)
            matrix = matrix.transpose(0, 2, 1) if "trans" in instruction.parts else matrix
            raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1, 16)
            warps = np.repeat(np.arange(len(where)), 8)
            self._shared.store(where[:, 8 * i : 8 * i + 8].reshape(-1), raw, warps, instruction.text)

    # Products.

    def _do_mma(self, instruction: Instruction) -> None:
        shape = next(i for i, x in enumerate(instruction.parts) if re.fullmatch(r"m\d+n\d+k\d+", x))
        if instruction.parts[shape].split("k")[0] != "m16n8":
            raise PtxError(f"not known to this machine: {instruction.text}")
        to, kind_a, kind_b, _ = instruction.parts[-4:]
        results, a, b, c = instruction.operands
        left = self._fragment(a if isinstance(a, tuple) else (a,), rows=2)
        right = self._fragment(b if isinstance(b, tuple) else (b,), rows=1)
        product = elements(left, kind_a) @ elements(right, kind_b).transpose(0, 2, 1)
        g, t = self._lane // 4, self._lane % 4
        for i, name in enumerate(results):
            added = self._get(c[i], to).astype(np.float64)
            value = product[self._warp, g + 8 * (i // 2), 2 * t + i % 2] + added
            self._set(name, value.astype(numpy_type(to)), to)

    def _fragment(self, names: Sequence[str], *, rows: int) -> Array:
        """Gather an operand's registers of a warp: [W, 8 * rows, bytes]; each holds four bytes of a row."""
        words = np.zeros((self._threads // 32, 8 * rows, 4 * len(names) // rows), np.uint32)
        g, t = self._lane // 4, self._lane % 4
        for i, name in enumerate(names):
            words[self._warp, g + 8 * (i % rows), t + 4 * (i // rows)] = self._get(name, "b32")
        return words.view(np.uint8)

    def _do_wgmma(self, instruction: Instruction) -> None:
        if "commit_group" in instruction.parts:
            self._product_groups.append(self._products)
            self._products = []
        elif "wait_group" in instruction.parts:
            while len(self._product_groups) > int(instruction.operands[0]):
                for end in self._product_groups.pop(0):
                    end()
        elif "mma_async" in instruction.parts:
            self._multiply_groups(instruction)

    def _multiply_groups(self, instruction: Instruction) -> None:
        """Multiply for each group of four warps. Sums are there at once; operands in shared memory stay
        under way until they are waited for."""
        to, kind_a, kind_b = instruction.parts[-3:]
        columns = int(re.findall(r"m64n(\d+)k", instruction.text)[0])
        results, a, b, scale, *flags = instruction.operands
        flags = [int(x) for x in flags]
        from_registers = isinstance(a, tuple)
        # 16-bit operands may run along rows: flags of A, where it has a descriptor, and of B.
        transposed = [0, 0, *flags[2:]]
        trans_a, trans_b = (0 if from_registers else transposed[-2]), transposed[-1]
        keep = self._get(scale, "pred")
        row = 16 * (self._warp % 4) + self._lane // 4
        for group in range(self._threads // 128):
            first = 128 * group
            warps = range(4 * group, 4 * group + 4)
            if from_registers:
                left = self._fragment(a, rows=2)[4 * group : 4 * group + 4].reshape(64, -1)
            else:
                left = self._operand(self._get(a, "b64")[first], 64, kind_a, trans_a, warps, instruction.text)
            right = self._operand(
                self._get(b, "b64")[first], columns, kind_b, trans_b, warps, instruction.text
            )
            product = flags[0] * flags[1] * (elements(left, kind_a) @ elements(right, kind_b).T)
            mine = slice(first, first + 128)
            for i, name in enumerate(results):
                column = 8 * (i // 4) + 2 * (self._lane % 4) + i % 2
                value = product[row[mine] + 8 * (i // 2 % 2), column[mine]]
                sums = np.zeros(self._threads) if name not in self._registers else self._get(name, to) * 1.0
                sums[mine] = value + (sums[mine] if keep[first] else 0)
                self._set(name, sums.astype(numpy_type(to)), to)

    def _operand(
        self, descriptor: int, rows: int, kind: str, transposed: int, warps: Sequence[int], text: str
    ) -> Array:
        """Read rows of 32 bytes of K by a matrix descriptor: [rows, 32]."""
        bits = int(descriptor)
        start, leading, stride = (16 * (bits >> at & 0x3FFF) for at in (0, 16, 32))
        swizzle = {0: 16, 1: 128, 2: 64, 3: 32}[bits >> 62]
        size = {"f16": 2, "bf16": 2, "tf32": 4}.get(kind, 1)
        r, k = np.arange(rows)[:, None], np.arange(32)[None, :]
        if transposed:
            # Atoms of `swizzle` bytes of rows by eight of K.
            element, byte = k // size, k % size
            unit = r // 8
            per = swizzle // 16
            at = (unit % per) * 16 + (unit // per) * leading + (element % 8) * swizzle
            at = at + (element // 8) * stride + (r % 8) * size + byte
        elif swizzle == 16:
            at = (r % 8) * 16 + (r // 8) * stride + (k // 16) * leading + k % 16
        else:
            at = (r % 8) * swizzle + (r // 8) * stride + k
        at = start + at
        at = at ^ ((at >> 7 & (swizzle // 16 - 1)) << 4)
        values, end = self._shared.start_product(at - SHARED_BASE, warps, text)
        self._products.append(end)
        return values

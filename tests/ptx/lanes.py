"""The registers of a program's threads, and the instructions that compute within each thread."""

# Shapes: N threads.

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from tests.ptx.text import Instruction, PtxError
from tests.ptx.values import (
    COMPARE,
    FUNCTIONS,
    RAW,
    Array,
    elements,
    numpy_type,
    quotient,
    split,
    typed,
    untyped,
)

_ABSENT = 0x7F
"""What a register holds that nothing has written."""


class Lanes:
    """The threads of one program, without what goes between them."""

    def __init__(self, num_threads: int, types: dict[str, str]) -> None:
        """Register -> its declared type, e.g. b32."""
        self._threads = num_threads
        self._types = types
        self._registers: dict[str, Array] = {}
        self._mask: Array | None = None
        """The threads that execute this instruction; None: all."""

    def _get(self, operand: str, kind: str) -> Array:
        """Read an operand as a type, e.g. s32, f16, bf16 (as float32), f16x2 ([N, 2])."""
        negated = operand.startswith("!")
        raw = self._registers.get(operand.removeprefix("!"))
        if raw is None:
            return self._constant(operand, kind)
        if kind == "pred":
            return ~raw if negated else raw
        if kind.endswith("x2"):
            halves = np.ascontiguousarray(raw).view(np.uint16).reshape(-1, 2)
            return typed(halves, kind.removesuffix("x2"))
        return typed(raw.astype(RAW[int(re.sub(r"\D", "", kind)) // 8]), kind)

    def _constant(self, text: str, kind: str) -> Array:
        if kind == "pred":
            return np.full(self._threads, int(text, 0) != 0)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            value: Any = np.uint32(int(text[2:], 16)).view(np.float32)
            return np.full(
                self._threads, value if kind[0] in "f" or kind == "bf16" else value.view(np.uint32)
            )
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            value = np.uint64(int(text[2:], 16)).view(np.float64)
            return np.full(self._threads, value if kind[0] == "f" else value.view(np.uint64))
        bits = 32 if kind.endswith("x2") else int(re.sub(r"\D", "", kind))
        raw = np.full(self._threads, int(text.removesuffix("U"), 0) % (1 << bits), RAW[bits // 8])
        if kind.endswith("x2"):
            return typed(raw.view(np.uint16).reshape(-1, 2), kind.removesuffix("x2"))
        return typed(raw, kind)

    def _set(self, register: str, value: Array, kind: str) -> None:
        """Write a value of a type; a wider register is extended by the type's sign."""
        if register == "_":
            return
        declared = self._types[register]
        if declared == "pred":
            raw = np.asarray(value, bool)
        else:
            size = int(re.sub(r"\D", "", declared)) // 8
            if kind.endswith("x2"):
                halves = np.ascontiguousarray(untyped(value, kind.removesuffix("x2")))
                raw = halves.view(np.uint32).reshape(-1)
            else:
                value = untyped(value, kind)
                signed = kind[0] == "s" and value.dtype.itemsize < size
                raw = (value.view(f"i{value.dtype.itemsize}") if signed else value).astype(RAW[size])
        if raw.shape != (self._threads,):
            raw = np.broadcast_to(raw, (self._threads,))
        if self._mask is not None:
            before = self._registers.get(register)
            raw = np.where(self._mask, raw, _ABSENT if before is None else before).astype(raw.dtype)
        self._registers[register] = raw

    def _active(self) -> Array:
        return np.arange(self._threads) if self._mask is None else np.flatnonzero(self._mask)

    def _address(self, operand: list[str], kind: str) -> Array:
        base = self._get(operand[0], kind)
        offset: Array = np.asarray(int(operand[1], 0) if len(operand) > 1 else 0).astype(base.dtype)
        address: Array = base + offset
        return address

    # Arithmetic.

    def _compute(self, instruction: Instruction) -> None:
        name, kind = instruction.parts[0], instruction.parts[-1]
        result, *operands = instruction.operands
        a = self._get(operands[0], kind)
        if name in FUNCTIONS:
            self._set(result, FUNCTIONS[name](a), kind)
            return
        if name == "not":
            self._set(result, ~a, kind)
            return
        if name == "popc":
            self._set(result, np.array([int(x).bit_count() for x in a], np.uint32), "b32")
            return
        if name in ("shl", "shr"):
            bits = int(re.sub(r"\D", "", kind))
            by = self._get(operands[1], "u32").astype(np.int64)
            kept = np.minimum(by, bits - 1).astype(a.dtype)
            moved = a << kept if name == "shl" else a >> kept
            self._set(result, np.where((by >= bits) & (kind[0] != "s"), 0, moved).astype(a.dtype), kind)
            return
        b = self._get(operands[1], kind)
        floating = a.dtype.kind == "f"
        if name in ("add", "sub"):
            value = a + b if name == "add" else a - b
        elif name in ("and", "or", "xor"):
            value = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name](a, b)
        elif name in ("min", "max"):
            pick = {"min": (np.minimum, np.fmin), "max": (np.maximum, np.fmax)}[name]
            value = pick[floating and "NaN" not in instruction.parts](a, b)
            value = np.maximum(value, 0) if "relu" in instruction.parts else value
        elif name == "div":
            value = a / b if floating else quotient(a, b)
        elif name == "rem":
            value = a - quotient(a, b) * b
        else:
            raise PtxError(f"not known to this machine: {instruction.text}")
        self._set(result, value, kind)

    def _do_mul(self, instruction: Instruction) -> None:
        self._multiply(instruction, None)

    def _do_mad(self, instruction: Instruction) -> None:
        self._multiply(instruction, instruction.operands[3])

    def _do_fma(self, instruction: Instruction) -> None:
        self._multiply(instruction, instruction.operands[3])

    def _multiply(self, instruction: Instruction, added: str | None) -> None:
        kind = instruction.parts[-1]
        result, a, b = instruction.operands[:3]
        a, b = self._get(a, kind), self._get(b, kind)
        if a.dtype.kind == "f":
            exact = a.astype(np.float64) * b.astype(np.float64)
            exact = exact if added is None else exact + self._get(added, kind).astype(np.float64)
            self._set(result, exact.astype(a.dtype), kind)
            return
        size = a.dtype.itemsize
        if "lo" in instruction.parts:
            value = a * b
        elif size == 8:
            value = np.array([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]).astype(a.dtype)
        else:
            wide = a.astype(f"{a.dtype.kind}{2 * size}") * b.astype(f"{a.dtype.kind}{2 * size}")
            if "wide" in instruction.parts:
                value, kind = wide, f"{kind[0]}{16 * size}"
            else:
                value = (wide >> np.asarray(8 * size, wide.dtype)).astype(a.dtype)
        self._set(result, value if added is None else value + self._get(added, kind), kind)

    def _do_setp(self, instruction: Instruction) -> None:
        comparison, kind = instruction.parts[1], instruction.parts[-1]
        result, a, b = instruction.operands[:3]
        a, b = self._get(a, kind), self._get(b, kind)
        unknown = np.isnan(a) | np.isnan(b) if a.dtype.kind == "f" else np.zeros(self._threads, bool)
        if comparison in ("nan", "num"):
            value = unknown if comparison == "nan" else ~unknown
        elif comparison in COMPARE:
            value = COMPARE[comparison](a, b) & ~unknown
        else:
            value = COMPARE[comparison.removesuffix("u")](a, b) | unknown
        if len(instruction.operands) > 3:
            other = self._get(instruction.operands[3], "pred")
            value = {"and": value & other, "or": value | other, "xor": value ^ other}[instruction.parts[2]]
        self._set(result, value, "pred")

    def _do_selp(self, instruction: Instruction) -> None:
        result, a, b, condition = instruction.operands
        kind = "b" + instruction.parts[-1][1:]
        chosen = np.where(self._get(condition, "pred"), self._get(a, kind), self._get(b, kind))
        self._set(result, chosen, kind)

    def _do_mov(self, instruction: Instruction) -> None:
        result, source = instruction.operands
        kind = instruction.parts[-1]
        if isinstance(source, tuple):
            bits = int(kind[1:])
            part = f"b{bits // len(source)}"
            joined = np.stack([self._get(x, part) for x in source], 1)
            self._set(result, joined.view(RAW[bits // 8]).reshape(-1), kind)
        elif isinstance(result, tuple):
            bits = int(kind[1:])
            raw = np.ascontiguousarray(self._get(source, kind))
            for name, piece in zip(result, split(raw, len(result)), strict=True):
                self._set(name, piece, f"b{bits // len(result)}")
        else:
            self._set(result, self._get(source, kind), kind)

    def _do_cvt(self, instruction: Instruction) -> None:
        *modes, to, source = instruction.parts[1:]
        result, *operands = instruction.operands
        if to in ("f16x2", "bf16x2") and source == "f32":
            self._set(result, np.stack([self._get(x, "f32") for x in reversed(operands)], 1), to)
        elif to == "f16x2":
            raw = np.ascontiguousarray(self._get(operands[0], "b16")).view(np.uint8).reshape(-1, 2)
            self._set(result, elements(raw, source.removesuffix("x2")), to)
        elif to in ("e4m3x2", "e5m2x2") and source == "f32":
            fp8 = torch.float8_e4m3fn if to == "e4m3x2" else torch.float8_e5m2
            pair = np.stack([self._get(x, "f32") for x in reversed(operands)], 1)
            limit = torch.finfo(fp8).max
            raw8 = torch.from_numpy(pair).clamp(-limit, limit).to(fp8).view(torch.uint8).numpy()
            self._set(result, raw8.view(np.uint16).reshape(-1), "b16")
        elif to == "tf32":
            raw = self._get(operands[0], "u32")
            self._set(result, (raw + np.uint32(0x1000)) & np.uint32(0xFFFFE000), "b32")
        else:
            value = self._get(operands[0], source)
            rounding = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
            for mode in modes:
                value = rounding[mode](value) if mode in rounding and value.dtype.kind == "f" else value
            if value.dtype.kind == "f" and to[0] in "us":
                limits = np.iinfo(numpy_type(to))
                value = np.clip(np.nan_to_num(value.astype(np.float64)), limits.min, limits.max)
            self._set(result, value.astype(np.float32 if to == "bf16" else numpy_type(to)), to)

    def _do_bfe(self, instruction: Instruction) -> None:
        kind = instruction.parts[-1]
        result = instruction.operands[0]
        a = self._get(instruction.operands[1], kind)
        start, length = (self._get(x, "u32").astype(np.int64) for x in instruction.operands[2:])
        bits = 8 * a.dtype.itemsize
        raw = a.view(RAW[a.dtype.itemsize])
        up = (bits - np.minimum(start + length, bits)).astype(raw.dtype)
        moved = (raw << up).view(a.dtype) >> (up + start.astype(raw.dtype)).astype(a.dtype)
        self._set(result, np.where(length == 0, 0, moved).astype(a.dtype), kind)

    def _do_bfi(self, instruction: Instruction) -> None:
        kind = instruction.parts[-1]
        result, a, b, start, length = instruction.operands
        a, b = self._get(a, kind), self._get(b, kind)
        start, length = (self._get(x, "u32").astype(np.uint64) for x in (start, length))
        field = (((np.uint64(1) << length) - np.uint64(1)) << start).astype(a.dtype)
        self._set(result, (b & ~field) | ((a << start.astype(a.dtype)) & field), kind)

    def _do_prmt(self, instruction: Instruction) -> None:
        result, a, b, selector = instruction.operands
        eight = np.stack([self._get(a, "b32"), self._get(b, "b32")], 1).view(np.uint8)
        selector = self._get(selector, "b32")
        chosen = np.zeros((self._threads, 4), np.uint8)
        for i in range(4):
            nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
            byte = np.take_along_axis(eight, (nibble & 7)[:, None].astype(np.int64), 1)[:, 0]
            chosen[:, i] = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
        self._set(result, chosen.view(np.uint32).reshape(-1), "b32")

    def _do_lop3(self, instruction: Instruction) -> None:
        result, *operands, table = instruction.operands
        a, b, c = (self._get(x, "b32") for x in operands)
        value = np.zeros(self._threads, np.uint32)
        for i in range(8):
            if int(table, 0) >> i & 1:
                value |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        self._set(result, value, "b32")

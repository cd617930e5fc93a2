"""Reads PTX text: a kernel's instructions, labels, parameters and the types of its registers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


class PtxError(RuntimeError):
    """A kernel did what no kernel may, or what this machine does not know. Raised with the instruction."""


@dataclass(frozen=True)
class Instruction:
    guard: str
    """The predicate's register, with a leading ! where it must be false; empty: always."""
    parts: tuple[str, ...]
    """The operation, cut at its dots."""
    operands: tuple[Any, ...]
    """Registers and constants as text; those in braces as a tuple; an address in brackets as [text]."""
    text: str


class Kernel:
    """A kernel's instructions, labels, parameters and register types."""

    def __init__(self, ptx: str) -> None:
        ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
        head, body = ptx.split(".entry", 1)[1].split("{", 1)
        self.parameters = re.findall(r"\.param \.(\w+)[^,)]*?(\w+)\s*(?=[,)])", head)
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.types: dict[str, str] = {}
        self._scopes: list[dict[str, str]] = [{}]
        body = re.sub(r"^\s*\.(loc|file)\b[^\n]*", "", body, flags=re.M)
        body = body.split(".section")[0].rstrip().removesuffix("}")
        for statement in re.split(r";", body):
            self._read(statement.strip())

    def _read(self, text: str) -> None:
        while True:
            label = re.match(r"(\$?\w+):", text)
            if label:
                self.labels[label[1]] = len(self.instructions)
                text = text[label.end() :].strip()
            elif text.startswith("{"):
                self._scopes.append({})
                text = text[1:].strip()
            elif text.startswith("}"):
                self._scopes.pop()
                text = text[1:].strip()
            else:
                break
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            for name in re.split(r"\s*,\s*", names):
                name, _, count = name.partition("<")
                new = name if name.startswith("%") else f"{name}@{len(self.instructions)}_"
                for each in [""] if not count else map(str, range(int(count[:-1]) + 1)):
                    self._scopes[-1][name + each] = new + each
                    self.types[new + each] = kind.removeprefix(".")
        elif text and not text.startswith("."):
            self.instructions.append(self._decode(re.sub(r"\s+", " ", text)))

    def _decode(self, text: str) -> Instruction:
        found = re.match(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*)", text)
        if found is None:
            raise PtxError(f"cannot read {text!r}")
        guard = found[1] + self._name(found[2]) if found[2] else ""
        pieces = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]]+", found[4])
        return Instruction(guard, tuple(found[3].split(".")), tuple(map(self._operand, pieces)), text)

    def _operand(self, piece: str) -> Any:
        if piece.startswith("{"):
            return tuple(self._name(x.strip()) for x in piece[1:-1].split(","))
        if piece.startswith("["):
            return [self._name(x.strip()) for x in piece[1:-1].split("+")]
        return self._name(piece)

    def _name(self, name: str) -> str:
        if "|" in name:
            return "|".join(map(self._name, name.split("|")))
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), name)

"""Answers of the reference on disk, shared by all runs of a user: a JSON file per question, named by the
question's hash, and beside it a safetensors file where the answer is tensors.

A file counts only if it is the user's own, nobody else may write to it, its hashes are right, and it holds
exactly the question that is asked. Any other is told of, and the answer is computed and written anew.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayk.types.files import JSON_BYTES, parse_json, read_own, user_cache, write_atomically

if TYPE_CHECKING:  # torch is imported when tensors are asked for
    from rayk.oracle.states import Fields

LIMIT_BYTES = 4 << 30
"""What a store may take of the disk; beyond it the answers that were used last go first out."""
KEPT_SHARE = 0.8  # of the limit, which is left after some went
_CODE = Path(__file__).parent

Question = dict[str, Any]
Answer = dict[str, Any]


def reference_folder() -> Path:
    """Return where the answers of all runs of this user are kept."""
    return user_cache("reference")


@functools.cache
def code_digest(*folders: Path) -> str:
    """Hash the code below these folders, by default what asks transformers: an answer of other code is
    another one."""
    digest = hashlib.sha256()
    for folder in folders or (_CODE,):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer, and when an earlier run computed it (ISO 8601, UTC); None: this one did."""

    answer: Answer
    since: str | None


@dataclass(eq=False)
class AnswerStore:
    """A folder of answers; with `folder` None nothing is kept.

    fresh:       only answers that were put into this object are found; those on disk are overwritten.
    limit_bytes: what the folder may hold.
    warn:        told of files that are not trusted, and of a disk that takes none.
    """

    folder: Path | None
    fresh: bool = False
    limit_bytes: int = LIMIT_BYTES
    warn: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2)
    num_kept: int = 0
    """Answers that came from disk."""
    num_computed: int = 0
    """Answers that were put."""
    refused: list[str] = field(default_factory=list)
    """Why files were not trusted, or not written."""
    _own: set[str] = field(default_factory=set)
    _num_bytes: int | None = None

    def get(self, question: Question) -> KeptAnswer | None:
        """Return the stored answer; None if there is none that counts."""
        name = _name(question)
        if self.folder is None or (self.fresh and name not in self._own):
            return None
        path = self.folder / f"{name}.json"
        try:
            stored = parse_json(read_own(path, JSON_BYTES))
            answer = _checked(stored, question)
            os.utime(path)  # what is used stays
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._refuse(f"{path} is not trusted, and its answer is computed anew: {error}")
            return None
        if name in self._own:
            return KeptAnswer(answer, None)
        self.num_kept += 1
        return KeptAnswer(answer, stored["computed"])

    def holds(self, question: Question) -> bool:
        """Tell whether `get` or `get_tensors` would look for an answer in a file that is there. It does not
        count as an answer."""
        name = _name(question)
        if self.folder is None or (self.fresh and name not in self._own):
            return False
        return (self.folder / f"{name}.json").exists()

    def put(self, question: Question, answer: Answer) -> None:
        """Store an answer atomically. A disk that does not take it is told of; the answer is then computed
        again when it is asked for."""
        self.num_computed += 1
        if self.folder is None:
            return
        name = _name(question)
        stored = {"question": question, "answer": answer, "computed": _now()}
        text = json.dumps(stored | {"digest": _digest(stored)})
        if self._write(f"{name}.json", text.encode(), JSON_BYTES):
            self._own.add(name)

    def get_tensors(self, question: Question) -> tuple[list[Fields], str | None] | None:
        """Return tensors by layer and field as they were put, on the CPU, and `since`; None without any."""
        kept = self.get(question)
        if kept is None:
            return None
        assert self.folder is not None
        path = self.folder / f"{_name(question)}.safetensors"
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(_read_noted(path, self.limit_bytes, kept.answer["sha256"]))
            layers = [
                {f: tensors[f"{i}.{f}"] for f in names} for i, names in enumerate(kept.answer["layers"])
            ]
            os.utime(path)
        except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
            self.num_kept -= kept.since is not None
            if isinstance(error, FileNotFoundError):  # evicted
                return None
            self._refuse(f"{path} is not trusted, and its answer is computed anew: {error}")
            return None
        return layers, kept.since

    def put_tensors(self, question: Question, layers: list[Fields]) -> None:
        """Store tensors by layer and field."""
        if self.folder is None:
            self.num_computed += 1
            return
        from safetensors.torch import save

        named = {
            f"{i}.{name}": t.detach().contiguous() for i, of in enumerate(layers) for name, t in of.items()
        }
        # What shares memory is written twice: safetensors takes no views.
        data = save({name: t.clone() for name, t in named.items()})
        if self._write(f"{_name(question)}.safetensors", data, self.limit_bytes):
            digest = hashlib.sha256(data).hexdigest()
            self.put(question, {"layers": [list(of) for of in layers], "sha256": digest})
        else:
            self.num_computed += 1

    def describe(self) -> dict[str, Any]:
        """Tell where answers of a run came from, for `reference` in environment.json."""
        return {
            "folder": str(self.folder),
            "fresh": self.fresh,
            "answers_kept": self.num_kept,
            "answers_computed": self.num_computed,
            "refused": self.refused,
        }

    def size(self) -> tuple[int, int]:
        """Count the files in the store, and their bytes."""
        sizes = [size for _, size, _ in self._files()]
        return len(sizes), sum(sizes)

    def _write(self, name: str, data: bytes, most: int) -> bool:
        """Write a file that readers see whole or not at all, and keep the folder within its limit."""
        assert self.folder is not None
        if len(data) > min(most, self.limit_bytes * KEPT_SHARE):
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self.folder / name, data)
        except OSError as error:
            self._refuse(f"answers cannot be kept in {self.folder}: {error}")
            return False
        if self._num_bytes is None:
            self._num_bytes = self.size()[1]
        else:
            self._num_bytes += len(data)
        if self._num_bytes > self.limit_bytes:
            self._evict(keep=name)
        return True

    def _evict(self, keep: str) -> None:
        """Delete what was used least lately, until KEPT_SHARE of the limit is left. Other runs may do so,
        too."""
        files = sorted(self._files())
        left = sum(size for _, size, _ in files)
        for _, size, path in files:
            if left <= self.limit_bytes * KEPT_SHARE:
                break
            if path.name != keep:
                path.unlink(missing_ok=True)
                left -= size
        self._num_bytes = left

    def _files(self) -> list[tuple[float, int, Path]]:
        """List when each file was used last, its size and itself."""
        if self.folder is None or not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            if path.suffix in (".json", ".safetensors"):
                try:
                    of = path.stat()
                except FileNotFoundError:  # another run evicted it
                    continue
                found.append((of.st_mtime, of.st_size, path))
        return found

    def _refuse(self, why: str) -> None:
        if why not in self.refused:
            self.refused.append(why)
            self.warn(why)


def _read_noted(path: Path, max_bytes: int, sha256: Any) -> bytes:
    """Read a file like `read_own`. Raises ValueError where it has another hash, too."""
    data = read_own(path, max_bytes)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError("it is damaged: its hash is not the one that was noted")
    return data


def _checked(stored: Any, question: Question) -> Answer:
    """Return the answer of a file that was parsed. Raises ValueError where it is not the question's."""
    if not isinstance(stored, dict) or set(stored) != {"question", "answer", "computed", "digest"}:
        raise ValueError("it is no answer of the reference")
    digest = stored["digest"]
    if digest != _digest({name: value for name, value in stored.items() if name != "digest"}):
        raise ValueError("it is damaged: its hash is not the one that it names")
    if _digest(stored["question"]) != _digest(question):  # JSON has no tuples
        raise ValueError("it answers another question")
    answer = stored["answer"]
    if isinstance(answer, dict) and isinstance(stored["computed"], str):
        return answer
    raise ValueError("it is no answer of the reference")


def _digest(stored: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


def _name(question: Question) -> str:
    return _digest(question)[:32]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

"""Answers of the reference on disk: one JSON file per question, named by the question's hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from rayk.oracle.files import write_atomically


class AnswerCache:
    """A folder of answers; with `folder` None it caches nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the stored answer; None if there is none or its file does not hold this question."""
        if self._folder is None:
            return None
        path = self._path(question)
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        if not isinstance(stored, dict) or stored.get("question") != question:
            return None
        answer = stored["answer"]
        assert isinstance(answer, dict)
        return answer

    def put(self, question: dict[str, Any], answer: dict[str, Any]) -> None:
        """Store an answer atomically."""
        if self._folder is not None:
            text = json.dumps({"question": question, "answer": answer})
            write_atomically(self._path(question), text)

    def _path(self, question: dict[str, Any]) -> Path:
        assert self._folder is not None
        text = json.dumps(question, sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

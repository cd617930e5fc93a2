"""Descriptions of forms are programs too: clients' schemas, expressions and grammars are compiled in bounded
processes before any engine does.

llguidance bounds what one step of an output takes, but not all of what it takes to compile a description,
and its threads cannot be stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from functools import lru_cache

from rayk.grammars import check, refusal
from rayk.serve.children import TOO_MUCH, Children, answer_all
from rayk.types.errors import UserError
from rayk.types.structured import StructuredOutputs

NUM_KEPT = 64
"""Answers that are kept, those used last."""
_LOG = logging.getLogger(__name__)


class Forms:
    """Checks descriptions, from any thread."""

    def __init__(self) -> None:
        self._children = Children(__name__, "the process that checks forms")
        self._problem = lru_cache(maxsize=NUM_KEPT)(self._find_problem)

    def close(self) -> None:
        """End the warm process. A later question starts another."""
        self._children.close()

    def check(self, wanted: StructuredOutputs) -> None:
        """Refuse a description that no engine would take, that no text fits, or that takes more than its
        bounds. Raises UserError; EngineDied where the processes end for another reason, DeadlineExceeded."""
        problem = self._problem(wanted)
        if problem is not None:
            raise problem

    def _find_problem(self, wanted: StructuredOutputs) -> UserError | None:
        answer = self._children.ask(json.dumps(dataclasses.asdict(wanted)).encode())
        if not answer:
            _LOG.warning("a form was refused: it took %s", TOO_MUCH)
            error = refusal(wanted, f"it took {TOO_MUCH} to compile")
            return dataclasses.replace(error, mend="fewer patterns for one text, or shorter repetitions")
        problem = json.loads(answer)
        return None if problem is None else UserError(**problem)


# The other side.


def main() -> None:
    """Answer for descriptions until the server has gone."""
    with contextlib.suppress(UserError):  # which every question is told
        check(StructuredOutputs(regex="a"))  # imports the library
    answer_all(_answer, lambda: None)


def _answer(question: bytes) -> bytes:
    fields = json.loads(question)
    try:
        check(StructuredOutputs(**{**fields, "choice": tuple(fields["choice"])}))
    except UserError as error:
        return json.dumps(dataclasses.asdict(error)).encode()
    return b"null"


if __name__ == "__main__":
    main()

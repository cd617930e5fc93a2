"""Chat templates are programs over what clients send: they run in bounded processes.

Neither what a template computes nor what Jinja works out while it compiles one takes more of the machine than
a question may.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rayk.serve.children import TOO_MUCH, Children, answer_all, given
from rayk.types.errors import UserError

MOST_CHARACTERS = 16 << 20
"""A template may write this much: twice the largest body."""
_SHOWN = 300
"""So many characters of a template's complaint are told."""
_WRITTEN = b"+"
"""Begins an answer that is the conversation; else it is the template's complaint."""
_JINJA = "transformers.utils.chat_template_utils"
_LOG = logging.getLogger(__name__)


class Templates:
    """Renders one chat template, from any thread."""

    def __init__(self, template: str) -> None:
        self.template = template
        self._children = Children(__name__, "the chat template's process", template)

    def start(self) -> int:
        """Start the warm process, unless it runs; returns its id."""
        return self._children.start()

    def close(self) -> None:
        """End the warm process. A later conversation starts another."""
        self._children.close()

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> str:
        """Write a conversation, up to where the answer begins. `arguments`: the template's variables. Raises
        UserError where the template refuses these, or takes more than its bounds; EngineDied where its
        processes end for another reason, DeadlineExceeded."""
        try:
            question = json.dumps([list(messages), dict(arguments)]).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"messages are plain JSON, less than 1000 levels deep: {error}") from error
        answer = self._children.ask(question)
        if not answer:
            _LOG.warning("a chat template was stopped: it took %s", TOO_MUCH)
            raise UserError(f"the chat template took {TOO_MUCH} over these messages")
        text = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] != _WRITTEN:
            raise UserError(f"the chat template refuses the messages: {text}")
        return text


# The other side.


def main() -> None:
    """Answer conversations until the server has gone."""
    template = given()
    importlib.import_module(_JINJA)  # no conversation pays for that, nor is to blame where it fails
    answer_all(partial(_answer, template), partial(_compile, template))


def _compile(template: str) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(template)


def _answer(template: str, question: bytes) -> bytes:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, arguments = json.loads(question)
    try:
        (text,), _ = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True, **arguments
        )
        kind, answer = _WRITTEN, str(text)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a template's own code raises of what it is given
        kind, answer = b"-", f"{type(error).__name__}: {error}"[:_SHOWN]
    if len(answer) > MOST_CHARACTERS:
        kind, answer = b"-", f"it writes more than {MOST_CHARACTERS} characters"
    return kind + answer.encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    main()

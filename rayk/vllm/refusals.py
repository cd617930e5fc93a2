"""What a vLLM engine failed of, read from its log: of its own causes, the machine's, or rayk's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rayk.types.bugs import MACHINE_WORDS
from rayk.types.errors import EngineDied, InternalError, RaykError, Unsupported, shortened

MAX_WORDS = 600
MACHINE_ERRORS = frozenset(
    {"OSError", "MemoryError", "EOFError", "OutOfMemoryError", "TimeoutError", "ConnectionError"}
    | {"BrokenPipeError", "ConnectionRefusedError", "ConnectionResetError", "FileNotFoundError"}
    | {"PermissionError", "ModuleNotFoundError", "ImportError"}
)
"""Errors of the machine, or of what is installed: the same model and arguments may well run elsewhere."""
NO_ROOM = ("Available memory on node", "Free memory on device", "No available memory")
"""What vLLM says where the machine has not the memory that an engine is to take."""
_RAISED = re.compile(r"(?:^|[\s.])(?P<type>(?:[A-Z]\w*)?(?:Error|Exception|Unsupported)): (?P<text>.+)")
_PLACE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LOGGED = re.compile(r"\bERROR\b[^\[]*\[(?P<place>[^\]]+)\] ?(?P<text>.*)")
"""vLLM begins each line of what it logs, also those of a traceback, with level, time and place."""
_OF_TRACEBACK = re.compile(
    r"\s|Traceback \(most recent call last\)|During handling of|The above exception was"
)
"""How lines of a traceback begin, except those of the error itself: calls are indented."""
_CALL = re.compile(r'\s+File "(?:[^"]*/)?(?P<file>[^"/]+)", line (?P<line>\d+)')
FOLLOWS = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Worker failed with error",
    "EngineCore encountered",
)
"""What vLLM's other processes say once one of them has failed."""


class _LoggedError(NamedTuple):
    type: str
    text: str
    place: str
    """FILE:LINE of the innermost call."""


def _find(log: str) -> _LoggedError | None:
    """The last error that is no consequence of another one."""
    found, place = None, ""
    for line in log.splitlines():
        if at := _PLACE.search(line):
            place = f"{at['file']}:{at['line']}"
        raised = _RAISED.search(line)
        if raised and not any(word in line for word in FOLLOWS):
            found = _LoggedError(raised["type"], raised["text"].strip(), place)
    return found


def cause_in(log: str) -> str:
    """In vLLM's words; empty where there are none."""
    found = _find(log)
    return "" if found is None else shortened(f"{found.type}: {found.text}", MAX_WORDS)


def complaint_in(log: str) -> str:
    """What vLLM logged as an error first, where, and what it raised; empty where it logged none. The log may
    begin within a traceback."""
    found = [
        logged for line in log.splitlines() if (logged := _LOGGED.search(line)) and logged["text"].strip()
    ]
    said = [logged for logged in found if not _OF_TRACEBACK.match(logged["text"])]
    if not said:
        return ""
    place = said[0]["place"]
    words = [logged["text"].strip() for logged in said if logged["place"] == place]
    if words[-1].isidentifier():  # An error without a text: the failed assertion says more.
        lines = [logged["text"] for logged in found if logged["place"] == place]
        words[-1] += _failed_line(lines[: lines.index(words[-1])])
    told = [shortened(text, MAX_WORDS // 2) for text in dict.fromkeys((words[0], words[-1]))]
    return f"{place}: {': '.join(told)}"


def _failed_line(traceback: Sequence[str]) -> str:
    """Return the place and the text of the innermost call of a traceback, in brackets."""
    calls = [(i, call) for i, line in enumerate(traceback) if (call := _CALL.match(line))]
    if not calls or calls[-1][0] + 1 == len(traceback):
        return ""
    i, call = calls[-1]
    return f" ({call['file']}:{call['line']}: {traceback[i + 1].strip()})"


def refusal(engine: str, log: str, version: str = "", words: str = "") -> RaykError | None:
    """Why an engine did not start: Unsupported where vLLM refuses the model or an argument, EngineDied where
    the machine failed it, InternalError where rayk's own code did. `words`: of the driver, TYPE: TEXT. None
    where nothing is said of it."""
    found = _find(log)
    if words and (found is None or not any(word in words for word in FOLLOWS)):
        kind, _, text = words.partition(": ")
        found = _LoggedError(kind, " ".join(text.split()), found.place if found is not None else "")
    if found is None:
        return None
    said = shortened(f"{found.type}: {found.text}", MAX_WORDS)
    if found.type == "Unsupported":
        return Unsupported(found.text)
    if found.type in MACHINE_ERRORS or any(word in found.text for word in (*MACHINE_WORDS, *NO_ROOM)):
        return EngineDied(engine, f"it does not start: {said}")
    if "/rayk/vllm/" in found.place and "/driver.py:" not in found.place:  # which only calls vLLM
        return InternalError(found.place, said, log[-4000:])
    return Unsupported(f"vLLM {version} refuses: {said}".replace("  ", " "))

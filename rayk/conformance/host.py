"""A process with ranks of a connector, or a store, called remotely and killed if it hangs.

`pool` starts it. Answers are ("ok", value), ("raised", the connector's error), ("user", a UserError) or
("broken", an error of this file). Only this process imports the connector's class.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rayk.conformance.engines import EnginePair
from rayk.conformance.store import StoreCase, StoreKey
from rayk.transfer.connector import Connector, ConnectorCase, Finished, KVRequest
from rayk.types.errors import UserError

METHODS = ("register", "describe", "connect", "send", "receive", "poll", "release", "close")
STORE_METHODS = ("save", "look_up")
"""A class that has these is a store."""
_PR_SET_PDEATHSIG = 1
RankName = tuple[int, int]
"""(side, rank in its engine); side 0 is the producer."""


class Raised(Exception):
    """The connector raised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectorFacts:
    """Properties that a connector class declares."""

    name: str
    mode: str
    is_cross_process: bool
    moves_whole_blocks_only: bool
    summary: str
    is_store: bool = False
    """Whether it is a `rayk.conformance.store.Store`, for which the rest says nothing."""
    is_persistent: bool = False
    is_thread_safe: bool = False
    finds_prefixes: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One request that a rank has reported, and the state of memory at that moment."""

    rank: RankName
    request_id: str
    error: str
    wrong: str
    """What was wrong with memory; empty if nothing was."""


@dataclass(eq=False)
class _ConnectorRank:
    connector: Connector
    memory: Any
    seeds: dict[str, int] = field(default_factory=dict)
    """Seeds of the requests in flight."""


class Host:
    """The methods that can be called remotely."""

    def __init__(self) -> None:
        self._make: Callable[[str], Connector] | None = None
        self._ranks: dict[RankName, _ConnectorRank] = {}
        self._store: Any = None

    def load(self, target: str, path: Sequence[str]) -> ConnectorFacts:
        """Import MODULE:CLASS. Raises UserError."""
        sys.path[:0] = [p for p in path if p not in sys.path]
        made = load_class(target)
        self._make = made
        is_store = all(callable(getattr(made, name, None)) for name in STORE_METHODS)
        if not is_store:
            # Import torch here, because the first call of a rank is timed.
            import rayk.conformance.memory  # noqa: F401

        return ConnectorFacts(
            name=getattr(made, "__name__", target),
            mode=str(getattr(made, "mode", "pull")),
            is_cross_process=bool(getattr(made, "is_cross_process", True)),
            moves_whole_blocks_only=bool(getattr(made, "moves_whole_blocks_only", False)),
            summary=(made.__doc__ or "").strip().partition("\n")[0],
            is_store=is_store,
            is_persistent=bool(getattr(made, "is_persistent", False)),
            is_thread_safe=bool(getattr(made, "is_thread_safe", False)),
            finds_prefixes=bool(getattr(made, "finds_prefixes", True)),
        )

    def supports(self, case: ConnectorCase | StoreCase) -> str | None:
        ask = getattr(self._make, "supports", None)
        return None if ask is None else _guarded(lambda: ask(case))

    def open(self, rank: RankName, pair: EnginePair, name: str) -> None:
        """Make a rank's memory and its connector, and register it."""
        import torch

        from rayk.conformance.memory import RankMemory

        torch.set_num_threads(1)
        assert self._make is not None, "nothing is loaded"
        make = self._make
        memory = RankMemory(pair.geometry(*rank), rank[0])
        connector = _guarded(lambda: make(name))
        missing = [m for m in METHODS if not callable(getattr(connector, m, None))]
        if missing:
            raise Raised(f"the class has no {', '.join(missing)}: see rayk.transfer.connector")
        self._ranks[rank] = _ConnectorRank(connector, memory)
        _guarded(lambda: connector.register(memory.caches))

    def register_again(self, rank: RankName, pair: EnginePair) -> str:
        """Register a second cache; returns what was raised, or ""."""
        from rayk.conformance.memory import RankMemory

        second = RankMemory(pair.geometry(*rank), rank[0])
        try:
            _guarded(lambda: self._ranks[rank].connector.register(second.caches))
        except Raised as error:
            return str(error)
        return ""

    def describe(self, rank: RankName) -> bytes:
        blob = _guarded(self._ranks[rank].connector.describe)
        if not isinstance(blob, bytes):
            raise Raised(f"describe() returned a {type(blob).__name__}, not bytes")
        return blob

    def connect(self, rank: RankName, producers: Sequence[bytes], consumers: Sequence[bytes]) -> None:
        """Pass everybody's descriptions to the rank."""
        _guarded(lambda: self._ranks[rank].connector.connect(producers, consumers))

    def call(self, rank: RankName, request: KVRequest, peers: Sequence[bytes], seed: int) -> bytes:
        """Call `send` (on a producer rank, whose blocks are filled first) or `receive`."""
        found = self._ranks[rank]
        memory, connector = found.memory, found.connector
        is_new = request.request_id not in found.seeds
        if is_new:
            memory.lend(request)
            if rank[0] == 0:
                memory.fill(request, seed)
            found.seeds[request.request_id] = seed
        method = connector.receive if rank[0] else connector.send
        try:
            answer = _guarded(lambda: method(request, tuple(peers)))
        except Raised:
            if is_new:
                # A refused request's blocks are the engine's again.
                del found.seeds[request.request_id]
                memory.take_back(request.request_id)
            raise
        if not isinstance(answer, bytes):
            raise Raised(f"{method.__name__}() returned a {type(answer).__name__}, not bytes")
        return answer

    def poll(self) -> list[Report]:
        """Poll every rank, and check memory for each report at once."""
        reports = []
        for rank, found in self._ranks.items():
            for finished in _guarded(found.connector.poll):
                reports.append(self._settle(rank, found, finished))
        return reports

    def release(self, rank: RankName, request_id: str) -> None:
        _guarded(lambda: self._ranks[rank].connector.release(request_id))

    def wrong_elsewhere(self, rank: RankName) -> str:
        wrong: str = self._ranks[rank].memory.wrong_elsewhere()
        return wrong

    def held(self, rank: RankName) -> dict[str, int] | None:
        """Return what the rank says it holds; None if it does not say."""
        ask = getattr(self._ranks[rank].connector, "held", None)
        return None if ask is None else dict(_guarded(ask))

    def close(self, rank: RankName) -> None:
        """Close the connector; its memory stays, to be checked."""
        _guarded(self._ranks[rank].connector.close)

    def forget(self) -> None:
        self._ranks.clear()
        if self._store is not None:
            with contextlib.suppress(Exception):
                self.close_store()
        self._store = None

    def open_store(self, folder: str) -> tuple[int, int | None]:
        """Make the store; return (tokens of a page, pages that it holds)."""
        make = self._make
        assert make is not None, "nothing is loaded"
        self._store = _guarded(lambda: make(folder))
        return self._store.block_tokens, self._store.max_blocks

    def save_pages(self, saves: Sequence[tuple[StoreKey, Sequence[bytes]]], at_once: bool) -> None:
        _each(lambda save: self._store.save(*save), saves, at_once)

    def look_up(self, keys: Sequence[StoreKey], at_once: bool) -> list[list[bytes]]:
        return [[bytes(page) for page in found] for found in _each(self._store.look_up, keys, at_once)]

    def close_store(self) -> None:
        _guarded(self._store.close)
        self._store = None

    def resources(self) -> dict[str, int]:
        """Count the threads and file descriptors of the process."""
        import gc

        gc.collect()
        tasks = Path("/proc/self/task")
        num_threads = len(list(tasks.iterdir())) if tasks.is_dir() else threading.active_count()
        files = Path("/proc/self/fd")
        return {
            "threads": num_threads,
            "file descriptors": len(list(files.iterdir())) if files.is_dir() else 0,
        }

    def _settle(self, rank: RankName, found: _ConnectorRank, finished: Finished) -> Report:
        request_id, error = finished.request_id, finished.error
        seed = found.seeds.pop(request_id, None)
        if seed is None:
            wrong = f"reported {request_id}, which is not in flight on this rank (twice, or never asked for)"
            return Report(rank=rank, request_id=request_id, error=error, wrong=wrong)
        memory = found.memory
        if rank[0] == 0:
            wrong = memory.changed_while_lent(request_id)
        else:
            wrong = "" if error else memory.wrong_content(request_id, seed)
        memory.take_back(request_id)
        return Report(rank=rank, request_id=request_id, error=error, wrong=wrong)


def load_class(target: str) -> Any:
    """Import the class that MODULE:CLASS names. Raises UserError."""
    module_name, _, name = target.partition(":")
    where = f"connector {target}"
    if not module_name or not name:
        raise UserError("not of the form MODULE:CLASS", where, "e.g. rayk.transfer:LocalConnector")
    try:
        module = importlib.import_module(module_name)
        found: Any = module
        for part in name.split("."):
            # A module may import its attributes lazily.
            found = getattr(found, part, None)
    except ImportError as error:
        mend = "the module must be importable from here: install it, or set PYTHONPATH"
        raise UserError(f"{module_name} cannot be imported: {error}", where, mend) from error
    except Exception as error:  # whatever the module's own code raises
        raise UserError(f"importing {target} raises {error!r}", where, "mend the module") from error
    if found is None:
        offered = [n for n, v in vars(module).items() if isinstance(v, type) and hasattr(v, "poll")]
        mend = f"one of {', '.join(offered)}" if offered else "the name of a class in that module"
        raise UserError(f"{module_name} has no {name}", where, mend)
    if not callable(found):
        raise UserError(f"{name} is a {type(found).__name__}, not a class", where, "the name of a class")
    return found


def _each(call: Callable[[Any], Any], of: Sequence[Any], at_once: bool) -> list[Any]:
    """Call the store's own code, one after the other or each in a thread, which all begin together."""
    if not at_once:
        return [_guarded(partial(call, one)) for one in of]
    ready = threading.Barrier(len(of))

    def run(one: Any) -> Any:
        ready.wait()
        return _guarded(partial(call, one))

    with ThreadPoolExecutor(len(of)) as pool:
        return list(pool.map(run, of))


def _guarded(call: Callable[[], Any]) -> Any:
    """Call the connector's own code; its exceptions become Raised."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - whatever a connector raises
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1]
        place = f"{Path(last.filename).name}:{last.lineno} in {last.name}"
        raise Raised(f"{type(error).__name__}: {error} ({place})") from error


def main() -> None:
    """Answer calls until the other end closes."""
    _die_with_parent()
    host = Host()
    with Connection(int(sys.argv[1])) as connection:
        while True:
            try:
                method, arguments = pickle.loads(connection.recv_bytes())  # noqa: S301 - our own parent's
            except (EOFError, ConnectionError):
                # Threads that a connector left behind must not keep the process.
                os._exit(0)
            connection.send_bytes(pickle.dumps(_answer(host, method, arguments)))


def _die_with_parent() -> None:
    """Ask for SIGKILL when the parent dies, which would not end a hung child."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _answer(host: Host, method: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "ok", getattr(host, method)(*arguments)
    except Raised as error:
        return "raised", str(error)
    except UserError as error:
        return "user", error
    except Exception:  # noqa: BLE001 - told to the caller
        return "broken", traceback.format_exc()

"""A leader whose engine dies while requests are aborted on other threads: every sink gets one end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from rayk.engine.leader import Leader, RequestEvent
from rayk.types.errors import EngineDied

LIMIT_S = 60.0


def test_an_abort_waits_until_the_end_of_the_engine_is_told() -> None:
    """Each of them would else close the same sink."""
    scheduler: Any = SimpleNamespace(max_positions=64, remove=lambda _: None)
    leader = Leader(scheduler, SimpleNamespace())  # type: ignore[arg-type]
    got: list[RequestEvent] = []
    problems: list[BaseException] = []
    is_asked, is_there = threading.Event(), threading.Event()

    def abort() -> None:
        try:
            leader.abort("r")
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            problems.append(error)

    aborting = threading.Thread(target=abort)

    class Sinks(dict[str, Any]):
        """Whoever finds a sink is overtaken by the next who looks for it, if that may be."""

        def get(self, key: str, default: Any = None) -> Any:
            found = super().get(key, default)
            if threading.current_thread() is aborting:
                is_asked.set()
                is_there.set()
            elif not aborting.ident:
                aborting.start()
                assert is_there.wait(LIMIT_S), "it neither waits nor looks"
                if is_asked.is_set():
                    aborting.join(LIMIT_S)
            return found

    class Death:
        """The leader's lock; it tells that the abort is there."""

        def __init__(self, lock: Any) -> None:
            self.lock = lock

        def __enter__(self) -> None:
            if threading.current_thread() is aborting:
                is_there.set()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    leader._death = Death(leader._death)  # type: ignore[assignment]
    leader._sinks = Sinks(r=got.append)
    leader.fail(EngineDied("prefill0", "killed"))
    aborting.join(LIMIT_S)
    assert problems == []
    assert [type(event.error) for event in got] == [EngineDied]

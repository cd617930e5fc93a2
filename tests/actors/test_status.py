"""What a worker says of itself on one thread while the engine's loop goes on, or ends, on another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rayk.actors.worker import Worker
from rayk.handover.reservations import Reservations


def test_reservations_are_told_while_others_are_given_out() -> None:
    reservations = Reservations(engine="decode0", epoch=1, num_ranks=1, commands=[])
    open_reservations: dict[str, Any] = reservations._open

    class OvertakenReservation:
        """Whoever looks at it has been overtaken by the loop's thread."""

        @property
        def reservation_id(self) -> str:
            open_reservations[f"r{len(open_reservations)}"] = SimpleNamespace(reservation_id="late")
            return "early"

    open_reservations["r0"] = OvertakenReservation()
    assert reservations.open_reservations == ("early",)
    assert len(open_reservations) == 2


def test_a_worker_that_forgets_its_engine_meanwhile_says_how_it_was() -> None:
    worker = Worker("rayk/x/prefill0/r0")

    class Leader:
        """Whoever looks at it has been overtaken by `dissolve`."""

        pool = SimpleNamespace(num_free_blocks=7, num_blocks=8)
        leases = ()
        ledger = None
        has_riders = False

        @property
        def manager(self) -> Leader:
            worker._leader = worker._handover = worker._loop = worker._rank = None
            return self

        @property
        def scheduler(self) -> Any:
            return SimpleNamespace(num_running=0, num_waiting=0, num_preemptions=0)

    worker._leader = Leader()  # type: ignore[assignment]
    assert worker.status()["num_free_blocks"] == 7

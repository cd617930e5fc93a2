"""Who may not speak with the ranks of a group: other users of the machine, and who does not know its key."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest

from rayk.parallel import shm_link
from rayk.parallel.proof import Proofs
from rayk.parallel.torch_group import TorchComm
from rayk.types.errors import CommError
from tests.listeners import listened_at
from tests.parallel import strangers
from tests.parallel.crew import free_address

MEET_S = 20.0
NUM_BYTES = 4096


@contextmanager
def another_user(body: Callable[[str, Connection], None], address: str) -> Iterator[Connection]:
    """`body` in a process of another user, at the name of the group of this address."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    key = hashlib.blake2b(f"{os.geteuid()} {address}".encode(), digest_size=16).hexdigest()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=body, args=(f"\0rayk-shm-{key}", theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(60)
        assert process.exitcode is not None


def told(pipe: Connection) -> object:
    assert pipe.poll(60), "the stranger gave no answer"
    return pipe.recv()


def test_rank_0_does_not_wait_for_the_word_of_another_user() -> None:
    address, links = free_address(), []
    host = threading.Thread(
        target=lambda: links.append(shm_link.connect(0, 2, address, NUM_BYTES, MEET_S)), daemon=True
    )
    host.start()
    with another_user(strangers.call_silently, address) as pipe:
        assert told(pipe) == "called"
        links.append(shm_link.connect(1, 2, address, NUM_BYTES, MEET_S))
        host.join(60)
        pipe.send("go")
    assert len(links) == 2
    for link in links:
        link.close()


def test_a_rank_tells_nothing_to_another_user_in_the_place_of_rank_0() -> None:
    address = free_address()
    with another_user(strangers.listen, address) as pipe:
        assert told(pipe) == "listens"
        with pytest.raises(CommError, match="user 65534 listens where rank 0 should"):
            shm_link.connect(1, 2, address, NUM_BYTES, MEET_S)
        assert told(pipe) == b""


def test_the_store_and_gloo_listen_at_the_address_they_were_given() -> None:
    before = listened_at()
    made = comms(free_address(), b"ours", b"ours")
    found = listened_at() - before
    for comm in made:
        comm.close()
    assert {host for host, *_ in found} == {"127.0.0.1"}


def test_bytes_from_who_does_not_know_the_secret_are_refused() -> None:
    ours, theirs = comms(free_address(), b"ours", b"theirs")
    for operation in (
        lambda c: c.broadcast_bytes(b"x" if c is ours else None),
        lambda c: c.gather_bytes(b"x"),
    ):
        found = together(operation, ours, theirs)
        refused = [str(f) for f in found if isinstance(f, CommError)]
        assert len(refused) == 1, found
        assert "was not sent by it" in refused[0]
    ours.close()
    theirs.close()


def test_a_message_counts_once_and_in_its_own_place() -> None:
    sender, receiver = Proofs(b"key"), Proofs(b"key")
    sender.begin("gather_bytes")
    message = sender.prove(1, b"payload")
    receiver.begin("gather_bytes")
    assert receiver.check(1, message) == b"payload"
    for rank, changed in ((2, message), (1, message + b"!"), (1, message[:-1]), (1, b"")):
        with pytest.raises(CommError, match="was not sent by it"):
            receiver.check(rank, changed)
    for operation in ("gather_bytes", "broadcast_bytes"):
        receiver.begin(operation)
        with pytest.raises(CommError, match="was not sent by it"):
            receiver.check(1, message)


def comms(address: str, *secrets: bytes) -> list[TorchComm]:
    """A gloo group of this process's threads, each rank with a secret of its own."""
    return list(
        together(
            lambda rank: TorchComm("gloo", rank, len(secrets), address, 60, secret=secrets[rank]),
            *range(len(secrets)),
        )
    )


def together(call: Callable[[Any], Any], *arguments: Any) -> list[Any]:
    """`call` of each argument at once: what it returned, or the CommError that it raised."""

    def one(argument: Any) -> Any:
        try:
            return call(argument)
        except CommError as error:
            return error

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(one, arguments))

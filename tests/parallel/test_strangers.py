"""Who may not speak with the ranks of a group: other users of the machine, and who does not know its key."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from rayk.parallel import shm_link
from rayk.types.errors import CommError
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

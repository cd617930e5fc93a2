"""The proof on the way from P's workers to D's, over real sockets: what is equal is told so, what is wrong is
named, and what does not come is never equal."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from rayk.types.errors import TransferError, UserError
from rayk.vllm import proof_verifier, proof_wire
from rayk.vllm.proof import ProofRecord, ProofRecords, Ticket
from rayk.vllm.proof_compare import ArrivedKV, Comparison
from rayk.vllm.proof_verifier import Fetcher
from rayk.vllm.proof_wire import ProofServer, ask
from tests.each import each
from tests.markers import thorough
from tests.pd import HANG_S
from tests.transfer.cluster import Shape
from tests.vllm.sides import HERE, HETERO, SECRET, SHAPES, Sides, roll_heads, sides, wait_for


@each("name", list(SHAPES))
def test_what_arrived_whole_is_equal_on_every_rank(name: str) -> None:
    with sides(SHAPES[name]) as made:
        for rank in range(made.shape.tp[1]):
            found = made.verify(rank)
            assert (found.status, found.why, found.wrong, found.num_unverified) == ("equal", "", [], 0)
            assert found.num_equal > 0
            assert found.num_bytes > 0


def shift_columns(page) -> None:
    """Every channel of every head holds the one before it: [units, elements] of 3 taps a channel."""
    page.copy_(page.reshape(-1, 3).roll(1, dims=0).reshape(page.shape))


def test_each_planted_bug_is_named_and_its_neighbour_is_right() -> None:
    with sides(Shape(units=4, tp=(2, 1))) as made:
        caches, table = made.caches[0], made.tables[0]
        before = [f.view.clone() for v in caches.all_views for f in v.fields]

        def planted(layer: int, field: str, change) -> Comparison:
            caches.change(layer, field, change)
            found = made.verify()
            for f, was in zip((f for v in caches.all_views for f in v.fields), before, strict=True):
                f.view.copy_(was)
            assert found.status == "mismatch", (field, found)
            assert found.mismatch is not None
            assert (found.mismatch.layer, found.mismatch.field) == (layer, field)
            return found

        found = planted(1, "k", roll_heads)
        assert found.mismatch.classification == "head 0 holds head 3 of the producer"
        assert (found.mismatch.head, found.mismatch.token) == (0, 0)

        keys, values = caches.copy_of(2, "k"), caches.copy_of(2, "v")
        caches.change(2, "v", lambda view: view.copy_(keys))
        found = planted(2, "k", lambda view: view.copy_(values))
        assert found.mismatch.classification == "K and V swapped"

        found = planted(0, "v", lambda view: view[table[-1]].fill_(0))
        assert found.mismatch.classification == "tail not written: tokens 28 to 29 hold only 0x00"
        assert found.mismatch.token == 28

        found = planted(1, "v", lambda view: view[table[3]].copy_(view[table[5]] + 1))
        assert found.mismatch.classification.startswith("block 3 of the sequence missing")
        assert (found.num_equal > 0, found.num_unverified) == (True, 0)
        assert made.verify().status == "equal"


def test_shifted_columns_of_a_state_are_named() -> None:
    with sides(SHAPES["states-1-to-2"]) as made:
        view = next(v for v in made.caches[1].all_views if v.group.spec.part == "state")
        layer, block = view.layer, made.tables[view.group.index][-1]
        made.caches[1].change(layer, "conv_x", lambda seen: shift_columns(seen[block, :, 0]))
        found = made.verify(1)
        assert made.verify(0).status == "equal"
    assert found.mismatch is not None
    assert (found.mismatch.layer, found.mismatch.field) == (layer, "conv_x")
    assert found.mismatch.classification == "channels shifted: channel c holds channel c-1"


def test_without_rows_the_digests_name_the_row_group() -> None:
    with sides(HETERO, keep_rows=False) as made:
        made.caches[1].change(2, "k", roll_heads)
        found = made.verify(1)
    assert found.status == "mismatch"
    assert found.mismatch is not None
    assert "digests differ" in found.mismatch.classification
    assert (found.mismatch.layer, found.mismatch.field, found.mismatch.head) == (2, "k", 2)


def test_rows_that_were_here_before_are_not_counted() -> None:
    with sides(HETERO) as made:
        first_block = made.tables[0][0]
        made.caches[0].change(0, "k", lambda view: view[first_block].fill_(1.5))
        assert made.verify(0).status == "mismatch"
        later = made.arrival(0, first_row=8)
        caches = made.caches[0]
        found = Fetcher(caches.description, caches.all_views, SECRET, HANG_S).verify(later)
    assert (found.status, found.num_unverified) == ("equal", 0)


@each("there, here", [(30, 28), (30, 27), (28, 30)])
def test_unlike_numbers_of_tokens_leave_rows_unverified_but_those_that_both_have(
    there: int, here: int
) -> None:
    with sides(HETERO, num_tokens=there) as made:
        caches = made.caches[0]
        what = made.tables, here, 0
        arrival = ArrivedKV("d", made.ticket, here, 0, caches.digests(*what), caches.rows(*what))
        found = Fetcher(caches.description, caches.all_views, SECRET, HANG_S).verify(arrival)
        # A cache of 3 layers, K and V, 2 heads: whole groups of 4 rows that both have are equal.
        assert found.num_equal == 3 * 2 * 2 * (min(there, here) // 4)
        assert (found.status, found.wrong) == ("equal" if here == 28 else "unverified", [])
        caches.change(1, "v", roll_heads)
        wrong = ArrivedKV("d", made.ticket, here, 0, caches.digests(*what), caches.rows(*what))
        found = Fetcher(caches.description, caches.all_views, SECRET, HANG_S).verify(wrong)
    assert found.status == "mismatch"
    assert found.mismatch is not None
    assert (found.mismatch.layer, found.mismatch.field, found.mismatch.token) == (1, "v", 0)


# What does not come is unverified


def check_unverified(found: Comparison, reason: str) -> None:
    assert found.status == "unverified", found
    assert reason in found.why
    assert (found.num_equal, found.wrong, found.mismatch) == (0, [], None)
    assert found.num_unverified > 0


def test_a_wrong_secret_is_refused_and_counted_on_both_sides() -> None:
    with sides(SHAPES["1-to-2"]) as made:
        check_unverified(made.verify(secret=b"another secret of enough letters"), "hung up")
        server = made.servers[0]
        wait_for(lambda: server.counts.refused == 2)  # A connection that breaks is tried once more.
        assert made.verify().status == "equal"
        # A server that does not know the secret is not believed either.
        liar = ProofServer(HERE, 0, b"another secret of enough letters", lambda request: b"\0" * 64)
        with pytest.raises(TransferError, match="hung up"):
            ask(liar.address, SECRET, [b"x"], time.monotonic() + HANG_S)
        liar.close()


def test_what_was_recorded_on_one_connection_is_worth_nothing_on_another() -> None:
    with sides(SHAPES["1-to-2"]) as made:
        server = made.servers[0]
        sent: list[bytes] = []
        came: list[bytes] = []
        with listener() as (address, accept):
            relay = threading.Thread(target=relay_once, args=(accept, server.address, sent, came))
            relay.start()
            answer = ask(address, SECRET, [b"\x02" + bytes(8) + b"\x01\x00n"], time.monotonic() + HANG_S)
            relay.join(HANG_S)
        assert answer[0][0] == 0
        # The client's words, to the true server.
        with socket.create_connection(server.address, timeout=HANG_S) as replayed:
            replayed.recv(40, socket.MSG_WAITALL)
            replayed.sendall(b"".join(sent))
            assert drain(replayed) == b""
        wait_for(lambda: server.counts.refused == 1)
        # The server's words, to a client.
        with listener() as (address, accept):
            replay = threading.Thread(target=say_and_hang_up, args=(accept, b"".join(came)))
            replay.start()
            with pytest.raises(TransferError, match="does not know the secret"):
                ask(address, SECRET, [b"x"], time.monotonic() + HANG_S)
            replay.join(HANG_S)


def drain(connection: socket.socket) -> bytes:
    """Everything until the peer hangs up, politely or not."""
    found = b""
    while part := receive(connection):
        found += part
    return found


def receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionError:
        return b""


@contextmanager
def listener():
    """(address, accept) of a socket that somebody else plays."""
    with socket.create_server((HERE, 0)) as made:
        made.settimeout(HANG_S)

        def accept() -> socket.socket:
            connection, _ = made.accept()
            connection.settimeout(HANG_S)
            return connection

        yield made.getsockname()[:2], accept


@contextmanager
def asked(accept):
    """A connection on which a client that proved the secret has asked its question."""
    with accept() as connection:
        channel = proof_wire.accept_channel(connection, SECRET, time.monotonic() + HANG_S)
        channel.receive(4096, time.monotonic() + HANG_S)
        yield connection


def relay_once(accept, address, sent: list[bytes], came: list[bytes]) -> None:
    """Pass one connection on, and remember what was said on it."""
    with accept() as client, socket.create_connection(address, timeout=HANG_S) as server:

        def forward() -> None:
            with suppress(OSError):
                while part := receive(client):
                    sent.append(part)
                    server.sendall(part)
                server.shutdown(socket.SHUT_WR)

        upward = threading.Thread(target=forward)
        upward.start()
        with suppress(OSError):
            while part := receive(server):
                came.append(part)
                client.sendall(part)
        upward.join(HANG_S)


def say_and_hang_up(accept, text: bytes, times: int = 1) -> None:
    """The peer may have heard enough before all is said."""
    for _ in range(times):
        with accept() as connection, suppress(OSError):
            connection.sendall(text)
            connection.shutdown(socket.SHUT_WR)
            drain(connection)


def with_peer(made: Sides, address) -> Ticket:
    """The ticket, with another address of P's rank 0."""
    host, port, life = made.ticket.ranks[0]
    return replace(made.ticket, ranks=((*address, life), *made.ticket.ranks[1:]))


@each("greeting", [b"", b"RAYK-KV1", b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), bytes(40)])
def test_garbage_and_silence_are_no_proof(greeting: bytes) -> None:
    with sides(HETERO) as made, listener() as (address, accept):
        times = 2 if len(greeting) < 40 else 1  # One that breaks off is asked again, garbage is not.
        speaker = threading.Thread(target=say_and_hang_up, args=(accept, greeting, times))
        speaker.start()
        check_unverified(made.verify(ticket=with_peer(made, address)), f"{HERE}:{address[1]}")
        speaker.join(HANG_S)


@each("answer", [b"", b"\0", b"\0" * 24, b"\0" * 25, b"\1", b"\x63", bytes(range(200))])
def test_answers_that_are_cut_or_of_another_life_are_no_proof(answer: bytes) -> None:
    with sides(HETERO) as made:
        liar = ProofServer(HERE, 0, SECRET, lambda request: answer)
        check_unverified(made.verify(ticket=with_peer(made, liar.address)), f"{HERE}:{liar.address[1]}")
        liar.close()


def test_a_server_that_hangs_up_within_a_message_is_no_proof() -> None:
    with sides(HETERO) as made, listener() as (address, accept):

        def play() -> None:
            for _ in range(2):
                with asked(accept) as connection:
                    connection.sendall((1000).to_bytes(4, "little") + bytes(500))

        player = threading.Thread(target=play)
        player.start()
        check_unverified(made.verify(ticket=with_peer(made, address)), "hung up")
        player.join(HANG_S)


@each("breaks", ["before the greeting", "after the question"])
def test_a_connection_that_broke_is_asked_once_more(breaks: str) -> None:
    """A server ends a connection whose client was kept from greeting, and a client may greet late: engines
    that wait for cores were seen to stop for half a minute."""
    with sides(HETERO) as made, listener() as (address, accept):

        def play() -> None:
            if breaks == "before the greeting":
                accept().close()
            else:
                with asked(accept):
                    pass
            relay_once(accept, made.servers[0].address, [], [])

        player = threading.Thread(target=play)
        player.start()
        assert made.verify(ticket=with_peer(made, address)).status == "equal"
        player.join(HANG_S)


def test_a_server_that_announces_too_much_is_not_waited_for() -> None:
    with sides(HETERO) as made, listener() as (address, accept):

        def play() -> None:
            with asked(accept) as connection:
                connection.sendall(b"\xff" * 4)
                drain(connection)  # Open until the client hangs up.

        player = threading.Thread(target=play)
        player.start()
        check_unverified(made.verify(ticket=with_peer(made, address)), "4294967295 bytes")
        player.join(HANG_S)


def test_slow_and_dead_servers_are_given_up_at_the_deadline() -> None:
    with sides(HETERO) as made, listener() as (address, _):
        # It never accepts: the greeting never comes.
        check_unverified(made.verify(ticket=with_peer(made, address), timeout_s=0.2), "no answer in time")
        made.servers[0].close()
        check_unverified(made.verify(), "refused")


def test_what_waited_long_behind_others_is_not_waited_for_as_long_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long_ago = time.monotonic() - 2 * HANG_S
    with sides(HETERO) as made, listener() as (address, _):
        monkeypatch.setattr(proof_verifier, "LEAST_S", 0.2)
        found = made.verify(ticket=with_peer(made, address), made_at=long_ago)
        check_unverified(found, "no answer in time")
        monkeypatch.setattr(proof_verifier, "LEAST_S", HANG_S)
        assert made.verify(made_at=long_ago).status == "equal"


def test_one_of_two_ranks_that_is_dead_leaves_its_units_unverified() -> None:
    with sides(SHAPES["2-to-1"]) as made:
        made.servers[1].close()
        found = made.verify()
    assert found.status == "unverified"
    assert found.num_equal == found.num_unverified > 0


def test_a_replica_stands_in_for_one_that_is_dead() -> None:
    with sides(SHAPES["replicas-4-to-1"]) as made:
        made.servers[0].close()
        assert made.verify().status == "equal"


def test_a_replica_that_does_not_come_may_be_the_one_that_was_read() -> None:
    with sides(SHAPES["replicas-4-to-1"]) as made:
        # Head 0 of one layer, as the arithmetic of a rank of its own has it.
        made.caches[0].change(1, "k", lambda view: view[:, 0].mul_(1 + 2**-20))
        assert made.verify().status == "mismatch"
        made.servers[0].close()
        found = made.verify()
    assert (found.status, found.wrong) == ("unverified", [])
    assert 0 < found.num_unverified < found.num_equal


@each("named", [(0, 1, 2), (0, 1, 2, 2)])
def test_a_rank_that_the_ticket_does_not_name_is_missed(named: tuple[int, ...]) -> None:
    with sides(SHAPES["replicas-4-to-1"]) as made:
        found = made.verify(ticket=replace(made.ticket, ranks=tuple(made.ticket.ranks[r] for r in named)))
    assert (found.status, found.wrong) == ("unverified", [])
    assert found.why == "the ticket names 3 of P's 4 ranks"


def test_a_digest_that_is_still_to_come_is_waited_for() -> None:
    with sides(HETERO) as made:
        record = made.records[0].pop_last("p")
        assert record is not None
        check_unverified(made.verify(timeout_s=0.2), HERE)
        later = threading.Timer(0.05, made.records[0].put, ("n", record))
        later.start()
        assert made.verify().status == "equal"
        later.join(HANG_S)


@each("host", ["bad..label", "h" * 300])
def test_an_address_that_is_none_is_no_proof_and_no_bug(host: str) -> None:
    with sides(HETERO) as made:
        check_unverified(made.verify(ticket=with_peer(made, (host, 1))), "label")


def test_a_request_without_a_ticket_or_of_another_shape_is_unverified() -> None:
    with sides(HETERO) as made:
        check_unverified(made.verify(ticket=None), "without rayk_proof")
        host, port, _ = made.ticket.ranks[0]
        elder = replace(made.ticket, ranks=((host, port, "0" * 32),))
        check_unverified(made.verify(ticket=elder), "started anew")
        made.records[0].clear()  # Nor is what died with that life waited for.
        check_unverified(made.verify(ticket=elder), "started anew")
    with sides(Shape(units=4, num_layers=2)) as other, sides(HETERO) as made:
        check_unverified(made.verify(ticket=other.ticket), "unlike caches")


def test_a_client_that_talks_garbage_is_refused_and_others_are_served() -> None:
    with sides(HETERO) as made:
        server = made.servers[0]
        for text in (bytes(64), b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64)):
            with socket.create_connection(server.address, timeout=HANG_S) as connection:
                assert len(connection.recv(40, socket.MSG_WAITALL)) == 40
                connection.sendall(text)
                assert drain(connection) == b""
        wait_for(lambda: server.counts.refused == 2)
        # Requests that nobody would send: answered as such.
        for request in (b"", b"\x02", b"\x63" + bytes(10), b"\x01" + bytes(8) + b"\x02\x00\xff\xfe"):
            answers = ask(server.address, SECRET, [request], time.monotonic() + HANG_S)
            assert answers[0][0] != 0
        assert made.verify().status == "equal"


# What is kept, told and counted


def test_records_are_bounded_by_number_and_bytes() -> None:
    record = ProofRecord(1, np.zeros(8, dtype=np.int64))
    kept = ProofRecords(max_records=2)
    for name in "abc":
        kept.put(name, record)
    assert [kept.get(name) is not None for name in "abc"] == [False, True, True]
    kept = ProofRecords(max_bytes=100)
    for name in "ab":
        kept.put(name, record)
    assert [kept.get(name) is not None for name in "ab"] == [False, True]
    kept.put("b", record)
    assert kept.pop_last("") is record
    assert kept.get("b") is None


def test_a_port_that_is_taken_or_beyond_the_last_is_told() -> None:
    with sides(HETERO) as made:
        for address in (made.servers[0].address, (HERE, 65536)):
            with pytest.raises(UserError, match="another port"):
                ProofServer(*address, SECRET, lambda request: request)


@thorough
def test_more_connections_than_a_server_holds_are_turned_away() -> None:
    with sides(HETERO) as made, ExitStack() as stack:
        server = made.servers[0]
        for _ in range(proof_wire.MAX_CONNECTIONS):
            connection = stack.enter_context(socket.create_connection(server.address, timeout=HANG_S))
            assert len(connection.recv(40, socket.MSG_WAITALL)) == 40
        late = stack.enter_context(socket.create_connection(server.address, timeout=HANG_S))
        assert drain(late) == b""
        assert server.counts.turned_away == 1

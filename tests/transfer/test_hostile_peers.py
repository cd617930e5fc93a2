"""What peers send that makes no sense ends a request by name, or nothing at all: never a rank."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayk.actors.engines import EngineHandle
from rayk.actors.forming import connect
from rayk.handover.commands import Describe
from rayk.handover.handover import TransferHandover
from rayk.kv.fields import PageField
from rayk.parallel.shard import EngineShape, Ranges, Stripe
from rayk.transfer.agent import TransferAgent
from rayk.transfer.costs import CostTable
from rayk.transfer.handshake import check_engine
from rayk.transfer.lease import ReleaseMessage, RenewMessage
from rayk.transfer.local_agent import LocalAgent, LocalNetwork
from rayk.transfer.nixl_agent import NixlAgent
from rayk.transfer.peer_data import check_ticket, wrong_reservation
from rayk.transfer.plan import plan_transfer
from rayk.transfer.push_messages import (
    ArrivedMessage,
    HelloMessage,
    StopMessage,
    StoppedMessage,
    Tally,
    WroteMessage,
    decode_push,
)
from rayk.transfer.pusher import _PushThread
from rayk.transfer.ticket import Reservation, TransferTicket
from rayk.types.errors import HandshakeMismatch, RaykError, TransferError
from tests import pd
from tests.transfer.cluster import Pair, Shape, local_pair, make_engine

TABLES = [[3, 7, 5]]
OWN = [[1, 2, 3]]
TALLY = Tally(0, *range(8))
MESSAGES = [
    ReleaseMessage("lease-r", "d0.0", 1),
    RenewMessage("lease-r", "d0.0", 1),
    ArrivedMessage("w", 0, 0, 2, (TALLY,), "measured"),
    WroteMessage("w", 0, 0, 1),
    StoppedMessage("w", 0, "why"),
    StopMessage("w", 0, "d0.0"),
    HelloMessage(0),
]
NESTED = "[" * 100_000 + "]" * 100_000
ODD = [
    *("Infinity", "-Infinity", "NaN", "1e400", "-1", "1.5", "true", "null", '"x"', "{}", "[]", NESTED),
    *("9" * 30, "9" * 5_000, "[[0]]", '["0"]', "9223372036854775808"),
]
"""JSON, or what Python takes for it."""


def seal_text(content: str) -> bytes:
    return b"%08x" % zlib.crc32(content.encode()) + content.encode()


def ready() -> tuple[Pair, TransferTicket]:
    pair = local_pair(Shape())
    pair.producer.write(pair.producer.shape.values(10), TABLES)
    return pair, pair.producer.ticket(10, TABLES)


def still_works(pair: Pair) -> None:
    """Another request comes as if nothing had happened."""
    ticket = pair.producer.ticket(10, TABLES, "after")
    pair.start(ticket, OWN)
    assert all(o.ok for o in pair.finish(ticket).values())


def test_messages_arrive_as_they_were_sent():
    for message in MESSAGES:
        raw = message.encode()
        assert (ReleaseMessage.decode(raw) or RenewMessage.decode(raw) or decode_push(raw)) == message


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_mutated_messages_change_nothing(data: st.DataObject):
    """One part of a message, at any depth, is something else. Whole numbers in another's place are none of
    these: nobody can tell."""
    parts = json.loads(data.draw(st.sampled_from(MESSAGES)).encode()[8:])
    marker = "\x00here"
    target = parts
    while True:
        index = data.draw(st.integers(0, len(target) - 1))
        if not isinstance(target[index], list) or not data.draw(st.booleans()):
            break
        target = target[index]
    target[index] = marker
    content = json.dumps(parts).replace(json.dumps(marker), data.draw(st.sampled_from(ODD)))
    action = data.draw(st.sampled_from(["keep", "shorten", "cut"]))
    if action == "shorten":
        content = json.dumps(parts[:-1])
    raw = seal_text(content)[: -1 if action == "cut" else None]
    found = ReleaseMessage.decode(raw) or RenewMessage.decode(raw) or decode_push(raw)
    if found is None:
        return
    for field in fields(found):
        value = getattr(found, field.name)
        numbers = [n for t in value for n in t] if field.name == "tally" else [value]
        assert all(isinstance(n, str) or (type(n) is int and 0 <= n < 2**63) for n in numbers), found


def test_a_message_of_which_a_bit_flipped_is_not_read():
    """A CRC finds every one."""
    for message in MESSAGES:
        raw = message.encode()
        for place in range(8 * len(raw)):
            flipped = bytearray(raw)
            flipped[place // 8] ^= 1 << place % 8
            found = (ReleaseMessage.decode, RenewMessage.decode, decode_push)
            assert not any(decode(bytes(flipped)) for decode in found), (raw, place)


@pytest.mark.parametrize("odd", ODD, ids=lambda text: text[:12])
def test_a_rank_outlives_odd_messages(odd: str):
    pair, ticket = ready()
    for sender, receiver in ((pair.consumer, pair.producer), (pair.producer, pair.consumer)):
        notify, name = sender.agents[0].notify, receiver.agents[0].name
        for content in (odd, f'["release", "lease-r", "d0.0", {odd}]', f'["arrived", "w", 0, 0, {odd}, []]'):
            notify(name, seal_text(content))
    assert pair.poll() == []
    assert pair.producer.ranks[0].released() == []
    pair.start(ticket, OWN)
    assert all(o.ok for o in pair.finish(ticket).values())


def test_nobody_releases_in_anothers_name():
    pair = local_pair(Shape(tp=(1, 2)))
    pair.producer.ticket(10, TABLES)
    notify, producer = pair.consumer.agents[0].notify, pair.producer.agents[0].name
    for name in ("d0.0", "d0.1"):
        notify(producer, ReleaseMessage("lease-r", name, 2).encode())
    pair.poll()
    assert pair.producer.ranks[0].released() == []
    pair.consumer.agents[1].notify(producer, ReleaseMessage("lease-r", "d0.1", 2).encode())
    pair.poll()
    assert pair.producer.ranks[0].released() == ["lease-r"]


@pytest.mark.parametrize("kind", ["local", pytest.param("nixl", marks=pytest.mark.nixl)])
def test_strangers_release_renew_and_stop_nothing(kind: str, caplog: pytest.LogCaptureFixture):
    network, number = LocalNetwork(), f"strange-{os.getpid()}."

    def make_agent(name: str) -> TransferAgent:
        return LocalAgent(name, network) if kind == "local" else NixlAgent(number + name)

    pair = Pair(*(make_engine(Shape(), side, make_agent) for side in (0, 1)))
    pair.connect()
    stranger, (rank,) = make_agent("stranger"), pair.producer.ranks
    lease_ns = 60 * 10**9
    for lease in "ab":
        rank.lease(lease, time.monotonic_ns() + 10 * lease_ns, lease_ns)
    opened_ns = time.monotonic_ns()
    stranger.add_peer(rank.description.agent_name, rank.description.agent_metadata)
    messages = [
        RenewMessage("a", stranger.name, 0),
        ReleaseMessage("b", stranger.name, 1),
        StopMessage("w", 0, stranger.name),
    ]
    for message in messages:
        stranger.notify(rank.description.agent_name, message.encode())
    until = time.monotonic() + 60.0
    while caplog.text.count("of no connected engine") < len(messages):
        assert time.monotonic() < until, "not all were turned away"
        pair.poll()
        stranger.notifications()  # over NIXL it sends as it is asked
    assert (rank.released(), rank.stops()) == ([], [])
    assert rank.expired(opened_ns + lease_ns) == ["a", "b"], "nobody renewed them"
    for agent in (stranger, *pair.consumer.agents, *pair.producer.agents):
        agent.close()


def test_a_new_life_of_a_consumer_takes_the_old_ones_right():
    pair = local_pair(Shape())
    agent, (rank,) = pair.consumer.agents[0], pair.producer.ranks
    pair.producer.ticket(10, TABLES)
    reborn = make_engine(Shape(), 1, lambda name: LocalAgent(name, agent.network), epoch=1)
    Pair(pair.producer, reborn).connect()
    agent.notify("p0.0", ReleaseMessage("lease-r", agent.name, 1).encode())
    pair.poll()
    assert rank.released() == []
    reborn.agents[0].notify("p0.0", ReleaseMessage("lease-r", "d1.0", 1).encode())
    pair.poll()
    assert rank.released() == ["lease-r"]


class Here(EngineHandle):
    """An engine of this process as its coordinator sees it."""

    async def call(self, command: object, timeout_s: float) -> list[Any]:
        return await asyncio.to_thread(self.leader.call, command)


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
def test_a_stranger_that_comes_first_ends_no_lease_of_an_engine(push: bool, checkpoint: Callable[..., Path]):
    """Its engines were connected as coordinators and fleets do it."""
    make_agent = pd.local_agents()
    stranger = make_agent("stranger")
    with pd.Pair.open(checkpoint("qwen3"), make_agent=make_agent, push=push, connect=False) as pair:
        producer = pair.p.extensions[0].transfer.description.agent_name

        async def connect_them() -> None:
            sides = [(side, side.engine) for side in (pair.p, pair.d)]
            handles = [
                Here(e.name, role, 1, e._config, [side])
                for (side, e), role in zip(sides, ("prefill", "decode"), strict=True)
            ]
            await connect(*handles, 60.0, is_push=push)

        def strike(message: Any) -> None:
            stranger.notify(producer, message.encode())
            for _ in range(3):
                pair.p.call(Describe())  # a turn each

        asyncio.run(connect_them())
        pair.is_push = push
        request = pd.make_request("r", range(5, 42), 4)
        reservation = pair.reserve(request) if push else None
        if reservation is not None:
            strike(StopMessage(reservation.reservation_id, 0, stranger.name))
        prefilled = pair.p.engine.collect(pair.start_prefill(request, reservation=reservation))
        ticket: Any = prefilled.payload
        strike(ReleaseMessage(ticket.lease_id, stranger.name, 1))
        assert pair.p.engine.leader.manager.leases == (ticket.lease_id,)
        done = pair.decode(request, prefilled)
        assert done.error is None
        assert {row.mode for row in done.info["transfers"]} == {"push" if push else "pull"}
        pair.check_all_free()


def test_a_reservation_that_is_refused_leaves_nothing_behind():
    pair = local_pair(Shape())
    worker = _PushThread(
        LocalAgent("push", LocalNetwork()),
        pair.producer.descriptions[0],
        None,
        CostTable(),
        time.monotonic_ns,
    )
    chunk: Any = SimpleNamespace(reservation=RESERVATION, attempt=0, is_last=True)
    worker.begin(chunk)  # its engine is not connected
    worker.note_computed(worker._last_layer, [chunk])
    worker.computed(worker._last_layer, [chunk], lambda: None)
    assert worker.take_over() == {"w": "consumer engine d epoch 0 is not connected"}
    assert not worker._computed
    assert not worker.pushes


def test_writes_that_were_never_announced_make_no_arrival_whole():
    from rayk.transfer.reservation_state import PushAttempt

    attempt = PushAttempt(0, {0, 7}, ArrivedMessage("w", 0, 0, 2))
    assert not attempt.is_whole
    attempt.writes.add(1)
    assert attempt.is_whole
    assert not PushAttempt(0, set(), ArrivedMessage("w", 0, 0, 10**15)).is_whole


CHANGES: dict[str, Any] = {
    "no tokens": {"num_tokens": 0},
    "tokens that no block is for": {"num_tokens": 2**40},
    "half a token": {"num_tokens": 9.5},
    "negative first row": {"first_row": -1},
    "first row from nowhere": {"first_row": 8},
    "attempt in words": {"attempt": "one"},
    "no tables": {"block_tables": ()},
    "a table too many": {"block_tables": ((3, 7, 5), (1,)), "generations": ((0, 0, 0), (0,))},
    "short table": {"block_tables": ((3, 7),), "generations": ((0, 0),)},
    "null block": {"block_tables": ((3, 0, 5),)},
    "block outside": {"block_tables": ((3, 40, 5),)},
    "negative block": {"block_tables": ((3, -2, 5),)},
    "block 2^70": {"block_tables": ((3, 2**70, 5),)},
    "blocks in words": {"block_tables": (("3", "7", "5"),)},
    "table is a number": {"block_tables": (3,)},
    "nested table": {"block_tables": (((3,), (7,), (5,)),)},
    "short generations": {"generations": ((0,),)},
    "generations are none": {"generations": None},
    "no digests": {"digests": None},
    "digests of another request": {"digests": np.zeros((1, 5), dtype=np.int64)},
    "digests of more ranks": {"digests": np.zeros((2, 6), dtype=np.int64)},
    "digests of floats": {"digests": np.zeros((1, 6))},
    "lease of no length": {"lease_ns": 0},
    "lease of no end": {"lease_ns": math.inf},
    "times of more ranks": {"digest_ns": (1, 2)},
    "times in words": {"digest_ns": ("1",)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_senseless_ticket_is_refused_by_name(change: dict[str, Any]):
    pair, ticket = ready()
    (rank,) = pair.consumer.ranks
    wrong = replace(ticket, **change)
    rank.hold(wrong)
    pair.poll()
    with pytest.raises(TransferError, match="of r: ") as caught:
        rank.start(wrong, OWN, time.monotonic_ns() + 60_000_000_000)
    assert caught.value.request_id == "r"
    assert not rank._active
    assert not rank._waiting
    still_works(pair)


@pytest.mark.parametrize(
    "change",
    [
        {"digests": None},
        {"digests": np.zeros((1, 2), dtype=np.int64)},
        {"num_tokens": 10**7},
        {"num_tokens": "ten"},
        {"seal": "0" * 32},
    ],
    ids=str,
)
def test_a_refused_ticket_proves_nothing(change: dict[str, Any]):
    pair, ticket = ready()
    (rank,) = pair.consumer.ranks
    assert rank.proofs(ticket, OWN)
    with pytest.raises(TransferError, match="of r: "):
        rank.proofs(replace(ticket, **change), OWN)


@pytest.mark.parametrize(
    "change",
    [{"num_tokens": "ten"}, {"num_tokens": 9.5}, {"first_row": None}, {"epoch": [0]}, {"engine": []}],
    ids=str,
)
def test_a_ticket_without_numbers_is_refused_before_it_is_used(change: dict[str, Any]):
    """By the leader of an engine, which goes on."""
    ticket = replace(ready()[1], **change)
    handover = TransferHandover(engine="d", epoch=0, shape=EngineShape())
    leader: Any = SimpleNamespace(prepare=lambda _: None, post=lambda act: act(), clock=lambda: 0)
    handover.attach(leader)
    told: list[Any] = []
    request: Any = SimpleNamespace(
        request_id="r", prompt_token_ids=[1] * 10, sampling=SimpleNamespace(temperature=0.0, seed=None)
    )
    handover.submit_decode(request, ticket, (), 20.0, told.append, recompute=True)
    assert [type(event.error) for event in told] == [TransferError]
    assert "its ticket lacks a n" in str(told[0].error)


def test_a_ticket_as_it_should_be_is_not_refused():
    pair, ticket = ready()
    pair.start(replace(ticket, lease_ns=10**9, digest_ns=(1,)), OWN)
    assert all(o.ok for o in pair.finish(ticket).values())


RESERVATION = Reservation(
    request_id="r",
    reservation_id="w",
    engine="d",
    epoch=0,
    num_tokens=10,
    block_tables=((1, 2, 3),),
    generations=((0, 0, 0),),
    hold_s=60.0,
)


@pytest.mark.parametrize(
    "change",
    [
        {"hold_s": math.inf},
        {"hold_s": math.nan},
        {"hold_s": "long"},
        {"num_tokens": 0},
        {"num_tokens": 2**70},
        {"num_cached_tokens": 11},
        {"wire_tables": (((1,),), ((2,),))},
        {"block_tables": None},
        {"block_tables": ((1, 50, 3),)},
        {"block_tables": (("1",),)},
        {"seal": "0" * 32},
    ],
    ids=str,
)
def test_a_senseless_reservation_is_not_written_into(change: dict[str, Any]):
    consumers = local_pair(Shape()).consumer.descriptions
    assert wrong_reservation(RESERVATION, consumers) is None
    assert wrong_reservation(replace(RESERVATION, **change), consumers)


def test_tables_of_either_side_are_looked_at_where_they_are_used():
    pair = local_pair(Shape())
    geometries = [side.descriptions[0].geometry for side in (pair.producer, pair.consumer)]
    plan = plan_transfer([geometries[0]], geometries[1])
    assert plan.lower(10, TABLES, OWN)
    for tables in ([TABLES, [[1, 0, 3]]], [TABLES, [[1]]], [TABLES, []], [[["a", "b", "c"]], OWN]):
        with pytest.raises(RaykError, match="table|null block"):
            plan.lower(10, *tables)


def told(pair: Pair, **changes: Any) -> list[Any]:
    """The producer's descriptions, with another geometry: of the rank, its group or the first field."""
    (known,) = pair.producer.descriptions
    (group,) = known.geometry.groups
    parts: dict[str, dict[str, Any]] = {"field": {}, "spec": {}, "group": {}, "rank": {}}
    for name, value in changes.items():
        where, _, what = name.partition("_")
        parts[where][what] = value
    spec = replace(group.group.spec, **parts["spec"])
    fields_ = {"fields": (replace(group.fields[0], **parts["field"]), *group.fields[1:])}
    other = replace(group, group=replace(group.group, spec=spec), **fields_ | parts["group"])
    return [replace(known, geometry=replace(known.geometry, groups=(other,), **parts["rank"]))]


def test_blocks_behind_the_pool_are_nobodys():
    """An engine that speculates keeps states there between steps: no ticket and no reservation names them."""
    pair, ticket = ready()
    (rank,) = pair.consumer.ranks
    num_blocks = pair.producer.descriptions[0].geometry.num_blocks

    def ends_at(num_pool_blocks: int) -> list[Any]:
        return told(pair, rank_num_scratch_blocks=num_blocks - num_pool_blocks)

    link = rank._links["p"]
    check_ticket(ticket, ends_at(8), rank.description, link.views, OWN, 0)
    with pytest.raises(TransferError, match="there are 0 .. 6"):
        check_ticket(ticket, ends_at(7), rank.description, link.views, OWN, 0)
    assert wrong_reservation(RESERVATION, ends_at(4)) is None
    assert "there are 0 .. 2" in str(wrong_reservation(RESERVATION, ends_at(3)))


def unchecked(**changes: Any) -> EngineShape:
    """A shape as it comes out of a pickle: without a look at its numbers."""
    made = object.__new__(EngineShape)
    whole = {"tp": 1, "dcp": 1, "dcp_interleave": 1, "stages": (), "draft_tp": 1}
    for name, value in (whole | changes).items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec_block_size": 2**40, "group_kernel_block_size": 2**40}, "rows of a block in group 0"),
        ({"spec_block_size": 0}, "rows of a block in group 0"),
        ({"group_kernel_block_size": 3}, "rows of a kernel block in group 0"),
        ({"rank_num_blocks": 2**40}, "num_blocks"),
        ({"rank_num_blocks": 0}, "num_blocks"),
        ({"rank_num_scratch_blocks": 39}, "num_scratch_blocks"),
        ({"rank_num_scratch_blocks": -1}, "num_scratch_blocks"),
        ({"rank_num_scratch_blocks": "1"}, "num_scratch_blocks"),
        ({"field_offset": -8}, "end of k in group 0"),
        ({"field_block_stride": 2**20}, "end of k in group 0"),
        ({"field_units": (0,)}, "units of k in group 0"),
        ({"field_units": (0, 2)}, "units of k in group 0"),
        ({"field_units": (1, 0)}, "units of k in group 0"),
        ({"field_units": 2}, "units of k in group 0"),
        ({"field_field": PageField("k", 2, 4, 2**12, "float32", 8)}, "fields of group 0"),
        ({"field_field": None}, "fields of group 0"),
        ({"group_fields": ()}, "fields of group 0"),
        ({"rank_shape": EngineShape(2)}, "units of k in group 0"),
        ({"rank_shape": EngineShape(5)}, "query heads of k in group 0"),
        ({"rank_shape": EngineShape(2**13)}, "shape"),
        ({"rank_shape": unchecked(tp=0)}, "shape"),
        ({"rank_shape": unchecked(draft_tp=2)}, "shape"),
        ({"rank_shape": unchecked(draft_tp=0)}, "shape"),
        ({"rank_shape": unchecked(tp="1")}, "shape"),
        ({"rank_shape": unchecked(dcp=2)}, "shape"),
        ({"rank_shape": unchecked(tp=8, dcp=8, dcp_interleave=2**20)}, "shape"),
        ({"rank_shape": unchecked(stages=(3, 0))}, "shape"),
        ({"rank_shape": unchecked(stages=[3])}, "shape"),
        ({"rank_shape": unchecked(stages=(1,) * 2**13)}, "shape"),
        ({"rank_shape": EngineShape(stages=(2,))}, "layers of group 0"),
        ({"rank_shape": EngineShape(stages=(1, 2))}, "layers of group 0"),
        ({"group_layers": (0, 1)}, "layers of group 0"),
        ({"group_layers": (0, 1, 2, 2)}, "layers of group 0"),
        ({"group_tokens": Stripe(2, 0)}, "tokens of group 0"),
        ({"group_tokens": None}, "tokens of group 0"),
        ({"rank_shape": EngineShape(2, 2), "group_tokens": Stripe(2, 1)}, "tokens of group 0"),
        ({"rank_shape": EngineShape(2, 2), "group_tokens": Stripe(2, 0, 2)}, "tokens of group 0"),
        ({"rank_shape": EngineShape(3, 3), "group_tokens": Stripe(3, 0)}, "tokens of group 0"),
        ({"group_tokens": Ranges(2**40, ((0, 4),))}, "tokens of group 0"),
        ({"group_tokens": Ranges(0, ())}, "tokens of group 0"),
        ({"group_tokens": Ranges(4, ((2, 4), (0, 1)))}, "tokens of group 0"),
        ({"group_tokens": Ranges(4, ((0, 5),))}, "tokens of group 0"),
        ({"group_tokens": Ranges(4, (3,))}, "tokens of group 0"),
        ({"group_tokens": Ranges(4, ((0, "4"),))}, "tokens of group 0"),
        ({"group_tokens": Ranges(4, ((0, 1),))}, "rows of a kernel block in group 0"),
    ],
    ids=str,
)
def test_a_cache_that_cannot_be_is_refused_at_the_handshake(changes: dict[str, Any], message: str):
    pair, ticket = ready()
    (rank,) = pair.consumer.ranks
    with pytest.raises(HandshakeMismatch, match=f"{message} of p rank 0"):
        rank.connect(told(pair, **changes), pair.consumer.descriptions)
    pair.start(ticket, OWN)
    assert all(o.ok for o in pair.finish(ticket).values()), "the link that was there is there"


@pytest.mark.parametrize("rank", [-1, 1, "0", 2**70])
def test_a_rank_that_no_engine_has_is_refused_at_the_handshake(rank: Any):
    pair, _ = ready()
    with pytest.raises(HandshakeMismatch, match="rank of p rank"):
        pair.consumer.ranks[0].connect(told(pair, rank_rank=rank), pair.consumer.descriptions)


@pytest.mark.parametrize(
    "tokens",
    [
        None,
        [Stripe()],
        (Stripe(),) * 2,
        (1,),
        (Stripe(2, 2),),
        (Stripe(2**70, 0, 0),),
        (Ranges(4, ((0, 4),)),),
    ],
    ids=str,
)
def test_slots_of_senseless_tokens_are_refused_at_the_handshake(tokens: Any):
    pair, _ = ready()
    (known,) = pair.producer.descriptions
    with pytest.raises(HandshakeMismatch, match="tokens of slots of p rank 0"):
        check_engine([replace(known, slot_tokens=tokens)])
    check_engine([replace(known, slot_tokens=(Stripe(2, 1, 3),))])


def test_ranks_that_divide_tokens_or_count_blocks_each_in_its_way_are_refused():
    pair = local_pair(Shape(tp=(2, 1)))
    first, second = pair.producer.descriptions
    unlike = replace(second.geometry, shape=EngineShape(2, 2))
    with pytest.raises(HandshakeMismatch, match="shape of p rank 1"):
        check_engine([first, replace(second, geometry=unlike)])
    (group,) = second.geometry.groups
    spec = replace(group.group.spec, block_size=2)
    fields_ = tuple(replace(f, field=replace(f.field, rows=2)) for f in group.fields)
    short = replace(group, group=replace(group.group, spec=spec), fields=fields_, kernel_block_size=2)
    with pytest.raises(HandshakeMismatch, match="tokens of blocks of p rank 1"):
        check_engine([first, replace(second, geometry=replace(second.geometry, groups=(short,)))])

"""The rules that keep unverified KV out, each by its smallest case: order, counting, agreement."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayk.kv.geometry import plan_rank
from rayk.kv.groups import group_layers
from rayk.kv.layout import LAYOUTS
from rayk.kv.specs import FullAttentionSpec, KVCacheSpec, Mamba2Spec, SlidingWindowSpec
from rayk.parallel.shard import EngineShape
from rayk.transfer.handshake import CacheDescription, check, check_engine
from rayk.transfer.lease import LeaseTable, ReleaseMessage
from rayk.transfer.session import (
    Cancel,
    ComputeDigests,
    Drained,
    Failed,
    Fence,
    FenceDone,
    Finish,
    Phase,
    PostFence,
    PostReads,
    ReadDone,
    ReadEnded,
    Release,
    Session,
    Verified,
)
from rayk.types.errors import HandshakeMismatch, TransferError

# Session


def two_reads() -> Session:
    fences = {0: Fence((5,), (1,)), 3: Fence((5,), (1,))}
    return Session("r", num_reads=2, fences=fences, notify=[0, 3, 4], deadline_ns=100)


def test_fence_after_all_data_digests_after_all_fences_release_after_the_verdict():
    session = two_reads()
    assert session.start() == [PostReads((0, 1))]
    assert session.handle(ReadDone(1), 1) == []
    assert session.handle(ReadDone(1), 1) == [], "the same read twice is one read"
    assert session.handle(ReadDone(0), 2) == [PostFence(0), PostFence(3)]
    assert session.handle(FenceDone(0, (1,)), 3) == []
    assert session.handle(FenceDone(0, (1,)), 3) == []
    assert session.handle(FenceDone(3, (1,)), 4) == [ComputeDigests()]
    assert session.handle(Verified(None), 5) == [Release((0, 3, 4)), Finish(None, is_draining=False)]
    assert session.is_drained
    assert session.handle(Verified(None), 6) == session.handle(ReadDone(0), 6) == session.release() == []


@pytest.mark.parametrize("found", [0, 2])
def test_any_other_generation_is_a_reused_block(found: int):
    session = two_reads()
    session.start()
    session.handle(ReadDone(0), 1)
    session.handle(ReadDone(1), 1)
    *_, finish = session.handle(FenceDone(3, (found,)), 2)
    assert isinstance(finish, Finish)
    assert f"block 5 was reused while being read (generation 1 -> {found}) on producer rank 3" in str(
        finish.error
    )


def test_blocks_are_taboo_until_the_last_read_has_ended():
    session = two_reads()
    session.start()
    cancel, release, finish = session.handle(Failed("peer lost"), 1)
    assert (cancel, release) == (Cancel((0, 1), ()), Release((0, 3, 4)))
    assert finish == Finish(TransferError("r", "peer lost"), is_draining=True)
    assert session.handle(ReadEnded(1, "cancelled"), 2) == []
    assert not session.is_drained
    assert session.handle(ReadDone(0), 3) == [Drained()]
    assert session.is_drained
    assert session.handle(ReadDone(0), 4) == []


def test_a_read_that_ends_after_the_deadline_is_not_waited_for():
    session = two_reads()
    session.start()
    session.handle(ReadDone(0), 1)
    cancel_or_release, *rest = session.handle(ReadDone(1), 100)
    assert cancel_or_release == Release((0, 3, 4))
    assert rest == [Finish(TransferError("r", "deadline passed while reading"), is_draining=False)]
    assert session.phase is Phase.OVER


# Leases


def release(consumer: str, num_expected: int = 2) -> ReleaseMessage:
    sent = ReleaseMessage("lease", consumer, num_expected)
    arrived = ReleaseMessage.decode(sent.encode())
    assert arrived == sent
    return sent


def test_a_lease_ends_when_every_consumer_rank_has_told_not_when_one_told_twice():
    table = LeaseTable()
    table.open("lease", deadline_ns=100)
    table.on_release(release("d.0"))
    table.on_release(release("d.0"))
    assert (table.take_released(), table.open_leases) == ([], ("lease",))
    table.on_release(release("d.1"))
    assert (table.take_released(), table.open_leases) == (["lease"], ())
    assert table.take_released() == table.expire(10**9) == []


def test_releases_may_come_before_the_lease_is_opened():
    table = LeaseTable()
    table.on_release(release("d.0"))
    table.on_release(release("d.1"))
    assert table.take_released() == []
    table.open("lease", deadline_ns=100)
    assert table.take_released() == ["lease"]


def test_a_lease_nobody_releases_expires_once_at_its_deadline():
    table = LeaseTable()
    table.open("lease", deadline_ns=100)
    table.on_release(release("d.0"))
    assert table.expire(99) == []
    assert table.expire(100) == ["lease"]
    assert table.expire(101) == table.take_released() == []


# Handshake

FULL = FullAttentionSpec(4, 2, 3, 3, "int8", 8)
SLIDING = SlidingWindowSpec(4, 2, 3, 3, "int8", 8, 6)
SPECS: dict[int, KVCacheSpec] = {0: FULL, 1: SLIDING}
STATE = Mamba2Spec(64, "bfloat16", 4, 8, 4, 2, 6)
HYBRID: dict[int, KVCacheSpec] = {0: FULL, 1: STATE}


def describe(
    specs: dict[int, KVCacheSpec] | None = None, layout: str = "BHLNC", tp_size: int = 1, rank: int = 0
) -> CacheDescription:
    groups = group_layers({(layer, spec.part): spec for layer, spec in (specs or SPECS).items()})
    shape = EngineShape(tp_size)
    geometry = plan_rank(groups, LAYOUTS[layout], shape=shape, rank=rank, num_blocks=8 * tp_size)
    return CacheDescription(
        engine="p",
        epoch=0,
        geometry=geometry,
        fingerprint={"weights": "w", "rope": "r"},
        device="cpu",
        transport="local",
        agent_name=f"p.{tp_size}",
        agent_metadata=b"",
        base_address=0,
    )


def test_what_the_plan_bridges_may_differ():
    larger = {0: replace(FULL, block_size=8), 1: replace(SLIDING, block_size=8)}
    for other in (describe(), describe(layout="LBNHC"), describe(tp_size=4), describe(larger)):
        check(describe(), replace(other, engine="d", epoch=3, device="cuda:0", base_address=64))
    rarer = {0: replace(FULL, block_size=8), 1: replace(STATE, block_size=1000)}
    for other in (describe(HYBRID, tp_size=4), describe(HYBRID, layout="LBNHC"), describe(rarer)):
        check(describe(HYBRID), replace(other, engine="d"))


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"protocol_version": 1}, "protocol_version"),
        ({"transport": "nixl"}, "transport"),
        ({"fingerprint": {"weights": "other", "rope": "r"}}, "model.weights"),
        ({"fingerprint": {"weights": "w", "rope": "other"}}, "model.rope"),
        ({"fingerprint": {"weights": "w"}}, "model.rope"),
        ({"fingerprint": {"weights": "w", "rope": "r", "norm": "n"}}, "model.norm"),
        ({"digest_version": 1}, "digest_version"),
        ({"rows_per_group": 128}, "rows_per_group"),
    ],
    ids=str,
)
def test_every_field_that_must_agree_is_compared(changes: dict[str, Any], differing: str):
    for pair in ((describe(), replace(describe(), **changes)), (replace(describe(), **changes), describe())):
        with pytest.raises(HandshakeMismatch) as caught:
            check(*pair)
        assert [name for name, _, _ in caught.value.fields] == [differing]


@pytest.mark.parametrize(
    ("specs", "differing"),
    [
        ({0: FULL, 1: replace(SLIDING, window=7)}, ["layer 1.attention.live_rows(1000000)"]),
        ({0: FULL, 2: SLIDING}, ["layer 1.attention.cache", "layer 2.attention.cache"]),
        ({0: FULL, 1: FULL}, ["layer 1.attention.kind", "layer 1.attention.live_rows(1000000)"]),
        (
            {0: replace(FULL, dtype="float16"), 1: SLIDING},
            ["layer 0.attention.kv_dtype", "layer 0.attention.k", "layer 0.attention.v"],
        ),
        ({0: replace(FULL, num_kv_heads=4), 1: SLIDING}, ["layer 0.attention.k", "layer 0.attention.v"]),
        (
            {layer: replace(s, head_size_k=2, head_size_v=4) for layer, s in ((0, FULL), (1, SLIDING))},
            ["layers 0-1.attention.k", "layers 0-1.attention.v"],
        ),
        (
            {0: SLIDING, 1: FULL},
            [
                f"layer {layer}.attention.{name}"
                for layer in (0, 1)
                for name in ("kind", "live_rows(1000000)")
            ],
        ),
    ],
    ids=["window", "layers", "groups", "dtype", "heads", "head sizes", "kinds"],
)
def test_every_layer_is_compared_field_by_field(specs: dict[int, KVCacheSpec], differing: list[str]):
    with pytest.raises(HandshakeMismatch) as caught:
        check(describe(), describe(specs))
    assert [name for name, _, _ in caught.value.fields] == differing
    assert all(a != b for _, a, b in caught.value.fields)


def test_layers_that_differ_alike_are_named_together():
    ours = dict.fromkeys(range(7), FULL)
    with pytest.raises(HandshakeMismatch) as caught:
        check(describe(ours), describe(ours | {n: replace(FULL, dtype="float16") for n in (0, 1, 2, 4, 6)}))
    assert caught.value.fields[0] == ("layers 0-2, 4, 6.attention.kv_dtype", "int8", "float16")


def test_formats_may_differ_where_they_can_be_converted():
    """What is live may not: the conversion is asked about formats alone."""
    other = {0: replace(FULL, dtype="float16"), 1: SLIDING}
    asked: list[tuple[str, str]] = []

    def can_convert(ours: KVCacheSpec, theirs: KVCacheSpec) -> bool:
        asked.append((ours.dtype, theirs.dtype))
        return True

    check(describe(), describe(other), can_convert)
    assert asked == [("int8", "float16")]
    with pytest.raises(HandshakeMismatch, match="live_rows"):
        check(describe(), describe(other | {1: replace(SLIDING, window=7)}), can_convert)


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"dtype": "float16"}, ["kv_dtype", "conv_x", "conv_b", "conv_c"]),
        ({"num_groups": 1}, ["conv_b", "conv_c"]),
        ({"num_heads": 4}, ["conv_x", "ssm"]),
        ({"conv_width": 3}, ["conv_x", "conv_b", "conv_c"]),
        # As many bytes, other channels and taps.
        ({"conv_width": 7, "head_size": 2, "state_size": 3}, ["conv_x", "conv_b", "conv_c", "ssm"]),
    ],
    ids=["dtype", "groups", "heads", "width", "channels"],
)
def test_states_are_compared_field_by_field(change: dict[str, Any], differing: list[str]):
    other = {0: FULL, 1: replace(STATE, **change)}
    with pytest.raises(HandshakeMismatch) as caught:
        check(describe(HYBRID), describe(other))
    assert [name for name, _, _ in caught.value.fields] == [f"layer 1.state.{name}" for name in differing]


def test_an_engine_is_described_by_all_its_ranks_in_order():
    first = replace(describe(tp_size=2), agent_name="p.0")
    second = replace(describe(tp_size=2, rank=1), agent_name="p.1")
    check_engine([first, second])
    for ranks in ([first], [second, first], [first, first], [first, replace(second, epoch=1)]):
        with pytest.raises(HandshakeMismatch):
            check_engine(ranks)

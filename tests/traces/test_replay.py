"""Requests are due when the trace and the answers say; prompts share what hash ids and sessions share."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayk.traces import Recorded
from rayk.traces.prompts import TracePrompts
from rayk.traces.replay import Replay


def turn(at_ns: int | None, session: str | None = None, delay_ns: int = 0) -> Recorded:
    return Recorded(at_ns=at_ns, num_prompt_tokens=1, num_output_tokens=1, session=session, delay_ns=delay_ns)


def played(rows: list[Recorded], lives: list[int]) -> dict[int, int]:
    """When each was due, where request i is answered `lives[i]` after it was due."""
    replay = Replay(iter(rows))
    ends: list[tuple[int, int]] = []
    due: dict[int, int] = {}
    now = 0
    while (next_ns := replay.next_due_ns()) is not None or ends:
        if ends and (next_ns is None or ends[0][0] <= next_ns):
            now, number = heapq.heappop(ends)
            replay.ended(number, now)
            continue
        at_ns, number, row = replay.take()
        assert row is rows[number]
        assert at_ns >= now, "handed out in order of time"
        now = due[number] = at_ns
        heapq.heappush(ends, (at_ns + lives[number], number))
    assert not replay.is_waiting
    return due


def test_a_session_goes_on_behind_its_answers_while_others_come_on_time() -> None:
    rows = [
        turn(0, "a"),
        turn(None, "a", delay_ns=5),
        turn(10),
        turn(11, "b"),
        turn(100, "a"),
        turn(12),
        turn(None, "b"),
        turn(200),
    ]
    # a's answers take 40 and 3: its third turn waits for its time, 100. b's first takes 1,000.
    due = played(rows, [40, 3, 7, 1000, 1, 1, 1, 1])
    assert due == {0: 0, 1: 45, 2: 10, 3: 11, 4: 100, 5: 12, 6: 1011, 7: 200}


@st.composite
def traces(draw: st.DrawFn) -> tuple[list[Recorded], list[int]]:
    count = draw(st.integers(1, 30))
    now, rows = 0, []
    known: dict[str, int] = {}  # the earliest that a session's last turn may be due
    for _ in range(count):
        session = draw(st.sampled_from([None, "a", "b", "c"]))
        if session in known:
            at_ns = draw(st.none() | st.integers(0, 300))
            known[session] = max(known[session], at_ns or 0)
            if known[session] >= now:
                rows.append(turn(at_ns, session, draw(st.integers(0, 20))))
                continue
            session = None
        now += draw(st.integers(0, 30))
        rows.append(turn(now, session))
        if session is not None:
            known[session] = now
    count = len(rows)
    return rows, draw(st.lists(st.integers(0, 60), min_size=count, max_size=count))


@given(traces())
def test_due_times_are_those_of_the_rule(trace: tuple[list[Recorded], list[int]]) -> None:
    """The rule by one pass over the rows: a turn is due at the latest of its time and its session's delay."""
    rows, lives = trace
    ended: dict[str, int] = {}
    expected = {}
    for number, row in enumerate(rows):
        at_ns = row.at_ns or 0
        if row.session in ended:
            at_ns = max(at_ns, ended[row.session] + row.delay_ns)
        expected[number] = at_ns
        if row.session is not None:
            ended[row.session] = at_ns + lives[number]
    assert played(rows, lives) == expected


def test_rows_are_pulled_one_ahead() -> None:
    pulled = 0

    def rows() -> Iterator[Recorded]:
        nonlocal pulled
        for at_ns in range(1000):
            pulled += 1
            yield turn(at_ns)

    replay = Replay(rows())
    for taken in range(1, 500):
        replay.take()
        assert pulled == taken + 1


def drawn(row: Recorded, index: int, *, block_tokens: int = 512, seed: int = 0) -> list[int]:
    return TracePrompts(block_tokens=block_tokens, token_ids=(0, 999), seed=seed).tokens(row, index)


def asked(num_tokens: int, hash_ids: tuple[int, ...] = (), session: str | None = None) -> Recorded:
    return Recorded(
        at_ns=0, num_prompt_tokens=num_tokens, num_output_tokens=1, hash_ids=hash_ids, session=session
    )


def test_a_partial_block_is_the_start_of_the_whole_one() -> None:
    assert drawn(asked(1024, (5, 6)), 1)[:600] == drawn(asked(600, (5, 6)), 0)


def test_prompts_are_what_loads_have_always_drawn() -> None:
    """By numpy, as written before blocks were kept: results of older loads can be had again."""
    prompts = TracePrompts(block_tokens=8, token_ids=(4, 900), seed=7)
    row = asked(2000, (3, 4, 3))
    expected: list[int] = []
    for hash_id in (3, 4, 3):
        expected += np.random.default_rng([7, 2, hash_id]).integers(4, 901, 8).tolist()
    expected += np.random.default_rng([7, 3, 11]).integers(4, 901, 8).tolist()
    assert prompts.tokens(row, 11) == expected == prompts.tokens(row, 11)
    assert len(expected) == 32


def test_a_session_without_hash_ids_begins_with_its_turn_before() -> None:
    first, second = drawn(asked(700, session="a"), 0), drawn(asked(1500, session="a"), 9)
    assert second[:700] == first
    other = drawn(asked(700, session="b"), 0)
    assert sum(x == y for x, y in zip(first, other, strict=True)) < 20

"""What is done with a connector between two engines. Scenarios raise CheckFailed for violations.

Every scenario ends with `Rig.end`: all requests reported, blocks overwritten, connectors closed, memory
compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rayk.conformance.rig import CONSUMER, PRODUCER, CheckFailed, Job, Rig, named

PARTIAL, WHOLE = 37, 32
"""Tokens of a request: its last block is partly filled at block sizes 16, 24 and 32; full at 16 and 32."""
MANY = 300
"""Tokens of a request with more blocks than fit a byte, at one token per block."""
ROUNDS = 4
NUM_CANCELLED = 8


def one_request(rig: Rig) -> None:
    rig.transfer(rig.job(PARTIAL))


def whole_blocks(rig: Rig) -> None:
    rig.transfer(rig.job(WHOLE))


def one_token(rig: Rig) -> None:
    rig.transfer(rig.job(1))


def lengths(rig: Rig) -> None:
    """Send requests of many lengths in turn, around the borders of blocks, windows and chunks."""
    for num_tokens in (1, 15, 16, 17, 31, 33, 47, 49, 63):
        rig.transfer(rig.job(num_tokens))


def many_blocks(rig: Rig) -> None:
    rig.transfer(rig.job(MANY))


def many_at_once(rig: Rig) -> None:
    rig.transfer(*(rig.job(n) for n in (5, 37, 16, 1, 50, 33)))


def second_halves_reversed(rig: Rig) -> None:
    """Three requests whose second halves come in the opposite order, the last much later."""
    jobs = [rig.job(n) for n in (20, 37, 8)]
    answers = rig.begin(jobs)
    for job in reversed(jobs):
        for _ in range(3):
            rig.poll()
        rig.follow([job], answers)
    rig.wait(jobs)
    rig.expect_done(jobs)


def blocks_reused(rig: Rig) -> None:
    """Use the same blocks on both sides three times, with other content."""
    first = rig.job(PARTIAL)
    rig.transfer(first)
    for _ in range(2):
        rig.transfer(rig.job(PARTIAL, like=first))


def request_id_reused(rig: Rig) -> None:
    """Use a request id again once it is free."""
    first = rig.job(PARTIAL)
    rig.transfer(first)
    rig.transfer(rig.job(20, request_id=first.request_id))


def producer_dies(rig: Rig) -> None:
    """A producer rank dies between the two halves of a request: consumers fail, or hold the right bytes."""
    job = rig.job(PARTIAL, deadline_s=rig.settings.fault_s)
    _first_half_then(rig, job, (PRODUCER, 0))


def consumer_dies(rig: Rig) -> None:
    """A consumer rank dies between the two halves: producers must get their blocks back."""
    job = rig.job(PARTIAL, deadline_s=rig.settings.fault_s)
    _first_half_then(rig, job, (CONSUMER, 0))


def never_followed(rig: Rig) -> None:
    """The second half of a request never comes: the first is over at its deadline."""
    job = rig.job(PARTIAL, deadline_s=rig.settings.fault_s)
    answers = rig.begin([job])
    ranks = rig.side(rig.first_side)
    rig.wait([job], ranks)
    for rank in ranks:
        if rig.first_side == CONSUMER and not rig.reports[rank, job.request_id].error:
            raise CheckFailed(f"{named(rank)} reported {job.request_id} as done, which nobody sent")
    # The second half comes too late.
    late = rig.try_half(job, 1 - rig.first_side, answers[job.request_id])
    _over_or_refused(rig, job, late, 1 - rig.first_side)
    rig.transfer(rig.job(PARTIAL, like=job))


def cancel_in_the_middle(rig: Rig) -> None:
    """Consumers give a request up while it is in flight; its blocks are reused."""
    job = rig.job(PARTIAL, deadline_s=rig.settings.fault_s)
    rig.follow([job], rig.begin([job]))
    rig.release(CONSUMER, job.request_id)
    rig.wait([job])
    rig.transfer(rig.job(PARTIAL, like=job))


def cancel_by_producer(rig: Rig) -> None:
    """Producers give a request up between its halves: nobody may take what their blocks hold then."""
    job = rig.job(PARTIAL, deadline_s=rig.settings.fault_s)
    if not rig.is_pull:
        # Producers do not know the request yet.
        rig.begin([job])
        rig.release(PRODUCER, job.request_id)
        rig.wait([job], rig.side(CONSUMER))
        return
    answers = rig.begin([job])
    rig.release(PRODUCER, job.request_id)
    rig.wait([job], rig.side(PRODUCER))
    late = rig.try_half(job, CONSUMER, answers[job.request_id])
    _over_or_refused(rig, job, late, CONSUMER)


def cancel_by_producer_in_the_middle(rig: Rig) -> None:
    """Producers give up requests in flight, after different numbers of polls; every other time their blocks
    are reused at once. Consumers fail, or hold the right bytes."""
    jobs = [rig.job(PARTIAL, deadline_s=rig.settings.fault_s) for _ in range(NUM_CANCELLED)]
    rig.follow(jobs, rig.begin(jobs))
    others = []
    for number, job in enumerate(jobs):
        rig.release(PRODUCER, job.request_id)
        rig.poll()
        if number % 2:
            rig.await_reports([job], rig.side(PRODUCER))
            other = rig.job(PARTIAL, like=job, alike=[PRODUCER])
            rig.follow([other], rig.begin([other]))
            others.append(other)
    rig.wait([*jobs, *others])
    rig.expect_done(others)


def release_twice(rig: Rig) -> None:
    """Releasing unknown, finished or released requests changes nothing."""
    for side in (PRODUCER, CONSUMER):
        rig.release(side, "a request nobody has heard of")
    job = rig.job(PARTIAL)
    rig.transfer(job)
    for side in (PRODUCER, CONSUMER, PRODUCER, CONSUMER):
        rig.release(side, job.request_id)
    given_up = rig.job(PARTIAL, deadline_s=rig.settings.fault_s)
    rig.begin([given_up])
    for _ in range(2):
        rig.release(rig.first_side, given_up.request_id)
    rig.wait([given_up], rig.side(rig.first_side))
    rig.transfer(rig.job(PARTIAL, like=job))


def stale_answer(rig: Rig) -> None:
    """Use the first half's answer again after its request is over."""
    job = rig.job(PARTIAL)
    answers = rig.begin([job])
    rig.follow([job], answers)
    rig.wait([job])
    rig.expect_done([job])
    second_side = 1 - rig.first_side
    again = job.due_in(rig.settings.fault_s)
    late = rig.try_half(again, second_side, answers[job.request_id])
    _over_or_refused(rig, again, late, second_side)


def same_request_twice(rig: Rig) -> None:
    """A request id in flight is refused, and its request still arrives."""
    job = rig.job(PARTIAL)
    answers = rig.begin([job])
    if not rig.try_half(job, rig.first_side):
        method = "send" if rig.is_pull else "receive"
        raise CheckFailed(f"a second {method}() of a request that is in flight did not raise")
    rig.follow([job], answers)
    rig.wait([job])
    rig.expect_done([job])


def second_registration(rig: Rig) -> None:
    """A second cache is refused, and the first still works."""
    for rank in rig.ranks:
        if not rig.register_again(rank):
            raise CheckFailed(f"{named(rank)} took a second cache: register() did not raise")
    rig.transfer(rig.job(PARTIAL))


def opened_again(rig: Rig) -> None:
    """Open and close engines repeatedly: threads and file descriptors must not add up."""
    counts = []
    for round_ in range(ROUNDS):
        if round_:
            rig.open()
        rig.transfer(rig.job(20))
        rig.end()
        counts.append(rig.resources())
    # A library may keep what it starts at first use.
    for what, first in counts[1].items():
        found = [count[what] for count in counts]
        if all(later > earlier for earlier, later in zip(found[1:], found[2:], strict=False)):
            raise CheckFailed(
                f"{what} add up: {', '.join(map(str, found))} after each of {ROUNDS} rounds "
                f"of opening and closing (the second: {first})"
            )


SCENARIOS: dict[str, Callable[[Rig], None]] = {
    run.__name__: run
    for run in (
        one_request,
        whole_blocks,
        one_token,
        lengths,
        many_blocks,
        many_at_once,
        second_halves_reversed,
        blocks_reused,
        request_id_reused,
        producer_dies,
        consumer_dies,
        never_followed,
        cancel_in_the_middle,
        cancel_by_producer,
        cancel_by_producer_in_the_middle,
        release_twice,
        stale_answer,
        same_request_twice,
        second_registration,
        opened_again,
    )
}


def _first_half_then(rig: Rig, job: Job, lost: tuple[int, int]) -> None:
    """Run the first half, lose a rank, run the second half on the living ranks as far as possible."""
    answers = rig.begin([job])
    rig.lose(lost)
    second_side = 1 - rig.first_side
    refused = rig.try_half(job, second_side, answers[job.request_id])
    ranks = rig.side(rig.first_side) if refused else rig.ranks
    rig.wait([job], ranks)


def _over_or_refused(rig: Rig, job: Job, refused: str, side: int) -> None:
    """Expect that a late half raised, or is reported like any other."""
    if not refused:
        rig.wait([job], rig.side(side))
        return
    until = time.monotonic() + rig.settings.fault_s / 3
    while time.monotonic() < until:
        rig.poll()

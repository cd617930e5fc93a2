"""Quiet steps taken at once, against single ones of a scheduler that asks its allocator in every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayk.kv.groups import KVCacheGroup
from rayk.kv.manager import KVCacheManager
from rayk.sched.batching import Scheduler
from rayk.sched.quiet import advance, later_batch, num_quiet_steps
from rayk.sched.request_state import RequestState
from rayk.types.batch import ScheduledBatch
from rayk.types.request import Request, SamplingParams
from tests.kv.brute import chunked, full, sliding
from tests.sched.world import EOS, STOP, one_layer_each, sampled_token
from tests.sched.world import state as state_spec

MAX_POSITIONS = 60
CACHES = (
    one_layer_each(full(4)),
    one_layer_each(full(2), sliding(5), state_spec(3)),
    one_layer_each(chunked(6), full(4), state_spec(1000)),
    one_layer_each(sliding(7)),
)
SALTS = (None, "one", "two")


class World:
    """A scheduler and its blocks, driven in steps."""

    def __init__(
        self, caches: int, num_blocks: int, *, caching: bool, limits: dict[str, int], ahead: bool = False
    ) -> None:
        """`ahead`: a step is scheduled before the tokens of the one before are told."""
        groups: tuple[KVCacheGroup, ...] = CACHES[caches]
        secret = b"of this test"
        self.manager = KVCacheManager(groups, num_blocks, prefix_caching=caching, secret=secret)
        self.scheduler = Scheduler(self.manager, max_positions=MAX_POSITIONS, eos_token_ids=[EOS], **limits)
        self.ahead = ahead
        self.in_flight: tuple[ScheduledBatch, dict[str, int]] | None = None
        self.states: list[RequestState] = []
        self.ended: list[tuple[int, str]] = []
        """(step, request), in the order in which they ended."""
        self.num_spans: list[int] = []
        """Quiet steps that were taken at once."""

    def add(self, request: Request, prefilled: int | None) -> None:
        """A request comes, with the KV of so many tokens of its prompt."""
        if prefilled is None:
            self.states.append(self.scheduler.add(request))
        elif self.manager.reserve_live(request.request_id, prefilled) is not None:
            first = sampled_token(request.request_id, len(request.prompt_token_ids) - 1)
            self.states.append(self.scheduler.add_prefilled(request, [first], prefilled))

    def step(self) -> None:
        """Take one step."""
        batch = self.scheduler.schedule()
        self.scheduler.take_admitted()
        last, self.in_flight = self.in_flight, None
        if batch is not None:
            self.in_flight = batch, self.sampled(batch)
        if not self.ahead:
            last, self.in_flight = self.in_flight, None
        if last is not None:
            got_token = self.scheduler.update(*last)
            self.ended += [(last[0].step, s.request_id) for s in got_token if s.finish_reason is not None]

    def sampled(self, batch: ScheduledBatch) -> dict[str, int]:
        """What the model says after the last token that each request computes in a step just scheduled."""
        states = self.scheduler.scheduled(batch)
        return {s.request_id: sampled_token(s.request_id, s.num_tokens - 2) for s in states}

    def steps_asking(self, num_steps: int) -> None:
        """Take steps one by one, and leave nothing out that might have no effect."""
        for _ in range(num_steps):
            for state in self.scheduler.running:
                state.num_covered = state.next_change = 0
            self.step()

    def steps(self, num_steps: int) -> None:
        """Take steps, the quiet ones at once."""
        while num_steps > 0:
            # As many are in flight afterwards as before: an engine that runs ahead takes a single one first.
            is_behind = self.ahead and self.in_flight is None
            num = 0 if is_behind else num_quiet_steps(self.scheduler, self.limit(num_steps))
            if num:
                self.num_spans.append(num)
                ended = advance(self.scheduler, num, [tokens_of(s, num) for s in self.scheduler.running])
                if self.in_flight is not None:
                    batch = later_batch(self.in_flight[0], num)
                    self.in_flight = batch, self.sampled(batch)
                self.ended += [(self.scheduler._step, s.request_id) for s in ended]
            else:
                self.step()
            num_steps -= num or 1

    def limit(self, num_steps: int) -> int:
        """Count the steps up to the first that ends a request, if that is one of so many."""
        return min([num_steps, *(num_left(s) - s.num_ahead for s in self.scheduler.running)])

    def picture(self) -> dict[str, Any]:
        """All that later steps depend on, and all that is counted."""
        self.scheduler.check_integrity()
        scheduler = {k: v for k, v in vars(self.scheduler).items() if k not in LEFT_OUT}
        for queue in ("_running", "_waiting"):
            scheduler[queue] = [s.request_id for s in scheduler[queue]]
        in_flight = scheduler["_in_flight"].items()
        scheduler["_in_flight"] = {step: [s.request_id for s in states] for step, states in in_flight}
        pool = vars(self.manager.pool) | {"_on_lost": None}
        pool["_blank"] = [b for b in range(self.manager.pool.num_blocks) if b in pool["_blank"]]
        pool["_oldest"] = list(pool["_oldest"])
        prefixes = vars(self.manager.prefixes) if self.manager.prefixes is not None else {}
        return {
            "scheduler": scheduler,
            "states": [{f: getattr(s, f) for f in STATE_FIELDS} for s in self.states],
            "tables": self.manager._tables,
            "usage": vars(self.manager._usage),
            "pool": pool,
            "names": list(prefixes.get("_names", {}).items()),
            "since": prefixes.get("_since"),
            "ended": self.ended,
            "in flight": [] if self.in_flight is None else self.in_flight[1],
        }


LEFT_OUT = {"allocator", "_away", "_admitted", "_settled"}
STATE_FIELDS = [
    f.name for f in fields(RequestState) if f.name not in ("num_covered", "next_change", "no_updates")
]
"""Those left out say when the allocator is asked next; and `_settled`, whom a drafter proposes for."""


def tokens_from(state: RequestState) -> Iterator[int]:
    """What the model says after a request's tokens."""
    position = len(state.tokens) - 1
    while True:
        yield sampled_token(state.request_id, position)
        position += 1


def tokens_of(state: RequestState, num: int) -> list[int]:
    tokens = tokens_from(state)
    return [next(tokens) for _ in range(num)]


def num_left(state: RequestState) -> int:
    sampling = state.request.sampling
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS})
    pairs = zip(range(1, MAX_POSITIONS), tokens_from(state), strict=False)
    return next((num for num, token in pairs if token in ends), MAX_POSITIONS)


@st.composite
def requests(draw: st.DrawFn, request_id: str) -> tuple[Request, int | None]:
    """A request, and the tokens of its prompt that were computed elsewhere, if any were."""
    prompt = (100,) * draw(st.integers(0, 12)) + tuple(
        draw(st.lists(st.integers(100, 101), min_size=1, max_size=9))
    )
    sampling = SamplingParams(
        max_tokens=draw(st.integers(2, 30)),
        ignore_eos=draw(st.sampled_from([True, True, False])),
        stop_token_ids=draw(st.sampled_from([(), (), (STOP,)])),
    )
    request = Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        cache_salt=draw(st.sampled_from(SALTS)),
    )
    is_prefilled = draw(st.sampled_from([False, False, True]))
    return request, len(prompt) if is_prefilled else None


def fits(world: World, request: Request) -> bool:
    """Whether the pool can hold a request that is alone."""
    num_tokens = min(len(request.prompt_token_ids) + request.sampling.max_tokens, MAX_POSITIONS)
    needed = world.manager.max_request_blocks(num_tokens, world.scheduler.max_batch_tokens)
    return needed < world.manager.pool.num_blocks


def play(draw: st.DrawFn, single: World, spans: World) -> None:
    """Do the same to both worlds, and hold them equal after every event."""
    for number in range(draw(st.integers(5, 14))):
        events = ["add", "add", "steps", "steps", "steps", "remove"] if number > 2 else ["add"]
        event = draw(st.sampled_from(events))
        if event == "add":
            request, prefilled = draw(requests(str(number)))
            if fits(single, request):
                single.add(request, prefilled)
                spans.add(request, prefilled)
        elif event == "remove" and single.states:
            name = draw(st.sampled_from(single.states)).request_id
            single.scheduler.remove(name)
            spans.scheduler.remove(name)
        else:
            num_steps = draw(st.integers(1, 40))
            single.steps_asking(num_steps)
            spans.steps(num_steps)
        assert spans.picture() == single.picture()


@st.composite
def played(draw: st.DrawFn) -> list[int]:
    """Play a game in two worlds; the lengths of its spans."""
    caches, num_blocks = draw(st.integers(0, len(CACHES) - 1)), draw(st.integers(20, 80))
    limits = {"max_batch_tokens": draw(st.sampled_from([2, 8, 64])), "max_seqs": draw(st.integers(2, 6))}
    how: dict[str, Any] = {"caching": draw(st.booleans()), "ahead": draw(st.booleans()), "limits": limits}
    single, spans = (World(caches, num_blocks, **how) for _ in range(2))
    play(draw, single, spans)
    return spans.num_spans


def test_quiet_steps_taken_at_once_are_as_many_single_ones() -> None:
    lengths: list[int] = []

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(played())
    def hold_equal(num_spans: list[int]) -> None:
        lengths.extend(num_spans)

    hold_equal()
    assert sum(length > 3 for length in lengths) > 200, "there were spans to take"


@pytest.mark.parametrize(
    "why",
    [
        "nobody runs",
        "a prompt is being computed",
        "one can be admitted",
        "its token is looked at",
        "two steps fly",
    ],
)
def test_a_step_that_decides_something_is_taken_alone(why: str) -> None:
    world = World(0, 80, caching=False, limits={"max_batch_tokens": 8, "max_seqs": 2})
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    request = Request(request_id="1", prompt_token_ids=(100,) * 12, sampling=sampling)
    if why != "nobody runs":
        world.add(request, None)
        world.step()
    if why not in ("nobody runs", "a prompt is being computed"):
        world.step()
        assert num_quiet_steps(world.scheduler, 99) == 19
        assert num_quiet_steps(world.scheduler, 7) == 7
    if why == "one can be admitted":
        world.add(Request(request_id="2", prompt_token_ids=(100,), sampling=sampling), None)
    elif why == "its token is looked at":
        world.states[0].waits_for_token = True
    elif why == "two steps fly":
        world.scheduler.schedule()
        assert num_quiet_steps(world.scheduler, 99) == 18
        world.scheduler.schedule()
    assert num_quiet_steps(world.scheduler, 99) == 0


def test_steps_are_quiet_as_long_as_there_are_blocks() -> None:
    """Two requests of 4 tokens each; blocks of 4, of which 3 are free."""
    world = World(0, 6, caching=False, limits={"max_batch_tokens": 8, "max_seqs": 2})
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    for name in ("1", "2"):
        world.add(Request(request_id=name, prompt_token_ids=(100,) * 4, sampling=sampling), None)
    world.step()
    assert num_quiet_steps(world.scheduler, 99) == 4
    world.steps(4)
    assert (world.num_spans, world.scheduler.num_preemptions) == ([4], 0)
    assert num_quiet_steps(world.scheduler, 99) == 0
    world.steps(1)
    assert world.scheduler.num_preemptions == 1


@pytest.mark.parametrize(("caches", "caching", "num"), [(0, False, 19), (3, False, 3), (0, True, 0)])
def test_steps_are_quiet_while_who_waits_lacks_blocks(caches: int, caching: bool, num: int) -> None:
    """Until one ends that has 19 tokens left, or a window leaves a block behind: tokens 0 to 3 are seen by
    none from 10 on. Where a prefix may be found, to ask is not without effect."""
    world = World(caches, 10, caching=caching, limits={"max_batch_tokens": 64, "max_seqs": 2})
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    world.add(Request(request_id="1", prompt_token_ids=(100,) * 7, sampling=sampling), None)
    world.step()
    waiting = Request(request_id="2", prompt_token_ids=(101,) * 36, sampling=sampling)
    world.add(waiting, None)
    assert num_quiet_steps(world.scheduler, 99) == num
    if num:
        world.steps(num)
        assert world.num_spans == [num]
        assert world.scheduler.is_short_of_blocks


def test_a_token_that_ends_a_request_before_the_last_step_is_refused() -> None:
    world = World(0, 80, caching=False, limits={"max_batch_tokens": 8, "max_seqs": 2})
    world.add(Request(request_id="1", prompt_token_ids=(100,), sampling=SamplingParams(max_tokens=9)), None)
    world.step()
    with pytest.raises(AssertionError, match="ended before"):
        advance(world.scheduler, 3, [[5, EOS, 5]])

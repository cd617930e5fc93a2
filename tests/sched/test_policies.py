"""Placement policies, each against its formula computed from all requests that are under way."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from rayk.sched.loads import LoadBook
from rayk.sched.policies import POLICIES, get_policy, heeds
from rayk.sched.policy import EngineLoad, EngineSet, Placement, PlacementRequest, Policy, PolicySettings
from rayk.sched.request_describer import RequestDescriber
from rayk.types.errors import UserError
from tests.each import each

ASKED = PlacementRequest(request_id="r", num_prompt_tokens=1)
SECRET = b"of these tests"
SETTINGS = PolicySettings(
    output_cost=1.7,
    move_cost=0.3,
    block_tokens=4,
    host_cost=0.4,
    host_blocks=4096,
    local_prompt_tokens=20,
    local_backlog_tokens=25,
)
TP = {"p0": 1, "p1": 2, "p2": 4, "d0": 2, "d1": 1, "d2": 2}
TIERS = {"p0": "a", "p1": "b", "p2": "a", "d0": "b", "d1": "a", "d2": ""}
"""Engine -> its node's host tier."""


def ask(
    request_id: str, prompt: Sequence[int], settings: PolicySettings = SETTINGS, **how: Any
) -> PlacementRequest:
    """A request as policies see it that heed prefixes."""
    return RequestDescriber("prefix_aware", settings, SECRET).describe(request_id, prompt, **how)


def place(
    policy: Policy, asked: PlacementRequest, prefill: Iterable[EngineLoad], decode: Iterable[EngineLoad]
) -> Placement:
    """Place a request on engines of lists, or of sets."""
    sides = (side if isinstance(side, EngineSet) else EngineSet(side) for side in (prefill, decode))
    return policy.place(asked, *sides)


def loads(side: str, count: int) -> list[EngineLoad]:
    return [EngineLoad(name=f"{side}{i}", tier="host") for i in range(count)]


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (1, 3), (2, 2), (2, 3), (4, 2), (3, 3)])
def test_round_robin_shares_equally_and_lets_every_pair_meet(num_prefill: int, num_decode: int) -> None:
    policy = get_policy("round_robin")
    pairs = num_prefill * num_decode
    sides = loads("p", num_prefill), loads("d", num_decode)
    places = [place(policy, ASKED, *sides) for _ in range(2 * pairs)]
    assert [p.prefill for p in places] == [f"p{n % num_prefill}" for n in range(2 * pairs)]
    assert Counter(p.decode for p in places) == {f"d{n}": 2 * num_prefill for n in range(num_decode)}
    every_pair = product((e.name for e in sides[0]), (e.name for e in sides[1]))
    assert Counter((p.prefill, p.decode) for p in places[:pairs]) == dict.fromkeys(every_pair, 1)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("session", [None, "s"])
def test_every_listed_policy_places_on_what_there_is(name: str, session: str | None) -> None:
    policy, asked = get_policy(name), replace(ASKED, session=session)
    assert place(policy, asked, loads("p", 1), []) == Placement(prefill="p0", decode=None)
    placed = place(policy, asked, loads("p", 1), loads("d", 1))
    assert placed.prefill in ("p0", None)
    assert placed.decode == "d0"
    policy.ended(asked, placed)
    policy.lost("d0")
    policy.lost("nobody")
    assert place(policy, asked, loads("p", 1), loads("d", 1)).decode == "d0"


def test_an_unknown_policy_names_the_choices() -> None:
    with pytest.raises(UserError, match="round_robin"):
        get_policy("round_robbin")


# --- what a policy should see, from all requests that are under way ----------------------------------


class World:
    """Requests come and go at random; everything is remembered and summed up anew for each question."""

    def __init__(self, seed: int, name: str, settings: PolicySettings = SETTINGS) -> None:
        self.draw = random.Random(seed)
        self.settings = settings
        self.policy: Policy = get_policy(name, settings)
        self.book = LoadBook()
        for engine, tp in TP.items():
            self.book.add(engine, tp)
            self.book.attached(engine, TIERS[engine])
        self.running: dict[str, tuple[PlacementRequest, Placement]] = {}
        self.ahead: set[str] = set()
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.given: list[tuple[tuple[int, ...], set[str]]] = []
        """(prompt, engines and tiers that were given it and live)"""

    def some_request(self, i: int) -> PlacementRequest:
        prompt = self.draw.choices((1, 2), weights=(6, 1), k=self.draw.randint(1, 40))
        session = self.draw.choice([None, "a", "b", "c"])
        self.prompts[str(i)] = tuple(prompt)
        return ask(str(i), prompt, self.settings, max_tokens=self.draw.randint(1, 30), session=session)

    def play(
        self, num: int, check: Callable[[PlacementRequest, list[str], list[str], Placement], None]
    ) -> list[Placement]:
        """Place `num` requests, of which some end; `check` sees each decision before it counts."""
        found = []
        for i in range(num):
            prefill = self.draw.sample(["p0", "p1", "p2"], self.draw.randint(1, 3))
            decode = self.draw.sample(["d0", "d1", "d2"], self.draw.choice([0, 1, 2, 3, 3]))
            asked = self.some_request(i)
            placed = self.policy.place(asked, self.book.of(prefill), self.book.of(decode))
            check(asked, prefill, decode, placed)
            found.append(placed)
            self.running[asked.request_id] = (asked, placed)
            self.ahead.add(asked.request_id)
            self.book.placed(asked, placed)
            names = {placed.prefill, placed.decode} - {None}
            holders = {holder for n in names for holder in (str(n), TIERS[str(n)])}
            self.given.append((self.prompts[asked.request_id], holders))
            self.some_news()
        return found

    def some_news(self) -> None:
        for request_id in list(self.running):
            fate = self.draw.random()
            if fate < 0.2:
                self.ahead.discard(request_id)
                self.book.prefilled(request_id)
            elif fate < 0.3:
                self.ahead.discard(request_id)
                self.policy.ended(*self.running.pop(request_id))
                self.book.ended(request_id)
        if self.draw.random() < 0.05:
            lost = self.draw.choice([*TP, "a", "b"])
            self.policy.lost(lost)
            self.given = [(prompt, names - {lost}) for prompt, names in self.given]

    def num_cached(self, asked: PlacementRequest, engine: str) -> int:
        """Tokens of whole blocks that the prompt shares with one that the engine, or tier, was given; never
        all."""
        return self.shared(asked, [prompt for prompt, names in self.given if engine in names])

    def in_tier(self, asked: PlacementRequest, engine: str) -> int:
        """Behind those, with one that anybody of its tier was ever given."""
        return (
            max(0, self.num_cached(asked, TIERS[engine]) - self.num_cached(asked, engine))
            if TIERS[engine]
            else 0
        )

    def new(self, asked: PlacementRequest, engine: str) -> float:
        """What the prompt costs an engine."""
        spared = self.num_cached(asked, engine) + (1 - self.settings.host_cost) * self.in_tier(asked, engine)
        return asked.num_prompt_tokens - spared

    def shared(self, asked: PlacementRequest, prompts: Sequence[tuple[int, ...]]) -> int:
        """Tokens of whole blocks that the prompt shares with one of these; never all."""
        best, own = 0, self.prompts[asked.request_id]
        for prompt in prompts:
            pairs = enumerate(zip(prompt, own, strict=False))
            ends = min(len(prompt), len(own))
            shared = next((i for i, (a, b) in pairs if a != b), ends)
            best = max(best, shared // self.settings.block_tokens * self.settings.block_tokens)
        return min(best, len(own) - 1)

    def prompt_ahead(self, engine: str) -> int:
        """Tokens to be computed there."""
        placed = [self.running[i] for i in self.ahead]
        return sum(
            asked.num_prompt_tokens - place.num_cached_tokens - place.num_host_tokens
            for asked, place in placed
            if (place.prefill or place.decode) == engine
        )

    def work(self, engine: str, more: float) -> float:
        outputs = sum(a.max_tokens for a, p in self.running.values() if (p.decode or p.prefill) == engine)
        tokens = self.prompt_ahead(engine) + self.settings.output_cost * outputs
        return (tokens + more) / TP[engine]


def assert_least(chosen: str | None, costs: dict[str, float]) -> None:
    assert chosen is not None
    assert costs[chosen] == pytest.approx(min(costs.values())), costs


def assert_least_loaded(
    world: World, asked: PlacementRequest, prefill: list[str], decode: list[str], placed: Placement
) -> None:
    output = world.settings.output_cost * asked.max_tokens
    own = asked.num_prompt_tokens + (0 if decode else output)
    assert_least(placed.prefill, {e: world.work(e, own) for e in prefill})
    if decode:
        assert_least(placed.decode, {e: world.work(e, output) for e in decode})
    assert (placed.decode is None) == (not decode)
    assert placed.num_cached_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_least_loaded_takes_who_has_least_to_do(seed: int) -> None:
    world = World(seed, "least_loaded")
    assert len(world.play(250, partial(assert_least_loaded, world))) == 250


@pytest.mark.parametrize("seed", range(4))
def test_prefix_aware_weighs_what_is_held_against_what_is_to_do(seed: int) -> None:
    world = World(seed, "prefix_aware")
    num_cached_tokens, num_in_tier = [], []

    def check(asked: PlacementRequest, prefill: list[str], decode: list[str], placed: Placement) -> None:
        num, settings = asked.num_prompt_tokens, world.settings
        num_cached = {e: world.num_cached(asked, e) for e in TP}
        output = settings.output_cost * asked.max_tokens
        more = 0 if decode else output
        assert_least(placed.prefill, {e: world.work(e, world.new(asked, e) + more) for e in prefill})
        assert placed.num_cached_tokens == num_cached[str(placed.prefill)]
        assert placed.num_host_tokens == world.in_tier(asked, str(placed.prefill))
        num_in_tier.append(placed.num_host_tokens)
        if decode:
            moved = {e: output + settings.move_cost * (num - num_cached[e]) for e in decode}
            assert_least(placed.decode, {e: world.work(e, moved[e]) for e in decode})
        num_cached_tokens.append(placed.num_cached_tokens)

    world.play(250, check)
    assert sum(map(bool, num_cached_tokens)) > 50, "the world has prefixes to share"
    assert sum(map(bool, num_in_tier)) > 20, "and such that another engine was given"


@pytest.mark.parametrize("seed", range(4))
def test_conditional_computes_little_prompts_where_they_are_decoded(seed: int) -> None:
    world = World(seed, "conditional")
    local: Counter[tuple[bool, bool]] = Counter()

    def check(asked: PlacementRequest, prefill: list[str], decode: list[str], placed: Placement) -> None:
        if not decode:
            assert placed.prefill in prefill
            return
        assert placed.decode in decode
        num_new = world.new(asked, placed.decode)
        is_short, is_idle = num_new <= 20, num_new + world.prompt_ahead(placed.decode) <= 25
        assert (placed.prefill is None) == (is_short and is_idle)
        computer = placed.prefill or placed.decode
        assert placed.num_cached_tokens == world.num_cached(asked, computer)
        local[is_short, is_idle] += 1

    world.play(700, check)
    assert all(local[short, idle] > 5 for short, idle in ((True, True), (True, False), (False, False)))


def test_a_prompt_that_is_cached_at_the_decode_engine_is_computed_there() -> None:
    policy = get_policy("conditional", replace(SETTINGS, local_prompt_tokens=4))
    prompt = tuple(range(40))
    sides = loads("p", 1), loads("d", 1)
    first = place(policy, ask("a", prompt), *sides)
    assert (first.prefill, first.num_cached_tokens) == ("p0", 0)
    again = place(policy, ask("b", (*prompt, 99, 98)), *sides)
    assert (again.prefill, again.decode, again.num_cached_tokens) == (None, "d0", 40)
    policy.lost("d0")
    after = place(policy, ask("c", prompt), *sides)
    assert (after.prefill, after.num_cached_tokens) == ("p0", 39), "the prefill engine has it still"


@pytest.mark.parametrize("host_cost", [0.0, 0.2, 0.24, 0.26, 0.5, 1.0, 3.0])
def test_what_the_host_tier_has_is_worth_a_shorter_queue_by_its_cost(host_cost: float) -> None:
    """One engine holds 64 of 80 tokens and has 16 more to compute; an idle one can load the 64."""
    settings = PolicySettings(block_tokens=16, host_cost=host_cost, host_blocks=100)
    policy, engines = get_policy("prefix_aware", settings), loads("p", 2)
    prompt = tuple(range(80))
    first = place(policy, ask("a", prompt[:64], settings), engines[1:], [])
    assert first.num_host_tokens == 0, "nobody has it yet"
    engines[1].num_prompt_tokens = 16
    idle, holds = 80 - (1 - min(host_cost, 1)) * 64, 80 - 64 + 16
    placed = place(policy, ask("b", prompt, settings), engines, [])
    assert placed.prefill == ("p0" if idle < holds else "p1")
    assert (placed.prefill == "p0") == (host_cost < 0.25)
    assert (placed.num_cached_tokens, placed.num_host_tokens) == ((0, 64) if idle < holds else (64, 0))


def test_the_tier_has_what_lost_engines_computed_and_no_more_than_it_has_room_for() -> None:
    settings = PolicySettings(block_tokens=4, index_blocks=0, host_cost=0.1, host_blocks=16)
    policy, engines = get_policy("prefix_aware", settings), loads("p", 1)
    prompt = tuple(range(12))
    place(policy, ask("a", prompt, settings), engines, [])
    policy.lost("p0")
    assert place(policy, ask("b", (*prompt, 7), settings), engines, []).num_host_tokens == 12
    for i in range(10):
        place(policy, ask(str(i), (50 + i,) * 8, settings), engines, [])
    assert place(policy, ask("c", (*prompt, 7), settings), engines, []).num_host_tokens == 0


def test_without_a_tier_nothing_is_looked_up_in_one() -> None:
    settings = PolicySettings(block_tokens=4)
    policy = get_policy("prefix_aware", settings)
    place(policy, ask("a", tuple(range(12)), settings), loads("p", 1), [])
    placed = place(policy, ask("b", tuple(range(13)), settings), [EngineLoad(name="p9", tier="host")], [])
    assert placed == Placement(prefill="p9", decode=None)


@pytest.mark.parametrize("name", ["prefix_aware", "conditional"])
def test_a_tier_that_is_lost_has_nothing_and_one_of_another_node_neither(name: str) -> None:
    settings = PolicySettings(block_tokens=4, index_blocks=0, host_cost=0.1, host_blocks=1000)
    policy, prompt = get_policy(name, settings), tuple(range(12))
    here, beside, elsewhere, without = (
        [EngineLoad(name=f"p{i}", tier=tier)] for i, tier in enumerate(("a", "a", "b", ""))
    )

    def num_found(engines: list[EngineLoad]) -> int:
        placed = place(policy, ask("b", (*prompt, 7), settings), engines, [])
        return placed.num_host_tokens

    assert num_found(here) == 0
    assert [num_found(e) for e in (beside, without, elsewhere)] == [12, 0, 0]
    policy.lost("a")
    assert [num_found(e) for e in (elsewhere, without, here, beside)] == [12, 0, 0, 12]
    policy.lost("b")
    assert [num_found(e) for e in (here, elsewhere)] == [12, 0]


def test_short_prompts_do_not_pile_up_where_others_decode() -> None:
    settings = PolicySettings(local_prompt_tokens=10, local_backlog_tokens=25)
    policy, book = get_policy("conditional", settings), LoadBook()
    for engine in ("p0", "d0"):
        book.add(engine)
    found = []
    for i in range(6):
        asked = ask(str(i), (i,) * 10, settings)
        placed = place(policy, asked, book.of(["p0"]), book.of(["d0"]))
        book.placed(asked, placed)
        found.append(placed.prefill)
        if i == 3:
            book.prefilled("0")
    assert found == [None, None, "p0", "p0", None, "p0"]


@pytest.mark.parametrize("name", ["least_loaded", "prefix_aware"])
def test_shares_are_in_proportion_to_tp_sizes(name: str) -> None:
    policy, book = get_policy(name), LoadBook()
    for engine, tp in {"p0": 1, "p1": 3, "d0": 2, "d1": 6}.items():
        book.add(engine, tp)
    found: Counter[str | None] = Counter()
    for i in range(400):
        asked = ask(str(i), (i,) * 10, max_tokens=7)
        placed = place(policy, asked, book.of(["p0", "p1"]), book.of(["d0", "d1"]))
        book.placed(asked, placed)
        found.update([placed.prefill, placed.decode])
    assert found == {"p0": 100, "p1": 300, "d0": 100, "d1": 300}


@pytest.mark.parametrize("name", ["least_loaded", "prefix_aware", "conditional"])
def test_idle_engines_that_are_alike_take_turns(name: str) -> None:
    policy = get_policy(name)
    found = Counter(
        place(policy, ask(str(i), (i,) * 100), loads("p", 3), loads("d", 2)).prefill for i in range(30)
    )
    assert found == {"p0": 10, "p1": 10, "p2": 10}


# --- sessions ---------------------------------------------------------------------------------------


def place_sessions(
    policy: Policy, prefill: list[EngineLoad], decode: list[EngineLoad], num: int
) -> list[Placement]:
    requests = (replace(ASKED, session=f"user {i}") for i in range(num))
    return [place(policy, asked, prefill, decode) for asked in requests]


def test_a_session_stays_whatever_the_load_and_moves_only_with_its_engine() -> None:
    policy = get_policy("session_affinity")
    prefill, decode = loads("p", 4), loads("d", 3)
    num = 2000
    before = place_sessions(policy, prefill, decode, num)
    prefill[0].num_prompt_tokens = decode[0].num_output_tokens = 10**6
    assert place_sessions(policy, prefill[::-1], decode[::-1], num) == before
    policy.lost("p2")
    left = [e for e in prefill if e.name != "p2"]
    after = place_sessions(policy, left, decode, num)
    assert [p.decode for p in after] == [p.decode for p in before]
    moved = [(a.prefill, b.prefill) for a, b in zip(before, after, strict=True) if a != b]
    assert {a for a, _ in moved} == {"p2"}
    assert len(moved) == sum(p.prefill == "p2" for p in before)
    to = Counter(b for _, b in moved)
    third = len(moved) / 3
    assert all(abs(to[e.name] - third) < 5 * (third * 2 / 3) ** 0.5 for e in left), "spread over those left"
    assert place_sessions(policy, prefill, decode, num) == before, "they come back with it"
    assert place_sessions(get_policy("session_affinity"), prefill, decode, num) == before, "in any process"


def test_an_engine_that_joins_takes_its_share_and_moves_nobody_else() -> None:
    policy = get_policy("session_affinity")
    before = place_sessions(policy, loads("p", 4), [], 1000)
    after = place_sessions(policy, loads("p", 5), [], 1000)
    moved = [b.prefill for a, b in zip(before, after, strict=True) if a != b]
    assert set(moved) == {"p4"}
    assert abs(len(moved) - 200) < 5 * (1000 * 0.2 * 0.8) ** 0.5


def test_sessions_are_spread_in_proportion_to_tp_sizes() -> None:
    policy, num = get_policy("session_affinity"), 8000
    engines = [EngineLoad(name=f"p{i}", num_ranks=num) for i, num in enumerate((1, 2, 1, 4))]
    found = Counter(p.prefill for p in place_sessions(policy, engines, [], num))
    for engine in engines:
        share = engine.num_ranks / 8
        assert abs(found[engine.name] - num * share) < 5 * (num * share * (1 - share)) ** 0.5


def test_sessions_that_share_a_prefill_engine_do_not_share_a_decode_engine() -> None:
    places = place_sessions(get_policy("session_affinity"), loads("p", 2), loads("d", 2), 2000)
    found = Counter((p.prefill, p.decode) for p in places)
    assert all(abs(count - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5 for count in found.values())
    assert len(found) == 4


@pytest.mark.parametrize("seed", range(2))
def test_without_a_session_requests_go_where_least_is_to_do(seed: int) -> None:
    world = World(seed, "session_affinity")
    places: dict[str, Placement] = {}

    def check(asked: PlacementRequest, prefill: list[str], decode: list[str], placed: Placement) -> None:
        if asked.session is None:
            assert_least_loaded(world, asked, prefill, decode, placed)
            places[asked.request_id] = placed

    world.play(200, check)
    assert len(places) > 20


# --- settings ---------------------------------------------------------------------------------------


OTHER = PolicySettings(
    output_cost=0.1,
    move_cost=9.0,
    block_tokens=16,
    index_blocks=4,
    host_cost=1.5,
    host_blocks=0,
    local_prompt_tokens=9,
    local_backlog_tokens=100,
)


@each("name", POLICIES)
@each("setting", [f.name for f in fields(PolicySettings)])
def test_a_setting_changes_decisions_of_policies_that_heed_it_and_no_others(name: str, setting: str) -> None:
    changed = replace(SETTINGS, **{setting: getattr(OTHER, setting)})
    worlds = [
        [World(seed, name, settings).play(150, lambda *_: None) for seed in range(4)]
        for settings in (SETTINGS, changed)
    ]
    assert (worlds[0] != worlds[1]) == (setting in POLICIES[name].heeds)
    assert heeds(name, setting, hands_over=True) == (setting in POLICIES[name].heeds)


@each("name", POLICIES)
@each("setting", [f.name for f in fields(PolicySettings)])
def test_settings_of_hand_overs_say_nothing_where_there_are_none(name: str, setting: str) -> None:
    found = []
    for settings in (SETTINGS, replace(SETTINGS, **{setting: getattr(OTHER, setting)})):
        policy, draw, book = get_policy(name, settings), random.Random(3), LoadBook()
        for engine in ("p0", "p1", "p2"):
            book.add(engine, TP[engine])
            book.attached(engine, TIERS[engine])
        for i in range(300):
            prompt = tuple(draw.choices((1, 2), weights=(6, 1), k=draw.randint(1, 40)))
            asked = ask(str(i), prompt, settings, max_tokens=draw.randint(1, 30))
            placed = place(policy, asked, book.of(["p0", "p1", "p2"]), [])
            book.placed(asked, placed)
            if i > 20:
                book.ended(str(i - draw.randint(1, 20)))
            found.append(placed)
    differs = found[:300] != found[300:]
    assert differs == heeds(name, setting, hands_over=False)

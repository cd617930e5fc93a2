"""The list of checks: id, claim, engines and scenario of each. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from rayk.conformance.engines import EnginePair
from rayk.conformance.store import StoreCase
from rayk.kv.layout import LAYOUTS
from rayk.transfer.connector import ConnectorCase
from rayk.types.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Check:
    id: str
    proves: str
    pair: EnginePair
    scenario: str
    """A key of scenarios.SCENARIOS."""
    fault: str = ""
    """The fault that is planted; see ConnectorCase."""
    is_about_parts: bool = False
    """Whether it is about a partly filled last block."""

    @property
    def case(self) -> ConnectorCase:
        return self.pair.case(self.fault)


@dataclass(frozen=True, kw_only=True)
class StoreCheck:
    """A check of a store; see rayk.conformance.store."""

    id: str
    proves: str
    case: StoreCase
    scenario: str
    """A key of store_scenarios.STORE_SCENARIOS, which is called with the case's fields."""


AnyCheck = TypeVar("AnyCheck", Check, StoreCheck, Check | StoreCheck)


def all_checks(*, every_layout: bool = False) -> tuple[Check, ...]:
    """Return every check, simple ones first. `every_layout`: all 36 pairs of layouts instead of 12."""
    return (
        *_requests(),
        *_layouts(every_layout),
        *_tp(),
        *_dcp(),
        *_pp(),
        *_blocks(),
        *_groups(),
        *_faults(),
        *_leaks(),
    )


def choose(checks: Sequence[AnyCheck], only: Sequence[str]) -> tuple[AnyCheck, ...]:
    """Checks whose id is one of `only`, or begins with one and a dot; all if `only` is empty. Raises
    UserError for a name that matches nothing."""
    chosen: dict[str, AnyCheck] = {}
    for name in only:
        found = [c for c in checks if c.id == name or c.id.startswith(name.rstrip(".") + ".")]
        if not found:
            ids: list[str] = [c.id for c in checks]
            close = get_close_matches(name, [*ids, *sorted({i.split(".")[0] for i in ids})], 3)
            mend = f"did you mean {', '.join(close)}? " if close else ""
            raise UserError(f"no check is called {name}", "--only", f"{mend}`--list` names all")
        chosen.update((c.id, c) for c in found)
    return tuple(c for c in checks if c.id in chosen) if only else tuple(checks)


ALIKE = EnginePair(tp=(1, 1))
SPLIT = EnginePair(tp=(1, 2))
MERGE = EnginePair(tp=(2, 1), layouts=("BHLNC", "BLNHC"))
_FAULT_PAIRS = {
    "producer_dies": (MERGE,),
    "consumer_dies": (SPLIT,),
    "cancel_in_the_middle": (SPLIT,),
    "cancel_by_producer_in_the_middle": (MERGE, SPLIT),
}
"""Pairs on which a fault is tried besides identical engines."""


def store_checks() -> tuple[StoreCheck, ...]:
    """Return every check of a store: what must be found, then what must not."""
    return (*_hits(), *_identity(), *_lives())


def _requests() -> Iterator[Check]:
    for scenario, proves in (
        ("one_request", "a request whose last block is not full arrives"),
        ("whole_blocks", "a request that fills its last block arrives"),
        ("one_token", "a request of one token arrives"),
        ("lengths", "requests of nine lengths around the borders of blocks arrive one after the other"),
        ("many_at_once", "six requests in flight at once do not mix"),
        ("second_halves_reversed", "requests may be followed up in another order than they were begun"),
        ("blocks_reused", "blocks are used again for other requests, with nothing left of the first"),
        ("request_id_reused", "a request id is free again once its request is over"),
    ):
        yield Check(
            id=f"requests.{scenario}",
            proves=proves,
            pair=ALIKE,
            scenario=scenario,
            is_about_parts=scenario in ("one_request", "one_token", "lengths"),
        )


def _layouts(every: bool) -> Iterator[Check]:
    names = list(LAYOUTS)
    for i, ours in enumerate(names):
        for j, theirs in enumerate(names):
            if not every and (j - i) % len(names) not in (0, 1):
                continue
            # Equal layouts use TP 1 to 1, so that a failure there is not about splitting heads.
            tp = (1, 1) if i == j else (2, 1)
            yield Check(
                id=f"layouts.{ours}-{theirs}",
                proves=f"pages laid out {ours} arrive in pages laid out {theirs}, TP {tp[0]} to {tp[1]}",
                pair=EnginePair(tp=tp, layouts=(ours, theirs)),
                scenario="one_request",
            )


def _tp() -> Iterator[Check]:
    for tp, kv_heads, query_heads, what in (
        ((2, 2), 4, 8, "every rank reads from its like"),
        ((1, 2), 4, 8, "a rank's heads are split between two"),
        ((1, 4), 4, 8, "a rank's heads are split among four"),
        ((2, 1), 4, 8, "the heads of two ranks are merged"),
        ((4, 2), 4, 8, "the heads of two pairs of ranks are merged"),
        ((4, 1), 2, 8, "heads that two producer ranks hold each arrive once, and every rank is told"),
        ((2, 4), 2, 8, "heads arrive at both consumer ranks that hold them"),
        ((4, 4), 2, 8, "heads that two ranks hold on either side arrive"),
        ((3, 2), 6, 6, "three ranks' heads go to two"),
        ((2, 3), 6, 6, "two ranks' heads go to three"),
        ((3, 1), 2, 6, "ranks hold unlike numbers of heads: a middle rank holds both"),
        ((1, 3), 2, 6, "heads arrive where ranks hold unlike numbers of them: a middle rank gets both"),
    ):
        yield Check(
            id=f"tp.{tp[0]}-{tp[1]}" + (f"-{kv_heads}-heads" if kv_heads != 4 else ""),
            proves=f"{what} ({kv_heads} KV heads, TP {tp[0]} to {tp[1]})",
            pair=EnginePair(tp=tp, num_kv_heads=kv_heads, num_query_heads=query_heads),
            scenario="one_request",
        )


def _dcp() -> Iterator[Check]:
    for dcp, interleave, what in (
        ((1, 2), (1, 1), "tokens of one rank are dealt to two in turn"),
        ((2, 1), (1, 1), "tokens that two ranks hold in turn come together in one"),
        ((3, 2), (1, 4), "tokens dealt to three ranks one by one come to two, which take four in turn"),
    ):
        yield Check(
            id=f"dcp.{dcp[0]}-{dcp[1]}",
            proves=f"{what}, also of a request with no token for some rank (1 KV head, DCP and TP "
            f"{dcp[0]} to {dcp[1]})",
            pair=EnginePair(tp=dcp, dcp=dcp, dcp_interleave=interleave, num_kv_heads=1, num_query_heads=6),
            scenario="lengths",
        )


def _pp() -> Iterator[Check]:
    for pp, what in (
        ((1, 2), "layers of one rank come to the ranks of two stages"),
        ((2, 1), "layers of two stages come together in one rank"),
        ((3, 2), "layers of three stages come to two"),
    ):
        yield Check(
            id=f"pp.{pp[0]}-{pp[1]}",
            proves=f"{what} (PP {pp[0]} to {pp[1]})",
            pair=EnginePair(pp=pp),
            scenario="lengths",
        )


def _blocks() -> Iterator[Check]:
    for sizes, what in (
        ((32, 16), "a producer's block fills two of the consumer's"),
        ((16, 32), "two of the producer's blocks fill one"),
        ((16, 24), "blocks of neither side are parts of the other's"),
        ((24, 16), "nor the other way round"),
        ((1, 16), "blocks of one token are gathered"),
    ):
        for tp in ((1, 1), (2, 1)):
            yield Check(
                id=f"blocks.{sizes[0]}-{sizes[1]}" + ("-tp-2-1" if tp == (2, 1) else ""),
                proves=f"{what} (block sizes {sizes[0]} to {sizes[1]}, TP {tp[0]} to {tp[1]})",
                pair=EnginePair(tp=tp, block_sizes=sizes, num_blocks=(180, 180)),
                scenario="lengths" if tp == (1, 1) else "one_request",
            )
    yield Check(
        id="blocks.many",
        proves="300 blocks of one request arrive, with ids over 255 (block size 1, TP 1 to 1)",
        pair=EnginePair(block_sizes=(1, 1), num_blocks=(640, 660)),
        scenario="many_blocks",
    )


def _groups() -> Iterator[Check]:
    for model, what in (
        ("sliding", "the tokens inside a window arrive; blocks before it are null"),
        ("chunked", "the tokens of the current chunk arrive; blocks before it are null"),
        ("fp8-token-head", "fp8 keys and values arrive, with a float32 scale each per token and head"),
        ("nvfp4", "4-bit keys and values arrive, which lie apart, with a scale per 16 elements"),
        ("mla", "latents, which every rank holds whole, arrive"),
        ("mamba1", "states of Mamba1 arrive"),
        ("mamba2", "states of Mamba2 arrive, with taps of x, B and C"),
        ("gdn", "states of a gated delta net arrive, with taps of q, k and v"),
        ("full+sliding", "two groups with a block table each arrive"),
        ("full+mamba2", "attention and states in one pool of blocks arrive"),
    ):
        for tp in ((1, 1), (1, 2), (2, 1)):
            yield Check(
                id=f"groups.{model}" + (f"-tp-{tp[0]}-{tp[1]}" if tp != (1, 1) else ""),
                proves=f"{what} (TP {tp[0]} to {tp[1]})",
                pair=EnginePair(model=model, tp=tp, layouts=("BHLNC", "BLHNC" if tp != (1, 1) else "BHLNC")),
                scenario="one_request",
            )


def _faults() -> Iterator[Check]:
    for scenario, proves in (
        (
            "producer_dies",
            "when a producer rank dies, consumers report by the deadline, and never wrong KV as done",
        ),
        ("consumer_dies", "when a consumer rank dies, producers get their blocks back by the deadline"),
        ("never_followed", "a request that nobody follows up is over at its deadline, for good"),
        ("cancel_in_the_middle", "a request given up by its consumers writes nothing once it is reported"),
        (
            "cancel_by_producer",
            "a request given up by its producers brings nothing of what their blocks hold then",
        ),
        (
            "cancel_by_producer_in_the_middle",
            "requests given up by their producers while they are read or written bring nothing of what the "
            "blocks hold then",
        ),
        ("release_twice", "releases of unknown, finished and released requests change nothing"),
        (
            "stale_answer",
            "an answer used again, when its request is over, moves no byte that passes for right",
        ),
        ("same_request_twice", "a request id in flight is refused"),
        ("second_registration", "a second cache is refused"),
    ):
        yield Check(id=f"faults.{scenario}", proves=proves, pair=ALIKE, scenario=scenario, fault=scenario)
        for pair in _FAULT_PAIRS.get(scenario, ()):
            yield Check(
                id=f"faults.{scenario}-tp-{pair.tp[0]}-{pair.tp[1]}",
                proves=f"{proves} (TP {pair.tp[0]} to {pair.tp[1]})",
                pair=pair,
                scenario=scenario,
                fault=scenario,
            )


def _leaks() -> Iterator[Check]:
    yield Check(
        id="leaks.opened_again",
        proves="threads and file descriptors do not add up when connectors are opened and closed",
        pair=ALIKE,
        scenario="opened_again",
    )


NAMES = {
    "adapter": "adapter",
    "adapter_path": "path of an adapter of the same name",
    "adapter_revision": "weights of an adapter of the same name and path",
    "salt": "cache salt",
    "revision": "revision of the model",
    "multimodal": "hash of an image with equal placeholders",
}
"""What people call the fields of a key."""


def _hits() -> Iterator[StoreCheck]:
    yield StoreCheck(
        id="hits.tokens",
        proves="an equal prompt finds all that was saved, a longer one the part that it shares",
        case=StoreCase(),
        scenario="hits",
    )
    for field, name in NAMES.items():
        yield StoreCheck(
            id=f"hits.{field}",
            proves=f"so does a prompt of an equal {name}",
            case=StoreCase(fields=(field,)),
            scenario="hits",
        )


def _identity() -> Iterator[StoreCheck]:
    def check(name: str, proves: str, scenario: str, *fields: str) -> StoreCheck:
        return StoreCheck(
            id=f"identity.{name}", proves=proves, case=StoreCase(fields=fields), scenario=scenario
        )

    yield check("tokens", "a prompt that differs in one token shares no block from there on", "tokens")
    for field, name in NAMES.items():
        yield check(field, f"equal tokens share nothing if they are of another {name}", "apart", field)
    images = "multimodal"
    yield check("hashes_alike", "nor if the hashes differ in one digit alone", "hashes_alike", images)
    yield check("places", "nor if equal images lie at other tokens, or in another order", "places", images)
    yield check("later_items", "blocks before an image are all that may be shared", "later_items", images)
    for field, name in NAMES.items():
        proves = f"a prefix of equal tokens and another {name} is not gone on with"
        yield check(f"prefixes.{field}", proves, "prefixes", field)
    for one, other in (
        ("adapter", "salt"),
        ("adapter", "revision"),
        ("salt", "revision"),
        ("adapter", "multimodal"),
        ("salt", "multimodal"),
    ):
        proves = f"{one} and {other} of equal text are not mixed up"
        yield check(f"mixed.{one}-{other}", proves, "mixed", one, other)
    for one, other in (("adapter", "salt"), ("adapter", "revision"), ("salt", "revision")):
        proves = f"{one} and {other} that give the same text when joined are not mixed up"
        yield check(f"joined.{one}-{other}", proves, "joined", one, other)
    for field in ("adapter", "salt"):
        proves = f"{field} and tokens that give the same text or bytes when joined are not mixed up"
        yield check(f"joined.{field}-tokens", proves, "joined_tokens", field)


def _lives() -> Iterator[StoreCheck]:
    for name, scenario, proves in (
        ("eviction", "eviction", "what was given up for others is not found, or as it was"),
        ("threads", "threads", "prompts that are saved and looked up at once find their own"),
        ("restart.tokens", "restart", "what was saved is found after a restart"),
    ):
        yield StoreCheck(id=f"lives.{name}", proves=proves, case=StoreCase(needs=scenario), scenario=scenario)
    for field, name in NAMES.items():
        yield StoreCheck(
            id=f"lives.restart.{field}",
            proves=f"not so with another {name}",
            case=StoreCase(fields=(field,), needs="restart"),
            scenario="restart",
        )

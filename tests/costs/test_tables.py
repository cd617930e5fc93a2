"""What a step is made of, what tables say of it, and tables on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rayk.costs import CostBook, EngineCosts, StepFeatures, decode_run, step_features, step_of
from rayk.costs.hull import Hull, place_of
from rayk.costs.losses import StepLosses
from rayk.costs.table import Gap, LinearCost, Residuals, StepTable, drafter_name, term_value
from rayk.types.batch import ScheduledBatch, ScheduledRequest
from rayk.types.errors import OutsideHull, UserError
from rayk.types.speculative import SpeculativeConfig


def batch(*shares: tuple[int, int], step: int = 0, drafts: int = 0) -> ScheduledBatch:
    """Requests that compute n tokens after b, of which the last `drafts` are proposed where n is over 1."""
    return ScheduledBatch(
        step=step,
        requests=tuple(
            ScheduledRequest(
                request_id=f"r{row}",
                row=row,
                num_computed_tokens=b,
                token_ids=(0,) * n,
                new_block_ids=((0, ()),),
                needs_logits=True,
                num_drafts=drafts if n > 1 else 0,
            )
            for row, (n, b) in enumerate(shares)
        ),
    )


def brute(shares: list[tuple[int, int]], window: int | None = None) -> tuple[int, int]:
    """(pairs, seen), counted one by one."""
    pairs, seen = 0, 0
    for n, b in shares:
        visible = [
            {key for key in range(position + 1) if window is None or key > position - window}
            for position in range(b, b + n)
        ]
        pairs += sum(map(len, visible))
        seen += len(set().union(*visible))
    return pairs, seen


@pytest.mark.parametrize("shares", [[(1, 7), (1, 3)], [(5, 0), (1, 9)], [(4, 6)], [(1, 0)]])
def test_features_are_sums_over_requests(shares):
    found = step_features(batch(*shares), (4, 64))
    assert (found.num_pairs, found.num_seen) == brute(shares)
    assert found.windowed == (brute(shares, 4), brute(shares, 64))
    assert found.num_requests == found.num_logits == len(shares)
    assert found.num_tokens == sum(n for n, _ in shares)
    assert found.is_decode == all(n == 1 and b > 0 for n, b in shares)


def test_drafts_behind_a_token_are_no_prompt():
    found = step_features(batch((4, 7), (1, 3), drafts=3))
    assert (found.num_drafts, found.num_prefills, found.num_logits, found.num_tokens) == (3, 0, 5, 5)
    assert (found.num_pairs, found.num_seen) == brute([(4, 7), (1, 3)])
    assert (found.kind, found.is_decode) == ("verify", True)
    assert step_of([(4, 7), (4, 9)], num_drafts=3).num_drafts == 6
    beside = step_features(replace(batch((4, 7), (9, 0), drafts=3)))
    assert (beside.kind, beside.num_prefills) == ("prefill", 1), "a prompt, or its first token"
    assert step_features(batch((5, 3))).kind == "prefill"
    assert step_features(batch((1, 3))).kind == "decode"


@pytest.mark.parametrize("befores", [[7, 3], [11, 1, 4, 40, 3, 12]])
def test_decode_steps_grow_by_a_token_each(befores):
    run = decode_run(befores, 9, (4, 12))
    singles = [step_features(batch(*[(1, before + i) for before in befores]), (4, 12)) for i in range(9)]
    assert [run.step(i) for i in range(9)] == singles
    terms = ("one", "requests", "tokens>1", "seen", "seen>20", "pairs<25", "seen@1", "pairs@0")
    table = StepTable(terms=terms, constants=(0.1, 1 / 3, 1e-3, 1 / 7, 3.3, 0.7, 1 / 9, 1e5))
    assert table.each_ns(run) == [table.ns(single) for single in singles]


@pytest.mark.parametrize(
    ("bounds", "seen", "num"),
    [
        ({}, (), 9),
        ({"num_seen": (0, 20)}, (), 5),
        ({"num_seen": (14, 99)}, (), 0),
        ({}, (5, 11), 9),
        ({}, (60,), 0),
    ],
)
def test_steps_are_inside_as_long_as_each_is(bounds, seen, num):
    """Two requests see 12, 14, ... 28 tokens; places of two tokens, each seeing so many."""
    hull = Hull(bounds=bounds, places=tuple(place_of((2, n, n)) for n in seen))
    run = decode_run([7, 3], 9)
    inside = [hull.why_outside(run.step(i)) is None for i in range(9)]
    assert hull.num_inside(run) == next((i for i, is_in in enumerate(inside) if not is_in), 9) == num


def test_terms():
    found = step_features(batch((5, 0), (1, 9)), (4,))
    values = {
        "one": 1,
        "requests": 2,
        "tokens>4": 2,
        "tokens>32": 0,
        "tokens<4": 4,
        "prefills": 1,
        "seen": 15,
        "seen@0": 9,
    }
    assert {term: term_value(term, found) for term in values} == values


COSTS = EngineCosts(
    key=EngineCosts.flat(1).key._replace(model="qwen3-00", tp=2),
    decode=StepTable(
        terms=("one", "seen"),
        constants=(1e6, 20.5),
        hull=Hull(bounds={"num_tokens": (1, 8)}),
        residuals=Residuals(num_steps=90, p50=0.01, p90=0.03, worst=0.2, worst_at="8 requests"),
        ratios=(0.9, 1.0, 1.3),
    ),
    prefill=StepTable(terms=("one", "tokens"), constants=(2e6, 1e4)),
    host_ns=3.0,
    commands={"MakeTicket": LinearCost(fixed_ns=5, byte_ns=0.5)},
    losses=StepLosses(prefill_beside_decode=0.35, decode_beside_decode=0.6),
)
DRAFTING = replace(
    COSTS,
    verify=StepTable(terms=("one", "tokens", "drafts"), constants=(3e6, 1e4, 500.0)),
    drafting={"ngram": StepTable(terms=("one", "drafts"), constants=(7.0, 2.0))},
)
NGRAM = SpeculativeConfig(method="ngram", num_tokens=3)


def test_steps_with_drafts_have_a_table_of_their_own():
    drafted = step_features(batch((4, 7), (1, 3), drafts=3))
    assert DRAFTING.step_ns(drafted) == 3e6 + 5e4 + 1500
    turns = DRAFTING.turns_of(NGRAM)
    assert turns is not None
    assert turns.ns(drafted) == 7 + 6
    assert DRAFTING.turns_of(None) is None
    assert DRAFTING.scaled(2).step_ns(drafted) == 2 * DRAFTING.step_ns(drafted)
    head = SpeculativeConfig(method="eagle3", model="heads/tiny", num_tokens=4)
    assert [drafter_name(s) for s in (NGRAM, head, replace(head, method="mtp", model=None))] == [
        "ngram",
        "eagle3 tiny x4",
        "mtp x4",
    ]
    with pytest.raises(UserError, match="no costs of steps with drafts of qwen3-00-tp2"):
        COSTS.step_ns(drafted)
    with pytest.raises(UserError, match=r"no costs of drafter ngram of .*; of mtp there are"):
        replace(DRAFTING, drafting={"mtp": turns}).turns_of(NGRAM)


def test_a_step_outside_of_its_table_is_refused():
    inside, outside = (step_features(batch(*[(1, 7)] * num)) for num in (8, 9))
    assert COSTS.step_ns(inside) == 1e6 + 20.5 * 64
    assert COSTS.step_ns(step_features(batch((3, 0)))) == 2e6 + 3e4
    with pytest.raises(OutsideHull, match="num_tokens 9 is outside of 1 to 8"):
        COSTS.step_ns(outside)
    assert COSTS.step_ns(outside, strict=False) == 1e6 + 20.5 * 72
    assert [COSTS.is_inside(f) for f in (inside, outside)] == [True, False]


def test_a_gap_is_read_off_its_quantiles():
    gap = Gap(quantiles=(1.0, 2.0, 6.0), stream_ns=10)
    assert [gap.ns(share) for share in (0, 0.25, 0.5, 0.75, 1)] == [1, 1.5, 2, 4, 6]
    assert gap.ns(num_streams=3) == 32
    shared = replace(gap, core_ns=5)
    assert [shared.ns(num_streams=n, num_cores=2) for n in (0, 1, 3)] == [2, 17, 42]
    assert shared.ns(num_streams=3) == 32, "no core is taken"


def test_a_book_comes_back_from_disk(tmp_path: Path):
    drafting = replace(DRAFTING, key=COSTS.key._replace(dcp=2))
    book = CostBook(engines={COSTS.key: COSTS, drafting.key: drafting})
    book.save(tmp_path)
    assert replace(CostBook.load(tmp_path), folder="") == book
    with pytest.raises(UserError, match="tp 2, not 1"):
        CostBook.load(tmp_path).find(COSTS.key._replace(tp=1))
    file = next(tmp_path.glob("qwen3*.json"))
    file.write_text(file.read_text().replace('"host_ns"', '"hots_ns"'))
    with pytest.raises(UserError, match="unknown key hots_ns"):
        CostBook.load(tmp_path)
    with pytest.raises(UserError, match="no cost tables"):
        CostBook.load(tmp_path / "none")


def test_a_book_that_knows_of_no_drafts_is_read(tmp_path: Path):
    """Those of version 2 do not."""
    book = CostBook(engines={COSTS.key: COSTS})
    book.save(tmp_path)
    file = next(tmp_path.glob("qwen3*.json"))
    found = json.loads(file.read_text())
    assert (found.pop("verify"), found.pop("drafting"), found["version"]) == (None, {}, 3)
    file.write_text(json.dumps(found | {"version": 2}))
    assert replace(CostBook.load(tmp_path), folder="") == book


def test_a_book_of_an_older_version_is_refused(tmp_path: Path):
    """Version 1 told of a host what its steps lose to neighbours; so its engines' files lack it."""
    CostBook(engines={COSTS.key: COSTS}).save(tmp_path)
    for name, text, why in (
        ("host.json", '{"version": 1, "num_cores": 2, "slow": 0.4}', "version 1, .*version 3"),
        ("gaps.json", "{}", "not a cost table"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=why) as refused:
            CostBook.load(tmp_path)
        (tmp_path / name).unlink()
        assert refused.value.where == str(tmp_path / name)
        assert ("rayk costs MODEL --from" in refused.value.mend) == ("version" in text)


def test_a_flat_book_has_costs_of_every_engine():
    features = StepFeatures(
        num_requests=2, num_tokens=5, num_logits=2, num_prefills=1, num_pairs=9, num_seen=5
    )
    assert CostBook.flat(100, 10).find(COSTS.key).step_ns(features) == 150

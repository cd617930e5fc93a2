"""Loops inside one test: every case runs, fixtures arrive, and the case that fails is named."""

from __future__ import annotations

import pytest

from tests.each import each


def test_every_case_runs_in_order_with_fixtures_of_pytest(tmp_path):
    seen = []

    @each("a", [1, 2])
    @each(("b", "c"), [(3, 4), (5, 6)])
    def body(a, tmp_path, b, c):
        seen.append((a, b, c, tmp_path))

    body(tmp_path=tmp_path)
    assert seen == [(a, b, c, tmp_path) for a in (1, 2) for b, c in ((3, 4), (5, 6))]


@pytest.mark.parametrize("chosen", [1, 2])
@each("value", [10, 20])
def test_pytest_sees_what_is_left(chosen, value, request):
    assert request.node.callspec.params == {"chosen": chosen}
    assert value in (10, 20)


@pytest.mark.parametrize(
    ("ids", "named"), [(None, "case 2 of 3: n=0"), (lambda n: f"<{n}>", "case 2 of 3: <0>")]
)
def test_the_case_that_fails_is_named(ids, named):
    @each("n", [1, 0, 2], ids=ids)
    def body(n):
        assert n

    with pytest.raises(AssertionError) as failed:
        body()
    assert failed.value.__notes__ == [named]


def test_a_case_speaks_for_itself_only():
    @each("n", [1])
    def body(n):
        pytest.skip("not here")

    with pytest.raises(AssertionError, match="case 1 of 1: n=1: skipped"):
        body()
    with pytest.raises(AssertionError, match="marker"):
        each("n", [pytest.param(1, marks=pytest.mark.slow)])
    with pytest.raises(AssertionError, match="no case"):
        each("n", [])

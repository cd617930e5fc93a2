"""`each`: the cases of a test that differ in numbers only, in a loop inside one test.

A test of pytest's own costs a millisecond or two to collect, to set up and to report: of thousands of cases
that take less, the suite would wait for the frame more than for the test.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

_PARAM = type(pytest.param())


def each(
    names: str | Sequence[str], cases: Iterable[Any], ids: Callable[[Any], str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Use it in place of pytest.mark.parametrize, with the same arguments: one test runs all cases.

    The first that fails ends it, and is named below the traceback. Fixtures are made once for all cases.
    No case may skip or bear a marker: it would speak for the others. `test.__wrapped__` runs one case.
    """
    names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
    rows = [_values(case, is_one=len(names) == 1) for case in cases]
    assert rows, "a loop over no case tests nothing"

    def told(row: tuple[Any, ...]) -> str:
        if ids is not None:
            return "-".join(str(ids(v)) for v in row)
        return ", ".join(f"{name}={value!r}" for name, value in zip(names, row, strict=True))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def loop(**fixtures: Any) -> None:
            for number, row in enumerate(rows, start=1):
                case = f"case {number} of {len(rows)}: {told(row)}"
                try:
                    test(**fixtures, **dict(zip(names, row, strict=True)))
                except pytest.skip.Exception as skipped:
                    raise AssertionError(f"{case}: skipped, and it cannot for the others") from skipped
                except BaseException as error:
                    error.add_note(case)
                    raise

        of_test = inspect.signature(test)
        rest = [p for name, p in of_test.parameters.items() if name not in names]
        loop.__signature__ = of_test.replace(parameters=rest)  # type: ignore[attr-defined]
        return loop

    return decorate


def _values(case: Any, *, is_one: bool) -> tuple[Any, ...]:
    if isinstance(case, _PARAM):
        assert not case.marks, f"a case with markers needs pytest.mark.parametrize: {case}"
        return tuple(case.values)
    return (case,) if is_one else tuple(case)

"""Bounds the time that regular expressions of a release take: a config.json may come from anyone.

Python's `re` tries a pattern's choices one after the other. How many there can be is bounded here from the
pattern's text, so that none that could take minutes is ever matched. Released configs stay far below, with
`.*self_attn.*`, `model\\.layers\\.(0|1|2)\\..*` or `^(?!.*experts).*$`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

MOST_CHARACTERS = 1000
MOST_TRIES = 12_000_000
"""Ways to try a pattern on a name: they take a second or so. Five repeats are below."""
NAME_CHARACTERS = 64
"""Modules' names are about as long."""


_TOKEN = re.compile(
    r"""
    (?P<repeat> (?: [*+] | \{\d*,?\d*\} ) [?+]? )
    | (?P<optional> \? [?+]? )
    | (?P<open> \( (?: \? (?: P<\w+> | <?[=!] | [:>] | [ims]*-?[ims]+: ) )? (?!\?) )
    | (?P<close> \) )
    | (?P<bar> \| )
    | (?P<rest> \( \? (?: [aims]+ | P=\w+ ) \) | \\[a-zA-Z0-9] | [\^$] )
    | (?P<some> \[ \^? \]? (?: \\. | [^\]\\] )* \] | \. )
    | (?P<one> \\. | [^(] )
    """,
    re.VERBOSE | re.DOTALL,
)
_SOME, _REST = "some", "rest"
"""What stands in a branch for one of several characters, and for any number of them; a character stands for
itself."""


def check_pattern(pattern: str) -> None:
    """Raise ValueError, which says why, for a pattern that `re` does not take or that could take long."""
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(pattern)} characters, more than {MOST_CHARACTERS}")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no regular expression: {error}") from error
    if _most_tries(pattern) > MOST_TRIES:
        raise ValueError("its repeats and alternatives leave too many ways to try it on a name")


def _most_tries(pattern: str) -> int:
    """Bound the ways in which a valid pattern can be tried on a name: those of its parts multiplied, even of
    parts that exclude each other."""
    tokens = list(_tokens(pattern))
    # Behind a repeat at the end nothing comes that could fail.
    num_repeats = sum(kind == "repeat" for kind, _ in tokens[:-1])
    ways = math.comb(NAME_CHARACTERS + num_repeats, num_repeats) << sum(k == "optional" for k, _ in tokens)
    groups: list[list[list[str]]] = [[[]]]  # The branches of every group that is open; the pattern is one.
    for kind, text in tokens:
        if kind == "open":
            groups.append([[]])
        elif kind == "bar":
            groups[-1].append([])
        elif kind in ("some", "one"):
            groups[-1][-1].append(_SOME if kind == "some" else text[-1].casefold())
        else:
            if kind == "close":
                ways *= _most_matching(groups.pop())
            elif kind in ("repeat", "optional"):
                del groups[-1][-1][-1:]
            groups[-1][-1].append(_REST)
    return ways * _most_matching(groups.pop())


def _tokens(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the kinds and texts of a valid pattern's parts. Raises ValueError for what has no bound here."""
    end, last = 0, ""
    while end < len(pattern):
        token = _TOKEN.match(pattern, end)
        if token is None:
            raise ValueError(f"its {pattern[end : end + 3]!r} is not supported")
        end, kind = token.end(), str(token.lastgroup)
        if kind == "repeat" and last == "close":
            raise ValueError(f"its repeat of a group, '){token[0]}', is not supported")
        yield kind, token[0]
        last = kind


def _most_matching(branches: Sequence[Sequence[str]]) -> int:
    """Bound how many alternatives one text may begin with: the longest, and those that agree with it."""
    sizes = [math.inf if _REST in branch else len(branch) for branch in branches]
    return max(
        sum(size <= longest and _agree(branch, other) for size, other in zip(sizes, branches, strict=True))
        for longest, branch in zip(sizes, branches, strict=True)
    )


def _agree(first: Sequence[str], second: Sequence[str]) -> bool:
    """Tell whether one text may begin with both, as far as both go on."""
    for one, other in zip(first, second, strict=False):
        if _REST in (one, other):
            return True
        if one != other and _SOME not in (one, other):
            return False
    return True

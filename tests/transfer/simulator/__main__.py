"""Tell what happens in one simulated world, and whether that is right."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence

from rayk.types.fault_table import (
    FAILURE_POLICIES,
    KINDS,
    MODES,
    POINTS,
    RANK_KINDS,
    ROLES,
    Fault,
    expected,
    table_text,
)
from tests.transfer.simulator.checks import check
from tests.transfer.simulator.world import World


def parse_fault(text: str) -> Fault:
    """KIND:POINT or KIND:POINT:ROLE, of the faults that the table knows. Raises ArgumentTypeError."""
    kind, *rest = text.split(":")
    if kind not in KINDS:
        raise ArgumentTypeError(f"{text!r}: no kind {kind!r}; one of {', '.join(KINDS)}")
    if not rest:
        raise ArgumentTypeError(f"{text!r}: no point; {kind}:POINT, one of {', '.join(POINTS)}")
    point, *roles = rest
    if point not in POINTS:
        raise ArgumentTypeError(f"{text!r}: no point {point!r}; one of {', '.join(POINTS)}")
    if roles and kind not in RANK_KINDS:
        raise ArgumentTypeError(
            f"{text!r}: {kind} strikes a message and takes no role; only {', '.join(RANK_KINDS)} take one"
        )
    if len(roles) > 1 or not set(roles) <= set(ROLES):
        raise ArgumentTypeError(f"{text!r}: no role {':'.join(roles)!r}; one of {', '.join(ROLES)}")
    return Fault(kind, point, *roles)


def story(world: World) -> str:
    """Everything that happened, one line each, with its time."""
    return "\n".join(f"{now:6d}  {text}" for now, text in world.trace)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if anything is wrong with the world."""
    parser = argparse.ArgumentParser(prog="tests.transfer.simulator", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=0, help="decides everything that is drawn: the same world every time"
    )
    parser.add_argument(
        "--fault",
        action="append",
        type=parse_fault,
        default=[],
        metavar="KIND:POINT[:ROLE]",
        help=f"strikes once; may be given again. KIND: {', '.join(KINDS)}. POINT: {', '.join(POINTS)}. "
        f"ROLE, of {', '.join(RANK_KINDS)}: {' or '.join(ROLES)} [default: prefill]",
    )
    parser.add_argument(
        "--mode",
        choices=MODES,
        default="pull",
        help="the decode engine reads, or the prefill engine writes [default: pull]",
    )
    parser.add_argument(
        "--policy",
        choices=FAILURE_POLICIES,
        default="fail",
        help="of a request whose transfer fails: it fails, the decode engine computes what is missing, or "
        "another prefill engine takes it [default: fail]",
    )
    parser.add_argument("--abort", action="store_true", help="a user gives a request up")
    parser.add_argument("--table", action="store_true", help="print what each fault must lead to, and end")
    asked = parser.parse_args(arguments)
    if asked.table:
        sys.stdout.write(table_text() + "\n")
        return 0
    faults: list[Fault] = asked.fault
    world = World(
        asked.seed, faults, mode=asked.mode, policy=asked.policy, abort=asked.abort, tracing=True
    ).run()
    wanted = expected(faults[0], asked.mode, asked.policy) if len(faults) == 1 and not asked.abort else None
    problems = check(world, wanted)
    note = f"; {wanted} is to come out" if wanted is not None else ""
    sys.stdout.write(f"{story(world)}\n\nverdict {world.verdict()}{note}\n")
    sys.stdout.write("".join(f"WRONG: {problem}\n" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

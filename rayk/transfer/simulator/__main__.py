"""Tell what happens in one simulated world, and whether that is right."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rayk.transfer.fault_table import MODES, Fault, expected, table_text
from rayk.transfer.recovery import POLICIES
from rayk.transfer.simulator.checks import check
from rayk.transfer.simulator.world import World


def parse_fault(text: str) -> Fault:
    """KIND:POINT or KIND:POINT:ROLE."""
    kind, _, rest = text.partition(":")
    point, _, role = rest.partition(":")
    return Fault(kind, point or None, role or None)


def story(world: World) -> str:
    """Everything that happened, one line each, with its time."""
    return "\n".join(f"{now:6d}  {text}" for now, text in world.trace)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if anything is wrong with the world."""
    parser = argparse.ArgumentParser(prog="rayk.transfer.simulator", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", action="append", default=[], help="KIND:POINT[:prefill|decode]")
    parser.add_argument("--mode", choices=MODES, default="pull")
    parser.add_argument("--policy", choices=POLICIES, default="fail")
    parser.add_argument("--abort", action="store_true", help="a user gives a request up")
    parser.add_argument("--table", action="store_true", help="print what each fault must lead to, and end")
    asked = parser.parse_args(arguments)
    if asked.table:
        sys.stdout.write(table_text() + "\n")
        return 0
    faults = [parse_fault(text) for text in asked.fault]
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

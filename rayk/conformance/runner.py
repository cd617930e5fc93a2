"""Runs checks, one after the other, and reports their verdicts."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rayk.conformance.catalog import Check
from rayk.conformance.host import ConnectorFacts, Raised
from rayk.conformance.pool import Died, HostPool, Hung
from rayk.conformance.rig import CheckFailed, Outcome, Rig, Settings
from rayk.conformance.scenarios import SCENARIOS
from rayk.types.errors import UserError

PASS, FAIL, UNSUPPORTED = "PASS", "FAIL", "UNSUPPORTED"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    id: str
    verdict: str
    """PASS, FAIL, or UNSUPPORTED (the connector declares that it does not do this)."""
    reason: str
    proves: str
    prefill_tp: int
    decode_tp: int
    prefill_layout: str
    decode_layout: str
    prefill_block_size: int
    decode_block_size: int
    kinds: str
    wall_s: float
    outcomes: tuple[Outcome, ...] = ()
    """What each rank reported, in order."""

    def record(self) -> dict[str, Any]:
        row = asdict(self)
        del row["outcomes"]
        return row

    def outcome_records(self) -> list[dict[str, Any]]:
        return [{"check": self.id, **asdict(outcome)} for outcome in self.outcomes]


def failed(results: Sequence[CheckResult]) -> list[CheckResult]:
    return [result for result in results if result.verdict == FAIL]


def headline(results: Sequence[CheckResult]) -> str:
    """E.g. `80 of 82 PASS, 2 UNSUPPORTED`."""
    counts = Counter(result.verdict for result in results)
    parts = [f"{counts.pop(PASS, 0)} of {len(results)} PASS"]
    return ", ".join([*parts, *(f"{count} {verdict}" for verdict, count in sorted(counts.items()))])


class Kit:
    """A connector's checks, as a context manager that ends its processes.

    `target` is MODULE:CLASS, `path` folders to import it from. Raises UserError if it cannot be imported.
    """

    def __init__(self, target: str, *, path: Sequence[str] = (), settings: Settings | None = None) -> None:
        self.target = target
        self.settings = settings or Settings()
        self._pool = HostPool(target, path)
        self._numbers = itertools.count()

    def __enter__(self) -> Kit:
        try:
            self._pool.take(1)
        except (Raised, Hung, Died) as error:
            self._pool.close()
            raise UserError(
                str(error), f"connector {self.target}", "the module must be importable"
            ) from error
        except BaseException:
            self._pool.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()

    def use(self, target: str) -> None:
        """Switch to another connector in the same processes. Raises UserError if it cannot be imported."""
        self.target = target
        self._pool.use(target)

    @property
    def facts(self) -> ConnectorFacts:
        facts = self._pool.facts
        assert isinstance(facts, ConnectorFacts), "the kit was not entered"
        return facts

    def run(self, check: Check) -> CheckResult:
        began = time.monotonic()
        outcomes: list[Outcome] = []
        verdict, reason = self._run(check, outcomes)
        pair = check.pair
        return CheckResult(
            id=check.id,
            verdict=verdict,
            reason=reason,
            proves=check.proves,
            prefill_tp=pair.tp[0],
            decode_tp=pair.tp[1],
            prefill_layout=pair.layouts[0],
            decode_layout=pair.layouts[1],
            prefill_block_size=pair.block_sizes[0],
            decode_block_size=pair.block_sizes[1],
            kinds=", ".join(check.case.kinds),
            wall_s=time.monotonic() - began,
            outcomes=tuple(outcomes),
        )

    def run_all(self, checks: Sequence[Check]) -> Iterator[CheckResult]:
        return (self.run(check) for check in checks)

    def _run(self, check: Check, outcomes: list[Outcome]) -> tuple[str, str]:
        try:
            (host,) = self._pool.take(1)
            why_not = host.call("supports", check.case, timeout_s=self.settings.call_s)
        except (Raised, Hung, Died) as error:
            return FAIL, f"supports(): {error}"
        if why_not is None and check.is_about_parts and self.facts.moves_whole_blocks_only:
            why_not = "it moves whole blocks only"
        if why_not is not None:
            return UNSUPPORTED, str(why_not)
        # A fresh name per check, whatever a connector left behind under an earlier one.
        name = f"{check.id.replace('.', '-')}-{next(self._numbers)}"
        rig = Rig(self._pool, check.pair, name, self.settings)
        try:
            rig.open()
            SCENARIOS[check.scenario](rig)
            rig.end()
        except CheckFailed as failure:
            return FAIL, str(failure)
        finally:
            rig.abandon()
            outcomes += rig.history
        return PASS, ""

"""Runs checks, one after the other, and reports their verdicts."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rayk.conformance.catalog import Check, StoreCheck
from rayk.conformance.host import ConnectorFacts, Raised
from rayk.conformance.pool import Died, HostPool, Hung
from rayk.conformance.rig import CheckFailed, Outcome, Rig, Settings
from rayk.conformance.scenarios import SCENARIOS
from rayk.conformance.store_scenarios import STORE_SCENARIOS, StoreRig
from rayk.types.errors import UserError

PASS, FAIL, UNSUPPORTED = "PASS", "FAIL", "UNSUPPORTED"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    id: str
    verdict: str
    """PASS, FAIL, or UNSUPPORTED (the connector declares that it does not do this)."""
    reason: str
    proves: str
    wall_s: float
    prefill_tp: int | None = None  # of connectors alone, as what follows
    decode_tp: int | None = None
    prefill_dcp: int | None = None
    decode_dcp: int | None = None
    prefill_pp: int | None = None
    decode_pp: int | None = None
    prefill_layout: str | None = None
    decode_layout: str | None = None
    prefill_block_size: int | None = None
    decode_block_size: int | None = None
    kinds: str | None = None
    outcomes: tuple[Outcome, ...] = ()
    """What each rank reported, in order."""

    def record(self) -> dict[str, Any]:
        row = asdict(self)
        del row["outcomes"]
        return {name: value for name, value in row.items() if value is not None}

    def outcome_records(self) -> list[dict[str, Any]]:
        return [{"check": self.id, **asdict(outcome)} for outcome in self.outcomes]


def failed(results: Sequence[CheckResult]) -> list[CheckResult]:
    return [result for result in results if result.verdict == FAIL]


def headline(results: Sequence[CheckResult]) -> str:
    """Count the verdicts, e.g. `80 of 82 PASS, 2 UNSUPPORTED`."""
    counts = Counter(result.verdict for result in results)
    parts = [f"{counts.pop(PASS, 0)} of {len(results)} PASS"]
    return ", ".join([*parts, *(f"{count} {verdict}" for verdict, count in sorted(counts.items()))])


class Kit:
    """A connector's checks, or a store's, as a context manager that ends its processes.

    `target` is MODULE:CLASS, `path` folders to import it from, `python` the interpreter that it runs in.
    Raises UserError if it cannot be imported.
    """

    def __init__(
        self,
        target: str,
        *,
        path: Sequence[str] = (),
        settings: Settings | None = None,
        python: str = sys.executable,
    ) -> None:
        self.target = target
        self.settings = settings or Settings()
        self._pool = HostPool(target, path, python)
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

    def run(self, check: Check | StoreCheck) -> CheckResult:
        began = time.monotonic()
        outcomes: list[Outcome] = []
        about: dict[str, Any] = {}
        if isinstance(check, StoreCheck):
            verdict, reason = self._try(check, lambda: self._try_store(check))
        else:
            verdict, reason = self._try(check, lambda: self._try_connector(check, outcomes))
            pair = check.pair
            about = {
                **{
                    f"{side}_{size}": getattr(pair, size)[number]
                    for size in ("tp", "dcp", "pp")
                    for number, side in enumerate(("prefill", "decode"))
                },
                "prefill_layout": pair.layouts[0],
                "decode_layout": pair.layouts[1],
                "prefill_block_size": pair.block_sizes[0],
                "decode_block_size": pair.block_sizes[1],
                "kinds": ", ".join(check.case.kinds),
            }
        return CheckResult(
            id=check.id,
            verdict=verdict,
            reason=reason,
            proves=check.proves,
            wall_s=time.monotonic() - began,
            outcomes=tuple(outcomes),
            **about,
        )

    def run_all(self, checks: Sequence[Check | StoreCheck]) -> Iterator[CheckResult]:
        return (self.run(check) for check in checks)

    def of_its_kind(self, checks: Sequence[Check | StoreCheck]) -> list[Check | StoreCheck]:
        """Return those checks that are for a connector, or for a store, whichever the class is. Raises
        UserError if there are none."""
        kind = StoreCheck if self.facts.is_store else Check
        found = [check for check in checks if isinstance(check, kind)]
        if not found:
            what = "a store" if self.facts.is_store else "no store"
            problem = f"{self.target} is {what}, for which none of these checks is"
            raise UserError(problem, "--only", "`--list` says which are for stores")
        return found

    def _try(self, check: Check | StoreCheck, run: Callable[[], str | None]) -> tuple[str, str]:
        """Return verdict and reason. `run` says why the check is not for this class, None once it has
        passed."""
        try:
            (host,) = self._pool.take(1)
            why_not = host.call("supports", check.case, timeout_s=self.settings.call_s)
        except (Raised, Hung, Died) as error:
            return FAIL, f"supports(): {error}"
        if why_not is not None:
            return UNSUPPORTED, str(why_not)
        try:
            why_not = run()
        except CheckFailed as failure:
            return FAIL, str(failure)
        return (PASS, "") if why_not is None else (UNSUPPORTED, why_not)

    def _try_connector(self, check: Check, outcomes: list[Outcome]) -> str | None:
        if check.is_about_parts and self.facts.moves_whole_blocks_only:
            return "it moves whole blocks only"
        # A fresh name per check, whatever a connector left behind under an earlier one.
        name = f"{check.id.replace('.', '-')}-{next(self._numbers)}"
        rig = Rig(self._pool, check.pair, name, self.settings)
        try:
            rig.open()
            SCENARIOS[check.scenario](rig)
            rig.end()
        finally:
            rig.abandon()
            outcomes += rig.history
        return None

    def _try_store(self, check: StoreCheck) -> str | None:
        needs = check.case.needs
        if needs == "restart" and not self.facts.is_persistent:
            return "it keeps nothing when it ends"
        if needs == "threads" and not self.facts.is_thread_safe:
            return "one thread at a time may call it"
        try:
            rig = StoreRig(self._pool, self._pool.new_folder(), self.settings)
            if needs == "eviction" and rig.max_blocks is None:
                return "it gives nothing up"
            STORE_SCENARIOS[check.scenario](rig, *check.case.fields)
            rig.end()
        except (Hung, Died) as error:
            raise CheckFailed(str(error)) from error
        finally:
            self._pool.forget()
        return None

"""pytest plugin: `pytest --rayk-connector MODULE:CLASS` collects every check as a test.

Every pytest run where rayk is installed loads it, so it imports nothing of rayk until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rayk.conformance.catalog import Check
    from rayk.conformance.runner import Kit

FOLDER = "conformance"
"""Prefix of the tests' ids, so that `-k conformance` selects them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rayk", "conformance of KV connectors")
    group.addoption("--rayk-connector", metavar="MODULE:CLASS", help="try this connector, a test per check")
    group.addoption(
        "--rayk-only",
        metavar="ID",
        action="append",
        default=[],
        help="only this check, or all whose ids begin with ID. (repeatable; `rayk conformance --list`)",
    )
    group.addoption("--rayk-timeout", metavar="SECONDS", type=float, default=60.0, help="for one check")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add a test for every check."""
    if config.option.rayk_connector is None:
        return
    from rayk.conformance.catalog import all_checks, choose
    from rayk.types.errors import UserError

    try:
        checks = choose(all_checks(), config.option.rayk_only)
    except UserError as error:
        raise pytest.UsageError(str(error)) from error
    folder = _Checks.from_parent(session, name=FOLDER, nodeid=FOLDER, checks=checks)
    items += folder.collect()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the connector's processes."""
    kit = config.stash.get(_KIT, None)
    if kit is not None:
        kit.__exit__(None, None, None)


_KIT = pytest.StashKey[Any]()


def _kit(config: pytest.Config) -> Kit:
    """Return the one kit of the run, started by the first test."""
    from rayk.conformance.rig import Settings
    from rayk.conformance.runner import Kit

    if _KIT not in config.stash:
        timeout = config.option.rayk_timeout
        settings = Settings(check_s=timeout, call_s=timeout / 2)
        path = [str(config.rootpath), str(config.invocation_params.dir)]
        config.stash[_KIT] = Kit(config.option.rayk_connector, path=path, settings=settings).__enter__()
    kit: Kit = config.stash[_KIT]
    return kit


class _Checks(pytest.Collector):
    def __init__(self, *, checks: tuple[Check, ...], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._checks = checks

    def collect(self) -> list[pytest.Item]:
        return [_CheckItem.from_parent(self, name=check.id, check=check) for check in self._checks]


class _ItemFailed(Exception):
    """A check failed."""


class _CheckItem(pytest.Item):
    def __init__(self, *, check: Check, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._check = check

    def runtest(self) -> None:
        from rayk.conformance.runner import FAIL, UNSUPPORTED
        from rayk.types.errors import UserError

        try:
            kit = _kit(self.config)
        except UserError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
        result = kit.run(self._check)
        if result.verdict == UNSUPPORTED:
            pytest.skip(f"the connector does not support it: {result.reason}")
        if result.verdict == FAIL:
            raise _ItemFailed(result.reason)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Show the reason alone, without the kit's own stack."""
        if isinstance(excinfo.value, _ItemFailed):
            connector = self.config.option.rayk_connector
            return f"{connector}: not so: {self._check.proves}\n{excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.config.rootpath, None, f"{FOLDER}: {self.name}"

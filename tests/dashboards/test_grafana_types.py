"""Values of the dashboards against the types that Grafana publishes of them (grafana-foundation-sdk).

Its `from_json` looks at no value: here each is held against the type that the field is declared with.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import prometheus, stat, timeseries, units
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import build

FILES = sorted(Path(build.FOLDER).glob("*.json"))
OPTIONS = {"timeseries": timeseries, "stat": stat}
UNITS = {value for name, value in vars(units).items() if isinstance(value, str) and not name.startswith("_")}
PLAIN = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}


def misfits(value: Any, hint: Any, where: str) -> Iterator[str]:
    """Where a value, or a part of it, is not of its type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        found = [list(misfits(value, one, where)) for one in arguments]
        if all(found):
            yield from min(found, key=len)
    elif origin is typing.Literal:
        if value not in arguments:
            yield f"{where}: {value!r} is none of {arguments}"
    elif origin is list:
        if not isinstance(value, list):
            yield f"{where}: {value!r} is no list"
            return
        for index, one in enumerate(value):
            yield from misfits(one, arguments[0], f"{where}[{index}]")
    elif origin is dict or hint in (object, Any):
        return
    else:
        yield from _plain_misfits(value, hint, where)


def _plain_misfits(value: Any, hint: Any, where: str) -> Iterator[str]:
    if hint is type(None):
        fits = value is None
    elif hint in PLAIN:
        fits = isinstance(value, PLAIN[hint]) and (hint is bool or not isinstance(value, bool))
    elif issubclass(hint, enum.Enum):
        fits = value in {one.value for one in hint}
    else:
        fits = isinstance(value, hint)
        if fits:
            for name, own in typing.get_type_hints(hint).items():
                yield from misfits(getattr(value, name), own, f"{where}/{name}")
    if not fits:
        yield f"{where}: {value!r} is no {hint.__name__}"


def all_misfits(given: dict[str, Any]) -> list[str]:
    """Of a dashboard's JSON, with its panels' options, custom fields and queries."""
    register_default_plugins()
    found = list(misfits(Dashboard.from_json(given), Dashboard, ""))
    for panel in given["panels"]:
        where = f"/{panel['title']}"
        kind = OPTIONS[panel["type"]]
        found += misfits(kind.Options.from_json(panel["options"]), kind.Options, f"{where}/options")
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "timeseries":
            custom = timeseries.FieldConfig.from_json(defaults["custom"])
            found += misfits(custom, timeseries.FieldConfig, f"{where}/custom")
        if defaults["unit"] not in UNITS:
            found.append(f"{where}: no unit {defaults['unit']}")
        for target in panel["targets"]:
            query = prometheus.Dataquery.from_json(target)
            found += misfits(query, prometheus.Dataquery, f"{where}/{target['refId']}")
            found += [f"{where}: {key} is lost" for key in target if key not in query.to_json()]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_value_is_of_the_type_that_grafana_declares(path: Path) -> None:
    assert all_misfits(json.loads(path.read_text())) == []


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        (("refresh",), 5),
        (("graphTooltip",), 7),
        (("panels", 0, "gridPos", "w"), "12"),
        (("panels", 0, "fieldConfig", "defaults", "unit"), "furlongs"),
        (("panels", 0, "options", "colorMode"), "loud"),
        (("panels", 0, "targets", 0, "expr"), None),
        (("panels", 0, "targets", 0, "editorMode"), "vim"),
        (("panels", 0, "targets", 0, "legend"), "{{engine}}"),
        (("panels", -1, "fieldConfig", "defaults", "custom", "showPoints"), "sometimes"),
        (("templating", "list", 0, "multi"), "yes"),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else None,
)
def test_a_value_of_another_type_is_noticed(keys: tuple[str | int, ...], wrong: Any) -> None:
    given = json.loads((Path(build.FOLDER) / "rayk-overview.json").read_text())
    part = given
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = wrong
    assert len(all_misfits(given)) >= 1

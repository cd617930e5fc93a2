"""Tables of other versions: older ones open and say what they lack, newer and strange ones say why not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rayk.cli.main import app
from rayk.reports import ResultWriter, load
from rayk.reports.files import TABLES
from rayk.reports.schema import KEY, SCHEMA_VERSION
from rayk.types.errors import UserError
from tests.reports.synthetic import SPEC, write_run
from tests.reports.test_columns import write_load

Change = Callable[[pa.Table], pa.Table]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("schema") / "run").parent


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def change(folder: Path, table: str, how: Change) -> None:
    path = folder / f"{table}.parquet"
    pq.write_table(how(pq.read_table(path)), path)


def version(number: bytes | None) -> Change:
    return lambda table: table.replace_schema_metadata({KEY: number} if number is not None else {})


def renamed(**names: str) -> Change:
    return lambda table: table.rename_columns([names.get(n, n) for n in table.column_names])


def test_every_table_names_its_version(whole: Path, tmp_path: Path) -> None:
    for made in (whole, write_load(tmp_path / "load")):
        for table in TABLES:
            metadata = pq.read_schema(made / f"{table}.parquet").metadata
            assert metadata[KEY] == str(SCHEMA_VERSION).encode()
        assert load(made).schema_version == SCHEMA_VERSION
        assert load(made).lacking == {}
        assert load(made).age_note == ""


def test_an_older_version_opens_and_says_what_it_lacks(folder: Path, whole: Path) -> None:
    older = version(None)
    change(folder, "requests", lambda t: older(t.drop_columns(["itl_ms", "seed"])))
    change(folder, "transfers", lambda t: older(renamed(transfer_ms="read_ms")(t)))
    change(folder, "cells", older)
    found = load(folder)
    assert found.schema_version == 0
    assert found.lacking == {"requests": ("itl_ms", "seed"), "transfers": ("transfer_ms",)}
    assert found.requests["itl_ms"].isna().all()
    assert found.requests["e2e_ms"].tolist() == load(whole).requests["e2e_ms"].tolist()
    answer = CliRunner().invoke(app, ["report", str(folder), "--format", "md"])
    assert answer.exit_code == 0
    assert answer.stdout.split() == [str(folder / "report.md")]
    assert f"tables of version 0, now {SCHEMA_VERSION}" in answer.stderr
    assert "requests itl_ms, seed; transfers transfer_ms" in answer.stderr


def test_a_load_of_an_older_version_opens(tmp_path: Path) -> None:
    made = write_load(tmp_path / "load")
    change(made, "cells", lambda t: version(None)(t.drop_columns(["tokens_per_chunk"])))
    assert load(made).lacking == {"cells": ("tokens_per_chunk",)}
    answer = CliRunner().invoke(app, ["report", str(made), "--format", "html"])
    assert answer.exit_code == 0, answer.stderr
    assert "cells tokens_per_chunk" in answer.stderr


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("command", ["report", "resume"])
def test_a_newer_version_is_refused(folder: Path, table: str, command: str) -> None:
    change(folder, table, version(str(SCHEMA_VERSION + 1).encode()))
    if command == "report":
        answer = CliRunner().invoke(app, ["report", str(folder)])
        assert answer.exit_code == 2
        told = answer.stderr
    else:
        with pytest.raises(UserError) as error:
            ResultWriter(folder, spec_yaml=SPEC, environment={}, resume=True)
        told = str(error.value)
    for part in (
        f"{table}.parquet",
        "newer rayk",
        f"version {SCHEMA_VERSION + 1}",
        f"up to {SCHEMA_VERSION}",
    ):
        assert part in told


@pytest.mark.parametrize("table", TABLES)
def test_tables_without_their_key_say_why_they_do_not_open(folder: Path, table: str) -> None:
    change(folder, table, renamed(cell_id="cell"))
    with pytest.raises(UserError, match=rf"{table}.parquet.*no column cell_id in its table of version 0"):
        load(folder)


def test_a_version_that_is_no_number_is_refused(folder: Path) -> None:
    change(folder, "cells", version(b"two"))
    with pytest.raises(UserError, match="no number: two"):
        load(folder)


def test_a_resumed_run_has_the_version_of_who_resumed_it(folder: Path) -> None:
    for table in TABLES:
        change(folder, table, version(None))
    writer = ResultWriter(folder, spec_yaml=SPEC, environment={}, resume=True)
    writer.finish()
    writer.close()
    assert load(folder).schema_version == SCHEMA_VERSION

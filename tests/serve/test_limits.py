"""Limits by name."""

from __future__ import annotations

import re

import pytest

from rayk.cli.main import app
from rayk.serve.limits import LIMITS, HttpSettings, http_settings
from rayk.types.errors import UserError


def test_limits_are_set_by_name() -> None:
    texts = ["max_n=3", "body_s=0.5", "ignores_unknown=true", "max_prompt_tokens=7"]
    found = http_settings("key", texts)
    assert found == HttpSettings(
        api_key="key", max_n=3, body_s=0.5, ignores_unknown=True, max_prompt_tokens=7
    )
    assert "key" not in repr(found)
    assert http_settings(None, []) == HttpSettings()


@pytest.mark.parametrize(
    "text",
    ["max_m=3", "max_n", "max_n=", "max_n=0", "max_n=-1", "max_n=1.5", "max_n=x", "body_s=nan", "body_s=inf"]
    + ["ignores_unknown=1", "api_key=x", "=3"],
)
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        http_settings(None, [text])
    assert caught.value.where == f"--limit {text}"


def test_the_commands_help_names_them_all() -> None:
    from typer.testing import CliRunner

    help_text = re.sub(
        r"[\s│]+", " ", CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    )
    assert [name for name in LIMITS if name not in help_text] == []

"""When an engine is not well, by what was seen of it."""

from __future__ import annotations

import pytest

from rayk.actors.members import SILENT_S, Member
from rayk.specs.serving import EngineEntry
from rayk.types.config import EngineConfig

NOW, PATIENCE_S = 1000.0, 30.0


@pytest.mark.parametrize(
    ("heard_s_ago", "turned_s_ago", "words"),
    [
        (0.0, 0.0, ""),
        (1.0, PATIENCE_S - 1, ""),  # a long step: its process answers
        (SILENT_S + 1, 0.0, "prefill0 has given no sign of life for 5 s"),
        (1.0, PATIENCE_S + 1, "prefill0 took no step for 31 s"),
    ],
)
def test_silence_and_standing_still_are_told_apart(
    heard_s_ago: float, turned_s_ago: float, words: str
) -> None:
    entry = EngineEntry(name="prefill0", role="prefill", config=EngineConfig(model="nowhere"))
    member = Member(entry, "prefill", state="ready")
    member.heard_s, member.turned_s = NOW - heard_s_ago, NOW - turned_s_ago
    assert member.why_unwell(NOW, PATIENCE_S) == words
